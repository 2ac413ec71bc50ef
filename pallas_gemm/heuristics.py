"""Which config computes a problem: enumerate, filter, score in seconds, pick the fastest."""

import dataclasses
import math

from pallas_gemm.architectures import Architecture
from pallas_gemm.config import STEP_BYTES, GemmConfig
from pallas_gemm.device import Device
from pallas_gemm.problem import Problem

# Of an H200, in clock cycles of an SM (docs/heuristics.md derives them from measured times).
FLOPS_PER_CYCLE = 4096
"""Of 16-bit operands; half of it for 32 bits, twice for 8."""
SHARED_BYTES_PER_CYCLE = 128
LOAD_CYCLES = 1000
"""From the start of a CTA to its first WGMMA."""
STORE_CYCLES = 1200
"""Between the last WGMMA of a tile and the first one of the next."""
LAST_STORE_CYCLES = 3000
"""From the last WGMMA to the end of the kernel."""
LAUNCH_SECONDS = 2.5e-6
CLOCK_HZ = 1.67e9
"""What an H200 sustains in a burst of large products."""


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
    for config in kernel.candidates(problem, device):
        if config.refusals(problem, device):
            continue
        tiles = math.prod(config.stacked_grid(problem))
        waves = math.ceil(tiles / device.coresident_clusters(config.cluster_size))
        # No more CTAs than it takes for that many waves: the rest would only draw power.
        ctas = math.ceil(tiles / waves) * config.cluster_size
        sized = dataclasses.replace(config, ctas=ctas)
        choices.append(Choice(sized, seconds(problem, sized, device)))
    return tuple(sorted(choices, key=lambda choice: choice.seconds))


def seconds(problem: Problem, config: GemmConfig, device: Device) -> float:
    """Predicts the time of the kernel: the busiest CTA's, or that of memory if it is longer."""
    rows, cols = config.tile
    steps = math.ceil(problem.k / config.tile_k(problem))
    multiply = rows * cols * STEP_BYTES / FLOPS_PER_CYCLE
    consumers = getattr(config, "consumers", 1)
    shared = (2 * rows + (1 + consumers) * cols) * STEP_BYTES / SHARED_BYTES_PER_CYCLE
    tiles = math.prod(config.stacked_grid(problem))
    waves = math.ceil(tiles / config.workers(problem, device))
    cycles = waves * (steps * max(multiply, shared) + STORE_CYCLES)
    busy = (cycles + LOAD_CYCLES + LAST_STORE_CYCLES) / CLOCK_HZ
    memory = problem_bytes(problem) / device.machine.dram_bytes_per_second
    return LAUNCH_SECONDS + max(busy, memory)


def problem_bytes(problem: Problem) -> int:
    """Bytes that any way of computing a problem moves: each operand and the result once."""
    return (
        math.prod(problem.a_shape) * problem.a_dtype.itemsize
        + math.prod(problem.b_shape) * problem.b_dtype.itemsize
        + math.prod(problem.out_shape) * problem.out_dtype.itemsize
    )
