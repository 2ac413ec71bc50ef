"""Sums over groups of factors whose blocks have scales, simulated: exact numbers, no races."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.device import H200
from pallas_gemm.kernels.hopper import kernel as hopper
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.problem import Blocks, Problem
from tests import races

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
SIMULATOR = plgpu.InterpretGPUParams(detect_races=True)
CONFIG = HopperConfig(
    tile=(128, 64), stages=2, consumers=2, store_columns=32, late_store=False, schedule="swizzle:2"
)
PROBLEM = Problem(
    *(128, 64, 640),
    *(E4M3, E4M3, jnp.float32),
    transpose_b=True,
    shared_a=True,
    shared_b=True,
    ragged_k=True,
    blocks=Blocks(128, 1, 1),
)


def _run(plan: HopperPlan, sizes: Any, *, poisoned: Any = ()) -> tuple[np.ndarray, np.ndarray]:
    """Returns what a kernel makes of groups of these sizes, and what is to come of it.

    What belongs to groups that are poisoned, or to none, is no number.
    """
    rng, problem = np.random.default_rng(0), plan.problem
    assert problem.blocks is not None
    (g, r, c, _), (m, n, k) = problem.blocks, (problem.m, problem.n, problem.k)
    ends = np.minimum(np.cumsum(sizes), k)
    spans = list(zip(ends - np.minimum(sizes, k), ends, strict=True))
    is_number = np.zeros(k, bool)
    for group, (start, end) in enumerate(spans):
        is_number[start:end] = group not in poisoned

    def drawn(rows: int, dtype: Any) -> Any:
        values = np.where(is_number, rng.integers(-3, 4, (rows, k)), np.nan)
        return jnp.asarray(values.astype(dtype))

    def scales(*shape: int) -> Any:
        return jnp.asarray(np.float32(2.0 ** rng.integers(-2, 3, shape)))

    a, b = drawn(m, problem.a_dtype), drawn(n, problem.b_dtype)
    row, col = scales(-(-m // r), k // g), scales(k // g, -(-n // c))
    with races.recorded() as raced:
        found = hopper.build(plan)(a, b, jnp.asarray(sizes, jnp.int32), row, col)
        jax.block_until_ready(found)
        assert not raced()
    left, right = (np.asarray(x, np.float64) for x in (a, b))
    left = left * np.repeat(np.repeat(np.asarray(row), r, 0)[:m], g, 1)
    right = right * np.repeat(np.repeat(np.asarray(col), c, 1)[:, :n], g, 0).T
    expected = [left[:, s:e] @ right[:, s:e].T for s, e in spans]
    return np.asarray(found, np.float64), np.stack(expected)


SIZES = {
    # Of several groups in a block, of one that is in several, with borders at blocks and elsewhere.
    "uneven": (1, 70, 0, 185, 128, 3, 200),
    "whole blocks": (128, 0, 256, 256),
    "none": (0, 0, 0),
    "the last alone": (0, 640),
}


@pytest.mark.each_value
# The simulator multiplies with NumPy, which warns of what this test is about.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(
    "blocks",
    [Blocks(128, 1, 1), Blocks(128, 128, 32), Blocks(32, 1, 64), Blocks(64, 1, 1)],
    ids=str,
)
def test_only_elements_of_a_group_are_in_its_sum(sizes: Any, blocks: Blocks) -> None:
    problem = dataclasses.replace(PROBLEM, batch=len(sizes), blocks=blocks)
    plan = HopperPlan(problem, dataclasses.replace(CONFIG, ctas=2), H200, interpret=SIMULATOR)
    poisoned = [group for group in (1, 4) if len(sizes) > 4]
    found, expected = _run(plan, sizes, poisoned=poisoned)
    checked = [group for group in range(len(sizes)) if group not in poisoned]
    np.testing.assert_array_equal(found[checked], expected[checked])


EDGES: dict[str, Any] = {
    "parts of tiles": {"m": 72, "n": 144},
    "other types": {"a_dtype": E5M2, "b_dtype": E4M3, "out_dtype": jnp.bfloat16},
    "a part of a step": {"k": 608, "blocks": Blocks(32, 1, 1)},
}
STAGED = dataclasses.replace(CONFIG, tile=(128, 128), stages=3)


@pytest.mark.every_other
@pytest.mark.parametrize("change", EDGES.values(), ids=EDGES)
@pytest.mark.parametrize("config", [CONFIG, STAGED], ids=["narrow", "wide"])
def test_edges(change: Any, config: HopperConfig) -> None:
    problem = dataclasses.replace(PROBLEM, batch=3, **change)
    if not config.registers_suffice(problem):
        pytest.skip("scales of four blocks of a step take more registers than there are")
    plan = HopperPlan(problem, dataclasses.replace(config, ctas=3), H200, interpret=SIMULATOR)
    found, expected = _run(plan, (130, 217, 200))
    rounded = jnp.asarray(expected, jnp.float32).astype(problem.out_dtype)
    np.testing.assert_array_equal(found, np.asarray(rounded, np.float64))


def test_crowded_groups_are_cut_along_k_and_their_sums_handed_on() -> None:
    sizes = (8400, 30, 0, 70)
    problem = dataclasses.replace(PROBLEM, m=128, n=128, k=8576, batch=len(sizes))
    plan = HopperPlan(problem, dataclasses.replace(CONFIG, ctas=1), H200, interpret=SIMULATOR)
    assert plan.relay
    np.testing.assert_array_equal(*_run(plan, sizes))
