"""How fast the workers of a launch go: never quite in step, and held together by the cache."""

import dataclasses

import numpy as np

STALL_PER_MISS = 0.08
"""How much longer a stretch of K takes when all of it comes from device memory.

The worker that reads a stripe first pays this; those that follow find it in the L2 and catch up.
That is what keeps workers together that share a stripe."""

TIME_SPREAD = 2.7
"""How much the time of a tile varies, per element of a tile's side (a standard deviation).

Queues in front of the L2 disturb a worker in proportion to what it asks for: to the bytes per
multiply-add, which for a tile of M x N is `1/M + 1/N`. A 128 x 128 tile varies by 4%."""

STEPS_UNDER_WAY = 0.6
"""How long a request is under way, in K steps of `STEP` elements: others may join it till then."""

STEP = 64
"""The K step of the measured kernels, in elements."""


@dataclasses.dataclass(frozen=True)
class Pace:
    """When each worker is where. A tile without stalls takes about one unit of time.

    Attributes:
        worker: Relative time that each worker takes for a tile.
        tile: Relative time that each tile takes.
        stall: Relative delay of a stretch of K that comes from device memory.
        under_way: How long a request is under way.
    """

    worker: list[float]
    tile: list[float]
    stall: float
    under_way: float


def pace_of(
    tiles: int,
    workers: int,
    *,
    loads_per_step: float,
    k: int,
    speed_spread: float,
    rng: np.random.Generator,
) -> Pace:
    """Draws the times of a launch.

    Args:
        tiles: Tiles of the launch.
        workers: Workers that run at the same time.
        loads_per_step: Elements that a worker reads per multiply-add.
        k: Extent of the contraction.
        speed_spread: Standard deviation of the speed of a worker.
        rng: Where the randomness comes from.
    """
    # Halving the normal's tails keeps every duration positive, however wide the spread.
    def durations(count: int, spread: float) -> list[float]:
        drawn = 1 + spread * rng.standard_normal(count)
        return np.clip(drawn, 0.5, 1.5).tolist()

    return Pace(
        worker=durations(workers, speed_spread),
        tile=durations(tiles, TIME_SPREAD * loads_per_step),
        stall=STALL_PER_MISS,
        under_way=min(STEPS_UNDER_WAY * STEP / k, 1.0),
    )
