"""Sums of exp beside the largest value: parts of any kind joined in any way are JAX's logsumexp."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.kernels.functions import exponentials

ODD = (-np.inf, np.inf, np.nan, np.finfo(np.float32).min, -1e30, 1e30, -200.0, 200.0, 0.0)


def _logsumexp(pair: Any) -> Any:
    """As JAX goes on from the largest values, and the sums beside them."""
    largest = jnp.where(jnp.isfinite(pair[0]), pair[0], 0.0)
    return jnp.log(exponentials.beside(pair, largest)) + largest


def _rows() -> Any:
    rows = [list(row) for row in itertools.product(ODD, repeat=4)]
    return jnp.asarray(rows, jnp.float32)


def _as_kernels_do(x: Any) -> Any:
    largest = jnp.max(x, 1)
    return largest, jnp.sum(jnp.exp(x - exponentials.bounded(largest)[:, None]), 1)


@pytest.mark.parametrize("along", [lambda x: exponentials.along(x, 1), _as_kernels_do])
def test_parts_joined_are_jaxs_of_any_values(along: Callable[[Any], Any]) -> None:
    x = _rows()
    largest, sums = zip(*map(along, jnp.split(x, 2, axis=1)), strict=True)
    found = exponentials.joined((jnp.stack(largest), jnp.stack(sums)))
    expected = jax.nn.logsumexp(x, 1)
    np.testing.assert_allclose(_logsumexp(found), expected, rtol=1e-6)
    numbers = ~np.isnan(x).any(1)
    np.testing.assert_array_equal(found[0][numbers], jnp.max(x, 1)[numbers])


def test_sums_are_beside_any_number() -> None:
    x = jnp.linspace(-3.0, 5.0, 12).reshape(3, 4)
    found = exponentials.beside(exponentials.along(x, 1), jnp.array([1.0, -2.0, 0.5]))
    expected = jnp.sum(jnp.exp(x - jnp.array([[1.0], [-2.0], [0.5]])), 1)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
