"""Tiles of the Blackwell kernel cut along k: simulated exactly, sabotaged, and compiled."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm import offline
from pallas_gemm.device import B200, DEVICES
from pallas_gemm.kernels import joining, work
from pallas_gemm.kernels.blackwell import kernel as blackwell
from pallas_gemm.kernels.blackwell import store
from pallas_gemm.kernels.blackwell.config import PAIR, BlackwellConfig
from pallas_gemm.kernels.blackwell.cta import freed_of
from pallas_gemm.kernels.blackwell.plan import BlackwellPlan
from pallas_gemm.kernels.functions.activations import gelu_tanh
from pallas_gemm.problem import Epilogue, Problem
from pallas_gemm.proving import products
from tests import blackwell_simulator

SINGLE = BlackwellConfig(
    tile=(128, 64),
    stages=2,
    cluster=(1, 1),
    ctas=2,
    store_columns=32,
    schedule="swizzle:2",
    split_k=4,
)
PAIRED = dataclasses.replace(SINGLE, tile=(128, 128), cluster=PAIR, ctas=4, split_k=2)
ONLINE = dataclasses.replace(PAIRED, schedule="online_swizzle:2")
WIDE = dataclasses.replace(SINGLE, tile=(128, 384), accumulators=1, stages=3, split_k=2)
ALL = Epilogue(0.5, 3.0, bias=True, residual=True, activation=jnp.square)
GATED = Epilogue(gated=True, bias=True, activation=jax.nn.relu)
FP8 = {"a_dtype": jnp.float8_e4m3fn, "b_dtype": jnp.float8_e5m2, "transpose_b": True}
SIMULATED: dict[str, tuple[Problem, BlackwellConfig]] = {
    # Of six steps, pieces of two and of one; the last one is ragged.
    "single, all of the epilogue": (Problem(136, 64, 328, epilogue=ALL), SINGLE),
    "computed order, gated, a batch": (
        Problem(192, 128, 200, transpose_a=True, transpose_b=True, batch=2, epilogue=GATED),
        ONLINE,
    ),
    # A piece has more steps than slots, and one has fewer.
    "wide, half by half": (Problem(256, 384, 392, transpose_b=True), WIDE),
    "the last tiles, float8 in steps of two atoms": (
        Problem(264, 144, 528, **FP8, epilogue=Epilogue(residual=True)),
        dataclasses.replace(PAIRED, split_last=2, step_bytes=256),
    ),
    "integers, stored directly": (
        Problem(136, 72, 400, jnp.int8, jnp.int8, jnp.int32, transpose_b=True),
        dataclasses.replace(SINGLE, direct_store=True),
    ),
}


@pytest.mark.parametrize("name", SIMULATED)
def test_pieces_of_a_tile_are_one_sum(
    name: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    problem, config = SIMULATED[name]
    operands = products.small_integers(problem, rng)
    expected = products.rounded(problem, products.exact(problem, operands))
    assert found(monkeypatch, (problem, config), operands.present(), expected) == set()


def found(
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[Problem, BlackwellConfig],
    operands: Any,
    expected: np.ndarray,
) -> set[str]:
    """Simulates a product and returns what is wrong with it."""
    blackwell_simulator.install(monkeypatch)
    plan = BlackwellPlan(*case, B200, interpret=blackwell_simulator.PARAMS)
    return blackwell_simulator.faults(blackwell.build(plan), operands, expected)


# One CTA computes a tile of four steps, in pieces of two, one and one.
ONE = dataclasses.replace(SINGLE, ctas=1, split_k=3)
TOLD = Problem(128, 64, 256, out_dtype=jnp.float32, transpose_b=True)
SUMMANDS = (1.0, 2.0**24, -(2.0**24))
"""Added in this order they are 0, in any other 1: float32 has no 2^24 + 1."""


def operands_that_tell_the_order() -> tuple[jax.Array, jax.Array]:
    a = np.zeros(TOLD.a_shape)
    a[:, [0, 128, 192]] = SUMMANDS
    return jnp.asarray(a, jnp.bfloat16), jnp.ones(TOLD.b_shape, jnp.bfloat16)


def wrong_piece(**wrong: Callable[[work.Piece], Any]) -> Callable[..., work.Piece]:
    def unpack(self: work.Coding, *entry: Any) -> work.Piece:
        piece = UNPACK(self, *entry)
        return piece._replace(**{name: change(piece) for name, change in wrong.items()})

    return unpack


def leave_out_the_last(self: joining.Summands, index: Any) -> Any:
    parts = self.plan.config.split_k - 1
    config = dataclasses.replace(self.plan.config, split_k=parts)
    return ADD_UP(
        dataclasses.replace(self, plan=dataclasses.replace(self.plan, config=config)), index
    )


def arrive_before_reading(cta: Any, turn: Any, half: Any) -> None:
    plgpu.barrier_arrive(freed_of(cta, turn, half))


UNPACK, ADD_UP = work.Coding.unpack, joining.Summands.__getitem__
FAULTS: dict[str, tuple[Any, str, Any, set[str]]] = {
    "a piece is computed twice": (
        work.Coding,
        "unpack",
        wrong_piece(first_step=lambda piece: piece.first_step * 0),
        {"wrong"},
    ),
    "a piece is left out": (joining.Summands, "__getitem__", leave_out_the_last, {"wrong"}),
    "summands change places": (
        work.Coding,
        "unpack",
        wrong_piece(summand=lambda piece: 2 - piece.summand),
        {"wrong"},
    ),
    "steps are counted from the start of each piece": (
        blackwell.Steps,
        "before_next",
        lambda _, before: before,
        {"race", "refused"},
    ),
    "an accumulator is freed while it is handed over": (
        store,
        "free_accumulator",
        arrive_before_reading,
        {"race", "refused"},
    ),
}


def test_summands_are_added_in_the_order_of_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = np.zeros(TOLD.out_shape)
    assert found(monkeypatch, (TOLD, ONE), operands_that_tell_the_order(), expected) == set()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, wrong, evidence = FAULTS[name]
    monkeypatch.setattr(owner, attribute, wrong)
    arrays, expected = operands_that_tell_the_order(), np.zeros(TOLD.out_shape)
    assert evidence & found(monkeypatch, (TOLD, ONE), arrays, expected)


def compiled(case: tuple[Problem, BlackwellConfig], target: str) -> tuple[offline.Report, ...]:
    plan = BlackwellPlan(*case, DEVICES[target])
    problem, epilogue = plan.problem, plan.problem.epilogue
    arrays = [
        (problem.a_shape, problem.a_dtype),
        (problem.b_shape, problem.b_dtype),
        *[((problem.n,), jnp.float32)] * epilogue.bias,
        *[(problem.out_shape, problem.out_dtype)] * epilogue.residual,
    ]
    shapes = [jax.ShapeDtypeStruct(*array) for array in arrays]
    return offline.compile_reports(blackwell.build(plan), *shapes, target=target)


LONG = Problem(512, 512, 8192, transpose_b=True)
FULL = Epilogue(0.5, 2.0, bias=True, residual=True, activation=gelu_tanh)


@pytest.mark.parametrize(
    ("target", "problem", "changes"),
    [
        ("b200", LONG, {"split_k": 6, "tile": (128, 128), "store_columns": 32}),
        ("b300", dataclasses.replace(LONG, epilogue=FULL), {"split_k": 3, "split_last": 1}),
    ],
)
def test_pieces_are_compiled_without_spills(
    target: str, problem: Problem, changes: dict[str, Any]
) -> None:
    config = BlackwellConfig(**changes)
    *whole, cut, joined = compiled((problem, config), target)
    assert [report.spill_bytes for report in (*whole, cut, joined)] == [0] * (2 + len(whole))
    tiles = config.split_last or config.tiles(problem)
    # A pair for each piece, and a CTA for each of four chunks of each of its tiles.
    assert [report.grid[0] for report in (cut, joined)] == [2 * config.split_k * tiles, 8 * tiles]
    # The first kernel multiplies and stores nothing by TMA; the second one has no ring.
    assert "tcgen05.mma" in cut.ptx
    assert "cp.async.bulk.tensor.2d.global" not in cut.ptx
    assert "tcgen05" not in joined.ptx
    assert "cp.async.bulk.tensor.2d.global" in joined.ptx
    assert joined.shared_memory_bytes < 2**15
