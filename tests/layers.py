"""Layers beside stock ones: the same parameters, results and gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests import reference

Function = Callable[..., jax.Array]


def normal(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return reference.normal(np.random.default_rng(seed), shape, dtype)


def assert_same_structure(ours: Any, stock: Any) -> None:
    """Compares the paths, shapes and types of two trees of parameters."""
    assert jax.tree.structure(ours) == jax.tree.structure(stock)
    assert jax.tree.map(_type, ours) == jax.tree.map(_type, stock)


def assert_same_tree(ours: Any, stock: Any) -> None:
    """Compares two trees of parameters bit for bit."""
    assert_same_structure(ours, stock)
    jax.tree.map(np.testing.assert_array_equal, ours, stock)


def assert_trained_as_well(
    ours: Function, stock: Function, *trees: Any, dtype: Any = jnp.bfloat16
) -> None:
    """Compares results, and gradients of every leaf of the arguments, with a stock program's.

    In bfloat16 unless told otherwise, where both round alike whatever the order of a sum is.
    """
    trees = jax.tree.map(lambda x: jnp.asarray(np.asarray(x).astype(dtype)), trees)
    g = normal(*jax.eval_shape(stock, *trees).shape, seed=9, dtype=dtype)

    def trained(f: Function, cast: Callable[[Any], Any]) -> list[jax.Array]:
        @jax.jit
        def step(g: jax.Array, *trees: Any) -> Any:
            result, pull = jax.vjp(f, *trees)
            return result, pull(g.astype(result.dtype))

        return jax.tree.leaves(step(*jax.tree.map(cast, (g, *trees))))

    with jax.enable_x64(True):
        exact = trained(stock, reference.wide)
    for our, xla, wide in zip(
        trained(ours, jnp.asarray), trained(stock, jnp.asarray), exact, strict=True
    ):
        assert wide.dtype == jnp.float64
        reference.assert_as_good_as_xla(our, xla, np.asarray(wide))


def _type(leaf: Any) -> tuple[tuple[int, ...], Any]:
    return leaf.shape, leaf.dtype
