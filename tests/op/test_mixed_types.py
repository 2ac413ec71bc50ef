"""Products of bfloat16 or float16 by float32, as the precision that is asked for says."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gemm import dot_general, explain, gemm, grouped_gemm, target
from tests import reference

M, N, K = 72, 64, 128
SIZES = jnp.asarray([20, 0, 47, 3], jnp.int32)
ROUNDED, SPLIT = "BF16_BF16_F32", "BF16_BF16_F32_X3"
FIRST_WITH_LAST = (((1,), (0,)), ((), ()))

pytestmark = pytest.mark.filterwarnings("ignore::pallas_gemm.planning.ignored.PromotedWarning")


@pytest.fixture(autouse=True)
def _promotes() -> Any:
    with jax.numpy_dtype_promotion("standard"):
        yield


def drawn(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def shares(result: Any, a: Any, b: Any) -> float:
    """Returns the largest error of a product, as a share of `|a| @ |b|`."""
    left, right = reference.wide(a), reference.wide(b)
    error = np.abs(reference.wide(result) - left @ right)
    return float((error / (np.abs(left) @ np.abs(right))).max())


@pytest.mark.parametrize(
    ("dtype", "precision", "least", "most"),
    [
        (jnp.bfloat16, ROUNDED, 2**-14, 2**-9),
        (jnp.bfloat16, SPLIT, 2**-25, 2**-16),
        (jnp.bfloat16, "TF32_TF32_F32", 2**-18, 2**-11),
        (jnp.bfloat16, "highest", 2**-30, 2**-22),
        (jnp.float16, "F16_F16_F32", 2**-18, 2**-12),
    ],
)
def test_the_wider_is_rounded_as_far_as_is_asked(
    dtype: Any, precision: str, least: float, most: float
) -> None:
    a, b = drawn(M, K, dtype=dtype), drawn(K, N, seed=1)
    for one, other in ((a, b), (b.T, a.T)):
        if precision == "F16_F16_F32" and one is not a:
            continue
        result = gemm(one, other, precision=precision, implementation="interpret")
        assert result.dtype == jnp.float32
        assert least < shares(result, one, other) < most


@pytest.mark.parametrize(("precision", "most"), [(ROUNDED, 2**-7), (SPLIT, 2**-16)])
def test_gradients_have_the_types_of_the_operands(precision: str, most: float) -> None:
    a, b, g = drawn(M, K, dtype=jnp.bfloat16), drawn(K, N, seed=1), drawn(M, N, seed=2)
    product = functools.partial(gemm, precision=precision, implementation="interpret")
    da, db = jax.vjp(product, a, b)[1](g)
    assert (da.dtype, db.dtype) == (jnp.bfloat16, jnp.float32)
    # The one is rounded to bfloat16 once more.
    assert shares(da, g, b.T) < most + 2**-8
    assert shares(db, a.T, g) < most


@pytest.mark.parametrize(("precision", "most"), [(None, 2**-10), (ROUNDED, 2**-8)])
def test_groups_of_mixed_types_are_kernels(precision: str | None, most: float) -> None:
    a, b, g = drawn(M, K, dtype=jnp.bfloat16), drawn(4, K, N, seed=1), drawn(M, N, seed=2)
    product = functools.partial(grouped_gemm, precision=precision, implementation="interpret")
    result, pull = jax.vjp(lambda a, b: product(a, b, SIZES), a, b)
    exact = functools.partial(lax.ragged_dot, group_sizes=SIZES, precision="highest")
    wanted, pull_exact = jax.vjp(exact, a.astype(jnp.float32), b)
    da, db = pull(g)
    assert (result.dtype, da.dtype, db.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    for ours, own in zip((result, da, db), (wanted, *pull_exact(g)), strict=True):
        scale = float(jnp.abs(own).max())
        assert float(jnp.abs(ours.astype(jnp.float32) - own).max()) < (most + 2**-8) * scale


def test_a_cast_is_shown_and_what_is_asked_for_decides() -> None:
    a = jax.ShapeDtypeStruct((8192, 14336), jnp.bfloat16)
    b = jax.ShapeDtypeStruct((14336, 4096), jnp.float32)
    with target("h200"):
        rounded = explain(dot_general, a, b, FIRST_WITH_LAST, ROUNDED)
        usual = explain(dot_general, a, b, FIRST_WITH_LAST)
    assert rounded.plan is not None
    (step,) = rounded.plan.realigned.passes
    assert str(step) == "cast b to 14336 x 4096 of bfloat16: moves 352.3 MB"
    assert usual.implementation == "xla"
    assert "cast float32 to bfloat16, or let precision='BF16_BF16_F32' do it" in usual.reason
