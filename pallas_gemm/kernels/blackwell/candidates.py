"""The configs of the Blackwell kernel that the heuristics choose among."""

import dataclasses
import math
from collections.abc import Iterator

from pallas_gemm.config import STEP_BYTES
from pallas_gemm.device import Device
from pallas_gemm.kernels.blackwell.config import PAIR, BlackwellConfig
from pallas_gemm.problem import Problem

# (rows, columns) of the tile, and the cluster. Pairs read half as much of the right operand, so
# they come first among equals.
SHAPES = (
    ((128, 256), PAIR),
    ((128, 192), PAIR),
    ((128, 128), PAIR),
    ((128, 256), (1, 1)),
    ((128, 128), (1, 1)),
    ((128, 64), (1, 1)),
)
MOST_STAGES = 12
"""Enough to cover the latency of memory with the smallest tile."""
FEWEST_DYNAMIC_STEPS = 8
"""Steps of k from which on a tile takes longer than launch control's answer to a request: about a
microsecond, which nobody has measured here."""


def candidates(problem: Problem, device: Device) -> Iterator[BlackwellConfig]:
    """Yields, for each tile, the config with as many stages as fit into shared memory.

    Where there are more tiles than run at once, they go to whichever cluster is free, unless a tile
    is over before it would be known who gets the next one.
    """
    widest = min(64, *(STEP_BYTES // dtype.itemsize for dtype in problem.stored_dtypes))
    for tile, cluster in SHAPES:
        config = BlackwellConfig(
            tile=tile,
            cluster=cluster,
            store_columns=math.gcd(tile[1] // problem.sums, widest),
        )
        tiles = math.prod(config.stacked_grid(problem))
        steps = math.ceil(problem.k / config.tile_k(problem))
        if tiles > config.workers(problem, device) and steps >= FEWEST_DYNAMIC_STEPS:
            config = dataclasses.replace(config, persistence="dynamic")
        for stages in range(MOST_STAGES, 1, -1):
            deeper = dataclasses.replace(config, stages=stages)
            if deeper.shared_memory_bytes(problem) <= device.shared_memory:
                yield deeper
                break
