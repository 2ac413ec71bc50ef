"""How fast the workers of a launch go: never quite in step, and held together by the cache."""

import dataclasses

import numpy as np
from numpy.typing import NDArray

STEP = 64
"""The K step of the measured kernels, in elements: the unit of the times below."""

STALL_PER_MISS = 0.075
"""How much longer a step takes whose operands come from device memory.

The worker that reads a stripe first pays this; those that follow find it in the L2 and catch up.
This holds workers together that share a stripe."""

STEP_SPREAD = 30.0
"""How much the time of a step varies, as a standard deviation, per load and multiply-add.

The queues in front of the L2 disturb a worker in proportion to its loads. A tile of M x N elements
has `1/M + 1/N` loads per multiply-add: 0.47 for 128 x 128. The steps of a tile vary independently,
so a tile of 128 such steps varies by 4%."""

STEPS_UNDER_WAY = 2.0
"""For how many steps a read is under way, so that another may join it.

A ring of slots in shared memory asks for a step's operands a few steps before they are used."""

LONGEST_UNDER_WAY = 0.25
"""The same as a part of a tile, at most: no worker ever joins a read of its own last tile."""


@dataclasses.dataclass(frozen=True)
class Pace:
    """When each worker is where. A tile without stalls takes about one unit of time.

    Attributes:
        worker: Relative time that each worker takes for a tile.
        tile: Relative time that each tile takes.
        stall: Relative delay of a stretch of K that comes from device memory.
        under_way: How long a read is under way.
    """

    worker: list[float]
    tile: list[float]
    stall: float
    under_way: float


def pace_of(
    *,
    tiles: int,
    workers: int,
    loads: float,
    k: int,
    shares: NDArray[np.float64],
    speed_spread: float,
    rng: np.random.Generator,
) -> Pace:
    """Draws the times of a launch.

    Args:
        tiles: Tiles of the launch.
        workers: Workers that run at the same time.
        loads: Elements that a worker reads per multiply-add.
        k: Extent of the contraction.
        shares: For each tile, the part of it that is visited, where tiles are cut along K.
        speed_spread: Standard deviation of the time that different workers take for a tile.
        rng: Where the randomness comes from.
    """

    def durations(count: int, spread: float | NDArray[np.float64]) -> list[float]:
        # No tile takes no time, however widely a very short one varies.
        return np.clip(1 + spread * rng.standard_normal(count), 0.5, 1.5).tolist()

    steps = k / STEP
    return Pace(
        worker=durations(workers, speed_spread),
        tile=durations(tiles, STEP_SPREAD * loads / steps**0.5 / np.sqrt(shares)),
        stall=STALL_PER_MISS,
        under_way=min(STEPS_UNDER_WAY / steps, LONGEST_UNDER_WAY),
    )
