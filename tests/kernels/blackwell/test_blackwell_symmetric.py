"""The Blackwell kernel computes half of a symmetric result: simulated with races, and compiled."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from pallas_gemm import offline
from pallas_gemm.device import B200
from pallas_gemm.kernels.blackwell import kernel as blackwell
from pallas_gemm.kernels.blackwell import store
from pallas_gemm.kernels.blackwell.config import PAIR, SQUARE, BlackwellConfig
from pallas_gemm.kernels.blackwell.plan import BlackwellPlan
from pallas_gemm.problem import Epilogue, Problem
from pallas_gemm.proving import products
from tests import blackwell_simulator
from tests.kernels.blackwell import test_blackwell_compiled as compiled

# Ragged: of the last row of tiles, 72 rows are results.
SINGLE = BlackwellConfig(tile=(128, 64), stages=2, cluster=(1, 1), ctas=2, store_slots=1)
DYNAMIC = dataclasses.replace(SINGLE, tile=(128, 128), cluster=PAIR, persistence="dynamic")
GRAM = Problem(328, 328, 72, transpose_b=True, symmetric="gram")
WITH_RESIDUAL = dataclasses.replace(GRAM, epilogue=Epilogue(0.5, 3.0, residual=True))


def drawn(problem: Problem, rng: np.random.Generator) -> products.Operands:
    """Small integers, of which the product is not symmetric, though the residual is."""
    operands = products.small_integers(problem, rng)
    if operands.residual is None:
        return operands
    turned = operands.residual.swapaxes(-1, -2)
    return operands._replace(residual=operands.residual + turned)


def mirrored(exact: np.ndarray) -> np.ndarray:
    """What is stored of a product: squares on and below the diagonal, and their mirror images."""
    row, col = np.indices(exact.shape[-2:]) // SQUARE
    return np.where(row >= col, exact, exact.swapaxes(-1, -2))


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (GRAM, SINGLE),
        (dataclasses.replace(WITH_RESIDUAL, batch=2), DYNAMIC),
        (
            dataclasses.replace(GRAM, m=448, n=448, transpose_a=True, transpose_b=False),
            dataclasses.replace(DYNAMIC, persistence="static", store_slots=2, schedule="raster"),
        ),
    ],
    ids=["single", "residual, batch, dynamic pair", "pair, transposed"],
)
def test_squares_below_the_diagonal_make_all_of_the_result(problem, config, monkeypatch, rng):
    assert config.tiles(problem) < np.prod(config.stacked_grid(problem))
    started = 2 if config.persistence == "dynamic" else None
    blackwell_simulator.install(monkeypatch, started=started)
    operands = drawn(problem, rng)
    kernel = blackwell.build(
        BlackwellPlan(problem, config, B200, interpret=blackwell_simulator.PARAMS)
    )
    out, raced = blackwell_simulator.simulate(kernel, operands.present())
    assert not raced
    expected = mirrored(products.rounded(problem, products.exact(problem, operands)))
    np.testing.assert_array_equal(out.astype(np.float64), expected)


def test_a_slot_that_is_overwritten_before_it_was_stored_is_noticed(monkeypatch, rng):
    blackwell_simulator.install(monkeypatch)
    monkeypatch.setattr(store, "await_store_slot", lambda _: None)
    operands = drawn(GRAM, rng)
    expected = mirrored(products.rounded(GRAM, products.exact(GRAM, operands)))
    kernel = blackwell.build(
        BlackwellPlan(GRAM, SINGLE, B200, interpret=blackwell_simulator.PARAMS)
    )
    assert {"race", "refused"} & blackwell_simulator.faults(kernel, operands.present(), expected)


def test_both_images_leave_by_tma_without_spills():
    wide = BlackwellConfig(stages=5, persistence="dynamic")
    large = dataclasses.replace(WITH_RESIDUAL, m=8192, n=8192, k=4096)
    small = dataclasses.replace(large, epilogue=Epilogue(), symmetric="product")
    narrow = dataclasses.replace(SINGLE, ctas=None, store_slots=2)
    cases = [(wide, large), (narrow, small)]
    kernels = [blackwell.build(BlackwellPlan(problem, config, B200)) for config, problem in cases]

    def both(a: Any, b: Any, residual: Any) -> Any:
        return kernels[0](a, b, residual), kernels[1](a, b)

    reports = offline.compile_reports(both, *compiled.operands(large), target="b200")
    for config, problem in cases:
        launched = config.launched(problem, B200) * config.cluster_size
        (report,) = (report for report in reports if report.grid[0] == launched)
        assert (report.spill_bytes, report.serialized) == (0, ())
        predicted = config.shared_memory_bytes(problem)
        assert predicted - 2560 < report.shared_memory_bytes <= predicted
        # Two squares of each chunk, each where it is and mirrored, and all in one group.
        stores = [line for line in report.ptx.splitlines() if "2d.global.shared::cta" in line]
        assert len(stores) == 4
        assert all(line.lstrip().startswith("@") for line in stores)
        assert report.ptx.count("cp.async.bulk.commit_group") == 1
        straight, turned = (
            report.ptx.count(f"stmatrix.sync.aligned.m8n8.x4{way}.shared.b16")
            for way in ("", ".trans")
        )
        assert straight == turned > 0
