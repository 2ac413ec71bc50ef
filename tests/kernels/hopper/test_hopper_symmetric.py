"""The Hopper kernel computes half of a symmetric result: simulated, with races recorded."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.device import H200
from pallas_gemm.kernels.hopper import kernel as hopper
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.problem import Epilogue, Problem
from pallas_gemm.proving import products
from schedules import Schedule, Triangle, hilbert
from tests.kernels.hopper import test_hopper_simulated as simulated

# Ragged: three rows of tiles, the last of which holds eight rows.
SMALL = HopperConfig(tile=(64, 64), consumers=1, stages=2, ctas=2, store_slots=1)
GRAM = Problem(136, 136, 72, transpose_b=True, symmetric="gram")
WITH_RESIDUAL = dataclasses.replace(GRAM, epilogue=Epilogue(0.5, 3.0, residual=True))


def run(problem: Problem, config: HopperConfig, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Simulates a product of small integers; fails if it raced. Returns also what is right."""
    operands = products.small_integers(problem, rng)
    same = problem.transpose_a != problem.transpose_b
    operands = operands._replace(b=operands.a if same else operands.a.swapaxes(-1, -2))
    if operands.residual is not None:
        turned = operands.residual.swapaxes(-1, -2)
        operands = operands._replace(residual=operands.residual + turned)
    expected = products.rounded(problem, products.exact(problem, operands))
    return simulated.run(problem, config, operands), expected


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (GRAM, SMALL),
        (dataclasses.replace(WITH_RESIDUAL, batch=2), dataclasses.replace(SMALL, late_store=False)),
        (
            dataclasses.replace(GRAM, m=192, n=192, transpose_a=True, transpose_b=False),
            HopperConfig(
                tile=(64, 128), pingpong=True, stages=2, ctas=2, store_slots=1, schedule="hilbert"
            ),
        ),
    ],
    ids=["late", "residual-batch", "pingpong-transposed"],
)
def test_half_the_tiles_make_all_of_the_result(problem, config, rng):
    assert config.tiles(problem) < np.prod(config.stacked_grid(problem))
    np.testing.assert_array_equal(*run(problem, config, rng))


@pytest.mark.parametrize("columns", [16, 32])
def test_what_chunks_write_twice_has_the_same_bits(columns, rng):
    """Chunks that are no squares: of one on the diagonal, a part is mirrored into another."""
    config = dataclasses.replace(SMALL, store_columns=columns, late_store=False)
    plan = HopperPlan(GRAM, config, H200, interpret=plgpu.InterpretGPUParams())
    assert not plan.chunks_are_squares
    # Real numbers, which are rounded in the order in which they are added up.
    a = products.normal(GRAM, rng).a
    out = np.asarray(jax.jit(hopper.build(plan))(a, a)).astype(np.float64)
    np.testing.assert_array_equal(out, out.T)
    wide = np.asarray(a).astype(np.float64)
    np.testing.assert_allclose(out, wide @ wide.T, rtol=0.01, atol=0.1)


def test_the_order_is_the_triangle_of_any():
    order = dataclasses.replace(SMALL, schedule=hilbert(6, 3)).resolve_schedule(
        dataclasses.replace(GRAM, batch=2)
    )
    assert isinstance(order, Schedule)
    assert order.triangle == Triangle(3)
    assert order.order.tolist() == [
        [row, col] for row, col in hilbert(6, 3).order.tolist() if col <= row % 3
    ]


def test_tiles_need_not_divide_each_other():
    config = HopperConfig(tile=(128, 144), stages=4)
    problem = Problem(2048, 2048, 8192, transpose_b=True, symmetric="gram")
    # One for each SM: 256 tiles of 128 x 128 are two waves, and their half is one and a bit.
    assert (config.tiles(problem), H200.sms) == (128, 132)
