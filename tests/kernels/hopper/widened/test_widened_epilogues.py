"""What follows sums of weights of few bits, in the GPU simulator: gates, residuals, functions."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.kernels.functions import words
from pallas_gemm.kernels.functions.axes import Names
from pallas_gemm.kernels.functions.parts import Split
from pallas_gemm.kernels.functions.split import split
from pallas_gemm.problem import Blocks, Epilogue, Problem
from tests.kernels.hopper.widened.test_widened_groups import of_groups, operands, run
from tests.kernels.hopper.widened.test_widened_simulated import Config, problem, weights

GATED = Epilogue(gated=True, residual=True, beta=None)


def gated(asked: Problem, config: Any, *sizes: int) -> None:
    """Simulates a gated product with a residual; without an activation, all of it is exact."""
    a, gate, scales, wide = operands(asked)
    up, wide_up = (x[..., ::-1, :] for x in (gate, wide))
    up = gate[..., ::-1] if asked.transpose_b else up
    scales += [x[..., ::-1, :] for x in scales]
    rng = np.random.default_rng(1)
    residual = jnp.asarray(rng.integers(-9, 9, (asked.m, asked.n)).astype(asked.added_dtype))
    given = [jnp.array(sizes)] if sizes else []
    found = run(asked, config, a, gate, up, *given, *scales, residual, jnp.float32(2))
    x = np.asarray(a, np.float64)
    if sizes:
        group = np.repeat(range(len(sizes)), sizes)
        sums = [np.einsum("mk,mkn->mn", x[: len(group)], own[group]) for own in (wide, wide_up)]
    else:
        sums = [x @ own for own in (wide, wide_up)]
    expected = np.zeros((asked.m, asked.n))
    rows = len(sums[0])
    expected[:rows] = (sums[0] * sums[1] + 2 * np.asarray(residual, np.float64)[:rows]).astype(
        np.float32
    )
    if asked.out_dtype != np.float32:
        expected = np.asarray(jnp.asarray(expected).astype(asked.out_dtype), np.float64)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.every_other
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(
    ("kind", "out", "group", "options"),
    [
        (jnp.int4, jnp.float32, 128, {"tile": (128, 16)}),
        (jnp.int8, jnp.bfloat16, 128, {"tile": (256, 24), "consumers": 2, "stages": 6, "step": 64}),
        (jnp.int4, jnp.bfloat16, 64, {"tile": (256, 16), "along_k": 1}),
        (jnp.int4, jnp.bfloat16, 32, {"tile": (256, 8), "consumers": 2, "along_k": 1}),
    ],
)
def test_gate_and_up_are_one_kernel(
    kind: Any, out: Any, group: int, options: Any, transpose_b: bool
) -> None:
    asked = problem(
        *(kind, 21, 192, 256), group=group, epilogue=GATED, out_dtype=out, transpose_b=transpose_b
    )
    gated(asked, Config(**options))


def test_experts_have_gates() -> None:
    asked = of_groups((5, 0, 11), m=19, group=64, epilogue=GATED, residual_dtype=jnp.bfloat16)
    gated(asked, Config(tile=(128, 8), step=64, persistence="static", ctas=3), 5, 0, 11)


def of_function(function: Any, *operands: Any, m: int, n: int) -> Epilogue:
    """A function of the sums as the epilogue of a kernel."""
    sums = jax.ShapeDtypeStruct((m, n), jnp.float32)
    parts = split(jax.make_jaxpr(function)(sums, *operands), Names("mn", "m", "n"), 1)
    assert isinstance(parts, Split)
    assert not parts.left
    return Epilogue(program=parts.program)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_function_has_several_results_and_operands(batch: int) -> None:
    m, n, rng = 37, 192, np.random.default_rng(1)

    def f(s: Any, x: Any, y: Any, bias: Any) -> Any:
        z = s + x.astype(jnp.float32) + bias[None]
        return z.astype(jnp.bfloat16), z * y.astype(jnp.float32)

    shape = (m, n) if batch == 1 else (batch, m, n)
    x, y = (jnp.asarray(rng.integers(-9, 9, shape).astype(t)) for t in (jnp.bfloat16, jnp.float16))
    bias = jnp.asarray(rng.integers(-9, 9, n).astype(jnp.float32))
    own = (x, y) if batch == 1 else (x[0], y[0])
    epilogue = of_function(f, *own, bias, m=m, n=n)
    asked = problem(
        *(jnp.int8, m, n, 256), group=128, epilogue=epilogue, batch=batch, out_dtype=jnp.bfloat16
    )
    assert len(words.program(asked).results) == 2
    a, b, scales, wide = operands(asked)
    config = Config(tile=(128, 40), consumers=2, along_k=1, stages=2)
    found = run(asked, config, a, b, *scales, x, y, bias)
    z = np.asarray(a, np.float64) @ wide + np.asarray(x, np.float64) + np.asarray(bias)
    np.testing.assert_array_equal(found[0], np.asarray(jnp.asarray(z, jnp.bfloat16), np.float64))
    np.testing.assert_array_equal(found[1], z * np.asarray(y, np.float64))


@pytest.mark.each_value
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(
    ("kind", "zeros", "group", "options"),
    [
        (jnp.uint4, jnp.uint4, 128, {}),
        (jnp.int4, jnp.int4, 32, {"step": 64, "tile": (64, 8), "along_k": 4, "stages": 8}),
        (jnp.int8, jnp.int8, 64, {"consumers": 2, "along_k": 1, "stages": 2}),
        (jnp.uint4, jnp.bfloat16, 64, {"step": 64}),
        (jnp.int8, jnp.float32, 384, {}),
        (jnp.float8_e4m3fn, jnp.float8_e4m3fn, 128, {}),
        (jnp.float4_e2m1fn, jnp.float4_e2m1fn, 128, {"tile": (128, 8)}),
    ],
)
def test_groups_have_zero_points(
    kind: Any, zeros: Any, group: int, options: Any, transpose_b: bool
) -> None:
    asked = problem(kind, 12, 192, 384, transpose_b=transpose_b, out_dtype=jnp.float32)
    asked = dataclasses.replace(asked, blocks=Blocks(group, 0, 1, zeros=True))
    check_zeros(asked, Config(**options), zeros)


@pytest.mark.parametrize("kind", [jnp.uint4, jnp.int8])
def test_gates_of_experts_have_zero_points(kind: Any) -> None:
    epilogue = Epilogue(gated=True)
    asked = of_groups((5, 0, 11), m=19, kind=kind, epilogue=epilogue)
    asked = dataclasses.replace(asked, blocks=Blocks(128, 0, 1, zeros=True))
    check_zeros(asked, Config(tile=(256, 8), consumers=2, along_k=1), kind, 5, 0, 11)


def test_gate_and_up_have_scales_and_zero_points_of_two_types() -> None:
    asked = problem(jnp.int8, 12, 192, 256, epilogue=Epilogue(gated=True), out_dtype=jnp.float32)
    asked = dataclasses.replace(asked, blocks=Blocks(128, 0, 1, zeros=True))
    check_zeros(asked, Config(), jnp.int8, of_up=jnp.float32)


def check_zeros(asked: Problem, config: Any, kind: Any, *sizes: int, of_up: Any = None) -> None:
    """Simulates a product of weights with zero points: all of it is rounded as theirs are."""
    rng, group = np.random.default_rng(2), asked.blocks.k if asked.blocks else asked.k
    a = jnp.asarray(rng.integers(-1, 2, asked.a_shape).astype(asked.a_dtype))
    lead = asked.b_shape[:-2]
    shape = (*lead, asked.k // group, asked.n)
    arrays: Any = []
    types = [(kind, jnp.bfloat16), (of_up or kind, of_up or jnp.bfloat16)]
    for own, of_scale in types[: asked.sums]:
        b, zero = (weights(x, t, rng) for x, t in ((asked.b_shape, asked.b_dtype), (shape, own)))
        scale = jnp.asarray((2.0 ** rng.integers(-1, 2, shape)).astype(of_scale))
        wide = np.float32(b)
        wide = wide.swapaxes(-1, -2) if asked.transpose_b else wide
        less, by = (np.repeat(np.float32(x), group, -2) for x in (zero, scale))
        stands = ((wide - less) * by).astype(asked.a_dtype)
        arrays.append((b, scale, zero, np.asarray(stands, np.float64)))
    rights, scales, zeros, stands = zip(*arrays, strict=True)
    given = [jnp.array(sizes)] if sizes else []
    found = run(asked, config, a, *rights, *given, *scales, *zeros)
    x, expected = np.asarray(a, np.float64), np.zeros((asked.m, asked.n))
    if sizes:
        of_row = np.repeat(range(len(sizes)), sizes)
        sums = [np.einsum("mk,mkn->mn", x[: len(of_row)], own[of_row]) for own in stands]
    else:
        sums = [x @ own for own in stands]
    expected[: len(sums[0])] = np.prod(sums, 0)
    np.testing.assert_allclose(found, expected, rtol=3e-7, atol=3e-6 * np.abs(expected).max())
