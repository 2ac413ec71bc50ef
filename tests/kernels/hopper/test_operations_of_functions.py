"""Operations of functions in a kernel, whatever shape and type of operand they take."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_gemm import HopperConfig, gemm, target

pytestmark = pytest.mark.usefixtures("as_users_write")

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
M, N, K = 72, 64, 80
SHAPES = {"number": (), "rows": (M, 1), "columns": (N,), "whole": (M, N)}
# Narrow, since each column of a thread is lowered by itself.
CONFIG = HopperConfig((64, 32), stages=2, ctas=2, store_columns=32, consumers=1, late_store=False)


def _chosen(s: Any, u: Any) -> Any:
    """Takes cases by truth values, and by numbers as `lax.switch` of a batch does."""
    whole = jnp.broadcast_to(u, s.shape)
    of_two = lax.select_n((whole > 0).astype(I32), s, -s)
    of_three = lax.select_n(jnp.clip(whole.astype(I32), 0, 2), s, 2 * s, 3 * s)
    # Each share is exact in float32.
    return jnp.where(u > 0, s, 0) + of_two / 256 + of_three * 256


def _of_truth(s: Any, u: Any) -> Any:
    flag = u.astype(bool)
    both, either = s.astype(bool) & flag, (s > 1) | ~flag
    return jnp.where(both, s, 0) + jnp.where(either ^ (s < u), s, 0) / 256


def _cast(s: Any, u: Any) -> Any:
    small = u.astype(jnp.float8_e4m3fn).astype(F32) + u.astype(jnp.float8_e5m2).astype(F32)
    return jnp.clip(s, -jnp.abs(small), 4) + small / 256 + (s / 8).astype(jnp.int8) * 256


def _of_bytes(s: Any, u: Any) -> Any:
    whole, small = (s / 2).astype(jnp.int8), (s / 16).astype(jnp.float8_e4m3fn)
    of_whole = jnp.where(whole > 3, whole * whole, -whole) + jnp.abs(whole)
    of_small = jnp.where(small < 1, small + small, -small)
    wide = of_whole.astype(jnp.float8_e5m2).astype(F32) + of_small.astype(jnp.float16).astype(F32)
    return wide + jnp.where(u.astype(jnp.int8) > 0, s, 0)


def _of_flags(s: Any, u: Any) -> Any:
    return (
        jnp.where(jnp.maximum(s > 0, u > 0), s, 0)
        + jnp.where(jnp.minimum(s > 0, u > 0), s, 0) * 256
    )


def _whole(s: Any, u: Any) -> Any:
    quarters = s / 4 + u.astype(F32)
    away = lax.round(quarters, lax.RoundingMethod.AWAY_FROM_ZERO)
    nearest = jnp.round(quarters) + away * 64
    not_all = ~(s > 0) & ~(u.astype(I32) + ~s.astype(I32) > 0)
    return nearest + (jnp.floor(quarters) + jnp.ceil(quarters) * 64) / 4096 + not_all.astype(F32)


def _without_effect(s: Any, u: Any) -> Any:
    named = checkpoint_name(s, "sums") + lax.stop_gradient(u.astype(F32))
    return jax.checkpoint(_straight)(named)


@jax.custom_vjp
def _straight(x: Any) -> Any:
    return jnp.round(x / 2)


_straight.defvjp(lambda x: (_straight(x), None), lambda _, g: (g,))


FUNCTIONS = (_chosen, _of_truth, _cast, _of_bytes, _of_flags, _whole, _without_effect)
DTYPES = (F32, BF16, I32, jnp.bool_)
# What is made of other shapes alone is computed outside: there, types take turns.
WHOLE = [("whole", dtype) for dtype in DTYPES]
OTHERS = [
    [(shape, DTYPES[(number + turn) % len(DTYPES)]) for turn, shape in enumerate([*SHAPES][:3])]
    for number in range(len(FUNCTIONS))
]
CASES = [
    (function, kinds)
    for function, others in zip(FUNCTIONS, OTHERS, strict=True)
    for kinds in (WHOLE[:2], WHOLE[2:3], WHOLE[3:], others)
]


def lowered_and_simulated(function: Any, a: Any, b: Any, *operands: Any) -> Any:
    """Checks that a kernel with a function is lowered, and returns its result."""

    def product(implementation: str, a: Any, b: Any, *operands: Any) -> Any:
        how: Any = {"config": CONFIG, "implementation": implementation, "transpose_b": True}
        return gemm(a, b, epilogue=function, operands=operands, **how)

    with target("h200"):
        traced = jax.jit(product, static_argnums=0).trace("hopper", a, b, *operands)
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
    return product("interpret", a, b, *operands)


@pytest.mark.parametrize(("function", "kinds"), CASES)
def test_they_are_lowered_and_exact(function: Any, kinds: Any) -> None:
    rng = np.random.default_rng(7)
    a, b = (jnp.asarray(rng.integers(-2, 3, size).astype(BF16)) for size in ((M, K), (N, K)))
    operands = [
        jnp.asarray(rng.integers(-2, 4, SHAPES[shape]).astype(dtype)) for shape, dtype in kinds
    ]

    # To lower a kernel with a result of each operand takes little longer than with one result.
    def of_each(s: Any, *operands: Any) -> Any:
        return [function(s, u) for u in operands]

    found = lowered_and_simulated(of_each, a, b, *operands)
    sums = jnp.asarray(np.asarray(a, np.float32) @ np.asarray(b, np.float32).T)
    for result, u in zip(found, operands, strict=True):
        np.testing.assert_array_equal(result, function(sums, u))


OF_16_BITS = {
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "log": lambda x: jnp.log(jnp.abs(x) + 1),
    "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "logistic": lax.logistic,
    "sqrt": lambda x: jnp.sqrt(jnp.abs(x)),
    "rsqrt": lambda x: lax.rsqrt(jnp.abs(x) + 1),
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "expm1": jnp.expm1,
    "log2": lambda x: jnp.log2(jnp.abs(x) + 1),
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "round": jnp.round,
}


TOGETHER = 6
"""A kernel takes some time to lower, and more functions would take too many registers."""


@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
@pytest.mark.parametrize("names", [*itertools.batched(OF_16_BITS, TOGETHER)], ids=" ".join)
def test_functions_of_16_bits_are_those_of_float32_rounded(
    names: Sequence[str], dtype: Any
) -> None:
    rng = np.random.default_rng(3)
    a, b = (jnp.asarray(rng.integers(-2, 3, size).astype(dtype)) for size in ((M, K), (N, K)))
    which = jnp.arange(N) % len(names)

    def one_for_each_column(s: Any, which: Any) -> Any:
        # Sums are whole numbers up to 100.
        x = (s / 64).astype(dtype)
        result = jnp.zeros_like(x)
        for number, name in enumerate(names):
            result = jnp.where(which == number, OF_16_BITS[name](x), result)
        return result

    found = lowered_and_simulated(one_for_each_column, a, b, which)
    assert found.dtype == dtype
    sums = np.asarray(a, np.float32) @ np.asarray(b, np.float32).T
    x = jnp.asarray(sums / 64).astype(dtype)
    for number, name in enumerate(names):
        both = (found, OF_16_BITS[name](x))
        own = (np.asarray(each[:, number :: len(names)], np.float32) for each in both)
        np.testing.assert_allclose(*own, rtol=2**-7, err_msg=name)
