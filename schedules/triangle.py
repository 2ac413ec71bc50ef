"""`Triangle`: the tiles on and below the diagonal, all that is computed of a symmetric result."""

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from schedules import _check


@dataclasses.dataclass(frozen=True)
class Triangle:
    """Which tiles of a grid hold anything on or below the diagonal.

    Sizes of a tile count in whatever unit both have in common: (128, 256) is (1, 2).

    >>> Triangle(3).tiles((3, 3))
    6

    Attributes:
        rows: Rows of tiles of one matrix; a batch of them is stacked along the rows of the grid.
        tile: Rows and columns of a tile.

    Raises:
        ValueError: A size is not a positive integer.
    """

    rows: int
    tile: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", _check.positive_int("rows", self.rows))
        if not isinstance(self.tile, tuple | list) or len(self.tile) != 2:
            raise ValueError(f"tile must be a pair (rows, columns), got {self.tile!r}")
        tall, wide = (_check.positive_int(f"tile[{i}]", size) for i, size in enumerate(self.tile))
        common = math.gcd(tall, wide)
        object.__setattr__(self, "tile", (tall // common, wide // common))

    def mask(self, grid: tuple[int, int]) -> NDArray[np.bool_]:
        """Returns bool `[rows, cols]`: which tiles of a grid are in it."""
        tall, wide = self.tile
        row, col = np.ogrid[: grid[0], : grid[1]]
        return col * wide < (row % self.rows + 1) * tall

    def tiles(self, grid: tuple[int, int]) -> int:
        """Returns how many tiles of a grid are in it."""
        rows, cols = grid
        tall, wide = self.tile
        last = (np.arange(rows, dtype=np.int64) % self.rows + 1) * tall
        return int(np.minimum(-(-last // wide), cols).sum())
