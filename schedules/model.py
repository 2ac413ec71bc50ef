"""What an order of tiles costs in the L2 cache, before any GPU has run it.

`predict` plays the launch of a matrix multiply on a model of the L2: so many workers as run at the
same time walk along K through their tiles, a little out of step, and each stretch they read is
answered by one partition of the L2, by the other, or by device memory. docs/schedule-model.md
shows what it predicts beside what was measured, and where it misses.
"""

import dataclasses
import math
from typing import Literal

import numpy as np

from schedules import _check
from schedules.machines import B200 as B200
from schedules.machines import H100 as H100
from schedules.machines import H200 as H200
from schedules.machines import MACHINES as MACHINES
from schedules.machines import Machine as Machine
from schedules.machines import machine_named as machine_named
from schedules.model_cache import SplitCache
from schedules.model_forms import k_tiling_intensity as k_tiling_intensity
from schedules.model_forms import log_swizzle_reuse as log_swizzle_reuse
from schedules.model_forms import mn_tiling_intensity as mn_tiling_intensity
from schedules.model_pace import pace_of
from schedules.model_problem import Problem
from schedules.model_run import simulate
from schedules.table import Schedule

Persistence = Literal["none", "static", "dynamic"]

SECTOR_BYTES = 32
"""What the L2 counts in."""

_SEED = 0
"""One seed for every prediction: the same question has the same answer."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a launch does to the memory system.

    Attributes:
        l2_sectors: Sectors of 32 bytes looked up in the L2: reads of the SMs that are not merged,
            second look-ups over the fabric between partitions, and writes.
        l2_hit_rate: Share of those look-ups that found their sector.
        requested_bytes: What the SMs ask for, a multicast counted once.
        merged_bytes: The part of it that joined a request already under way.
        fabric_bytes: What one partition of the L2 asked of another.
        dram_read_bytes: Read from device memory.
        dram_write_bytes: Written to device memory: the output, once.
        compulsory_read_bytes: The operands, once: no order can read less.
        concurrency: Workers (clusters) that run at the same time.
        waves: How often each worker at most takes a tile.
        tail: Share of the workers that the last wave leaves idle.
        balance: Mean share of a worker divided by the largest share.
    """

    l2_sectors: int
    l2_hit_rate: float
    requested_bytes: int
    merged_bytes: int
    fabric_bytes: int
    dram_read_bytes: int
    dram_write_bytes: int
    compulsory_read_bytes: int
    concurrency: int
    waves: int
    tail: float
    balance: float


def predict(
    schedule: Schedule,
    *,
    machine: Machine,
    tile: tuple[int, int, int],
    k: int,
    cluster: tuple[int, int] = (1, 1),
    persistence: Persistence = "static",
    workers: int | None = None,
    multicast: bool = True,
    itemsize: int = 2,
    out_itemsize: int = 2,
    batch: int = 1,
) -> Prediction:
    """Predicts what the order `schedule` does to the L2 and to device memory.

    The prediction is the same every time: what varies in a run is drawn from a fixed seed. Tiles at
    the edge count as whole ones.

    Args:
        schedule: The order, on the grid of cluster tiles (of output tiles without clusters).
        machine: What it runs on.
        tile: Rows and columns of one CTA's output tile, and its step along K, in elements.
        k: Extent of the contraction.
        cluster: CTAs of a cluster along the rows and along the columns.
        persistence: "static" deals the tiles out beforehand, one by one; "dynamic" gives the next
            tile to the first worker that is free, and so does the hardware with "none", where every
            cluster computes one tile.
        workers: Clusters that run at the same time; as many as the machine holds if None.
        multicast: Whether the CTAs of a cluster read what they share once.
        itemsize: Bytes of an element of A or B.
        out_itemsize: Bytes of an element of the output.
        batch: How many problems follow each other, each in the same order.

    Raises:
        ValueError: An argument is not legal; the message names it.
    """
    _check.one_of("persistence", persistence, ("none", "static", "dynamic"))
    problem = Problem.checked(
        schedule,
        tile=tile,
        k=k,
        cluster=cluster,
        multicast=multicast,
        itemsize=itemsize,
        out_itemsize=out_itemsize,
        batch=batch,
    )
    clusters = _concurrency(machine, cluster, workers)
    ctas = 1 if multicast else cluster[0] * cluster[1]
    cache = _simulated(problem, machine, clusters, ctas, dealt=persistence == "static")
    return _summary(problem, cache, clusters * ctas, clusters)


def _concurrency(machine: Machine, cluster: tuple[int, int], workers: int | None) -> int:
    """Returns how many clusters run at the same time."""
    if not isinstance(machine, Machine):
        raise ValueError(f"machine must be a Machine such as machines.H200, got {machine!r}")
    limit = machine.concurrency(cluster[0] * cluster[1])
    if workers is None:
        return limit
    if _check.positive_int("workers", workers) > limit:
        raise ValueError(
            f"workers must be at most the {limit} clusters of {cluster[0]} x {cluster[1]} CTAs "
            f"that {machine.name} runs at the same time, got {workers}"
        )
    return workers


def _simulated(
    problem: Problem, machine: Machine, clusters: int, ctas: int, *, dealt: bool
) -> SplitCache:
    """Returns the cache after the run."""
    rng = np.random.default_rng(_SEED)
    # Which SM a worker lands on is not ours to know: each partition gets its share, at random.
    # All CTAs of a cluster sit in one processing cluster, hence beside the same partition.
    sides = rng.permutation(np.arange(clusters) % machine.l2_partitions).repeat(ctas)
    owners = rng.integers(machine.l2_partitions, size=problem.blocks).tolist()
    cache = SplitCache(machine.l2_bytes * problem.stretches, owners, machine.l2_partitions)
    pace = pace_of(
        problem.tiles,
        clusters * ctas,
        loads_per_step=1 / problem.tile[0] + 1 / problem.tile[1],
        k=problem.k,
        speed_spread=machine.speed_spread,
        rng=rng,
    )
    simulate(problem.launch(sides.tolist(), dealt=dealt), pace, cache)
    return cache


def _summary(problem: Problem, cache: SplitCache, workers: int, clusters: int) -> Prediction:
    """Returns the cache's counters in bytes and sectors, and how the tiles fill the waves."""

    def in_bytes(size: int) -> int:
        return round(size / problem.stretches)

    looked_up = cache.read + cache.fabric + cache.written
    waves = math.ceil(problem.tiles / workers)
    return Prediction(
        l2_sectors=round(in_bytes(looked_up) / SECTOR_BYTES),
        l2_hit_rate=1 - (cache.fabric + cache.dram) / looked_up,
        requested_bytes=in_bytes(cache.read + cache.merged),
        merged_bytes=in_bytes(cache.merged),
        fabric_bytes=in_bytes(cache.fabric),
        dram_read_bytes=in_bytes(cache.dram),
        dram_write_bytes=in_bytes(cache.written),
        compulsory_read_bytes=problem.operand_bytes,
        concurrency=clusters,
        waves=waves,
        tail=1 - (problem.tiles - (waves - 1) * workers) / workers,
        balance=problem.tiles / (waves * workers),
    )
