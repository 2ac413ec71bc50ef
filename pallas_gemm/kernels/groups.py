"""Groups: which pieces of work there are, as their sizes say.

    rows in groups      sizes ──▶ the kernel, which finds its pieces itself (`hopper/group_walk.py`)
    sums over groups    sizes ──▶ where each group is, the largest first ──▶ an order ──▶ table

For sums, the program makes a table: to find the largest group, each is compared with every other.
XLA makes two small kernels of this: where groups end, and the table.
"""

from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gemm.config import GemmConfig
from pallas_gemm.kernels import launch, work
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
        place: How many groups are larger than each, or as large and before it.
        all_rows: How many rows all groups have together: the same for each.
        all_tiles: How many rows of tiles, likewise.
    """

    rows: jax.Array
    sizes: jax.Array
    tiles: jax.Array
    place: jax.Array
    all_rows: jax.Array
    all_tiles: jax.Array


class Tiles(NamedTuple):
    """Rows of tiles: of each, its group, its first row, and the row after the last of its group.

    What is beyond the last row of tiles has no rows.
    """

    group: jax.Array
    first: jax.Array
    end: jax.Array


class _Cells(NamedTuple):
    """The columns of a table, for each worker: the number of its pieces, then words of each piece.

    An axis more is that of groups, of which one says what a column holds: summed over it, a table
    takes a single kernel, and the bounds of groups are read there and nowhere else.

    Attributes:
        worker: Whose they are.
        column: Which columns they are.
        place: Of each column, which place in the order the piece has.
        word: Which of its words.
        group: Which group would have to say it.
    """

    worker: jax.Array
    column: jax.Array
    place: jax.Array
    word: jax.Array
    group: jax.Array

    @classmethod
    def of(cls, order: OnlineSchedule, workers: int, words: int, groups: int) -> Self:
        """Returns those of a table that has room for a whole order, and for one column more."""
        width = words * (-(-len(order) // workers) + PADDING) + 2
        shape = (workers, width, groups)
        worker, column, group = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(3))
        turn, word = np.divmod(np.maximum(np.arange(width, dtype=np.int32) - 1, 0), words)
        turn, word = (lax.broadcast_in_dim(jnp.asarray(x), shape, (1,)) for x in (turn, word))
        return cls(worker, column, worker + workers * turn, word, group)

    def each(self, bounds: Bounds) -> Bounds:
        """Returns the bounds, of each cell those of its group."""
        shape = self.group.shape
        return Bounds(*(lax.broadcast_in_dim(x, shape, (2,)) for x in bounds))

    def table(self, own: Any, words: tuple[Any, ...], pieces: Any, last: Any) -> jax.Array:
        """Returns the table: pieces dealt in turn, and the same in every last column.

        Args:
            own: Which cells are of the piece's group.
            words: What each of these says for each word.
            pieces: How many pieces there are.
            last: What is in the last column.
        """
        workers, width, _ = self.group.shape
        nothing, first = jnp.zeros_like(self.group), self.group == 0
        count = lax.div(pieces - self.worker + (workers - 1), jnp.int32(workers))
        cells = jnp.where(own, lax.select_n(self.word, *words), nothing)
        cells = jnp.where(self.column == 0, jnp.where(first, count, nothing), cells)
        cells = jnp.where(self.column == width - 1, jnp.where(first, last, nothing), cells)
        return cells.sum(axis=2, dtype=jnp.int32)


def sizes_operand(problem: Problem, sizes: jax.Array) -> jax.Array:
    """Returns the operand from which a kernel finds the pieces of rows in groups: the sizes.

    Sizes in int32 are taken as they are, whatever they say, so that no kernel runs beside.
    """
    return launch.on_its_own(sizes if sizes.dtype == jnp.int32 else _within(sizes, problem.m))


def order_operand(
    config: GemmConfig, problem: Problem, order: OnlineSchedule, workers: int, sizes: jax.Array
) -> jax.Array:
    """Returns the operand by which a kernel is told the pieces, int32 `[workers, columns]`.

    Column 0 is the worker's number of pieces, and the words of each follow, as in
    `tiles.dealt_table`; the last column is the element after the last one of all groups.

    They are every tile of every group. The largest group comes first, so that what workers are
    dealt differs by a small one at most.
    """
    coding = work.SumCoding()
    cells = _Cells.of(order, workers, coding.words, problem.batch)
    each = cells.each(bounds(sizes, problem.k, 1))
    # Without signs, a quotient is one operation.
    stacked, col = (x.astype(jnp.int32) for x in order(cells.place.astype(jnp.uint32)))
    height = jnp.int32(config.grid(problem)[0])
    start, end = (jnp.minimum(x, problem.k) for x in (each.rows - each.sizes, each.rows))
    words = coding.pack_sum(lax.rem(stacked, height), col, cells.group, start, end)
    own = lax.div(stacked, height) == each.place
    return cells.table(own, words, len(order), jnp.minimum(each.all_rows, problem.k))


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
    row_ends, tile_ends, place, all_rows, all_tiles = lax.reduce(
        (
            jnp.where(until, others, nothing),
            jnp.where(until, tiles, nothing),
            larger.astype(jnp.int32),
            others,
            tiles,
        ),
        (jnp.int32(0),) * 5,
        lambda xs, ys: tuple(x + y for x, y in zip(xs, ys, strict=True)),
        (1,),
    )
    return Bounds(row_ends, sizes, tile_ends, place, all_rows, all_tiles)


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
