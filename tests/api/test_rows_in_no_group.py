"""Rows in no group: zeros, whatever a function is there, and no derivative of theirs counts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import group_sums, grouped_gemm, ragged_dot

A, W, SIZES = jnp.ones((5, 7)), jnp.ones((2, 7, 4)), jnp.array([2, 1])


def _of(name: str, x: Any, sizes: Any = SIZES) -> Any:
    # No square root of 0 has a finite derivative.
    words = {name: x, "activation": jnp.sqrt}
    if name == "operands":
        words = {"epilogue": lambda s, x: jnp.sqrt(s * x), "operands": (x,)}
    return jnp.sum(grouped_gemm(A, W, sizes, **words))


@pytest.mark.parametrize(
    ("name", "start", "expected"),
    [
        ("bias", jnp.zeros((2, 4)), [[2 * 0.5 / 7**0.5] * 4, [0.5 / 7**0.5] * 4]),
        ("alpha", jnp.ones(2), [2 * 4 * 7**0.5 / 2, 4 * 7**0.5 / 2]),
        ("row_scale", jnp.ones(5), [4 * 7**0.5 / 2] * 3 + [0, 0]),
        ("col_scale", jnp.ones(4), [3 * 7**0.5 / 2] * 4),
        ("operands", jnp.ones((2, 4)), [[2 * 7**0.5 / 2] * 4, [7**0.5 / 2] * 4]),
    ],
)
def test_no_derivative_of_theirs_counts(name: str, start: Any, expected: Any) -> None:
    found = jax.grad(lambda x: _of(name, x))(start)
    np.testing.assert_allclose(found, np.array(expected), rtol=1e-6)


def test_what_no_row_is_given_does_no_harm() -> None:
    bias = jnp.stack([jnp.zeros(4), jnp.full(4, jnp.nan)])
    found = jax.grad(lambda x: jnp.sum(grouped_gemm(A, W, jnp.array([3, 0]), bias=x)))(bias)
    np.testing.assert_array_equal(found[0], 3)


@pytest.mark.parametrize(
    ("left", "words"),
    [
        (A.astype(jnp.complex64), {"alpha": 2.0}),
        (A.astype(jnp.int8), {"row_scale": jnp.full(5, 0.1)}),
    ],
    ids=["complex", "whole numbers"],
)
def test_types_are_refused_as_in_one_product(left: Any, words: Any) -> None:
    with pytest.raises(TypeError, match="need real operands and a floating-point result"):
        grouped_gemm(left, W.astype(left.dtype), SIZES, **words)


def test_sums_of_whole_numbers_are_not_scaled() -> None:
    whole, scale = jnp.ones((4, 320), jnp.int8), jnp.full((4, 20), 0.1)
    args = whole, whole.T, jnp.array([160, 160])
    with pytest.raises(TypeError, match="a floating-point result, got operands of int8"):
        group_sums(*args, row_scale=scale)
    found = group_sums(*args, row_scale=scale, preferred_element_type=jnp.float32)
    np.testing.assert_allclose(found, 16, rtol=1e-5)


def test_a_product_is_mapped_over_no_examples() -> None:
    args = jnp.zeros((0, 5, 7)), jnp.zeros((0, 2, 7, 4)), jnp.zeros((0, 2), jnp.int32)
    assert jax.vmap(ragged_dot)(*args).shape == (0, 5, 4)


def test_what_is_not_linear_is_not_transposed() -> None:
    def scaled(x: Any) -> Any:
        return grouped_gemm(x, W, SIZES, row_scale=A[:, 0])

    with pytest.raises(NotImplementedError, match="only a product without bias"):
        jax.linear_transpose(scaled, A)(jnp.ones((5, 4)))
