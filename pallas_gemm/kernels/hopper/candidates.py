"""The configs of the Hopper kernel that the heuristics choose among."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from pallas_gemm.config import STEP_BYTES
from pallas_gemm.device import Device
from pallas_gemm.kernels.hopper.config import (
    MAX_BARRIERS,
    HopperConfig,
    stored_by_tma,
)
from pallas_gemm.problem import Problem

# Rows of a tile, and its columns: with these, 94 products drawn at random take 0.5% longer on an
# H200 than with the best of 41 tiles. One of the right width makes the last wave a full one, narrow
# ones are for results of few rows. 256 x 128 is never the best: two WGMMAs of 128 columns for each
# consumer take 4 to 10% longer than one of 256.
COLUMNS = {
    256: (208, 192),
    192: (192,),
    128: (256, 208, 192, 176, 160, 144, 128, 16),
    64: (256, 192, 160, 128, 64, 32, 16),
}
IN_TURNS = (128, 128)
"""The tile of a symmetric result, which is stored twice, while another is multiplied: a third of
the products of 4096 cubed would otherwise be beyond the diagonal or in a wave that is not full."""
CONSUMERS = {256: 2, 192: 3, 128: 2, 64: 1}
"""Warpgroups that share a tile of so many rows."""
ONLY_CUT = 192
"""Rows of tiles that only count where their k loop is cut: with 4 pieces of k, 768 x 1536 in such
tiles keeps 128 SMs busy."""
FEWEST_STAGES = 3
"""Of a ring, unless nothing else fits: narrower store slots make room for another stage."""
FEWEST_ROWS_CUT = 64
"""And columns: 8 x 9984 x 8192, 16 x 4096 x 14336 and 32 x 6144 x 4096 are no faster when cut."""
FEWEST_STEPS = 8
"""Of a piece of k: with fewer, its sum takes longer to hand over than to compute."""
MOST_WAVES = 3
"""Of pieces of k: each takes part of the L2 until it is joined."""
FULLER = 1.05
"""What more waves must gain in busy SMs."""
MOST_STAGES = 20
"""Enough to cover the latency of memory with the smallest tile."""
ROWS_OF_GROUPS = 128
"""Of a tile where groups have as many on average: fewer would be read from the L2 too often."""
STORE_BOUND_STEPS = 2
"""Steps of k that are over before two store slots are empty again: 32 products of 2048 x 2048 x 128
take 92 us on an H200 with two slots and four stages, and 84 us with four slots and three stages,
as XLA's do. With four steps, two slots are the better choice."""


def candidates(problem: Problem, device: Device) -> Iterator[HopperConfig]:
    """Yields, for each tile, the config with as many stages as fit into shared memory."""
    widest = min(64, *(STEP_BYTES // dtype.itemsize for dtype in problem.stored_dtypes))
    for form in _forms(problem):
        config = HopperConfig(
            store_columns=widest,
            # A second one overlaps stores of TMA with the next chunk; threads wait for theirs.
            store_slots=(4 if _is_short(problem) else 2) if stored_by_tma(problem) else 1,
            late_store=False,
            **form,
        )
        config = _ordered(config, problem, device)
        narrow = dataclasses.replace(config, store_columns=max(16, widest // 2))
        ready = deepest(config, problem, device)
        if _stages(ready) < FEWEST_STAGES:
            ready = max(ready, deepest(narrow, problem, device), key=_stages)
        if ready and config.tile[0] != ONLY_CUT:
            yield ready
        if ready and _may_be_cut(problem):
            yield from _cut(ready, problem, device)


def _forms(problem: Problem) -> Iterator[dict[str, Any]]:
    """Yields what is particular about each: its tile, and how consumers share it."""
    ways = (False,) if problem.symmetric else (False, True)
    for mirrored, rows in itertools.product(ways, COLUMNS):
        for columns in COLUMNS[rows]:
            if rows < ROWS_OF_GROUPS and problem.m >= ROWS_OF_GROUPS * problem.groups > 0:
                continue
            if _is_filled(rows, columns, problem, mirrored=mirrored):
                consumers = CONSUMERS[rows]
                yield {"tile": (rows, columns), "consumers": consumers, "mirrored": mirrored}
    if problem.symmetric:
        yield {"tile": IN_TURNS, "pingpong": True}


def _may_be_cut(problem: Problem) -> bool:
    """Whether tiles may be cut along k: few rows are bound by memory, which few SMs keep busy."""
    enough = min(problem.m, problem.n) >= FEWEST_ROWS_CUT
    return enough and not (problem.groups or problem.ragged_k or problem.symmetric)


def _cut(config: HopperConfig, problem: Problem, device: Device) -> Iterator[HopperConfig]:
    """Yields the config with the k loop of its tiles cut, so that few tiles keep all SMs busy.

    Into as many pieces as make a wave; or two or three, if they leave fewer SMs idle.
    """
    tiles, fit = config.pieces(problem), device.coresident_clusters(config.cluster_size)
    most = -(-problem.k // config.tile_k(problem)) // FEWEST_STEPS
    fullest = 0.0
    for waves in range(1, MOST_WAVES + 1):
        parts = min(waves * fit // tiles, most)
        share = parts * tiles / (waves * fit)
        if parts > 1 and share > fullest * FULLER:
            fullest = share
            cut = dataclasses.replace(
                config, split_k=parts, late_store=False, schedule="online_swizzle:8"
            )
            yield deepest(_joined_by_all(cut, problem, fit), problem, device) or cut


def _joined_by_all(config: HopperConfig, problem: Problem, workers: int) -> HopperConfig:
    """Returns the config with chunks so narrow that there is one for each worker, if possible."""
    chunks = config.tiles(problem) * config.stores_per_tile(problem)
    narrowest = max(16, 32 // problem.out_dtype.itemsize)
    columns = config.store_columns
    while columns > narrowest and chunks < workers:
        columns, chunks = columns // 2, 2 * chunks
    return dataclasses.replace(config, store_columns=columns)


def _is_filled(rows: int, columns: int, problem: Problem, *, mirrored: bool) -> bool:
    """Whether at least half of a tile is not beyond the edge, or it is the smallest."""
    across = problem.sums * problem.n
    m, n = (across, problem.m) if mirrored else (problem.m, across)
    return (rows < 2 * m or rows == min(COLUMNS)) and (columns < 2 * n or columns == 16)


def _stages(config: HopperConfig | None) -> int:
    return config.stages if config else 0


def _ordered(config: HopperConfig, problem: Problem, device: Device) -> HopperConfig:
    """Stores late where that is possible, and computes the order where nothing is gained by it.

    With a tile per CTA there is no next tile to store it under, and half a microsecond is gained by
    not waiting for the first entry of a table (2048 cubed on an H200: 23.5 us instead of 24.0).
    """
    if config.tiles(problem) <= device.sms and not problem.symmetric:
        return dataclasses.replace(config, schedule="online_swizzle:8")
    if _is_short(problem):
        return config
    return dataclasses.replace(
        config, late_store=config.allows_late_store(config.as_computed(problem))
    )


def _is_short(problem: Problem) -> bool:
    """Whether a tile is stored more slowly than it is computed."""
    return problem.k * problem.a_dtype.itemsize <= STORE_BOUND_STEPS * STEP_BYTES


def deepest(
    config: HopperConfig, problem: Problem, device: Device, fewest: int = 2
) -> HopperConfig | None:
    """Returns the config with as many stages as fit into shared memory, None if too few do."""
    two, three = (
        dataclasses.replace(config, stages=stages).shared_memory_bytes(problem) for stages in (2, 3)
    )
    fit = 2 + (device.shared_memory - two) // (three - two)
    most = min(MOST_STAGES, MAX_BARRIERS // (2 if config.pingpong else 1))
    for stages in range(min(most, fit), fewest - 1, -1):
        deeper = dataclasses.replace(config, stages=stages)
        # Barriers take a little more.
        if deeper.shared_memory_bytes(problem) <= device.shared_memory:
            return deeper
    return None
