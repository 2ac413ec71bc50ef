"""Sums over groups of float32, stored with the contracted dimension last, simulated: no races."""

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
from pallas_gemm.problem import Problem
from tests import races, summaries

F32 = jnp.float32
SIMULATOR = plgpu.InterpretGPUParams(detect_races=True)
SUMS: Any = {"a_dtype": F32, "b_dtype": F32, "out_dtype": F32, "transpose_b": True}
SUMS |= {"shared_a": True, "shared_b": True, "ragged_k": True}
CONFIGS = {
    "two consumers": HopperConfig(
        tile=(128, 64), stages=3, consumers=2, store_columns=32, late_store=False
    ),
    "claimed": HopperConfig(
        tile=(64, 32), stages=4, consumers=1, store_columns=32, persistence="dynamic",
        late_store=False,
    ),
}  # fmt: skip
SIZES = {
    # Borders at steps of 32 and elsewhere, several groups in a step, one in several steps.
    "uneven": (1, 30, 0, 65, 32, 3, 21),
    "whole steps": (32, 0, 64, 64),
    "none": (0, 0, 0),
    "the last alone": (0, 160),
    "too many": (100, 100),
}


@pytest.mark.every_other
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", CONFIGS)
# The simulator multiplies with NumPy, which warns of what this test is about.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_only_elements_of_a_group_are_in_its_sum(name: str, sizes: Any) -> None:
    m, n, k = 136, 72, 160
    problem = Problem(m, n, k, batch=len(sizes), **SUMS)
    ends = np.minimum(np.cumsum(sizes), k)
    spans = list(zip(ends - np.minimum(sizes, k - ends + sizes), ends, strict=True))
    spans = [(min(s, e), e) for s, e in zip([0, *ends[:-1]], ends, strict=True)]
    rng = np.random.default_rng(0)
    poisoned = np.arange(k) >= ends[-1]
    if len(spans) > 4:
        poisoned[slice(*spans[3])] = True
    a, b = (np.where(poisoned, np.nan, rng.integers(-3, 4, (rows, k))) for rows in (m, n))
    plan = HopperPlan(problem, CONFIGS[name], H200, interpret=SIMULATOR)
    with races.recorded() as raced:
        given = jnp.asarray(a, F32), jnp.asarray(b, F32), jnp.asarray(sizes, jnp.int32)
        found = jax.block_until_ready(hopper.build(plan)(*given))
        assert not raced()
    np.testing.assert_array_equal(found, np.stack([a[:, s:e] @ b[:, s:e].T for s, e in spans]))


@pytest.mark.parametrize("tile", [(128, 256), (128, 192), (256, 64), (64, 64)])
def test_nothing_is_spilled(tile: tuple[int, int]) -> None:
    consumers = 1 if tile[0] == 64 else 2
    config = HopperConfig(
        tile=tile, stages=4, consumers=consumers, store_columns=32, persistence="dynamic",
        late_store=False,
    )  # fmt: skip
    problem = Problem(4096, 4096, 8192, batch=8, **SUMS)
    shapes = (problem.a_shape, problem.b_shape)
    operands = [jax.ShapeDtypeStruct(shape, F32) for shape in shapes]
    operands.append(jax.ShapeDtypeStruct((8,), jnp.int32))
    run = hopper.build(HopperPlan(problem, config, H200))
    found = summaries.KEPT.of(run, *operands, target="h200")
    assert all((own.spill_bytes, own.serialized) == (0, "") for own in found)
