"""Sums of exp in one pass: the largest value of some, and the sum of exp beside it.

    left of values       largest, sum(exp(x - largest))
    left of two parts    both sums beside the larger of both, added up

Where the largest value is infinite or no number, 0 is in its place, as in JAX's `logsumexp`.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

Pair = tuple[Any, Any]
"""The largest values, and the sums of exp beside them."""


def along(x: Any, axis: int, exp: Callable[[Any], Any] = jnp.exp) -> Pair:
    """Reduces an axis of values, with this function as `exp`."""
    largest = jnp.max(x, axis=axis)
    kept = tuple(i for i in range(x.ndim) if i != axis)
    beside = lax.broadcast_in_dim(_finite(largest), x.shape, kept)
    return largest, jnp.sum(exp(x - beside), axis=axis)


def of_both(one: Pair, other: Pair, exp: Callable[[Any], Any] = jnp.exp) -> Pair:
    """Reduces what is left of two parts."""
    largest = jnp.maximum(one[0], other[0])
    return largest, _weighted(*one, largest, exp) + _weighted(*other, largest, exp)


def joined(left: Pair, add: Callable[..., Any] = jnp.sum) -> Any:
    """Reduces the first axis of what is left of several parts; returns both as one array."""
    largest = jnp.max(left[0], axis=0)
    return jnp.stack([largest, add(_weighted(*left, largest[None]), axis=0)])


def in_pairs(x: Any, axis: int = 0) -> Any:
    """Adds up the first axis in an order that follows from its size alone."""
    assert axis == 0
    # A product and a sum may otherwise be one instruction, or two, as XLA likes.
    x = lax.optimization_barrier(x)
    while (count := x.shape[0]) > 1:
        half = count // 2
        pairs = x[:half] + x[half : 2 * half]
        x = jnp.concatenate([pairs, x[2 * half :]]) if count % 2 else pairs
    return x[0]


def across(left: Any, axes: Any) -> Any:
    """Reduces what is left of parts that devices have, both as one array, over axes of a mesh."""
    largest, sums = left
    of_all = lax.pmax(largest, axes)
    return jnp.stack([of_all, lax.psum(_weighted(largest, sums, of_all), axes)])


def beside(left: Any, x: Any) -> Any:
    """Returns sums of exp(z - x), of what is left of z."""
    largest, sums = left
    return sums * jnp.exp(_finite(largest) - x)


def _finite(largest: Any) -> Any:
    return jnp.where(jnp.abs(largest) < math.inf, largest, jnp.zeros_like(largest))


def _weighted(own: Any, sums: Any, largest: Any, exp: Callable[[Any], Any] = jnp.exp) -> Any:
    """Returns sums beside their own largest values as they are beside larger ones."""
    weights = exp(_finite(own) - _finite(largest))
    # Of minus infinity alone the sum is 0, and its weight may be infinite.
    return jnp.where(sums == 0, sums, sums * weights)
