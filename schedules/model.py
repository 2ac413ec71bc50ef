"""The cost of an order of tiles in the L2 cache, before any GPU has run it.

`predict` plays the launch of a matrix multiply on a model of the L2. The workers that run at the
same time walk along K through their tiles, a little out of step. One partition of the L2, the other
one, or device memory answers each stretch that they read. docs/schedule-model.md shows what it
predicts beside what was measured, and where it misses.
"""

import dataclasses
import math
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from schedules import _check, _public
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
from schedules.pieces import Pieces
from schedules.table import Int32Array, Schedule

Persistence = Literal["none", "static", "dynamic"]

SECTOR_BYTES = 32
"""The unit in which the L2 counts."""

_SMS_OF_A_PAIR = 2
"""SMs of a texture processing cluster (TPC)."""

_DRAWS = 4
"""Runs that a prediction is the mean of: workers get out of step differently in each."""

_TILES_IN_ALL = 2**14
"""Many tiles make a run a mean of its own, so larger problems take fewer runs."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The load of a launch on the memory system.

    Attributes:
        l2_sectors: Sectors of 32 bytes looked up in the L2: reads of the SMs that are not merged,
            second look-ups over the fabric between partitions, and writes.
        l2_hit_rate: Share of those look-ups that found their sector.
        requested_bytes: The bytes that the SMs ask for, a multicast counted once.
        merged_bytes: The part of it that joined a request already under way.
        fabric_bytes: The bytes that one partition of the L2 asked of another.
        dram_read_bytes: Read from device memory.
        dram_write_bytes: Written to device memory: the output, once, and of the sums of pieces what
            does not stay in the L2 until they are joined.
        compulsory_read_bytes: The operands, once: no order can read less.
        concurrency: Workers (clusters) that run at the same time.
        waves: How often each worker at most takes a tile, or a piece of one.
        tail: Share of the workers that the last wave leaves idle.
        balance: Mean share of a worker divided by the largest share; pieces count as long as they
            are.
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


@dataclasses.dataclass(frozen=True)
class TileByTile:
    """The load of a launch on the memory system, tile by tile.

    Attributes:
        prediction: The sums over all tiles.
        wave: int32 `[rows, cols]`: the wave that computes each tile, counted from 0; -1 for none.
        l2_share: `[rows, cols]`: the share of a tile's operands that the L2 had, or was already
            waiting for, so that device memory was not asked. NaN for a tile that is not visited.
    """

    prediction: Prediction
    wave: Int32Array
    l2_share: NDArray[np.float64]


def predict(  # noqa: PLR0913 - a launch has that many properties, and each is a keyword
    schedule: Schedule | Pieces,
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
        schedule: The order, on the grid of cluster tiles (of output tiles without clusters). Or
            pieces of tiles that are cut along K: each reads its own part of K, and stores float32
            sums, which are read once when all are there.
        machine: The GPU that it runs on.
        tile: Rows and columns of one CTA's output tile, and its step along K, in elements.
        k: Extent of the contraction.
        cluster: CTAs of a cluster along the rows and along the columns.
        persistence: "static" deals the tiles out beforehand, one by one. "dynamic" gives the next
            tile to the first worker that is free. With "none" every cluster computes one tile, and
            the hardware starts the next cluster when one ends.
        workers: Clusters that run at the same time; None for the most that the machine holds.
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
    crew = _Crew.checked(machine, cluster, workers, multicast)
    return _summary(problem, _runs(problem, machine, crew, persistence), crew)


def predict_tiles(
    schedule: Schedule,
    *,
    machine: Machine,
    tile: tuple[int, int, int],
    k: int,
    cluster: tuple[int, int] = (1, 1),
    persistence: Persistence = "static",
) -> TileByTile:
    """Predicts what `predict` does, tile by tile; the arguments are those of `predict`.

    Raises:
        ValueError: An argument is not legal; the message names it.
    """
    _check.one_of("persistence", persistence, ("none", "static", "dynamic"))
    if not isinstance(schedule, Schedule):
        raise ValueError(f"schedule must be a Schedule, got {schedule!r}")
    problem = Problem.checked(
        schedule,
        tile=tile,
        k=k,
        cluster=cluster,
        multicast=True,
        itemsize=2,
        out_itemsize=2,
        batch=1,
    )
    crew = _Crew.checked(machine, cluster, None, multicast=True)
    runs = _runs(problem, machine, crew, persistence)
    asked = sum(problem.stripe_bytes) * problem.stretches
    from_memory = np.mean([run.from_memory for run in runs], axis=0) / asked
    positions = schedule.positions()
    return TileByTile(
        prediction=_summary(problem, runs, crew),
        wave=positions // np.int32(crew.clusters),
        l2_share=np.where(positions < 0, np.nan, 1 - from_memory[positions]),
    )


@dataclasses.dataclass(frozen=True)
class _Crew:
    """The clusters that run at the same time.

    Attributes:
        clusters: How many.
        size: CTAs of each.
        walking: How many walk through the tiles at a pace of their own: the clusters, or without
            multicast, which ties a cluster's CTAs together, all of their CTAs.
    """

    clusters: int
    size: int
    walking: int

    @classmethod
    def checked(
        cls, machine: Machine, cluster: tuple[int, int], workers: int | None, multicast: bool
    ) -> Self:
        """Returns the crew, or raises a `ValueError` that names the argument at fault."""
        if not isinstance(machine, Machine):
            raise ValueError(f"machine must be a Machine such as machines.H200, got {machine!r}")
        size = cluster[0] * cluster[1]
        limit = machine.concurrency(size)
        clusters = limit if workers is None else _check.positive_int("workers", workers)
        if clusters > limit:
            raise ValueError(
                f"workers must be at most the {limit} clusters of {cluster[0]} x {cluster[1]} CTAs "
                f"that {machine.name} runs at the same time, got {workers}"
            )
        return cls(clusters, size, clusters if multicast else clusters * size)

    def gpcs(self, machine: Machine, rng: np.random.Generator) -> list[int]:
        """Returns the GPC of each that walks: CTAs that follow each other share a pair of SMs.

        Where a pair is, is not documented: each GPC gets its share of them, at random.
        """
        together = max(1, _SMS_OF_A_PAIR // self.size)
        pairs = math.ceil(self.clusters / together)
        places = rng.permutation(np.arange(pairs) % machine.gpcs).repeat(together)
        return places[: self.clusters].repeat(self.walking // self.clusters).tolist()


@dataclasses.dataclass(frozen=True)
class _Run:
    """One run: the cache with its counters, and what memory answered: see `simulate`."""

    cache: SplitCache
    from_memory: list[int]


def _runs(problem: Problem, machine: Machine, crew: _Crew, persistence: Persistence) -> list[_Run]:
    """Returns the runs that a prediction is the mean of."""
    draws = max(1, min(_DRAWS, _TILES_IN_ALL // problem.tiles))
    # Seeded by the number of the draw: the same question always has the same answer.
    return [
        _simulated(problem, machine, crew, persistence == "static", seed) for seed in range(draws)
    ]


def _simulated(problem: Problem, machine: Machine, crew: _Crew, dealt: bool, seed: int) -> _Run:
    """Returns one run."""
    rng = np.random.default_rng(seed)
    gpcs = crew.gpcs(machine, rng)
    cache = SplitCache(
        machine.l2_bytes * problem.stretches,
        rng.integers(machine.l2_partitions, size=problem.blocks).tolist(),
        partitions=machine.l2_partitions,
        groups=machine.gpcs,
    )
    pace = pace_of(
        tiles=problem.tiles,
        workers=crew.walking,
        loads=1 / problem.tile[0] + 1 / problem.tile[1],
        k=problem.k,
        shares=problem.shares,
        speed_spread=machine.speed_spread,
        rng=rng,
    )
    return _Run(cache, simulate(problem.launch(gpcs, dealt=dealt), pace, cache))


def _summary(problem: Problem, runs: list[_Run], crew: _Crew) -> Prediction:
    """Returns the mean of the runs in bytes and sectors, and how the tiles fill the waves."""
    read, merged, fabric, dram, written = (
        sum(getattr(run.cache, counter) for run in runs) / (len(runs) * problem.stretches)
        for counter in ("read", "merged", "fabric", "dram", "written")
    )
    looked_up = read + fabric + written
    # The sums of pieces are never written to memory, but for those that are read from it again.
    back = sum(sum(run.from_memory[problem.tiles :]) for run in runs)
    handed_over = sum(map(len, problem.joined)) * problem.sum_bytes
    stored = written - handed_over + back / (len(runs) * problem.stretches)
    waves = [math.ceil(count / crew.walking) for count in problem.kernels]
    last = problem.kernels[-1] - (waves[-1] - 1) * crew.walking
    # What each worker computes of every kernel, in tiles.
    work = np.zeros((len(waves), max(waves) * crew.walking))
    of_kernels = np.split(problem.shares, np.cumsum(problem.kernels)[:-1])
    for own, shares in zip(work, of_kernels, strict=True):
        own[: len(shares)] = shares
    computed = work.reshape(-1, crew.walking).sum(axis=0)
    return Prediction(
        l2_sectors=round(looked_up / SECTOR_BYTES),
        l2_hit_rate=1 - (fabric + dram) / looked_up,
        requested_bytes=round(read + merged),
        merged_bytes=round(merged),
        fabric_bytes=round(fabric),
        dram_read_bytes=round(dram),
        dram_write_bytes=round(stored),
        compulsory_read_bytes=problem.operand_bytes,
        concurrency=crew.clusters,
        waves=sum(waves),
        tail=1 - last / crew.walking,
        balance=float(computed.sum() / (computed.max() * crew.walking)),
    )


def __dir__() -> list[str]:
    """Returns the public names."""
    return _public.names(
        globals(),
        "SECTOR_BYTES",
        "B200",
        "H100",
        "H200",
        "MACHINES",
        "Machine",
        "machine_named",
        "k_tiling_intensity",
        "log_swizzle_reuse",
        "mn_tiling_intensity",
    )
