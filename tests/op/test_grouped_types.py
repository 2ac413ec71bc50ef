"""Products of groups of 8 and 32 bits in the layout of `lax`, simulated."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gemm import explain, grouped_gemm, ragged_dot, target

M, N, K = 72, 64, 128
SIZES = jnp.asarray([20, 0, 47, 3], jnp.int32)
SIMULATED = functools.partial(grouped_gemm, implementation="interpret")
F32, I8, E4M3 = jnp.float32, jnp.int8, jnp.float8_e4m3fn


def drawn(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(F32))


def integers(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape).astype(F32))


def exact(a: Any, b: Any) -> Any:
    return lax.ragged_dot(a.astype(F32), b.astype(F32), SIZES, precision="highest")


@pytest.mark.parametrize(("dtype", "out"), [(I8, jnp.int32), (E4M3, F32), (F32, F32)])
def test_matrices_are_turned_where_a_kernel_reads_k_last(dtype: Any, out: Any) -> None:
    a, b = integers(M, K).astype(dtype), integers(4, K, N, seed=1).astype(dtype)
    result = SIMULATED(a, b, SIZES, preferred_element_type=out)
    assert result.dtype == out
    np.testing.assert_array_equal(result, exact(a, b))


def test_a_gate_turns_both_matrices_and_an_epilogue_follows() -> None:
    a, b, up = integers(M, K), integers(4, K, N, seed=1), integers(4, K, N, seed=2)
    result = SIMULATED(
        *(a.astype(I8), b.astype(I8), SIZES),
        up=up.astype(I8),
        activation="relu",
        preferred_element_type=F32,
    )
    np.testing.assert_array_equal(result, jnp.maximum(exact(a, b), 0) * exact(a, up))


@pytest.mark.parametrize(("precision", "error"), [(None, 0.02), ("BF16_BF16_F32_X3", 0.0005)])
def test_gradients_of_float32_are_kernels_too(precision: str | None, error: float) -> None:
    a, b, g = drawn(M, K), drawn(4, K, N, seed=1), drawn(M, N, seed=2)
    result, pull = jax.vjp(lambda a, b: SIMULATED(a, b, SIZES, precision=precision), a, b)
    wanted, pull_exact = jax.vjp(exact, a, b)
    pairs = [(result, wanted), *zip(pull(g), pull_exact(g), strict=True)]
    for ours, own in pairs:
        assert ours.dtype == own.dtype == F32
        assert 0 < float(jnp.abs(ours - own).max()) < error


def test_passes_of_groups_are_counted() -> None:
    shape = jax.ShapeDtypeStruct
    rows, sizes = shape((8192, 4096), I8), shape((8,), jnp.int32)
    product = functools.partial(ragged_dot, preferred_element_type=jnp.int32)
    with target("h200"):
        found = explain(product, rows, shape((8, 4096, 4096), I8), sizes)
    assert found.plan is not None
    (step,) = found.plan.realigned.passes
    assert str(step) == "transpose b to 8 x 4096 x 4096: moves 268.4 MB"


def test_the_gradient_of_matrices_is_one_kernel_after_two_transpositions() -> None:
    shape = jax.ShapeDtypeStruct
    operands = shape((8192, 4096), F32), shape((8, 4096, 4096), F32), shape((8,), jnp.int32)
    product = functools.partial(ragged_dot, precision="TF32_TF32_F32")
    with target("h200"):
        found = explain(jax.grad(lambda *x: jnp.sum(product(*x)), 1), *operands)
    _, gradient = (own.plan.realigned for own in found.products if own.plan is not None)
    assert gradient.kernels == 1
    assert [str(step).partition(":")[0] for step in gradient.passes] == [
        "transpose a to 4096 x 8192",
        "transpose b to 4096 x 8192",
    ]
