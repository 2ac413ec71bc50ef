"""How long a kernel takes: what configs are chosen by, and the time that `explain` shows.

A model of the busiest CTA, in clock cycles. Each step of the k loop takes as long as the slowest of
what it needs: the tensor cores, the TMA unit, the latency of memory shared out to the slots of the
ring, and the way of the tiles of one GPC to the L2. Each tile adds what its epilogue cannot hide.
The kernel takes that, or as long as memory needs, or a little longer where both are close.

The constants, and those of Hopper in `architectures.py`, are a fit to bursts of random products on
an H200, bfloat16, float16 and float8 from 2 us to 7 ms: seeds 1 and 2, and the orders, of
`bench/results/h200_random_kernels.csv`. The fit has not seen seed 3, the choice of its terms has.
There, half of the predictions are within 4%, and nine of ten within 11%; the configs that they
choose are 1% slower than the fastest that were tried.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pallas_gemm.config import STEP_BYTES, GemmConfig
from pallas_gemm.device import Device
from pallas_gemm.kernels.functions import words
from pallas_gemm.planning import bands
from pallas_gemm.planning.architectures import Architecture
from pallas_gemm.planning.realign import Realigned, Step
from pallas_gemm.problem import ROW_BYTES, Problem
from pallas_gemm.program import ARGMAX, LOGSUMEXP
from schedules.model import SECTOR_BYTES

LAUNCH_SECONDS = 1.95e-6
"""A kernel takes this, and so does each pass over an operand before or after it."""
STEP_CYCLES = 74
"""Each step takes these, whatever it does."""
LATENCY_CYCLES = 1400
"""From a request for operands to their arrival. All slots of a ring but one are on their way. Few
rows with rings of several depths tell it: 4 x 4096 x 14336 takes 36.0 us with 7 stages, 29.3 with
11."""
LATE_STORE_CYCLES = 1000
"""Between two tiles of a CTA where the first is stored while the second is multiplied: squares of
up to 4096 tell it."""
MIRRORED_STORE_CYCLES = 6000
"""The same where each tile is stored twice: 4096 cubed by half, in tiles of 128 x 128."""
IN_TURNS_CYCLES = 1500
"""The same where consumers compute tiles in turns. Eight products with a residual or a float32
result, with two store slots and in bands of 8 rows, are predicted within 4%."""
MORE_IN_TURNS_CYCLES = 0.04
"""The same for each element and byte beyond these four: 8192 x 2048 x 6144 NT with a
float32 residual and result takes 278 us in turns on an H200, and 4096 x 4096 x 6144 282 us. In
tiles of 128 x 256, both take 274."""
USUAL_BYTES = 4
STORE_CYCLES = 0.05
"""Between two tiles elsewhere, for each byte of the tile's part of the result and the residual. The
same products are predicted within 6% in tiles of 128 x 256, and those with a residual within 4% in
tiles of 256 x 192. Without these bytes, predictions were up to 16% too short."""
LINES_CYCLES = 0.13
"""The same where threads store the result, whose rows are no multiple of 16 bytes. On an H200, 63
products of 1254 x 1254 x 32 take 121 us so, and 192 of 577 x 577 x 64 with a float32 result 194 us.
Without a number of its own, 68 us are predicted for both."""
LOADED_CYCLES = 500
"""The same for each chunk of a tile, where consumers in turns load operands. 8192 x 8192 x 256 with
two of them and a sum of each row takes 145 us on an H200, in tiles of 64 x 256 of 16 chunks."""
PARTS_OF_SECTORS = 1.5
"""A stored byte counts for this number of bytes more. It does so where rows of the result are no
whole number of sectors, and the result is larger than the L2. 170703 x 1288 with K=15 takes 280 us
on an H200 beside its passes, and 25020 x 1432 with K=5 takes 38 us."""
EXP_CYCLES = 0.15
"""Between two tiles where consumers do not take turns, for each element whose exp is summed up, and
which is stored. In tiles of 128 x 256 on an H200, 8192 x 151936 with K=2048 takes 6.69 ms with sums
of exp, and 6.29 ms bare. With K=4096, 4096 x 128256 takes 5.35 and 5.25 ms."""
REDUCED_CYCLES = {"sum": 0.02, "max": 0.02, "min": 0.02, LOGSUMEXP: 0.09, ARGMAX: 0.067}
"""Between two tiles, for each element that is reduced along its row where none is stored or loaded.
Products of 16384 x 16384 and 65536 x 4096 tell it in tiles of 128 x 256. With K=64 to 512, the
latter take 114 to 380 us on an H200 with places of the largest values, and 149 to 401 us with sums
of exp. Maxima were measured with one product, 65536 x 8192 x 64: 124 us."""
REDUCED_IN_TURNS_CYCLES = 600
"""Between two tiles of consumers in turns, there: 137 to 351 us, and 157 to 392 us."""
LOG_CYCLES = 0.28
"""For each element and logarithm of a function whose result is not rounded: it branches. With
softplus in float32, 8192 x 8192 takes 190 us with K=256 and 303 with K=1024, and 8192 x 5120 x 160
takes 125."""
LAST_STORE_CYCLES = 0.106
"""From the last WGMMA to the end of the kernel, for each element of the tile."""
JOIN_CYCLES = 2000
"""The second kernel takes these, where tiles are cut along k. With the next two, a fit to the cut
configs of 13 products, off by 4% in the mean."""
HAND_OVER_CYCLES = 0.2
"""For each element of a tile that is stored as a summand."""
HIDDEN_SHARE = 0.8
"""The share of that which is hidden where a piece goes on with another promised part. With it, of
39 drawn products in four parts the way that is chosen is 0.5% slower on an H200 than the fastest
one. It would be 3% without it, and 2% with a share of 0.5. The share was chosen by 22 of them."""
SUMMAND_CYCLES = 0.08
"""For each summand that a consumer adds."""
POWER_SHARE = 0.14
"""A burst in which every SM multiplies all the time loses this share of the clock."""
MEMORY_SHARE = 0.95
"""A kernel reaches this share of the peak bandwidth of memory."""
PASS_SHARE = 0.8
"""A pass over an operand reaches this share of the peak bandwidth of memory."""
TURNED_IN_CACHE, TURNED_MORE = 40e6, 0.5
"""A transposition of 8 bits takes longer than a copy: each byte beyond the first costs half of a
byte more. 17 MB, 4096 x 4096, are read and written in 8 us on an H200, and 59 MB in 41."""
SHARPNESS = 3.6
"""How little computing and reading memory hold each other up: the power of their norm."""


def seconds(
    problem: Problem,
    config: GemmConfig,
    device: Device,
    architecture: Architecture,
    *,
    at_least: bool = False,
) -> float:
    """Predicts the time of a kernel.

    Args:
        problem: The product.
        config: The config.
        device: The GPU.
        architecture: The architecture of the kernel.
        at_least: Returns no more than with any stages, CTAs and order; with all CTAs that fit.
    """
    if architecture.seconds is not None:
        return 0.0 if at_least else architecture.seconds(problem, config, device)
    rows, cols = config.tile
    # A step has as many bytes of each type: what is half as wide is multiplied twice as fast.
    per_cycle = architecture.flops_per_cycle * device.machine.tensor_share
    step_bytes = config.tile_k(problem) * problem.a_dtype.itemsize
    multiply = rows * cols * step_bytes / per_cycle + config.scaling_cycles(problem)
    loading = architecture.row_cycles * (rows + config.loaded_columns)
    loops = _loops(problem, config, device)
    steps = sum(loop.waves * loop.steps for loop in loops)
    # A ring that holds all steps is filled once.
    refills = sum(loop.waves for loop in loops) > 1 or config.stages < steps
    waits = 0.0 if at_least else _waiting(problem, config, device, architecture, refills=refills)
    step = STEP_CYCLES + max(multiply, loading * (step_bytes / STEP_BYTES), waits)
    idle = _idle_cycles(problem, config, loops, multiply)
    computed = sum(loop.pieces * loop.steps for loop in loops) * config.cluster_size
    used = computed / (steps * device.sms) * multiply
    if at_least:
        # Steps that wait draw less power: beside idle cycles the shortest step is not the best.
        lost = POWER_SHARE * used
        step = max(step, lost + math.sqrt(lost * (lost + idle / steps)))
    clock_hz = device.machine.clock_hz * (1 - POWER_SHARE * min(1.0, used / step))
    busy = (steps * step + idle) / clock_hz
    moved = problem.moved_bytes + PARTS_OF_SECTORS * _bytes_in_parts(problem, device)
    memory = moved / (MEMORY_SHARE * device.machine.dram_bytes_per_second)
    both = (busy**SHARPNESS + memory**SHARPNESS) ** (1 / SHARPNESS)
    joining = 0.0 if at_least else _join_cycles(problem, config, loops[-1], device)
    return len(loops) * LAUNCH_SECONDS + both + joining / device.machine.clock_hz


def _waiting(
    problem: Problem,
    config: GemmConfig,
    device: Device,
    architecture: Architecture,
    *,
    refills: bool,
) -> float:
    """Returns how many cycles a step waits for memory and for other tiles of its GPC."""
    step_bytes = config.tile_k(problem) * problem.a_dtype.itemsize
    neighbours = bands.rows_of_neighbours(problem, config, device) * step_bytes
    return max(
        refills * LATENCY_CYCLES / max(1, config.stages - 1),
        neighbours / architecture.gpc_bytes_per_cycle,
        config.awaited_cycles(problem),
    )


def _idle_cycles(
    problem: Problem, config: GemmConfig, loops: Sequence["_Loops"], multiply: float
) -> float:
    """Returns the cycles of a CTA beside its steps: between tiles, and after each kernel.

    Args:
        problem: The product.
        config: The config.
        loops: The k loops of each kernel.
        multiply: The cycles for which the tensor cores compute a step.
    """
    waves, kernels = sum(loop.waves for loop in loops), len(loops)
    stored = (2 if problem.symmetric else 1) * math.prod(config.tile)
    between = _between_tiles(problem, config, stored, loops[0].steps * multiply)
    idle = (waves - kernels) * between + kernels * LAST_STORE_CYCLES * stored
    idle += waves * stored * LOG_CYCLES * _logarithms(problem)
    return idle + (kernels - 1) * LATENCY_CYCLES


def _between_tiles(problem: Problem, config: GemmConfig, stored: int, multiplied: float) -> float:
    """Returns the cycles between two tiles of a CTA.

    Args:
        problem: The product.
        config: The config.
        stored: How many elements a tile stores.
        multiplied: The cycles for which the tensor cores compute a tile.
    """
    program = problem.epilogue.program
    sums_exp = EXP_CYCLES * stored if program is not None and program.sums_exp else 0.0
    if not problem.bytes_of_each:
        reduced = stored * _reduced_cycles(problem)
        if config.overlap == "turns":
            return REDUCED_IN_TURNS_CYCLES + max(0.0, reduced - multiplied)
        return reduced
    if config.overlap == "late":
        return sums_exp + (MIRRORED_STORE_CYCLES if problem.symmetric else LATE_STORE_CYCLES)
    by_threads = problem.out_shape[-1] * problem.out_dtype.itemsize % ROW_BYTES > 0
    store = (LINES_CYCLES if by_threads else STORE_CYCLES) * stored * problem.bytes_of_each
    if config.overlap == "turns":
        more = max(0, problem.bytes_of_each - USUAL_BYTES)
        if problem.loaded_dtypes:
            chunks = math.ceil(config.tile[1] / config.store_columns)
            store = max(store, LOADED_CYCLES * chunks)
        # One consumer stores while the other multiplies.
        waits = max(0.0, store - multiplied)
        return IN_TURNS_CYCLES + MORE_IN_TURNS_CYCLES * stored * more + waits
    return sums_exp + store


def _logarithms(problem: Problem) -> int:
    """Returns how many logarithms a function computes of an element to all digits."""
    if problem.epilogue.is_identity:
        return 0
    program = words.program(problem)
    if "log" not in program.primitives or program.is_coarse:
        return 0
    return sum(step.primitive.name == "log" for step in program.steps)


def _reduced_cycles(problem: Problem) -> float:
    """Returns the cycles that it takes to reduce an element along its row."""
    program = problem.epilogue.program
    assert program is not None
    rows = (own for own in program.reductions if own.kind == "m" and program.vectors(own))
    return sum(REDUCED_CYCLES[own.reduction] for own in rows)


class _Loops(NamedTuple):
    """The k loops of a kernel: how many pieces of work, in how many waves, of how many steps."""

    pieces: int
    waves: int
    steps: int


def _loops(problem: Problem, config: GemmConfig, device: Device) -> list[_Loops]:
    """Returns what each kernel computes, but for the one that joins.

    There are two if only the last tiles are cut along k.
    """
    # A sum over a group takes as many steps as the group is long, on average.
    length = problem.k / (problem.batch if problem.ragged_k else 1)
    workers, tiles = config.workers(problem, device), _tiles(problem, config)
    parts, last = config.split_k, config.split_last
    split = [(tiles, parts)] if last is None else [(tiles - last, 1), (last, parts)]
    return [
        _Loops(
            count * parts,
            math.ceil(count * parts / workers),
            math.ceil(length / config.tile_k(problem) / parts),
        )
        for count, parts in split
    ]


def _tiles(problem: Problem, config: GemmConfig) -> int:
    """Returns how many tiles there are. Each group of rows leaves half of a tile empty."""
    if not problem.groups:
        return config.tiles(problem)
    most, cols = config.stacked_grid(problem)
    height = config.tile[0] * config.cluster[0]
    return min(most, math.ceil(problem.m / height + problem.groups / 2)) * cols


def _join_cycles(problem: Problem, config: GemmConfig, cut: _Loops, device: Device) -> float:
    """Predicts how long it takes to join the pieces of tiles that are cut along k, if any are."""
    if config.split_k == 1:
        return 0.0
    joined, cluster_size = config.joined(problem), config.cluster_size
    chunks = cut.pieces // config.split_k * cluster_size * joined.chunks
    at_once = config.workers(problem, device) * cluster_size * joined.at_once
    of_tile = config.summands(problem)
    summands = math.ceil(chunks / at_once) * of_tile * joined.sums
    more = (of_tile - 1) // (config.split_k - 1) - 1
    handed_over = cut.waves * math.prod(config.tile) * (1 + more * (1 - HIDDEN_SHARE))
    return JOIN_CYCLES + HAND_OVER_CYCLES * handed_over + SUMMAND_CYCLES * summands


def pass_seconds(moved: float, device: Device) -> float:
    """Predicts how long a pass takes that reads and writes `moved` bytes of memory."""
    return LAUNCH_SECONDS + moved / (PASS_SHARE * device.machine.dram_bytes_per_second)


def passes_seconds(realigned: Realigned, device: Device) -> float:
    """Predicts the time of the passes over operands and result around a kernel."""
    dtype = realigned.problem.a_dtype
    counted = (_pass_bytes(step, dtype) for step in realigned.passes if step.bytes)
    return sum(pass_seconds(count, device) for count in counted)


def _pass_bytes(step: Step, dtype: np.dtype) -> float:
    """Returns the bytes of a pass; more than it moves where a transposition is slower than that."""
    if step.action != "transpose" or dtype.itemsize > 1:
        return step.bytes
    return step.bytes + TURNED_MORE * max(0.0, step.bytes - TURNED_IN_CACHE)


def epilogue_seconds(problem: Problem, realigned: Realigned, device: Device) -> float:
    """Predicts the time of the pass in which XLA applies the epilogue; 0 where the kernel does.

    Args:
        problem: The product.
        realigned: The part of it that the kernel computes.
        device: The GPU.
    """
    if realigned.unfused is None:
        return 0.0
    each = problem.sums * realigned.problem.out_dtype.itemsize + problem.out_dtype.itemsize
    each += problem.epilogue.residual * problem.added_dtype.itemsize
    return pass_seconds(math.prod(problem.out_shape) * each, device)


def program_seconds(problem: Problem, device: Device) -> float:
    """Predicts the time of the pass in which XLA applies a program to float32 sums."""
    each = 2 * problem.accumulator_dtype.itemsize + problem.bytes_of_each
    return pass_seconds(math.prod(problem.out_shape) * each, device)


def _bytes_in_parts(problem: Problem, device: Device) -> int:
    """Returns the bytes of large results that TMA stores in rows of no whole number of sectors."""
    rows, total = math.prod(problem.out_shape[:-1]), 0
    for dtype in problem.result_dtypes:
        row = problem.out_shape[-1] * dtype.itemsize
        if row % ROW_BYTES == 0 and row % SECTOR_BYTES and rows * row > device.machine.l2_bytes:
            total += rows * row
    return total
