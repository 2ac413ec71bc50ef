"""The matrix multiply whose order is being judged, checked, and laid out for the simulated run."""

import dataclasses
import math
from typing import Self

import numpy as np

from schedules import _check
from schedules.model_run import Launch, Stripes
from schedules.table import Int32Array, Schedule

STRETCHES = 16
"""Stretches along K in which a tile is simulated, at most."""

FEWEST_STRETCHES = 4
"""As many as a large problem gets; its many tiles make up for the coarse steps."""

STRETCHES_IN_ALL = 2**18
"""How many a simulation may take before tiles get fewer of them: about half a second."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A schedule and what each of its tiles reads and writes.

    Attributes:
        grid: Rows and columns of the tiles that one worker computes at a time.
        order: The (row, col) of each such tile, in visiting order.
        tile: Rows and columns of such a tile, in elements.
        k: Extent of the contraction.
        stretches: Stretches along K that are simulated.
        joinable: Whether reads of A, and of B, may join a request under way.
        itemsize: Bytes of an element of A or B.
        out_itemsize: Bytes of an element of the output.
        batch: How many problems follow each other.
    """

    grid: tuple[int, int]
    order: Int32Array
    tile: tuple[int, int]
    k: int
    stretches: int
    joinable: tuple[bool, bool]
    itemsize: int
    out_itemsize: int
    batch: int

    @classmethod
    def checked(
        cls,
        schedule: Schedule,
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
        if not isinstance(schedule, Schedule):
            raise ValueError(f"schedule must be a Schedule, got {schedule!r}")
        tile_m, tile_n, k_block = positive_ints("tile", tile, 3)
        cluster_m, cluster_n = positive_ints("cluster", cluster, 2)
        k = _check.positive_int("k", k)
        _check.true_or_false("multicast", multicast)
        grid, order = schedule.grid, schedule.order
        if multicast:
            tile_m, tile_n = tile_m * cluster_m, tile_n * cluster_n
        else:
            # Each CTA reads for itself, like a worker of its own beside the others of its cluster.
            grid = grid[0] * cluster_m, grid[1] * cluster_n
            order = _ctas_of(order, cluster_m, cluster_n)
        batch = _check.positive_int("batch", batch)
        return cls(
            grid=grid,
            order=order,
            tile=(tile_m, tile_n),
            k=k,
            stretches=min(math.ceil(k / k_block), _stretches(len(order) * batch)),
            joinable=(not multicast or cluster_n == 1, not multicast or cluster_m == 1),
            itemsize=_check.positive_int("itemsize", itemsize),
            out_itemsize=_check.positive_int("out_itemsize", out_itemsize),
            batch=batch,
        )

    @property
    def tiles(self) -> int:
        """Tiles of the whole batch."""
        return len(self.order) * self.batch

    @property
    def stripe_bytes(self) -> tuple[int, int]:
        """Bytes of a tile's stripe of A and of its stripe of B."""
        return self.tile[0] * self.k * self.itemsize, self.tile[1] * self.k * self.itemsize

    @property
    def output_bytes(self) -> int:
        """Bytes of one tile of the output."""
        return self.tile[0] * self.tile[1] * self.out_itemsize

    @property
    def operand_bytes(self) -> int:
        """Bytes of A and B."""
        a, b = self.stripe_bytes
        return self.batch * (self.grid[0] * a + self.grid[1] * b)

    @property
    def blocks(self) -> int:
        """Blocks that the run touches: stretches of A and B, and output tiles."""
        return self.batch * sum(self.grid) * self.stretches + self.tiles

    def launch(self, groups: list[int], *, dealt: bool) -> Launch:
        """Returns the run. Its sizes count `1 / stretches` of a byte, so that all are whole.

        Args:
            groups: For each worker, the group of SMs it belongs to.
            dealt: Whether the tiles are dealt out beforehand.
        """
        problem = np.arange(self.batch)[:, None]
        a_stripe = (problem * self.grid[0] + self.order[:, 0]).ravel()
        b_stripe = (problem * self.grid[1] + self.order[:, 1]).ravel() + self.batch * self.grid[0]
        both = sum(self.stripe_bytes)
        a, b = (
            Stripes((stripe * self.stretches).tolist(), size, size / both, joinable)
            for stripe, size, joinable in zip(
                (a_stripe, b_stripe), self.stripe_bytes, self.joinable, strict=True
            )
        )
        return Launch(
            operands=(a, b),
            stretches=self.stretches,
            first_output=self.blocks - self.tiles,
            output_size=self.output_bytes * self.stretches,
            groups=groups,
            dealt=dealt,
        )


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
