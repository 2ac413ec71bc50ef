"""Operations of functions in a kernel, whatever shape and type of operand they take."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gemm import HopperConfig, gemm, target

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
M, N, K = 72, 128, 80
SHAPES = {"number": (), "rows": (M, 1), "columns": (N,), "whole": (M, N)}
CONFIG = HopperConfig((64, 64), stages=2, ctas=2, store_columns=32, consumers=1, late_store=False)


@pytest.fixture(autouse=True)
def _as_users_write() -> Iterator[None]:
    """Functions broadcast and promote as they do by default."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


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


@pytest.mark.parametrize("dtype", [F32, BF16, I32, jnp.bool_])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("function", [_chosen, _of_truth, _cast])
def test_they_are_lowered_and_exact(function: Any, shape: str, dtype: Any) -> None:
    rng = np.random.default_rng(7)
    a, b = (jnp.asarray(rng.integers(-2, 3, size), BF16) for size in ((M, K), (K, N)))
    u = jnp.asarray(rng.integers(-2, 4, SHAPES[shape]), dtype)

    def product(a: Any, b: Any, u: Any, implementation: str) -> Any:
        how: Any = {"config": CONFIG, "implementation": implementation}
        return gemm(a, b, epilogue=function, operands=(u,), **how)

    with target("h200"):
        traced = jax.jit(product, static_argnums=3).trace(a, b, u, "hopper")
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
    found = product(a, b, u, "interpret")
    sums = np.asarray(a, np.float32) @ np.asarray(b, np.float32)
    np.testing.assert_array_equal(found, function(jnp.asarray(sums), u))
