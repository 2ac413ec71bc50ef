"""Products of float32 as sums of products of shorter types, simulated, in all their forms."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import explain, gated_gemm, gemm, gram, target
from tests import reference
from tests.reference import Formula

M, N, K = 72, 104, 136
SIMULATED = functools.partial(gemm, implementation="interpret")
X3 = "BF16_BF16_F32_X3"
ERRORS = {
    "BF16_BF16_F32": 2**-8,
    X3: 2**-16,
    "BF16_BF16_F32_X6": 2**-22,
    "BF16_BF16_F32_X9": 2**-22,
    "TF32_TF32_F32_X3": 2**-21,
    "highest": 2**-22,
}
"""Of an element, at most, as a share of `|a| @ |b|`."""


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(jnp.float32))


def assert_within(share: float, result: Any, a: Any, b: Any) -> None:
    left, right = reference.wide(a), reference.wide(b)
    assert result.dtype == jnp.float32
    error = np.abs(reference.wide(result) - left @ right)
    assert np.all(error <= share * (np.abs(left) @ np.abs(right)))


@functools.cache
def computed(precision: str) -> jax.Array:
    return SIMULATED(normal(M, K), normal(K, N, seed=1), precision=precision)


@pytest.mark.parametrize("precision", ERRORS)
def test_errors_are_those_of_the_precision(precision: str) -> None:
    a, b, share = normal(M, K), normal(K, N, seed=1), ERRORS[precision]
    assert_within(share, computed(precision), a, b)
    # As one product of bfloat16 they would be larger.
    if precision != "BF16_BF16_F32":
        with pytest.raises(AssertionError):
            assert_within(share, computed("BF16_BF16_F32"), a, b)


@pytest.mark.parametrize(
    ("precision", "layout"), [(X3, "NT"), (X3, "TT"), ("TF32_TF32_F32_X3", "TN")]
)
def test_operands_are_stored_in_any_way(precision: str, layout: str) -> None:
    a, b = normal(M, K), normal(K, N, seed=1)
    left, right = (side == "T" for side in layout)
    result = SIMULATED(
        *(a.T if left else a, b.T if right else b),
        transpose_a=left,
        transpose_b=right,
        precision=precision,
    )
    assert_within(ERRORS[precision], result, a, b)


def test_each_product_of_a_batch_and_one_operand_shared() -> None:
    a, b = normal(3, 72, 136), normal(3, 136, 64, seed=1)
    assert_within(ERRORS[X3], SIMULATED(a, b, precision=X3), a, b)
    shared = jax.vmap(lambda x: SIMULATED(x, b[0], precision=X3))(a)
    assert_within(ERRORS[X3], shared, a, b[0])


def test_an_epilogue_follows_the_sum_of_all_terms() -> None:
    a, b = normal(M, K), normal(K, N, seed=1)
    extras: Any = {"bias": normal(N, seed=2), "residual": normal(M, N, seed=3)}
    result = SIMULATED(a, b, **extras, activation="gelu", precision="BF16_BF16_F32_X6")
    exact = Formula(activation="gelu")(a, b, **extras)
    np.testing.assert_allclose(result, exact, rtol=1e-5, atol=1e-4)


def test_both_right_operands_of_a_gate_are_split() -> None:
    a, gate, up = normal(M, K), normal(K, 128, seed=1), normal(K, 128, seed=2)
    product = functools.partial(gated_gemm, activation="relu", precision="BF16_BF16_F32_X6")
    result = product(a, gate, up, implementation="interpret")
    exact = Formula(activation="relu")(a, gate, up=up)
    np.testing.assert_allclose(result, exact, rtol=1e-5, atol=2e-3)


def test_derivatives_are_as_precise() -> None:
    a, b = normal(M, K), normal(K, 64, seed=1)
    result, pull = jax.vjp(functools.partial(SIMULATED, precision=X3), a, b)
    g = normal(*result.shape, seed=2)
    da, db = pull(g)
    assert_within(ERRORS[X3], da, g, b.T)
    assert_within(ERRORS[X3], db, a.T, g)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
def test_infinite_elements_are_where_float32_has_them() -> None:
    a, b = normal(M, K), jnp.where(normal(K, N, seed=1) > 0, 1.0, 0.5)
    a = a.at[3, 5].set(jnp.inf).at[7, 1].set(jnp.nan).at[9, 9].set(-3.4028e38)
    result = SIMULATED(a, b, precision="BF16_BF16_F32_X6")
    exact = reference.wide(a) @ reference.wide(b)
    np.testing.assert_array_equal(np.isnan(result), np.isnan(exact))
    np.testing.assert_array_equal(np.isposinf(result), np.isposinf(exact))
    finite = np.isfinite(exact)
    np.testing.assert_allclose(np.asarray(result)[finite], exact[finite], rtol=1e-4, atol=1e-4)


def test_a_symmetric_result_is_computed_as_a_whole() -> None:
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    with target("h200"):
        found = explain(functools.partial(gram, precision=X3), x)
    assert found.implementation == "hopper"
    assert found.plan is not None
    assert found.plan.realigned.scheme is not None
    assert not found.plan.realigned.problem.symmetric
