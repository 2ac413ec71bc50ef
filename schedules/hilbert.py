"""Space-filling curves: every run of consecutive tiles, long or short, is a compact patch."""

import functools

import numpy as np
from numpy.typing import NDArray

from schedules import _check
from schedules.table import Schedule

Path = NDArray[np.int32]
Vectors = NDArray[np.int64]


def hilbert(rows: int, cols: int) -> Schedule:
    """Follows a Hilbert curve made for this very rectangle.

    Each tile is one step from the last, on every grid: no jumps, and nothing to tune. On squares
    whose side is a power of two it is the usual curve. The curve runs along the longer side and
    ends at that side's other end, or in the opposite corner where parity forbids that.

    >>> from schedules.draw import numbers, path
    >>> print(numbers(hilbert(8, 8)))
     0  3  4  5 58 59 60 63
     1  2  7  6 57 56 61 62
    14 13  8  9 54 55 50 49
    15 12 11 10 53 52 51 48
    16 17 30 31 32 33 46 47
    19 18 29 28 35 34 45 44
    20 23 24 27 36 39 40 43
    21 22 25 26 37 38 41 42
    >>> print(path(hilbert(5, 8)))
    ○─┐ ┌─────┐ ┌─●
    ┌─┘ └─┐ ┌─┘ └─┐
    └─┐ ┌─┘ └─┐ ┌─┘
    ┌─┘ └─┐ ┌─┘ └─┐
    └─────┘ └─────┘

    Args:
        rows: Rows of tiles.
        cols: Columns of tiles.

    Raises:
        ValueError: An argument is not legal; the message names it.
    """
    rows, cols = _check.grid_size(rows, cols)
    length, width = max(rows, cols), min(rows, cols)
    # A path of an even number of tiles must end an odd number of steps from its start.
    lengthwise = width == 1 or length % 2 == 0 or width % 2 == 1
    curve = _edge_curve(length, width) if lengthwise else _diagonal_curve(length, width)
    # The pieces repeat within one curve; kept longer, they only fill the memory.
    _edge_curve.cache_clear()
    order = curve[:, ::-1] if cols >= rows else curve
    return Schedule((rows, cols), order, "hilbert")


@functools.cache
def _edge_curve(length: int, width: int) -> Path:
    """Returns the (x, y) of a path through `length` x `width` tiles from (0, 0) to (length - 1, 0).

    There is none when `length` is odd and `width` even, nor for a single column of several tiles;
    every split below keeps its pieces clear of these.
    """
    if width == 1:
        return _line(length)
    if 2 * length > 3 * width:
        # Too long for a square-like turn: two curves one behind the other.
        half = length // 2
        first = half - half % 2 if width % 2 == 0 else half
        second = _edge_curve(length - first, width) + np.array([first, 0])
        return np.concatenate([_edge_curve(first, width), second]).astype(np.int32)
    left, bottom = _quadrants(length, width)
    climb = _edge_curve(bottom, left)[:, ::-1]
    cross = _edge_curve(length, width - bottom) + np.array([0, bottom])
    descend = (length - 1, bottom - 1) - _edge_curve(bottom, length - left)[:, ::-1]
    return np.concatenate([climb, cross, descend]).astype(np.int32)


def _quadrants(length: int, width: int) -> tuple[int, int]:
    """Returns the width of the climbing part and its height, as near to one half as parity lets."""
    legal = [
        (left, bottom)
        for left in range(max(1, length // 2 - 1), min(length, length // 2 + 2))
        for bottom in range(max(1, width // 2 - 1), min(width, width // 2 + 2))
        if _has_edge_curve(bottom, left)
        and _has_edge_curve(bottom, length - left)
        and _has_edge_curve(length, width - bottom)
    ]
    return min(legal, key=lambda split: abs(2 * split[0] - length) + abs(2 * split[1] - width))


def _has_edge_curve(length: int, width: int) -> bool:
    return width == 1 or (length > 1 and (length % 2 == 0 or width % 2 == 1))


def _diagonal_curve(length: int, width: int) -> Path:
    """Returns the (x, y) of a path from (0, 0) to (length - 1, width - 1), not both even."""
    if length < width:
        return _diagonal_curve(width, length)[:, ::-1]
    if width == 1:
        return _line(length)
    # The rest is an edge curve along the far side, whose length must then be even.
    rest = length // 2 + length // 2 % 2
    ahead = _edge_curve(rest, width) * (1, -1) + (length - rest, width - 1)
    return np.concatenate([_diagonal_curve(length - rest, width), ahead]).astype(np.int32)


def _line(length: int) -> Path:
    return np.stack([np.arange(length), np.zeros(length, int)], axis=1).astype(np.int32)


def clipped_hilbert(rows: int, cols: int) -> Schedule:
    """Follows the usual Hilbert curve over the power-of-two square that covers the grid.

    Tiles outside the grid are skipped, so that on other grids than those squares the order jumps
    where the curve leaves the grid.

    >>> from schedules.draw import numbers
    >>> print(numbers(clipped_hilbert(8, 8)))
     0  3  4  5 58 59 60 63
     1  2  7  6 57 56 61 62
    14 13  8  9 54 55 50 49
    15 12 11 10 53 52 51 48
    16 17 30 31 32 33 46 47
    19 18 29 28 35 34 45 44
    20 23 24 27 36 39 40 43
    21 22 25 26 37 38 41 42
    >>> print(numbers(clipped_hilbert(3, 5)))
     0  3  4  5 14
     1  2  7  6 13
    11 10  8  9 12

    Args:
        rows: Rows of tiles.
        cols: Columns of tiles.

    Raises:
        ValueError: An argument is not legal; the message names it.
    """
    rows, cols = _check.grid_size(rows, cols)
    size = 1 << (max(rows, cols) - 1).bit_length()
    # Each square of the curve: the tile where it enters, the way it runs along, the way across.
    entry = np.zeros((1, 2), np.int64)
    along = np.array([[0, 1]])
    across = np.array([[1, 0]])
    while size > 1:
        entry, along, across = _split(entry, along, across, size)
        size //= 2
        opposite = entry + (size - 1) * (along + across)
        # Squares that lie outside go now: the cover of a thin grid is far larger than the grid.
        inside = np.all(np.minimum(entry, opposite) < (rows, cols), axis=1)
        entry, along, across = entry[inside], along[inside], across[inside]
    return Schedule((rows, cols), entry.astype(np.int32), "clipped_hilbert")


def _split(
    entry: Vectors, along: Vectors, across: Vectors, size: int
) -> tuple[Vectors, Vectors, Vectors]:
    """Returns the four quarters of each square in the order in which the curve visits them."""
    half = size // 2
    last_entry = entry + (size - 1) * along + (half - 1) * across
    entries = [entry, entry + half * across, entry + half * (along + across), last_entry]
    alongs = [across, along, along, -across]
    acrosses = [along, across, across, -along]
    quarters = [np.stack(part, axis=1).reshape(-1, 2) for part in (entries, alongs, acrosses)]
    return quarters[0], quarters[1], quarters[2]
