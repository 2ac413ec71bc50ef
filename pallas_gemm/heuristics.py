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
import math

from pallas_gemm.architectures import Architecture
from pallas_gemm.config import STEP_BYTES, GemmConfig
from pallas_gemm.device import Device
from pallas_gemm.problem import Problem
from pallas_gemm.realign import Realigned

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
WIDEST_BAND = 64
"""The most rows or columns of tiles that an order keeps together."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A config and what it is predicted to take.

    Attributes:
        config: A legal config.
        seconds: The predicted time.
    """

    config: GemmConfig
    seconds: float


def rank(problem: Problem, device: Device, architecture: Architecture) -> tuple[Choice, ...]:
    """Returns every legal candidate for a problem, fastest first."""
    kernel = architecture.load()
    choices = []
    for candidate in kernel.candidates(problem, device):
        if not candidate.refusals(problem, device):
            config = dataclasses.replace(
                candidate,
                ctas=balanced_ctas(problem, candidate, device),
                schedule=("online_" if candidate.is_online else "")
                + order(problem, candidate, device),
            )
            choices.append(Choice(config, seconds(problem, config, device, architecture)))
    return tuple(sorted(choices, key=lambda choice: choice.seconds))


def balanced_ctas(problem: Problem, config: GemmConfig, device: Device) -> int:
    """Returns how many CTAs it takes for as few waves as possible: more would only draw power."""
    tiles = math.prod(config.stacked_grid(problem))
    waves = math.ceil(tiles / device.coresident_clusters(config.cluster_size))
    return math.ceil(tiles / waves) * config.cluster_size


def order(problem: Problem, config: GemmConfig, device: Device) -> str:
    """Returns the order of the tiles that reads the fewest bytes by a closed form.

    While a band of `group` rows is walked across, the tiles under way form a rectangle of that many
    rows: a wave reads its rows of the left operand and its columns of the right one. All waves of
    a band of h rows, with w tiles under way, read `h * h / w` tile rows and 1 tile column for each
    column of the grid. That is least where the rectangle is square in elements.
    """
    rows, cols = config.stacked_grid(problem)
    under_way = min(config.workers(problem, device), rows * cols)
    tile_rows, tile_cols = (
        size * sharers for size, sharers in zip(config.tile, config.cluster, strict=True)
    )
    ways = (
        (rows, cols, tile_rows, tile_cols, ""),
        (cols, rows, tile_cols, tile_rows, ":cols"),
    )
    best = min(
        (
            _band_loads(across, along, group, under_way, size_across, size_along),
            len(suffix),
            group,
            suffix,
        )
        for across, along, size_across, size_along, suffix in ways
        for group in range(1, min(across, WIDEST_BAND) + 1)
    )
    return f"swizzle:{best[2]}{best[3]}"


def _band_loads(
    across: int, along: int, group: int, under_way: int, size_across: int, size_along: int
) -> float:
    """Returns elements of k that a banded order reads, per element of k."""
    whole, rest = divmod(across, group)
    total = 0.0
    for height, bands in ((group, whole), (rest, min(rest, 1))):
        # A rectangle is no longer than the band: beyond it the next band begins.
        length = min(along, math.ceil(under_way / height)) if height else 0
        waves = along / length if length else 0
        total += bands * waves * (height * size_across + length * size_along)
    return total


def seconds(
    problem: Problem, config: GemmConfig, device: Device, architecture: Architecture
) -> float:
    """Predicts the time of a kernel: the busiest CTA's, or that of memory if it is longer."""
    rows, cols = config.tile
    steps = math.ceil(problem.k / config.tile_k(problem))
    # A step has as many bytes of each type: what is half as wide is multiplied twice as fast.
    multiply = rows * cols * STEP_BYTES / architecture.flops_per_cycle
    shared = architecture.load().shared_rows(config) * STEP_BYTES / SHARED_BYTES_PER_CYCLE
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
