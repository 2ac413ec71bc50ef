"""Products of groups whose matrices have odd sizes, simulated: they are padded for the kernel."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gemm import explain, group_sums, grouped_gemm, ragged_dot, target

M, N, K = 71, 53, 77
SIZES = jnp.asarray([20, 0, 46, 3], jnp.int32)
SIMULATED = functools.partial(grouped_gemm, implementation="interpret")
BF16, F32, I8, E4M3 = jnp.bfloat16, jnp.float32, jnp.int8, jnp.float8_e4m3fn


def integers(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32))


def exact(a: Any, b: Any) -> Any:
    return lax.ragged_dot(a.astype(F32), b.astype(F32), SIZES, precision="highest")


@pytest.mark.every_other
@pytest.mark.parametrize("dtype", [BF16, F32, I8, E4M3])
@pytest.mark.parametrize(("n", "k"), [(N, K), (64, K), (N, 64), (100, 120)])
def test_rows_in_groups_are_exact(dtype: Any, n: int, k: int) -> None:
    a, b = integers(M, k).astype(dtype), integers(4, k, n, seed=1).astype(dtype)
    result = SIMULATED(a, b, SIZES, preferred_element_type=jnp.int32 if dtype == I8 else F32)
    np.testing.assert_array_equal(result, exact(a, b))


@pytest.mark.every_other
@pytest.mark.parametrize("dtype", [I8, jnp.int4])
@pytest.mark.parametrize(("n", "k"), [(N, K), (64, K), (56, 72)])
def test_matrices_of_few_bits_are_exact(dtype: Any, n: int, k: int) -> None:
    a, b = integers(M, k), integers(4, k, n, seed=1)
    result = SIMULATED(a.astype(BF16), b.astype(dtype), SIZES, preferred_element_type=F32)
    np.testing.assert_array_equal(result, exact(a, b))


@pytest.mark.every_other
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (F32, F32), (I8, I8), (E4M3, jnp.float8_e5m2)])
@pytest.mark.parametrize(("m", "n"), [(N, K), (64, 48)])
def test_sums_over_groups_are_exact(dtypes: Any, m: int, n: int) -> None:
    a, b = integers(m, M).astype(dtypes[0]), integers(M, n, seed=1).astype(dtypes[1])
    out = jnp.int32 if dtypes[0] == I8 else F32
    result = group_sums(a, b, SIZES, preferred_element_type=out, implementation="interpret")
    ends = np.cumsum(SIZES)
    parts = [slice(end - size, end) for end, size in zip(ends, SIZES, strict=True)]
    x, y = np.asarray(a, np.float32), np.asarray(b, np.float32)
    np.testing.assert_array_equal(result, [x[:, own] @ y[own] for own in parts])


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_gradients_are_exact(dtype: Any) -> None:
    a, b, g = integers(M, K), integers(4, K, N, seed=1), integers(M, N, seed=2)
    product = functools.partial(SIMULATED, preferred_element_type=F32)
    _, pull = jax.vjp(lambda a, b: product(a, b, SIZES), a.astype(dtype), b.astype(dtype))
    wanted = jax.vjp(exact, a, b)[1](g)
    # bfloat16 holds these sums.
    for ours, own in zip(pull(g), wanted, strict=True):
        np.testing.assert_array_equal(ours, own.astype(dtype))


def test_a_gate_and_a_bias_follow() -> None:
    a, b, up = integers(M, K), integers(4, K, N, seed=1), integers(4, K, N, seed=2)
    bias = integers(4, N, seed=3)
    given = {"up": up.astype(BF16), "activation": "relu", "preferred_element_type": F32}
    gated = SIMULATED(a.astype(BF16), b.astype(BF16), SIZES, **given)
    np.testing.assert_array_equal(gated, jnp.maximum(exact(a, b), 0) * exact(a, up))
    given = {"bias": bias, "activation": "relu", "preferred_element_type": F32}
    added = SIMULATED(a.astype(BF16), b.astype(BF16), SIZES, **given)
    group = np.repeat(np.arange(4), np.asarray(SIZES))
    own = np.maximum(np.asarray(exact(a, b))[: len(group)] + np.asarray(bias)[group], 0)
    np.testing.assert_array_equal(added[: len(group)], own)


def test_a_function_follows_rows_as_long_as_they_are() -> None:
    def function(s: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.maximum(s, 0), jnp.sum(s + 1, -1)

    a, b = integers(M, K), integers(4, K, 64, seed=1)
    product = functools.partial(SIMULATED, epilogue=function)
    found, count = product(a.astype(BF16), b.astype(BF16), SIZES), np.sum(SIZES)
    for ours, wanted in zip(found, function(exact(a, b)), strict=True):
        np.testing.assert_array_equal(ours[:count], wanted[:count])
    with pytest.raises(ValueError, match="rows in groups need a result with rows of a multiple"):
        product(a.astype(BF16), b[..., :N].astype(BF16), SIZES)


@pytest.mark.parametrize("dtype", [BF16, F32, I8])
def test_a_kernel_takes_them(dtype: Any) -> None:
    shape = jax.ShapeDtypeStruct
    operands = shape((8191, 1001), dtype), shape((8, 1001, 1003), dtype), shape((8,), jnp.int32)
    product = functools.partial(ragged_dot, preferred_element_type=F32)
    with target("h200"):
        (found,) = explain(product, *operands).products
    assert found.implementation == "hopper"


@pytest.mark.gpu("hopper")
@pytest.mark.parametrize("dtype", [BF16, F32, I8, E4M3])
def test_products_and_sums_are_exact_on_a_gpu(dtype: Any) -> None:
    sizes = jnp.asarray([301, 0, 17, 1290, 1, 700], jnp.int32)
    a, b, y = integers(2333, 517), integers(6, 517, 391, seed=1), integers(2333, 391, seed=2)
    own_a, own_b, own_y = (x.astype(dtype) for x in (a, b, y))
    given: Any = {"preferred_element_type": jnp.int32 if dtype == I8 else F32}
    given["implementation"] = "hopper"
    rows = grouped_gemm(own_a, own_b, sizes, **given)
    wanted = lax.ragged_dot(a, b, sizes, precision="highest")
    np.testing.assert_array_equal(rows, wanted)
    sums = group_sums(own_a.T, own_y, sizes, **given)
    pull = jax.vjp(lambda b: lax.ragged_dot(a, b, sizes, precision="highest"), b)[1]
    np.testing.assert_array_equal(sums, pull(y)[0])
