"""`Schedule`: the order in which output tiles are visited, as plain data."""

import dataclasses
import functools
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from schedules import _check
from schedules.triangle import Triangle

Int32Array = NDArray[np.int32]

PADDING = -1
"""Fills the rows of a dealt table that are shorter than the longest one."""


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """The order in which the tiles of a grid are visited.

    Two schedules are equal if they visit the same grid in the same order, whatever their names. So
    a schedule can be a dictionary key, a static argument or the key of a cache.

    >>> backwards = Schedule((1, 2), [[0, 1], [0, 0]], name="backwards")
    >>> backwards.packed().tolist()
    [1, 0]

    Attributes:
        grid: (rows, cols) of output tiles.
        order: int32 `[tiles, 2]`, the (row, col) of each tile in visiting order. Read-only.
        name: The name of the order in a table; the builders use the text that `parse` reads back.
        triangle: Which tiles are visited, if only those on and below the diagonal are; None for
            all.
        is_online: Whether a kernel computes the order instead of reading it from a table.

    Raises:
        ValueError: The grid is not one, or `order` does not visit each tile of it, or of its
            triangle, exactly once and no other.
    """

    grid: tuple[int, int]
    order: Int32Array = dataclasses.field(repr=False)
    name: str = "custom"
    triangle: Triangle | None = dataclasses.field(default=None, repr=False)
    is_online: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.grid, tuple | list) or len(self.grid) != 2:
            raise ValueError(f"grid must be a pair (rows, cols), got {self.grid!r}")
        if not isinstance(self.name, str):
            raise ValueError(f"name must be a string, got {self.name!r}")
        grid = _check.grid_size(*self.grid)
        object.__setattr__(self, "grid", grid)
        object.__setattr__(self, "order", frozen(_checked_order(grid, self.order, self.triangle)))

    @property
    def rows(self) -> int:
        """The number of rows of tiles."""
        return self.grid[0]

    @property
    def cols(self) -> int:
        """The number of columns of tiles."""
        return self.grid[1]

    def __len__(self) -> int:
        return len(self.order)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Schedule):
            return NotImplemented
        same = (self.grid, self.triangle) == (other.grid, other.triangle)
        return same and np.array_equal(self.order, other.order)

    def __hash__(self) -> int:
        return self._content_hash

    @functools.cached_property
    def _content_hash(self) -> int:
        return hash((self.grid, self.triangle, self.order.tobytes()))

    def __reduce__(self) -> tuple[type["Schedule"], tuple[Any, ...]]:
        # A hash of bytes is good for one process only, so a pickle must not carry the cached one.
        return Schedule, (self.grid, self.order, self.name, self.triangle)

    def within(self, triangle: Triangle) -> "Schedule":
        """Returns the same order of those tiles alone that are in a triangle.

        >>> from schedules import Triangle, raster
        >>> from schedules.draw import numbers
        >>> print(numbers(raster(4, 4).within(Triangle(4))))
        0
        1 2
        3 4 5
        6 7 8 9
        """
        if triangle == self.triangle:
            return self
        inside = triangle.mask(self.grid)[self.order[:, 0], self.order[:, 1]]
        tall, wide = triangle.tile
        name = f"triangle:{tall}x{wide}:{self.name}"
        return Schedule(self.grid, self.order[inside], name, triangle)

    def packed(self) -> Int32Array:
        """Returns int32 `[tiles]`: row in the upper 16 bits, column in the lower 16, read-only.

        Rows from 32,768 up make the entry negative, but none is `PADDING`: unpack the row with
        `(entry >> 16) & 0xFFFF`, and compare with `PADDING` rather than with zero.
        """
        return self._packed

    @functools.cached_property
    def _packed(self) -> Int32Array:
        unsigned = self.order.astype(np.uint32)
        return frozen((unsigned[:, 0] << 16 | unsigned[:, 1]).view(np.int32))

    def positions(self) -> Int32Array:
        """Returns int32 `[rows, cols]`: when each tile is visited, counted from 0; else -1."""
        when = np.full(self.grid, -1, np.int32)
        when[self.order[:, 0], self.order[:, 1]] = np.arange(len(self), dtype=np.int32)
        return when

    def deal(
        self, workers: int, how: Literal["round_robin", "contiguous"] = "round_robin"
    ) -> Int32Array:
        """Shares the tiles among workers, whose shares differ by at most one tile.

        Args:
            workers: How many workers there are. Workers beyond the number of tiles get none.
            how: "round_robin" gives tile t to worker `t % workers`, so that tiles that follow each
                other are computed at the same time. "contiguous" gives each worker one run of tiles
                that follow each other.

        Returns:
            int32 `[workers, longest]` of packed entries, each row filled up with `PADDING`.

        Raises:
            ValueError: `workers` is not a positive integer or `how` is neither word.
        """
        workers = _check.worker_count(workers)
        _check.one_of("how", how, ("round_robin", "contiguous"))
        longest = -(-len(self) // workers)
        table = np.full((workers, longest), PADDING, np.int32)
        if how == "round_robin":
            dealt = np.full(workers * longest, PADDING, np.int32)
            dealt[: len(self)] = self.packed()
            table[:] = dealt.reshape(longest, workers).T
        else:
            table[np.arange(longest) < share_sizes(len(self), workers)[:, None]] = self.packed()
        return frozen(table)


def share_sizes(tiles: int, workers: int) -> NDArray[np.int64]:
    """Returns how many of the tiles each worker gets: the first `tiles % workers` get one more."""
    return tiles // workers + (np.arange(workers) < tiles % workers)


def _checked_order(
    grid: tuple[int, int], order: ArrayLike, triangle: Triangle | None
) -> Int32Array:
    """Returns `order` as int32, or raises unless it visits each tile that it must exactly once."""
    rows, cols = grid
    tiles = rows * cols if triangle is None else triangle.tiles(grid)
    what = f"grid={grid}" + ("" if triangle is None else f" in {triangle}")
    try:
        given = np.asarray(order)
    except ValueError as error:  # Rows of different lengths.
        raise ValueError(f"order must be an integer array: {error}") from None
    if given.shape != (tiles, 2) or not np.issubdtype(given.dtype, np.integer):
        raise ValueError(
            f"order must be an integer array of shape ({tiles}, 2) for {what}, "
            f"got shape {given.shape} of {given.dtype}"
        )
    outside = np.any((given < 0) | (given >= grid), axis=1)
    if np.any(outside):
        row, col = given[np.argmax(outside)]
        raise ValueError(f"order must stay inside grid={grid}, got tile ({row}, {col})")
    visits = np.bincount(given[:, 0].astype(np.int64) * cols + given[:, 1], minlength=rows * cols)
    # One visit for each tile that is wanted: those few tiles cannot be others as well.
    wanted = 1 if triangle is None else triangle.mask(grid).ravel().astype(np.int64)
    if np.any(visits != wanted):
        wrong = int(np.argmax(visits != wanted))
        raise ValueError(
            f"order must visit every tile of {what} exactly once, "
            f"got tile {divmod(wrong, cols)} {visits[wrong]} times"
        )
    return given.astype(np.int32)


def frozen(array: Int32Array) -> Int32Array:
    """Returns a copy that cannot be made writeable again: its memory is an immutable `bytes`."""
    return np.frombuffer(array.tobytes(), np.int32).reshape(array.shape)
