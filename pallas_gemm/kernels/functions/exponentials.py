"""Sums of exp in one pass: the largest value of some, and the sum of exp beside it.

    left of values    largest, sum(exp(x - largest))

Where the largest value is infinite or no number, 0 is in its place, as in JAX's `logsumexp`. A
kernel has the largest number of float32 there, which takes fewer instructions: the sum is 0 or
infinite.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

Pair = tuple[Any, Any]
"""The largest values, and the sums of exp beside them."""

LARGEST = float(np.finfo(np.float32).max)


def along(x: Any, axis: int) -> Pair:
    """Reduces an axis of values."""
    largest = jnp.max(x, axis=axis)
    return largest, jnp.sum(jnp.exp(x - jnp.expand_dims(_finite(largest), axis)), axis=axis)


def bounded(largest: Any) -> Any:
    """Returns what a kernel takes sums of exp beside: finite numbers, or none."""
    return jnp.minimum(jnp.maximum(largest, -LARGEST), LARGEST)


def joined(left: Pair, add: Callable[..., Any] | None = None) -> Any:
    """Reduces the first axis of several parts' pairs; returns both as one array.

    Args:
        left: The pairs.
        add: A function that adds up; None for XLA, in one pass over the pairs.
    """
    if add is not None:
        largest = jnp.max(left[0], axis=0)
        return jnp.stack([largest, add(_weighted(*left, largest[None]), axis=0)])
    nothing = (jnp.full((), -math.inf, left[0].dtype), jnp.zeros((), left[1].dtype))
    return jnp.stack(lax.reduce(left, nothing, _both, (0,)))


def _both(one: Pair, other: Pair) -> Pair:
    """Returns the pair of two parts."""
    largest = jnp.maximum(one[0], other[0])
    return largest, _weighted(*one, largest) + _weighted(*other, largest)


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


def _weighted(own: Any, sums: Any, largest: Any) -> Any:
    """Returns sums beside their own largest values as they are beside larger ones."""
    weights = jnp.exp(_finite(own) - _finite(largest))
    # Of minus infinity alone the sum is 0, and its weight may be infinite.
    return jnp.where(sums == 0, sums, sums * weights)
