"""Which config computes a problem: enumerate, filter, score in seconds, pick the fastest.

The score is a model of the busiest CTA, in clock cycles: each step of the k loop takes as long as
the tensor cores need for it, or as shared memory needs to feed them, and each tile adds what its
epilogue cannot hide. Its constants were chosen after times of the Hopper kernel on an H200, in
bursts on N(0, 1) bfloat16 operands: 1310 us for 8192 cubed, 165 us for 4096 cubed, 171 us for
8192 x 8192 x 1024 and 23.5 us for 2048 cubed with tiles of 128 x 256; 5.2 us for 1024 cubed
(64 x 128), 3.1 us for 512 cubed (64 x 64), 33 us for 16 x 8192 x 8192 (64 x 16, mirrored). What
takes longer than 2 ms is slowed down further by the power limit, all configs alike.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator

from pallas_gemm.config import STEP_BYTES, GemmConfig
from pallas_gemm.device import Device
from pallas_gemm.planning.architectures import Architecture
from pallas_gemm.planning.realign import Realigned
from pallas_gemm.problem import Problem
from schedules import OnlineSchedule, Schedule
from schedules.spec import ONLINE

SHARED_BYTES_PER_CYCLE = 128
LOAD_CYCLES = 600
"""From the start of a CTA to its first WGMMA."""
STORE_CYCLES = 1200
"""Between the last WGMMA of a tile and the first one of the next."""
LAST_STORE_CYCLES = 0.05
"""From the last WGMMA to the end of the kernel, for each element of the tile."""
LAUNCH_SECONDS = 2.0e-6
"""Of a kernel, and of each pass over an operand before or after it."""
CLOCK_HZ = 1.62e9
"""What an H200 holds in a burst of large products, less what waiting for memory costs."""
MEMORY_SHARE = 0.8
"""Of the peak bandwidth of memory, what a pass over an operand reaches."""
NOT_OVERLAPPED = 0.2
"""Of the shorter of computing and reading memory, what the longer does not hide."""
HELD_SHARE = 0.35
"""Of the L2, what holds the operands of a wave for the next one."""
BAND_SHARE = 0.6
"""Of the L2, what the rows of a band may take: 16384 cubed runs 4% faster on an H200 in bands of 8
rows of tiles (34 MB) than of 16, and 8192 cubed as fast in either."""
FULL_WAVES = 0.96
"""Of the clusters that fit, how many must be launched at least for waves to be full."""
WRITTEN = 128
"""Operations for each byte of the result, up to which it takes longest to write it."""
RAGGED = 1.2
"""What it costs that waves reach into the next band. With 128 tiles under way on an H200, bands of
11 rows are slower than of 8 at nine products with K from 12288 to 28672, by 0.4 to 2.1% in bursts.
"""
WIDEST_BAND = 16
"""The most rows or columns of tiles that an order keeps together: 4096 x 4096 x 256 takes 16.9 us
on an H200 in bands of 32 rows of tiles, 16.1 us in bands of 16 and 15.9 us in bands of 8."""
USUAL_BAND = 8
"""Rows of tiles of a band where any order reads the operands once: the L2 holds them, or all tiles
are computed at the same time."""
USUAL_ROWS = 1024
"""Rows of an operand that a band may have however long they are: 8192 x 8192 x 28672 runs 2% faster
on an H200 in bands of 1024 rows than of 640 or of 2048."""
ABREAST = 4
"""Waves for which a band may have any rows: CTAs are still about as far as each other, and read the
same part of them. 4096 x 4096 with K of 12288, 14336 and 28672 runs as fast in bands of 16 rows of
tiles as of 8 in bursts, and 0.1 to 1.0% faster in sustained work."""


def rank(
    problem: Problem,
    device: Device,
    architecture: Architecture,
    schedule: str | Schedule | OnlineSchedule | None = None,
) -> tuple[GemmConfig, ...]:
    """Returns every legal candidate for a problem, fastest first.

    Args:
        problem: What is to be computed.
        device: The GPU that it is for.
        architecture: Whose kernel it is.
        schedule: The order of the tiles; None for the one that suits each candidate.
    """
    return tuple(_legal(problem, device, architecture, schedule))


@functools.lru_cache(maxsize=4096)
def best(
    problem: Problem,
    device: Device,
    architecture: Architecture,
    schedule: str | Schedule | OnlineSchedule | None = None,
) -> GemmConfig | None:
    """Returns the first of `rank`, None if there is none."""
    return next(_legal(problem, device, architecture, schedule), None)


def _legal(
    problem: Problem,
    device: Device,
    architecture: Architecture,
    schedule: str | Schedule | OnlineSchedule | None,
) -> Iterator[GemmConfig]:
    """Yields legal candidates, fastest first; to score them is quicker than to check them."""
    candidates: Iterable[GemmConfig] = architecture.candidates(problem, device)
    if schedule is not None:
        candidates = (config.reordered(schedule) for config in candidates)
    for candidate in sorted(candidates, key=lambda c: seconds(problem, c, device, architecture)):
        config = fitted(problem, candidate, device, schedule)
        if not config.refusals(problem, device):
            yield config


def fitted(
    problem: Problem,
    config: GemmConfig,
    device: Device,
    schedule: str | Schedule | OnlineSchedule | None = None,
) -> GemmConfig:
    """Returns the config with balanced CTAs and, unless it is given, the order that suits it."""
    config = dataclasses.replace(config, ctas=balanced_ctas(problem, config, device))
    if schedule is not None:
        return config
    kind = ONLINE if config.is_online else ""
    return dataclasses.replace(config, schedule=kind + order(problem, config, device))


def balanced_ctas(problem: Problem, config: GemmConfig, device: Device) -> int:
    """Returns how many CTAs it takes for as few waves as possible: more would only draw power.

    A few less that make all waves full are better still: bands then begin where waves do. But all
    of them write a result faster than some: 32 products of 2048 x 2048 x 128 take 84 us on an H200
    with 132 CTAs, and 88 us with 128.
    """
    tiles = math.prod(config.stacked_grid(problem))
    most = device.coresident_clusters(config.cluster_size)
    if tiles > most and 2 * problem.k * problem.sums <= WRITTEN * problem.out_dtype.itemsize:
        return most * config.cluster_size
    waves = math.ceil(tiles / most)
    fewest = math.ceil(FULL_WAVES * most)
    full = next((size for size in range(most, fewest, -1) if tiles % size == 0), None)
    return (full or math.ceil(tiles / waves)) * config.cluster_size


def order(problem: Problem, config: GemmConfig, device: Device) -> str:
    """Returns the banded order of the tiles that reads the fewest bytes from memory.

    By a closed form: while a band of rows of tiles is walked across, the tiles under way form a
    rectangle. Each wave reads the columns of the right operand that it comes to, and the band's
    rows of the left operand, unless both fit into the part of the L2 in which the model of the
    cache (`schedules.model`) finds them again. It reads within 20% of the best such order there.
    """
    rows, cols = config.stacked_grid(problem)
    under_way = min(config.workers(problem, device), rows * cols)
    sizes = (config.tile[0] * config.cluster[0], config.tile[1] * config.cluster[1])
    held = HELD_SHARE * device.machine.l2_bytes / (problem.k * problem.a_dtype.itemsize)
    walks = (
        _Walk(rows, cols, *sizes, under_way, held),
        _Walk(cols, rows, *sizes[::-1], under_way, held),
    )
    if under_way == rows * cols or walks[0].operands <= held:
        return f"swizzle:{min(rows, USUAL_BAND)}"
    _, along, group = min(
        (walk.loads(group), along, group)
        for along, walk in zip(("", ":cols"), walks, strict=True)
        for group in walk.groups
    )
    return f"swizzle:{group}{along}"


@dataclasses.dataclass(frozen=True)
class _Walk:
    """Walking through a grid of tiles in bands.

    Attributes:
        across: Tiles of the grid across the bands.
        along: Tiles of the grid along the bands.
        height: Rows of an operand that a tile reads, across the bands.
        width: Those of the other operand.
        under_way: Tiles computed at the same time.
        held: Rows that the L2 holds.
    """

    across: int
    along: int
    height: int
    width: int
    under_way: int
    held: float

    @property
    def operands(self) -> int:
        """Rows of both operands."""
        return self.across * self.height + self.along * self.width

    @property
    def groups(self) -> range:
        """The bands to consider: those whose rows the L2 holds while they are walked.

        A band that is done before its wave is belongs to the walk the other way: 512 x 128256 x
        4096 runs 9% slower on an H200 in bands of 18 columns of 4 tiles than in one of 4 rows.
        """
        rows = max(USUAL_ROWS, self.held * BAND_SHARE / HELD_SHARE)
        if self.across * self.along <= ABREAST * self.under_way:
            rows = math.inf
        widest = max(1, int(min(self.across, WIDEST_BAND, rows // self.height)))
        return range(min(widest, math.ceil(self.under_way / self.along)), widest + 1)

    def loads(self, group: int) -> float:
        """Returns the rows of both operands that all bands of `group` tiles read from memory."""
        whole, rest = divmod(self.across, group)
        rows = whole * self._band(group) + (self._band(rest) if rest else 0)
        return rows * (RAGGED if self.under_way % group and group < self.across else 1)

    def _band(self, group: int) -> float:
        length = min(self.along, math.ceil(self.under_way / group))
        fits = group * self.height + length * self.width <= self.held
        waves = 1 if fits else self.along / length
        return waves * group * self.height + self.along * self.width


def seconds(
    problem: Problem, config: GemmConfig, device: Device, architecture: Architecture
) -> float:
    """Predicts the time of a kernel: the busiest CTA's, or that of memory if it is longer."""
    rows, cols = config.tile
    steps = math.ceil(problem.k / config.tile_k(problem))
    # A step has as many bytes of each type: what is half as wide is multiplied twice as fast.
    multiply = rows * cols * STEP_BYTES / architecture.flops_per_cycle
    shared = architecture.shared_rows(config) * STEP_BYTES / SHARED_BYTES_PER_CYCLE
    tiles = math.prod(config.stacked_grid(problem))
    waves = math.ceil(tiles / config.workers(problem, device))
    cycles = waves * steps * max(multiply, shared) + (waves - 1) * STORE_CYCLES
    busy = (cycles + LOAD_CYCLES + LAST_STORE_CYCLES * rows * cols) / CLOCK_HZ
    memory = problem_bytes(problem) / device.machine.dram_bytes_per_second
    return LAUNCH_SECONDS + max(busy, memory) + NOT_OVERLAPPED * min(busy, memory)


def pass_seconds(realigned: Realigned, device: Device) -> float:
    """Predicts the time of the passes over operands and result around a kernel."""
    bandwidth = MEMORY_SHARE * device.machine.dram_bytes_per_second
    return sum(LAUNCH_SECONDS + step.bytes / bandwidth for step in realigned.steps if step.bytes)


def problem_bytes(problem: Problem) -> int:
    """Bytes that any way of computing a problem moves: each operand and the result once."""
    return (
        math.prod(problem.a_shape) * problem.a_dtype.itemsize
        + math.prod(problem.b_shape) * problem.b_dtype.itemsize * problem.sums
        + math.prod(problem.out_shape) * problem.out_dtype.itemsize
    )
