"""The naive orders: row after row, or column after column."""

from typing import Literal

import numpy as np

from schedules import _check
from schedules.table import Schedule

Along = Literal["rows", "cols"]


def raster(rows: int, cols: int, *, along: Along = "rows") -> Schedule:
    """Walks the rows one after the other, or the columns.

    On a large problem one wave of workers covers few rows and every column: nearly all of B is
    read again for each wave. It is the order to compare the others with.

    >>> from schedules.draw import numbers
    >>> print(numbers(raster(8, 8)))
     0  1  2  3  4  5  6  7
     8  9 10 11 12 13 14 15
    16 17 18 19 20 21 22 23
    24 25 26 27 28 29 30 31
    32 33 34 35 36 37 38 39
    40 41 42 43 44 45 46 47
    48 49 50 51 52 53 54 55
    56 57 58 59 60 61 62 63

    Args:
        rows: Rows of tiles.
        cols: Columns of tiles.
        along: "rows" for row-major order, "cols" for column-major order.

    Raises:
        ValueError: An argument is not legal; the message names it.
    """
    rows, cols = _check.grid_size(rows, cols)
    _check.one_of("along", along, ("rows", "cols"))
    index = np.arange(rows * cols, dtype=np.int32)
    if along == "rows":
        return Schedule((rows, cols), np.stack([index // cols, index % cols], axis=1), "raster")
    return Schedule((rows, cols), np.stack([index % rows, index // rows], axis=1), "raster:cols")
