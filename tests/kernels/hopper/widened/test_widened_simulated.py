"""Weights that go through registers in the GPU simulator, which also records races."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.device import H200
from pallas_gemm.kernels.element_types import BITS
from pallas_gemm.kernels.hopper.widened import kernel
from pallas_gemm.kernels.hopper.widened.config import WidenedConfig
from pallas_gemm.kernels.hopper.widened.plan import WidenedPlan
from pallas_gemm.kernels.ptx import tf32
from pallas_gemm.problem import Blocks, Epilogue, Problem
from tests import races

SIMULATOR = plgpu.InterpretGPUParams(detect_races=True)
Config = functools.partial(WidenedConfig, tile=(128, 16), stages=4, along_k=2, store_columns=16)


def problem(kind: Any, m: int, n: int, k: int, *, group: int = 0, **options: Any) -> Problem:
    blocks = Blocks(group, 0, 1) if group else None
    return Problem(m, n, k, options.pop("to", jnp.bfloat16), kind, blocks=blocks, **options)


def weights(shape: tuple[int, ...], kind: Any, rng: np.random.Generator) -> jax.Array:
    """Weights of any value that they can have but infinity and NaN; TF32 holds those of float32."""
    if kind == jnp.float32:
        return tf32.rounded(jnp.asarray(rng.standard_normal(shape), kind))
    if jnp.issubdtype(kind, jnp.integer):
        limits = jnp.iinfo(kind)
        drawn = rng.integers(int(limits.min), int(limits.max) + 1, shape)
    else:
        drawn = np.float32(rng.standard_normal(shape) * 2)
    return jnp.asarray(drawn.astype(kind))


def check(
    asked: Problem,
    config: WidenedConfig,
    scales: Any = jnp.float32,
    plan: type[WidenedPlan] = WidenedPlan,
    **extras: Any,
) -> None:
    """Simulates a kernel; what it makes is what weights that were widened before would."""
    rng = np.random.default_rng(0)
    a = jnp.asarray(rng.integers(-3, 4, asked.a_shape).astype(asked.a_dtype))
    b = weights(asked.b_shape, asked.b_dtype, rng)
    whole = np.float32(b)
    whole = whole.T if asked.transpose_b else whole
    given = []
    if asked.blocks:
        groups = asked.k // asked.blocks.k
        given.append(jnp.asarray(rng.uniform(0.5, 2, (groups, asked.n)).astype(scales)))
        whole = whole * np.repeat(np.float32(given[0]), asked.blocks.k, 0)
    run = kernel.build(plan(asked, config, H200, interpret=SIMULATOR))
    with races.recorded() as raced:
        found = np.asarray(jax.jit(run)(a, b, *given, *extras.values()), np.float64)
        assert not raced()
    # Scales that the sums are multiplied by leave weights as they are.
    if not config.form(asked).scales_sums:
        whole = whole.astype(asked.a_dtype)
    whole = np.asarray(whole, np.float64)
    exact = np.asarray(a, np.float64) @ whole
    exact = exact * np.asarray(extras.get("col_scale", 1.0)) + np.asarray(extras.get("bias", 0.0))
    # Rounded once, but for what sums of float32 lack.
    half = jnp.finfo(asked.out_dtype).eps / 2
    np.testing.assert_allclose(found, exact, rtol=half, atol=1e-6 * np.abs(exact).max())


@pytest.mark.each_value
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("kind", BITS)
def test_each_type_is_multiplied_as_it_is_stored(kind: Any, transpose_b: bool) -> None:
    check(problem(kind, 12, 192, 640, group=128, transpose_b=transpose_b), Config())


@pytest.mark.parametrize(
    ("asked", "config", "scales"),
    [
        # Groups that are shorter than a step, and longer; the last rows, columns and steps cut.
        (problem(jnp.int4, 20, 320, 480, group=32), Config(step=64, consumers=2), jnp.bfloat16),
        (problem(jnp.int8, 9, 160, 384, group=128), Config(step=64, along_k=1), jnp.float32),
        # Without scales, in float16, and results of float32.
        (
            problem(jnp.int8, 40, 128, 256, to=jnp.float16, out_dtype=jnp.float32),
            Config(tile=(128, 24), step=64, consumers=2, along_k=1, stages=2),
            None,
        ),
        (
            problem(jnp.int4, 70, 256, 256, group=64, to=jnp.float16, out_dtype=jnp.float16),
            Config(tile=(256, 40), consumers=4, along_k=1, store_columns=32),
            jnp.float16,
        ),
        # Four that take steps in turns, one of which has one more than the others.
        (
            problem(jnp.int4, 8, 64, 1152, group=128),
            Config(tile=(64, 8), along_k=4, stages=8),
            jnp.float32,
        ),
    ],
    ids=["short groups", "long groups", "float32", "float16", "in turns"],
)
def test_every_form_of_a_kernel(asked: Problem, config: WidenedConfig, scales: Any) -> None:
    check(asked, config, scales)


SINGLE = {"to": jnp.float32, "out_dtype": jnp.float32}


@pytest.mark.parametrize(
    ("asked", "config"),
    [
        (problem(jnp.float32, 20, 320, 480, **SINGLE), Config(step=32, consumers=2)),
        (problem(jnp.float32, 12, 192, 640, **SINGLE), Config(step=64)),
        (problem(jnp.float32, 9, 64, 68, **SINGLE), Config(tile=(64, 16), step=32, along_k=1)),
        (
            problem(jnp.float32, 70, 96, 256, to=jnp.float32),
            Config(tile=(64, 40), step=32, along_k=1, store_columns=32, persistence="static"),
        ),
    ],
    ids=["cut", "in turns", "one panel", "bfloat16"],
)
def test_float32_is_multiplied_as_it_is_stored(asked: Problem, config: WidenedConfig) -> None:
    check(asked, config)


def test_float32_is_rounded_where_the_simulator_does_not() -> None:
    x = 1 + 2.0**-11 + 2.0**-20
    asked = problem(jnp.float32, 8, 64, 64, **SINGLE)
    config = Config(tile=(64, 16), step=32, along_k=1)
    run = kernel.build(WidenedPlan(asked, config, H200, interpret=SIMULATOR))
    for left, right in ((x, 1), (1, x)):
        a, b = np.full(asked.a_shape, left, "f"), np.full(asked.b_shape, right, "f")
        np.testing.assert_array_equal(jax.jit(run)(a, b), 64 * (1 + 2.0**-10))


def test_what_follows_is_applied_to_the_sums() -> None:
    epilogue = Epilogue(bias=True, col_scale=True)
    asked = problem(jnp.int8, 12, 192, 256, epilogue=epilogue)
    rng = np.random.default_rng(1)
    bias, scale = (jnp.asarray(rng.uniform(0.5, 2, 192).astype(jnp.float32)) for _ in range(2))
    check(asked, Config(step=64), bias=bias, col_scale=scale)
