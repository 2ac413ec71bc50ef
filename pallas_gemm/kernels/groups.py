"""Groups: which pieces of work there are, computed in the program from the groups' sizes.

    rows in groups      sizes ──▶ tiles of each group ──▶ an order of those that there are ─┐
    sums over groups    sizes ──▶ where each group is, the largest first ──▶ an order ──────┴▶ table

A tile has rows of one group alone, so that the sizes say how many rows of tiles there are; their
number has a bound (`GemmConfig.grid`), which is what the table has room for. XLA makes three small
kernels of this: where groups end, the group of each word of the table, and the words.
"""

from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

from pallas_gemm.config import GemmConfig
from pallas_gemm.kernels import work
from pallas_gemm.problem import Problem
from schedules import OnlineSchedule

PADDING = 2
"""Entries past the last one that a walk may read."""


class Bounds(NamedTuple):
    """Where groups end, in rows and in rows of tiles: an array of each, a number for each group.

    Sizes may say more than there are rows: then groups end past the last one, where nothing is read
    or stored.

    Attributes:
        rows: The row after the last one of each group.
        sizes: How many rows each has.
        tiles: The row of tiles after the last one of each group.
    """

    rows: jax.Array
    sizes: jax.Array
    tiles: jax.Array


class Tiles(NamedTuple):
    """Rows of tiles: of each, its group, its first row, and the row after the last of its group.

    What is beyond the last row of tiles counts as the last group's, of whose rows it has none.
    """

    group: jax.Array
    first: jax.Array
    end: jax.Array


class _Columns(NamedTuple):
    """The columns of a table, for each worker: the number of its pieces, then words of each piece.

    Attributes:
        worker: Whose they are.
        column: Which columns they are.
        place: Of each column, which place in the order the piece has.
        word: Which of its words.
    """

    worker: jax.Array
    column: jax.Array
    place: jax.Array
    word: jax.Array

    @classmethod
    def of(cls, order: OnlineSchedule, workers: int, words: int) -> Self:
        """Returns those of a table that has room for a whole order, and for one column more."""
        shape = (workers, words * (-(-len(order) // workers) + PADDING) + 2)
        worker, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        turn, word = jnp.divmod(jnp.maximum(column - 1, 0), words)
        return cls(worker, column, worker + workers * turn, word)

    def filled(self, pieces: Any, words: tuple[jax.Array, ...], last: jax.Array) -> jax.Array:
        """Returns the table: pieces dealt in turn, and the same in every last column."""
        workers, width = self.column.shape
        count = (pieces - self.worker + workers - 1) // workers
        table = jnp.where(self.column == 0, count, lax.select_n(self.word, *words))
        last = lax.broadcast_in_dim(last, table.shape, ())
        return jnp.where(self.column == width - 1, last, table)


def order_operand(
    config: GemmConfig, problem: Problem, order: OnlineSchedule, workers: int, sizes: jax.Array
) -> jax.Array:
    """Returns the operand by which a kernel is told the pieces, int32 `[workers, columns]`.

    Column 0 is the worker's number of pieces, and the words of each follow, as in
    `tiles.dealt_table`; the last column is the element after the last one of all groups.
    """
    told = _told_rows if problem.groups else _told_sums
    return told(config, problem, order, workers, sizes)


def _told_rows(
    config: GemmConfig, problem: Problem, order: OnlineSchedule, workers: int, sizes: jax.Array
) -> jax.Array:
    """Returns the operand for rows in groups: only tiles that there are, in the order of these."""
    height = config.out_tile(problem)[0] * config.cluster[0]
    ends = bounds(sizes, problem.m, height)
    rows, coding = jnp.minimum(ends.tiles[-1], order.grid[0]), work.GroupCoding()
    columns = _Columns.of(order, workers, coding.words)
    # The row of tiles of a place past the end may be any.
    row, col = order(columns.place, jnp.maximum(rows, 1))
    tiles = tiles_of(ends, height, row)
    words = coding.pack_group(tiles.group, col, tiles.first, jnp.minimum(tiles.end, problem.m))
    return columns.filled(rows * order.grid[1], words, jnp.minimum(ends.rows[-1], problem.m))


def _told_sums(
    config: GemmConfig, problem: Problem, order: OnlineSchedule, workers: int, sizes: jax.Array
) -> jax.Array:
    """Returns the operand for sums over groups: every tile of every group.

    The largest group comes first, so that what workers are dealt differs by a small one at most.
    """
    ends, coding = bounds(sizes, problem.k, 1), work.SumCoding()
    columns = _Columns.of(order, workers, coding.words)
    stacked, col = order(columns.place)
    place, row = jnp.divmod(stacked, config.grid(problem)[0])
    group = _by_size(ends.sizes)[jnp.minimum(place, problem.batch - 1)]
    end = ends.rows[group]
    start = end - ends.sizes[group]
    words = coding.pack_sum(row, col, group, *(jnp.minimum(x, problem.k) for x in (start, end)))
    return columns.filled(len(order), words, jnp.minimum(ends.rows[-1], problem.k))


def _by_size(sizes: jax.Array) -> jax.Array:
    """Returns the groups, the largest first."""
    square = (sizes.shape[0],) * 2
    own, other = (lax.broadcasted_iota(jnp.int32, square, axis) for axis in (0, 1))
    mine, others = (lax.broadcast_in_dim(sizes, square, (axis,)) for axis in (0, 1))
    before = (others > mine) | ((others == mine) & (other < own))
    place = before.sum(axis=1, dtype=jnp.int32)
    here = lax.broadcast_in_dim(place, square, (1,)) == own
    return jnp.where(here, other, jnp.zeros_like(other)).sum(axis=1, dtype=jnp.int32)


def bounds(sizes: jax.Array, rows: int, height: int) -> Bounds:
    """Returns where groups of these sizes end, of so many rows and in tiles of this height.

    A negative size is that of an empty group.
    """
    if sizes.dtype.itemsize < 4:
        sizes = sizes.astype(jnp.int32)
    sizes = jnp.clip(sizes, 0, rows).astype(jnp.int32)
    square = (sizes.shape[0],) * 2
    own, other = (lax.broadcasted_iota(jnp.int32, square, axis) for axis in (0, 1))

    def counted(x: jax.Array) -> jax.Array:
        return jnp.where(other <= own, lax.broadcast_in_dim(x, square, (1,)), jnp.zeros_like(own))

    # One reduction of both is one kernel.
    row_ends, tile_ends = lax.reduce(
        (counted(sizes), counted(_tiles(sizes, height))),
        (jnp.int32(0),) * 2,
        lambda xs, ys: (xs[0] + ys[0], xs[1] + ys[1]),
        (1,),
    )
    return Bounds(row_ends, sizes, tile_ends)


def tiles_of(ends: Bounds, height: int, which: jax.Array) -> Tiles:
    """Returns rows of tiles by their numbers."""
    shape = (*which.shape, ends.tiles.shape[0])
    each_group = lax.broadcast_in_dim(ends.tiles, shape, (which.ndim,))
    is_before = each_group <= lax.broadcast_in_dim(which, shape, tuple(range(which.ndim)))
    group = jnp.minimum(is_before.sum(axis=-1, dtype=jnp.int32), shape[-1] - 1)
    end, size = ends.rows[group], ends.sizes[group]
    tile = which - (ends.tiles[group] - _tiles(size, height))
    return Tiles(group, end - size + tile * height, end)


def _tiles(sizes: jax.Array, height: int) -> jax.Array:
    return (sizes + (height - 1)) // height
