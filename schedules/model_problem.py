"""The matrix multiply whose order is being judged, checked, and laid out for the simulated run."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from schedules import _check
from schedules.model_run import Launch, Stripes
from schedules.pieces import Pieces, unsplit
from schedules.table import Int32Array, Schedule

STRETCHES = 16
"""Stretches along K in which a tile is simulated, at most."""

FEWEST_STRETCHES = 4
"""The number for a large problem; its many tiles make up for the coarse steps."""

STRETCHES_IN_ALL = 2**18
"""How many a simulation may take before tiles get fewer of them: about half a second."""

SUM_BYTES = 4
"""Of each sum that a piece of a tile hands over: float32, or int32."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A schedule and what each of its tiles reads and writes.

    Attributes:
        grid: Rows and columns of the tiles that one worker computes at a time.
        order: The (row, col) of each such tile, or piece of one, in visiting order.
        tile: Rows and columns of such a tile, in elements.
        k: Extent of the contraction.
        kernels: How many of them each kernel visits.
        stretches: Stretches along K that are simulated.
        spans: For each tile or piece, the first stretch of its own, and the one after its last.
        joinable: Whether reads of A, and of B, may join a request under way.
        itemsize: Bytes of an element of A or B.
        out_itemsize: Bytes of an element of the output.
        batch: How many problems follow each other.
        matrices: How many of them are stacked along the rows of the grid.
        symmetric: Both operands are one array, and what is computed of the result, on and below the
            diagonal, is stored twice.
    """

    grid: tuple[int, int]
    order: Int32Array
    tile: tuple[int, int]
    k: int
    kernels: tuple[int, ...]
    stretches: int
    spans: NDArray[np.int64]
    joinable: tuple[bool, bool]
    itemsize: int
    out_itemsize: int
    batch: int
    matrices: int = 1
    symmetric: bool = False

    @classmethod
    def checked(
        cls,
        schedule: Schedule | Pieces,
        *,
        tile: tuple[int, int, int],
        k: int,
        cluster: tuple[int, int],
        multicast: bool,
        itemsize: int,
        out_itemsize: int,
        batch: int,
    ) -> Self:
        """Returns the problem, or raises a `ValueError` that names the argument at fault."""
        if not isinstance(schedule, Schedule | Pieces):
            raise ValueError(f"schedule must be a Schedule or Pieces, got {schedule!r}")
        tile_m, tile_n, k_block = positive_ints("tile", tile, 3)
        cluster_m, cluster_n = positive_ints("cluster", cluster, 2)
        k = _check.positive_int("k", k)
        _check.true_or_false("multicast", multicast)
        grid, order = schedule.grid, schedule.order
        triangle = schedule.triangle if isinstance(schedule, Schedule) else None
        steps, batch = math.ceil(k / k_block), _check.positive_int("batch", batch)
        ctas = 1 if multicast else cluster_m * cluster_n
        stretches = min(steps, _stretches(len(order) * ctas * batch))
        spans = np.tile([0, stretches], (len(order), 1))
        kernels = (len(order) * batch,)
        if isinstance(schedule, Pieces):
            _check_steps(schedule, k, k_block)
            kernels, stretches, spans = _cut(schedule, stretches, batch)
        if multicast:
            tile_m, tile_n = tile_m * cluster_m, tile_n * cluster_n
        else:
            # Each CTA reads for itself, like a worker of its own beside the others of its cluster.
            grid = grid[0] * cluster_m, grid[1] * cluster_n
            order = _ctas_of(order, cluster_m, cluster_n)
        return cls(
            grid=grid,
            order=order,
            tile=(tile_m, tile_n),
            k=k,
            kernels=tuple(count * ctas for count in kernels),
            stretches=stretches,
            spans=spans.repeat(ctas, axis=0),
            joinable=(not multicast or cluster_n == 1, not multicast or cluster_m == 1),
            itemsize=_check.positive_int("itemsize", itemsize),
            out_itemsize=_check.positive_int("out_itemsize", out_itemsize),
            batch=batch,
            matrices=1 if triangle is None else -(-schedule.grid[0] // triangle.rows),
            symmetric=triangle is not None,
        )

    @property
    def tiles(self) -> int:
        """Tiles of the whole batch, or pieces of them."""
        return len(self.order) * self.batch

    @property
    def stripe_bytes(self) -> tuple[int, int]:
        """Bytes of a tile's stripe of A and of its stripe of B."""
        return self.tile[0] * self.k * self.itemsize, self.tile[1] * self.k * self.itemsize

    @property
    def output_bytes(self) -> int:
        """Bytes that are stored for one tile: of a symmetric output, on average."""
        whole = math.prod(self.tile) * self.out_itemsize
        return whole * math.prod(self.grid) // len(self.order) if self.symmetric else whole

    @property
    def sum_bytes(self) -> int:
        """Bytes that are stored for one piece of a tile."""
        return math.prod(self.tile) * SUM_BYTES

    @functools.cached_property
    def shares(self) -> NDArray[np.float64]:
        """For each tile or piece, how much of the tile it is."""
        first, end = self.spans.T
        return np.tile((end - first) / self.stretches, self.batch)

    @functools.cached_property
    def joined(self) -> list[list[int]]:
        """For each tile that is cut, the numbers of its pieces."""
        tile = self.order @ [self.grid[1], 1]
        _, counts = np.unique(tile, return_counts=True)
        by_tile = np.split(np.lexsort((self.spans[:, 0], tile)), counts.cumsum()[:-1])
        return [pieces.tolist() for pieces in by_tile if len(pieces) > 1]

    @property
    def operand_bytes(self) -> int:
        """Bytes of A and B."""
        a, b = self.stripe_bytes
        return self.batch * (self.grid[0] * a + (0 if self.symmetric else self.grid[1] * b))

    @property
    def blocks(self) -> int:
        """Blocks that the run touches: stretches of A and B, and output tiles."""
        return self.batch * self._stripes * self.stretches + self.tiles + len(self.joined)

    @property
    def _stripes(self) -> int:
        """Stripes of both operands of one problem."""
        if not self.symmetric:
            return sum(self.grid)
        (rows, cols), (tall, wide) = self.grid, self._parts
        return self.matrices * max(rows // self.matrices * tall, cols * wide)

    @property
    def _parts(self) -> tuple[int, int]:
        """How many stripes a tile reads of either operand: of one array, they must be as wide."""
        common = math.gcd(*self.tile)
        return self.tile[0] // common, self.tile[1] // common

    def launch(self, groups: list[int], *, dealt: bool) -> Launch:
        """Returns the run. Its sizes count `1 / stretches` of a byte, so that all are whole.

        Args:
            groups: For each worker, the group of SMs it belongs to.
            dealt: Whether the tiles are dealt out beforehand.
        """
        both, joined = sum(self.stripe_bytes), self.joined
        sizes = [self.output_bytes * self.stretches] * self.tiles
        for piece in itertools.chain.from_iterable(joined):
            sizes[piece] = self.sum_bytes * self.stretches
        operands = tuple(
            Stripes((stripe * self.stretches).tolist(), size, size / both, joinable)
            for stripe, size, joinable in self._read()
        )
        return Launch(
            kernels=self.kernels,
            operands=operands,
            stretches=self.stretches,
            spans=[(first, end) for first, end in self.spans.tolist()] * self.batch,
            first_output=self.blocks - self.tiles - len(joined),
            output_sizes=sizes,
            joined=joined,
            joined_size=self.output_bytes * self.stretches,
            groups=groups,
            dealt=dealt,
        )

    def _read(self) -> Iterator[tuple[Int32Array, int, bool]]:
        """Yields the stripes that every tile reads: their numbers, their size, if they are joined.

        In a symmetric result, the stripes of B are stripes of A.
        """
        problem = np.arange(self.batch)[:, None]
        row, col = self.order.T
        starts: tuple[Any, Any]
        if not self.symmetric:
            starts = problem * self.grid[0] + row, problem * self.grid[1] + col
            starts = starts[0], starts[1] + self.batch * self.grid[0]
            parts = 1, 1
        else:
            matrix, row = np.divmod(row, self.grid[0] // self.matrices)
            first = problem * self._stripes + matrix * (self._stripes // self.matrices)
            parts = self._parts
            starts = first + row * parts[0], first + col * parts[1]
        for start, part, size, joinable in zip(
            starts, parts, self.stripe_bytes, self.joinable, strict=True
        ):
            for i in range(part):
                yield (start + i).ravel(), size // part, joinable


def _check_steps(pieces: Pieces, k: int, k_block: int) -> None:
    if pieces.steps != (steps := math.ceil(k / k_block)):
        raise ValueError(
            f"schedule must be made for {steps} steps of k, of {k_block} in k={k}, got"
            f" {pieces.steps}"
        )


def _cut(
    pieces: Pieces, stretches: int, batch: int
) -> tuple[tuple[int, ...], int, NDArray[np.int64]]:
    """Returns how many pieces each kernel visits, how many stretches a tile has, and which a piece.

    Pieces of one tile differ by a step at most: they have the same number of stretches.
    """
    if batch > 1:
        raise ValueError(f"batch must be 1 for pieces of k, got {batch}")
    try:
        _, parts, last = unsplit(pieces)
    except ValueError as error:
        raise ValueError(f"schedule must be pieces as split_k makes them: {error}") from None
    each = max(1, round(stretches / parts))
    whole = 0 if last is None else len(pieces) - last * parts
    first = each * pieces.spans[:, 2].astype(np.int64)
    end = np.where(np.arange(len(pieces)) < whole, each * parts, first + each)
    kernels = (whole, len(pieces) - whole) if whole else (len(pieces),)
    return kernels, each * parts, np.stack([first, end], axis=1)


def positive_ints(argument: str, value: object, count: int) -> tuple[int, ...]:
    """Returns `value` as a tuple of `count` positive integers, or raises."""
    if not isinstance(value, tuple | list) or len(value) != count:
        raise ValueError(f"{argument} must be {count} positive integers, got {value!r}")
    return tuple(_check.positive_int(f"{argument}[{i}]", part) for i, part in enumerate(value))


def _stretches(tiles: int) -> int:
    """Returns how many stretches along K a tile is worth, for a simulation that ends soon."""
    return max(FEWEST_STRETCHES, min(STRETCHES, STRETCHES_IN_ALL // tiles))


def _ctas_of(order: Int32Array, cluster_m: int, cluster_n: int) -> Int32Array:
    """Returns the order of output tiles, `cluster_m x cluster_n` of them in each cluster tile."""
    row, col = np.divmod(np.arange(cluster_m * cluster_n, dtype=np.int32), cluster_n)
    corner = order * np.array([cluster_m, cluster_n], np.int32)
    return (corner[:, None, :] + np.stack([row, col], axis=1)).reshape(-1, 2)
