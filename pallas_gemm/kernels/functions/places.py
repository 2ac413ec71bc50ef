"""Where the largest value of some is: what is left of `argmax` where each part has its own.

    left of values    largest, the place of the first value that is as large

A value that is no number is larger than any, as in JAX. Places are numbers of float32, like
everything else that a tile leaves.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

Pair = tuple[Any, Any]
"""The largest values, and their places."""

MOST = 2**24
"""Places that float32 tells apart."""


def along(x: Any, axis: int) -> Pair:
    """Reduces an axis of values."""
    return _first((x, lax.broadcasted_iota(x.dtype, x.shape, axis)), axis)


def joined(left: Pair) -> Any:
    """Reduces the first axis of several parts' pairs; returns both as one array."""
    return jnp.stack(_first(left, 0))


def _first(pairs: Pair, axis: int) -> Any:
    nothing = (jnp.full((), -math.inf, pairs[0].dtype), jnp.full((), math.inf, pairs[1].dtype))
    return lax.reduce(pairs, nothing, both, (axis,))


def both(one: Pair, other: Pair) -> Pair:
    """Returns the pair of two parts, in whatever order they come."""
    (x, own), (y, others) = one, other
    # What is not equal to itself is no number.
    is_larger = (y > x) | (lax.ne(y, y) & lax.eq(x, x))
    is_as_large = (y == x) | (lax.ne(y, y) & lax.ne(x, x))
    is_taken = is_larger | (is_as_large & (others < own))
    return jnp.where(is_taken, y, x), jnp.where(is_taken, others, own)


def across(left: Any, axes: Any, size: int) -> Any:
    """Reduces what is left of the parts that devices have, over axes of a mesh.

    Args:
        left: The pair, as one array.
        axes: The axes.
        size: The number of values in each part.
    """
    largest, places = left
    pair = largest, places + size * lax.axis_index(axes).astype(places.dtype)
    return joined(tuple(lax.all_gather(x, axes) for x in pair))
