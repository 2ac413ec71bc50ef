"""The arithmetic twins of `raster` and `swizzle`: a tile from its index, without a table.

They let a kernel compare an order that each worker computes ("on-line") with the same order read
from memory ("off-line").
"""

import dataclasses
from typing import Any, ClassVar

import numpy as np

from schedules import _check
from schedules.raster import Along
from schedules.swizzle import swizzle_name
from schedules.table import Schedule


@dataclasses.dataclass(frozen=True)
class OnlineSchedule:
    """An order given by arithmetic: `online(index)` is the tile visited at that place.

    The index may be a Python int, a NumPy array or a traced int32, and the row and column are of
    the same type: only operators are applied to it. It must be at least 0 and below the number of
    tiles; nothing checks that. Instances are hashable, and everything but the index is known when
    a kernel is traced. A side may be longer than a table's, whose entries have 16 bits for it.

    >>> online_swizzle(4, 4, group=2)(5)
    (1, 2)

    Attributes:
        grid: (rows, cols) of output tiles.
        name: The text that `parse` reads as the equal table.
        group: How many rows (columns) make a band; 1 and not serpentine is `raster`.
        along: "rows" for bands of rows, "cols" for bands of columns.
        serpentine: Whether every other band is walked backwards.
        is_online: Whether a kernel computes the order instead of reading it from a table.
    """

    grid: tuple[int, int]
    name: str
    group: int
    along: Along
    serpentine: bool
    is_online: ClassVar[bool] = True

    def __len__(self) -> int:
        return self.grid[0] * self.grid[1]

    def __call__(self, index: Any, rows: Any = None) -> tuple[Any, Any]:
        """Returns the (row, col) of the tile visited at `index`.

        Args:
            index: Which, counted from 0.
            rows: How many rows of the grid there are, if that is known later than the grid, when
                it may be a number of the running program; None for all.
        """
        rows, cols = self.grid[0] if rows is None else rows, self.grid[1]
        if self.along == "rows":
            return self._banded(index, rows, cols, min(self.group, self.grid[0]))
        col, row = self._banded(index, cols, rows, min(self.group, cols))
        return row, col

    def _banded(self, index: Any, rows: Any, cols: Any, group: int) -> tuple[Any, Any]:
        band = index // (cols * group)
        within = index - band * (cols * group)
        if group == 1:
            row, col = band, within
        else:
            # The quotient is 1 in the narrower last band alone; a bool would need a conversion.
            if isinstance(rows, int):
                whole, rest = divmod(rows, group)
                height = group if rest == 0 else group + band // whole * (rest - group)
            else:
                whole = rows // group
                rest = rows - whole * group
                height = group + (band + 1) // (whole + 1) * (rest - group)
            col = within // height
            row = band * group + within - col * height
        if self.serpentine:
            # An odd band counts its columns from the far end.
            col = col + (band & 1) * (cols - 1 - 2 * col)
        return row, col

    def table(self) -> Schedule:
        """Returns the same order as a table."""
        return Schedule(self.grid, np.stack(self(np.arange(len(self))), axis=1), self.name)


def online_raster(rows: int, cols: int, *, along: Along = "rows") -> OnlineSchedule:
    """Returns the arithmetic of `raster` with the same arguments.

    >>> online_raster(8, 8)(10)
    (1, 2)

    Args:
        rows: Rows of tiles.
        cols: Columns of tiles.
        along: "rows" for row-major order, "cols" for column-major order.

    Raises:
        ValueError: An argument is not legal; the message names it.
    """
    grid = _check.grid_size(rows, cols, _check.TILE_LIMIT)
    _check.one_of("along", along, ("rows", "cols"))
    name = "raster" if along == "rows" else "raster:cols"
    return OnlineSchedule(grid, name, 1, along, serpentine=False)


def online_swizzle(
    rows: int, cols: int, *, group: int = 8, along: Along = "rows", serpentine: bool = True
) -> OnlineSchedule:
    """Returns the arithmetic of `swizzle` with the same arguments.

    >>> online_swizzle(8, 8, group=3)(10)
    (1, 3)

    Args:
        rows: Rows of tiles.
        cols: Columns of tiles.
        group: How many rows (columns) make a band. More than there are makes one band.
        along: "rows" for bands of rows, "cols" for bands of columns.
        serpentine: Whether every other band is walked backwards.

    Raises:
        ValueError: An argument is not legal; the message names it.
    """
    grid = _check.grid_size(rows, cols, _check.TILE_LIMIT)
    group = _check.positive_int("group", group)
    _check.one_of("along", along, ("rows", "cols"))
    _check.true_or_false("serpentine", serpentine)
    name = swizzle_name(group, along, serpentine=serpentine)
    return OnlineSchedule(grid, name, group, along, serpentine)
