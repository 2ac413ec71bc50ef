"""Symmetric products that XLA computes whole: their derivatives are those of the product."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_gemm import gram, symmetric_matmul
from tests import reference


def _symmetric(seed: int) -> Any:
    x = reference.integers(np.random.default_rng(seed), (16, 16), jnp.float32)
    return x + x.T


X, G = _symmetric(0), reference.integers(np.random.default_rng(2), (16, 16), jnp.float32)


def _check(ours: Any, theirs: Any, *operands: Any) -> None:
    """Compares values and both derivatives."""
    found, pull = jax.vjp(ours, *operands)
    expected, stock_pull = jax.vjp(theirs, *operands)
    np.testing.assert_array_equal(found, expected)
    for own, stock in zip(pull(G), stock_pull(G), strict=True):
        np.testing.assert_array_equal(own, stock)
    changes = (G,) * len(operands)
    moved, stock_moved = (jax.jvp(f, operands, changes)[1] for f in (ours, theirs))
    np.testing.assert_array_equal(moved, stock_moved)


@pytest.mark.parametrize("residual", [False, True])
def test_of_one_device(residual: bool) -> None:
    more = {"implementation": "xla", "alpha": 2, **({"residual": X} if residual else {})}
    added = X if residual else 0
    _check(lambda a, b: symmetric_matmul(a, b, **more), lambda a, b: 2 * (a @ b) + added, X, X)
    _check(lambda a: gram(a, **more), lambda a: 2 * (a @ a.T) + added, G)


def test_the_derivative_of_a_residual_is_its_own() -> None:
    def ours(r: Any) -> Any:
        return gram(G, residual=r, implementation="xla")

    _check(ours, lambda r: G @ G.T + r, X)


def test_on_an_explicit_mesh() -> None:
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Explicit,))
    with jax.sharding.set_mesh(mesh):
        rows, whole = jax.device_put(X, P("i")), jax.device_put(X, P())

        def gradient(f: Any) -> Any:
            return jax.grad(lambda a, b: jnp.sum(jnp.sin(f(a, b) / 8)), (0, 1))(rows, whole)

        for ours, theirs in zip(gradient(symmetric_matmul), gradient(jnp.matmul), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
