"""Work along K: which steps of which tile are computed at a time, as plain data."""

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from schedules import _check
from schedules.table import Int32Array, Schedule, frozen

FIELDS = ("row", "col", "first step", "steps")
STEP_LIMIT = 65_536
"""A packed entry keeps the first step of a piece, and how many it takes, in 16 bits each."""


@dataclasses.dataclass(frozen=True, eq=False)
class Pieces:
    """Pieces of work, in the order in which they are computed.

    The sum of a tile is made of its pieces', in the order of their first steps. Two are equal when
    they have the same pieces in the same order, as two schedules are.

    >>> Pieces((1, 1), 5, [[0, 0, 2, 3], [0, 0, 0, 2]]).spans.tolist()
    [[2, 3, 1], [0, 2, 0]]

    Attributes:
        grid: (rows, cols) of output tiles.
        steps: Steps of k that each tile takes in all.
        table: int32 `[pieces, 4]`, the row and column of each piece's tile, its first step, and how
            many steps it takes.

    Raises:
        ValueError: The pieces do not compute every step of every tile exactly once.
    """

    grid: tuple[int, int]
    steps: int
    table: Int32Array = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        grid = _check.grid_size(*self.grid)
        steps = _check.positive_int("steps", self.steps)
        if steps >= STEP_LIMIT:
            raise ValueError(f"steps must be below {STEP_LIMIT}, got {steps}")
        object.__setattr__(self, "grid", grid)
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "table", frozen(_checked(grid, steps, self.table)))

    def __len__(self) -> int:
        return len(self.table)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pieces):
            return NotImplemented
        # What they cover says the grid and the steps.
        return np.array_equal(self.table, other.table)

    def __hash__(self) -> int:
        return self._content_hash

    @functools.cached_property
    def _content_hash(self) -> int:
        return hash(self.table.tobytes())

    def __reduce__(self) -> tuple[type["Pieces"], tuple[Any, ...]]:
        # As of a schedule: a pickle must not carry the cached hash.
        return Pieces, (self.grid, self.steps, self.table)

    @property
    def order(self) -> Int32Array:
        """The (row, col) of the tile of each piece."""
        return self.table[:, :2]

    @property
    def spans(self) -> Int32Array:
        """The (first step, steps) of each piece, and which summand of its tile it makes."""
        _, summand = _by_tile(self.grid, self.table)
        return np.concatenate([self.table[:, 2:], summand[:, None]], axis=1)


class Split(NamedTuple):
    """How tiles are cut along k: what `split_k` is told, but for the steps.

    >>> from schedules import raster
    >>> unsplit(split_k(raster(1, 2), steps=5, parts=2)) == Split(raster(1, 2), parts=2)
    True
    """

    tiles: Schedule
    parts: int
    last: int | None = None


def split_k(tiles: Schedule, steps: int, parts: int, last: int | None = None) -> Pieces:
    """Cuts tiles into the same number of pieces of k, whose lengths differ by at most one step.

    Tiles that stay whole come first, then the first pieces of all others, in the order of the
    tiles: what is computed at the same time reads the same part of the operands.

    >>> from schedules import raster
    >>> split_k(raster(1, 2), steps=5, parts=2).table.tolist()
    [[0, 0, 0, 3], [0, 1, 0, 3], [0, 0, 3, 2], [0, 1, 3, 2]]
    >>> split_k(raster(1, 2), steps=5, parts=2, last=1).table.tolist()
    [[0, 0, 0, 5], [0, 1, 0, 3], [0, 1, 3, 2]]

    Args:
        tiles: The order of the tiles.
        steps: Steps of k that each takes.
        parts: Into how many pieces.
        last: How many tiles are cut, the last ones of the order; None for all.

    Raises:
        ValueError: A number is not positive, or there are more pieces than steps, or more tiles to
            cut than there are.
    """
    steps, parts = _check.positive_int("steps", steps), _check.positive_int("parts", parts)
    if parts > steps:
        raise ValueError(f"parts must be at most the {steps} steps of k, got {parts}")
    last = len(tiles) if last is None else _check.positive_int("last", last)
    if last > len(tiles):
        raise ValueError(f"last must be at most the {len(tiles)} tiles, got {last}")
    whole, cut = np.split(tiles.order, [len(tiles) - last])
    part = np.repeat(np.arange(parts), last)
    least, longer = divmod(steps, parts)
    first = part * least + np.minimum(part, longer)
    length = least + (part < longer)
    uncut = np.column_stack([whole, np.tile([0, steps], (len(whole), 1))])
    pieces = np.column_stack([np.tile(cut, (parts, 1)), first, length])
    return Pieces(tiles.grid, steps, np.concatenate([uncut, pieces]))


def unsplit(pieces: Pieces) -> Split:
    """Returns of what `split_k` makes these pieces; `last` is None if all or none are cut.

    >>> from schedules import raster
    >>> tiles, parts, last = unsplit(split_k(raster(1, 2), steps=5, parts=3, last=1))
    >>> tiles.order.tolist(), parts, last
    ([[0, 0], [0, 1]], 3, 1)

    Raises:
        ValueError: It makes none such.
    """
    first = pieces.table[:, 2] == 0
    tiles = Schedule(pieces.grid, pieces.order[first])
    parts = 1 + int(pieces.spans[:, 2].max())
    whole = int((pieces.table[:, 3] == pieces.steps).sum())
    last = len(tiles) - whole if parts > 1 and whole else None
    made = split_k(tiles, pieces.steps, parts, last).table
    if np.array_equal(made, pieces.table):
        return Split(tiles, parts, last)
    how = f"split_k(..., steps={pieces.steps}, parts={parts}, last={last})"
    if len(made) != len(pieces):
        raise ValueError(f"{how} makes {len(made)} pieces of the tiles, got {len(pieces)}")
    wrong = int((made != pieces.table).any(axis=1).argmax())
    raise ValueError(
        f"piece {wrong} of {how} is {made[wrong].tolist()}, got {pieces.table[wrong].tolist()}"
    )


def _by_tile(grid: tuple[int, int], table: Int32Array) -> tuple[np.ndarray, np.ndarray]:
    """Returns the pieces tile by tile in the order of their steps, and the place of each there."""
    tile = table[:, 0].astype(np.int64) * grid[1] + table[:, 1]
    sorted_by = np.lexsort((table[:, 2], tile))
    starts = np.searchsorted(tile[sorted_by], tile)
    place = np.empty(len(table), np.int32)
    place[sorted_by] = np.arange(len(table), dtype=np.int32)
    return sorted_by, place - starts.astype(np.int32)


def _checked(grid: tuple[int, int], steps: int, given: ArrayLike) -> Int32Array:
    """Returns the table as int32, or raises unless it has every step of every tile exactly once."""
    table = np.array(given)
    if table.ndim != 2 or table.shape[1] != len(FIELDS) or table.dtype.kind not in "iu":
        raise ValueError(
            f"table must be an integer array [pieces, {len(FIELDS)}] of {', '.join(FIELDS)},"
            f" got shape {table.shape} of {table.dtype}"
        )
    row, col, first, length = table.T
    outside = (row < 0) | (row >= grid[0]) | (col < 0) | (col >= grid[1])
    outside |= (first < 0) | (length < 1) | (first + length > steps)
    if outside.any():
        wrong = table[outside.argmax()].tolist()
        raise ValueError(f"table must stay inside grid={grid} and steps={steps}, got {wrong}")
    covered = np.zeros((*grid, steps + 1), np.int32)
    np.add.at(covered, (row, col, first), 1)
    np.add.at(covered, (row, col, first + length), -1)
    times = covered.cumsum(axis=-1)[..., :-1]
    if (times != 1).any():
        tile_row, tile_col, step = np.argwhere(times != 1)[0].tolist()
        raise ValueError(
            f"table must compute every step of every tile exactly once, got step {step} of tile"
            f" ({tile_row}, {tile_col}) {times[tile_row, tile_col, step]} times"
        )
    return table.astype(np.int32)
