"""Grouped orders: bands of rows (or columns) narrow enough for the cache, walked one by one."""

from collections.abc import Sequence

import numpy as np

from schedules import _check
from schedules.raster import Along
from schedules.table import Int32Array, Schedule


def swizzle(
    rows: int, cols: int, *, group: int = 8, along: Along = "rows", serpentine: bool = True
) -> Schedule:
    """Walks bands of `group` rows (or columns), each from end to end, before the next band.

    Inside a band the short side is walked first. When `group` does not divide the grid the last
    band is narrower: there is never an extra tile. With `serpentine` every other band is walked in
    the opposite direction, so that a band starts beside the tiles where the last one ended.

    >>> from schedules.draw import numbers
    >>> print(numbers(swizzle(8, 8, group=3)))
     0  3  6  9 12 15 18 21
     1  4  7 10 13 16 19 22
     2  5  8 11 14 17 20 23
    45 42 39 36 33 30 27 24
    46 43 40 37 34 31 28 25
    47 44 41 38 35 32 29 26
    48 50 52 54 56 58 60 62
    49 51 53 55 57 59 61 63

    Args:
        rows: Rows of tiles.
        cols: Columns of tiles.
        group: How many rows (columns) make a band. More than there are makes one band.
        along: "rows" for bands of rows, "cols" for bands of columns.
        serpentine: Whether every other band is walked backwards.

    Raises:
        ValueError: An argument is not legal; the message names it.
    """
    rows, cols = _check.grid_size(rows, cols)
    group = _check.positive_int("group", group)
    _check.one_of("along", along, ("rows", "cols"))
    _check.true_or_false("serpentine", serpentine)
    if along == "rows":
        order = _banded(rows, cols, group, serpentine=serpentine)
    else:
        order = _banded(cols, rows, group, serpentine=serpentine)[:, ::-1]
    return Schedule((rows, cols), order, swizzle_name(group, along, serpentine=serpentine))


def swizzle_name(group: int, along: str, *, serpentine: bool) -> str:
    """Returns the text that `parse` reads as this order."""
    suffix = (":cols" if along == "cols" else "") + ("" if serpentine else ":straight")
    return f"swizzle:{group}{suffix}"


def _banded(rows: int, cols: int, group: int, *, serpentine: bool) -> Int32Array:
    group = min(group, rows)
    index = np.arange(rows * cols)
    band = index // (cols * group)
    within = index - band * cols * group
    height = np.where(band == rows // group, rows - rows // group * group, group)
    row, col = group * band + within % height, within // height
    if serpentine:
        col = np.where(band % 2 == 1, cols - 1 - col, col)
    return np.stack([row, col], axis=1).astype(np.int32)


def nested_swizzle(
    rows: int, cols: int, *, factors: Sequence[int] = (8, 8), along: Along = "rows"
) -> Schedule:
    """Walks bands, in each of them bands across it, and so on: one factor per level.

    The first factor is the number of rows of a band, the second the number of columns of a block of
    a band. The third cuts a block into bands of rows again. The last band of any level is narrower
    where its factor does not divide; there is never an extra tile. One factor gives `swizzle`
    without serpentine.

    >>> from schedules.draw import numbers
    >>> print(numbers(nested_swizzle(8, 8, factors=[4, 3])))
     0  1  2 12 13 14 24 25
     3  4  5 15 16 17 26 27
     6  7  8 18 19 20 28 29
     9 10 11 21 22 23 30 31
    32 33 34 44 45 46 56 57
    35 36 37 47 48 49 58 59
    38 39 40 50 51 52 60 61
    41 42 43 53 54 55 62 63

    Args:
        rows: Rows of tiles.
        cols: Columns of tiles.
        factors: The width of the bands at each level, outermost first; 1 to 32 of them.
        along: "rows" to cut into bands of rows first, "cols" to cut into bands of columns first.

    Raises:
        ValueError: An argument is not legal; the message names it.
    """
    rows, cols = _check.grid_size(rows, cols)
    _check.one_of("along", along, ("rows", "cols"))
    if isinstance(factors, str) or not isinstance(factors, Sequence) or not 0 < len(factors) < 33:
        raise ValueError(f"factors must be a list of 1 to 32 positive integers, got {factors!r}")
    levels = tuple(_check.positive_int(f"factors[{i}]", f) for i, f in enumerate(factors))
    name = f"nested_swizzle:{'x'.join(map(str, levels))}"
    if along == "rows":
        return Schedule((rows, cols), _nested(rows, cols, levels), name)
    return Schedule((rows, cols), _nested(cols, rows, levels)[:, ::-1], f"{name}:cols")


def _nested(rows: int, cols: int, factors: tuple[int, ...]) -> Int32Array:
    if not factors:
        index = np.arange(rows * cols)
        return np.stack([index // cols, index % cols], axis=1).astype(np.int32)
    group, inner = min(factors[0], rows), factors[1:]
    # A band is a smaller grid of the same kind, lying on its side.
    band = _nested(cols, group, inner)[:, ::-1]
    first_rows = np.arange(0, rows - group + 1, group)
    shifts = np.stack([first_rows, np.zeros_like(first_rows)], axis=1)
    bands = [(band + shifts[:, None]).reshape(-1, 2)]
    rest = rows % group
    if rest:
        bands.append(_nested(cols, rest, inner)[:, ::-1] + (rows - rest, 0))
    return np.concatenate(bands).astype(np.int32)


def log_swizzle(rows: int, cols: int, *, log: int | None = None) -> Schedule:
    """Walks bands of `2**log` columns from top to bottom, by bit shifts alone.

    A launch grid of `rows << log` by `ceil(cols / 2**log)` positions (x, y), x fastest, becomes
    the tile `(x >> log, (y << log) + (x & (2**log - 1)))`; positions that fall outside the grid of
    tiles are skipped.

    >>> from schedules.draw import numbers
    >>> print(numbers(log_swizzle(8, 8, log=2)))
     0  1  2  3 32 33 34 35
     4  5  6  7 36 37 38 39
     8  9 10 11 40 41 42 43
    12 13 14 15 44 45 46 47
    16 17 18 19 48 49 50 51
    20 21 22 23 52 53 54 55
    24 25 26 27 56 57 58 59
    28 29 30 31 60 61 62 63

    Args:
        rows: Rows of tiles.
        cols: Columns of tiles.
        log: The logarithm of the width of a band, 0 to 16. None picks 3 if that leaves at least 6
            bands, else 2 if that leaves at least 3, else 1 if that leaves at least 2, else 0.

    Raises:
        ValueError: An argument is not legal; the message names it.
    """
    rows, cols = _check.grid_size(rows, cols)
    if log is None:
        log = next((s for s, bands in ((3, 6), (2, 3), (1, 2)) if _bands(cols, s) >= bands), 0)
    log = _check.int_at_least("log", log, 0)
    if log > 16:
        raise ValueError(f"log must be at most 16, got {log}")
    width = min(1 << log, 1 << (cols - 1).bit_length())
    shift = width.bit_length() - 1
    y, x = np.divmod(np.arange(-(-cols // width) * rows * width), rows * width)
    row, col = x >> shift, (y << shift) + (x & (width - 1))
    order = np.stack([row, col], axis=1)[col < cols]
    return Schedule((rows, cols), order.astype(np.int32), f"log_swizzle:{log}")


def _bands(cols: int, log: int) -> int:
    return -(-cols >> log) if cols >= 1 << log else 0
