"""Groups: what the program computes of their sizes for a kernel, which finds its pieces itself.

    rows in groups      sizes ──▶ the kernel (`hopper/group_walk.py`)
    sums over groups    sizes ──▶ where each group is, the largest first ──▶ the kernel
                        (`hopper/sum_walk.py`)

XLA makes two small kernels of the second: where groups end, and the table of them by size.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_gemm.kernels import launch
from pallas_gemm.kernels.plan import KernelPlan


class Bounds(NamedTuple):
    """Where groups end, in rows and in rows of tiles: an array of each, a number for each group.

    Sizes may say more than there are rows: then groups end past the last one, where nothing is read
    or stored.

    Attributes:
        rows: The row after the last one of each group.
        sizes: How many rows each has.
        tiles: The row of tiles after the last one of each group.
        place: How many groups are larger than each, or as large and before it.
    """

    rows: jax.Array
    sizes: jax.Array
    tiles: jax.Array
    place: jax.Array


class Tiles(NamedTuple):
    """Rows of tiles: of each, its group, its first row, and the row after the last of its group.

    What is beyond the last row of tiles has no rows.
    """

    group: jax.Array
    first: jax.Array
    end: jax.Array


class Ranked(NamedTuple):
    """A row of the table of groups by size.

    Attributes:
        group: The group.
        first: Its first contracted element.
        end: The one after its last.
    """

    group: Any
    first: Any
    end: Any


CLAIMED = (0, len(Ranked._fields))
"""Where the table has a counter: of the pieces that are claimed, beyond the first of each worker.

Every row has such a word, since XLA makes zeros in the kernel that makes the rest, and not in one
of their own."""


def operand(plan: KernelPlan, sizes: jax.Array) -> Any:
    """Returns the operand from which the kernel of a plan finds its pieces."""
    problem = plan.problem
    if not problem.groups:
        table = ranked(sizes, problem.k)
        return jax.new_ref(table) if plan.claims_tiles else launch.on_its_own(table)
    # Sizes in int32 are taken as they are, whatever they say, so that no kernel runs beside.
    return launch.on_its_own(sizes if sizes.dtype == jnp.int32 else _within(sizes, problem.m))


def ranked(sizes: jax.Array, elements: int) -> jax.Array:
    """Returns the table of groups of so many elements, the largest first: int32 `[groups, 4]`.

    A row has the words of `Ranked`, and a zero.
    """
    ends = bounds(sizes, elements, 1)
    shape = (sizes.shape[0], len(Ranked._fields) + 1, sizes.shape[0])
    place, word, group = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(3))
    each = Bounds(*(lax.broadcast_in_dim(x, shape, (2,)) for x in ends))
    first, end = (jnp.minimum(x, elements) for x in (each.rows - each.sizes, each.rows))
    words = lax.select_n(word, *Ranked(group, first, end), jnp.zeros_like(group))
    # Of each place one group says it, so that a sum is a choice.
    return jnp.where(each.place == place, words, jnp.zeros_like(words)).sum(axis=2, dtype=jnp.int32)


def bounds(sizes: jax.Array, rows: int, height: int) -> Bounds:
    """Returns where groups of these sizes end, of so many rows and in tiles of this height.

    A negative size is that of an empty group.
    """
    sizes = _within(sizes, rows)
    square = (sizes.shape[0],) * 2
    own, other = (lax.broadcasted_iota(jnp.int32, square, axis) for axis in (0, 1))
    mine, others = (lax.broadcast_in_dim(sizes, square, (axis,)) for axis in (0, 1))
    before, nothing = other < own, jnp.zeros_like(own)
    larger = (others > mine) | ((others == mine) & before)
    tiles, until = _tiles(others, height), before | (other == own)
    # One reduction of all is one kernel.
    row_ends, tile_ends, place = lax.reduce(
        (
            jnp.where(until, others, nothing),
            jnp.where(until, tiles, nothing),
            larger.astype(jnp.int32),
        ),
        (jnp.int32(0),) * 3,
        lambda xs, ys: tuple(x + y for x, y in zip(xs, ys, strict=True)),
        (1,),
    )
    return Bounds(row_ends, sizes, tile_ends, place)


def tiles_of(ends: Bounds, height: int, which: jax.Array) -> Tiles:
    """Returns rows of tiles by their numbers."""
    shape = (*which.shape, ends.tiles.shape[0])
    each = Bounds(*(lax.broadcast_in_dim(x, shape, (which.ndim,)) for x in ends))
    number = lax.broadcast_in_dim(which, shape, tuple(range(which.ndim)))
    own, first = _in_group(each, height, number)
    group = lax.broadcasted_iota(jnp.int32, shape, which.ndim)
    found = (jnp.where(own, x, jnp.zeros_like(x)) for x in (group, first, each.rows))
    return Tiles(*(x.sum(axis=-1, dtype=jnp.int32) for x in found))


def _in_group(each: Bounds, height: int, which: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns which of rows of tiles are each group's, and where these then begin."""
    start = each.tiles - _tiles(each.sizes, height)
    own = (start <= which) & (which < each.tiles)
    return own, each.rows - each.sizes + (which - start) * height


def _within(sizes: jax.Array, rows: int) -> jax.Array:
    """Returns sizes of groups among so many rows, as int32."""
    if sizes.dtype.itemsize < 4:
        sizes = sizes.astype(jnp.int32)
    return jnp.clip(sizes, 0, rows).astype(jnp.int32)


def _tiles(sizes: jax.Array, height: int) -> jax.Array:
    return lax.div(sizes + (height - 1), jnp.int32(height))
