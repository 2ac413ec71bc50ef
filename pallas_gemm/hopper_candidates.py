"""The configs of the Hopper kernel that the heuristics choose among."""

import dataclasses
from collections.abc import Iterator

from pallas_gemm.config import STEP_BYTES
from pallas_gemm.device import Device
from pallas_gemm.hopper_config import MAX_BARRIERS, HopperConfig
from pallas_gemm.problem import Problem

# (rows, columns) of the tile, and the warpgroups that share it.
TILES = (
    ((128, 256), 2),
    ((256, 128), 2),
    ((128, 192), 2),
    ((128, 128), 2),
    ((64, 256), 1),
    ((64, 128), 1),
    ((64, 64), 1),
)
MOST_STAGES = 12
"""Enough to cover the latency of memory with the smallest tile."""


def candidates(problem: Problem, device: Device) -> Iterator[HopperConfig]:
    """Yields, for each tile, the config with as many stages as fit into shared memory."""
    for tile, consumers in TILES:
        config = HopperConfig(
            tile=tile,
            consumers=consumers,
            store_columns=min(64, STEP_BYTES // problem.out_dtype.itemsize),
            late_store=False,
        )
        config = dataclasses.replace(config, late_store=config.allows_late_store(problem))
        for stages in range(min(MOST_STAGES, MAX_BARRIERS), 1, -1):
            deeper = dataclasses.replace(config, stages=stages)
            if deeper.shared_memory_bytes(problem) <= device.shared_memory:
                yield deeper
                break
