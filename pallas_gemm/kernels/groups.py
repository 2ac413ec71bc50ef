"""Groups: what a program computes of their sizes.

Where XLA computes the product (`planning/by_xla/xla_groups.py`), `bounds` and `tiles_of` say where
groups and their rows of tiles are. For a kernel that finds its pieces itself,
`hopper/groups/table.py` makes a table of them.

Sizes may say more than there is, by far: no sum of them is larger than `MOST`, so that none wraps.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_gemm.kernels.traced import divided

MOST = 2**31 - 1
"""The largest sum of sizes: more rows than there are."""


class Bounds(NamedTuple):
    """Where groups are, in rows and in rows of tiles: an array of each, a number for each group.

    Sizes may say more than there are rows: then groups end past the last one, where nothing is read
    or stored.

    Attributes:
        first: The first row of each group.
        end: The row after its last.
        first_tile: Its first row of tiles.
        end_tile: The row of tiles after its last.
    """

    first: jax.Array
    end: jax.Array
    first_tile: jax.Array
    end_tile: jax.Array


class Tiles(NamedTuple):
    """Rows of tiles: of each, its group, its first row, and the row after the last of its group.

    A tile beyond the last row of tiles has no rows.
    """

    group: jax.Array
    first: jax.Array
    end: jax.Array


def bounds(sizes: jax.Array, rows: int, height: int) -> Bounds:
    """Returns where groups of these sizes end: in `rows` rows, and in tiles of this height.

    A negative size is that of an empty group.
    """
    sizes = within(sizes, rows)
    others, before, _ = pairs(sizes)
    first, tile = sums(where(before, others), where(before, tiles(others, height)))
    return Bounds(first, added(first, sizes), tile, added(tile, tiles(sizes, height)))


def pairs(sizes: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns, for each two groups, the size of the other, and if it is before, and if larger.

    If two are equally large, the one before counts as the larger.
    """
    square = (sizes.shape[0],) * 2
    own, other = (lax.broadcasted_iota(jnp.int32, square, axis) for axis in (0, 1))
    mine, others = (lax.broadcast_in_dim(sizes, square, (axis,)) for axis in (0, 1))
    before = other < own
    return others, before, (others > mine) | ((others == mine) & before)


def where(those: jax.Array, numbers: jax.Array) -> jax.Array:
    """Returns the numbers of those, and zeros."""
    return jnp.where(those, numbers, jnp.zeros_like(numbers))


def sums(*terms: jax.Array) -> list[jax.Array]:
    """Returns the sums over all others, as `added`: one reduction of all is one kernel."""

    def add(xs: Any, ys: Any) -> Any:
        return tuple(map(added, xs, ys))

    return list(lax.reduce(terms, (jnp.int32(0),) * len(terms), add, (1,)))


def tiles_of(ends: Bounds, height: int, which: jax.Array) -> Tiles:
    """Returns rows of tiles by their numbers."""
    shape = (*which.shape, ends.end.shape[0])
    each = Bounds(*(lax.broadcast_in_dim(x, shape, (which.ndim,)) for x in ends))
    number = lax.broadcast_in_dim(which, shape, tuple(range(which.ndim)))
    own = (each.first_tile <= number) & (number < each.end_tile)
    first = each.first + (number - each.first_tile) * height
    group = lax.broadcasted_iota(jnp.int32, shape, which.ndim)
    found = (jnp.where(own, x, jnp.zeros_like(x)) for x in (group, first, each.end))
    return Tiles(*(x.sum(axis=-1, dtype=jnp.int32) for x in found))


def within(sizes: jax.Array, rows: int) -> jax.Array:
    """Returns sizes of groups among `rows` rows, as int32."""
    if sizes.dtype.itemsize < 4:
        sizes = sizes.astype(jnp.int32)
    return jnp.clip(sizes, 0, rows).astype(jnp.int32)


def tiles(rows: jax.Array, height: int) -> jax.Array:
    """Returns how many tiles of a height these rows take; or steps, or parts."""
    whole, rest = divided(rows, height)
    return whole + jnp.minimum(rest, 1)


def added(first: jax.Array, second: jax.Array) -> jax.Array:
    """Returns the sum of numbers that are not negative, or `MOST` if it is larger."""
    return first + jnp.minimum(second, MOST - first)
