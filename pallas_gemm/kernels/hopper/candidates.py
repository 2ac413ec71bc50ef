"""The configs of the Hopper kernel that the heuristics choose among."""

import dataclasses
import math
from collections.abc import Iterator

from pallas_gemm.config import STEP_BYTES
from pallas_gemm.device import Device
from pallas_gemm.kernels.hopper.config import MAX_BARRIERS, HopperConfig, stored_by_tma
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
MIRRORED_TILES = (
    *TILES,
    # Of any width, where a tile of the right size makes the last wave a full one.
    ((128, 208), 2),
    ((128, 176), 2),
    ((128, 160), 2),
    ((128, 144), 2),
    # Narrow, for a result of few rows.
    ((64, 32), 1),
    ((64, 16), 1),
)
MOST_STAGES = 20
"""Enough to cover the latency of memory with the smallest tile."""
STORE_BOUND_STEPS = 2
"""Steps of k that are over before two store slots are empty again: 32 products of 2048 x 2048 x 128
take 92 us on an H200 with two slots and four stages, and 84 us with four slots and three stages,
as XLA's do. With four steps, two slots are the better choice."""


def candidates(problem: Problem, device: Device) -> Iterator[HopperConfig]:
    """Yields, for each tile, the config with as many stages as fit into shared memory."""
    for mirrored, tiles in ((False, TILES), (True, MIRRORED_TILES)):
        for tile, consumers in tiles:
            config = HopperConfig(
                tile=tile,
                consumers=consumers,
                store_columns=min(64, STEP_BYTES // problem.out_dtype.itemsize),
                # A second one overlaps stores of TMA with the next chunk; threads wait for theirs.
                store_slots=(4 if _is_short(problem) else 2) if stored_by_tma(problem) else 1,
                late_store=False,
                mirrored=mirrored,
            )
            yield from _deepest(_ordered(config, problem, device), problem, device)


def _ordered(config: HopperConfig, problem: Problem, device: Device) -> HopperConfig:
    """Stores late where that is possible, and computes the order where nothing is gained by it.

    With a tile per CTA there is no next tile to store it under, and half a microsecond is gained by
    not waiting for the first entry of a table (2048 cubed on an H200: 23.5 us instead of 24.0).
    """
    if math.prod(config.stacked_grid(problem)) <= device.sms:
        return dataclasses.replace(config, schedule="online_swizzle:8")
    if _is_short(problem):
        return config
    return dataclasses.replace(
        config, late_store=config.allows_late_store(config.as_computed(problem))
    )


def _is_short(problem: Problem) -> bool:
    """Whether a tile is stored more slowly than it is computed."""
    return problem.k * problem.a_dtype.itemsize <= STORE_BOUND_STEPS * STEP_BYTES


def _deepest(config: HopperConfig, problem: Problem, device: Device) -> Iterator[HopperConfig]:
    for stages in range(min(MOST_STAGES, MAX_BARRIERS), 1, -1):
        deeper = dataclasses.replace(config, stages=stages)
        if deeper.shared_memory_bytes(problem) <= device.shared_memory:
            yield deeper
            return


def shared_rows(config: HopperConfig) -> int:
    """Returns rows of `STEP_BYTES` that shared memory takes in and gives out per k step.

    Each consumer reads its own rows of the left operand, and all of the right one.
    """
    rows, cols = config.tile
    return 2 * rows + (1 + config.consumers) * cols
