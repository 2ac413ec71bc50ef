"""The configs that are considered for weights of few bits, and how long each is predicted to take.

Memory limits a product of few rows: the weights are read once, and enough warpgroups have to widen
them as fast as they come. The tensor cores limit a product of many rows.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from pallas_gemm.device import Device
from pallas_gemm.kernels.element_types import BITS, FLOATS_8
from pallas_gemm.kernels.hardware import (
    MAX_BARRIERS,
    WARPGROUP_THREADS,
    WGMMA_DEPTH,
    WGMMA_ROWS,
)
from pallas_gemm.kernels.hopper.widened.config import MOST_SUMS, WidenedConfig
from pallas_gemm.problem import Problem

NARROW = 32
"""Rows of the result for which two warpgroups are too few to widen as fast as memory brings."""
NARROW_FORMS = ((64, 1, 4), (128, 1, 2), (128, 1, 3), (128, 1, 4), (256, 2, 2))
FORMS = ((64, 1, 4), (128, 1, 1), (128, 1, 2), (128, 2, 1), (128, 2, 2), (256, 2, 1))
"""Columns of the result, consumers that share them, and those that take steps in turns."""
CTAS = (2, 3, 4, 5, 8)
"""CTAs of a cluster that share the steps of few rows."""
CTAS_OF_GROUPS = (2,)
SHARED, SHARED_OF_GROUPS = 256, 1024
"""Each of these CTAs has this part of k at least. With 1024 for both, 30 x 2048 x 2048 takes 6.1 us
on an H200 instead of 4.8, and 1 x 2048 x 2048 4.1 instead of 3.6. Fewer were not tried in groups.
"""
MOST_SHARED = 96
"""Registers of sums of a warpgroup, of tiles that CTAs may share: with 128 some are spilled."""
MOST_OF_FLOATS, MOST_OF_GATED_FLOATS = 40, 16
"""The most columns of a tile of 8-bit floats that a cluster shares, of 128 rows of sums for each
warpgroup: stored [k, n] by four CTAs and more; gated, in turns of four, by three and more. From 48
and 24 columns on, 128 to 1428 bytes and 152 to 640 are spilled."""
JOINED_CYCLES = 2950
"""CTAs of a cluster take these to wait for each other, and to hand over their sums."""
LEFT_CYCLES, LEFT_ELEMENT_CYCLES, FLAGS_SECONDS = 7000, 0.05, 2.5e-6
"""Where all CTAs share tiles, they take these to hand over their sums; and flags are set to 0."""
FEWEST_STEPS = 4
"""Each of these CTAs has at least."""
TURN_CYCLES = 400
"""From one warpgroup that takes steps in turns to the next, until its sums are added."""
UNTURNED = 1.5
"""Widening takes longer by this factor where weights are not turned as they are loaded."""
ALONE = 0.13
"""Widening takes longer by this share for each warpgroup that lacks four."""
WARPGROUPS = 4
MOST_ROWS = 128
"""Rows of sums of a warpgroup: with 256 it has too few registers for the weights on their way."""
MOST_OF_FOUR = 24
"""The most columns of a tile whose four warpgroups have 128 rows each, in long steps. 32 spill.
Two pairs do not where weights of 4 bits are stored [k, n], but where rows are in groups. 32 x 28672
x 8192 takes 40.3 us so on an H200, and 42.8 in short steps."""
MOST_COLUMNS = 256
"""Rows of the result that are widened for at once."""
MOST_WHOLE, MOST_PARTED = 64, 128
"""Rows that all tiles have. Up to the second, they may be halved, or be thirds: then more CTAs have
a tile."""
WIDE, NARROWER = (128, 128), (96, 64, 48, 32)
"""If a result has fewer tiles of the first size than the GPU has SMs, tiles may be narrower. In
int4, 256 x 1024 x 4096 takes 9.9 us so on an H200, and 13.3 us in tiles of 128 rows."""
CHUNKS = (64, 32, 16)
MOST_STAGES = 16
LAUNCH_SECONDS = 1.7e-6
"""A kernel takes so long until its first operands arrive. The constants were fitted together to 160
configs of 45 products with 1 to 256 rows on an H200. Their predictions are off by 10%."""
WGMMA_CYCLES, COLUMN_CYCLES = 19.6, 0.305
"""A WGMMA of 64 rows and 16 contracted elements takes these cycles, and more for each column."""
STEPS = (64, 128)
"""Contracted elements of a step; 256 takes 6% longer."""
END_CYCLES, ELEMENT_CYCLES = 145, 0.36
"""From the last step of a tile to its end, and for each of its elements."""
LATENCY_CYCLES = 1200
"""From a request for operands to their arrival."""
STEP_CYCLES = 143
"""Each step takes these, whatever it does."""
CLOCK_SHARE = 0.92
"""The share of the highest clock that is left while all SMs multiply."""
LOAD_BYTES = 43
"""An SM loads these in a cycle."""
MEMORY_SHARE = 0.95
"""The share of the peak bandwidth of memory that a kernel reaches."""
CACHED_SHARE = 0.9
"""The share of the L2 that activations may take up."""
SHARPNESS = 2.75
"""How little computing and reading memory hold each other up: the power of their norm."""


def candidates(problem: Problem, device: Device, cut: object = None) -> Iterator[WidenedConfig]:
    """Yields configs for a problem, each with the most stages that fit.

    Args:
        problem: A product whose right operand has few bits.
        device: The GPU.
        cut: Must be None: no config of this kernel cuts tiles as it is told.
    """
    if cut is not None:
        return
    columns = _columns_of_groups(problem) if problem.groups else _columns(problem, device)
    for cols, step in itertools.product(columns, STEPS):
        for rows, consumers, along_k in NARROW_FORMS if cols <= NARROW else FORMS:
            # A gated column has two rows of sums.
            tile = rows * problem.sums, cols
            if tile[0] // consumers > _most_rows(problem, cols, (consumers, along_k), step):
                continue
            sums = tile[0] // consumers * cols // WARPGROUP_THREADS
            if sums > MOST_SUMS:
                continue
            for ctas in _ctas(problem, device, tile) if sums <= MOST_SHARED else (1,):
                if not _may_join(problem, tile, (consumers, along_k), ctas):
                    continue
                config = _deepest(problem, device, tile, (consumers, along_k), ctas, step)
                if config is not None:
                    yield config
                    yield from _shared_by_all(problem, config, device)


def _most_rows(problem: Problem, cols: int, warpgroups: tuple[int, int], step: int) -> int:
    """How many rows of sums a warpgroup may have, for which it has enough registers."""
    is_short = math.prod(warpgroups) == WARPGROUPS and cols > MOST_OF_FOUR and step == STEPS[-1]
    is_packed = BITS[problem.b_dtype] == 4 and not problem.transpose_b
    is_spared = is_packed and not problem.groups and cols <= NARROW and warpgroups == (2, 2)
    return MOST_ROWS // 2 if is_short and not is_spared else MOST_ROWS


def _shared_by_all(
    problem: Problem, config: WidenedConfig, device: Device
) -> Iterator[WidenedConfig]:
    """Yields a config whose tiles all CTAs share, if they leave some with less to do.

    Few rows are over before that pays, and more than a tile has were not tried.
    """
    tiles, ctas = config.tiles(problem), device.coresident_clusters(1)
    has_all = MOST_WHOLE < problem.m <= min(config.tile[1], MOST_PARTED) and not problem.groups
    if config.ctas_along_k > 1 or not has_all or tiles % ctas == 0:
        return
    if tiles * config.steps(problem) >= FEWEST_STEPS * ctas:
        yield dataclasses.replace(config, shares_all=True, persistence="static")


def _may_join(
    problem: Problem, tile: tuple[int, int], warpgroups: tuple[int, int], ctas: int
) -> bool:
    """Whether a cluster has enough registers to share a tile, beside those that widen floats."""
    consumers, along_k = warpgroups
    if problem.b_dtype not in FLOATS_8 or tile[0] // consumers < MOST_ROWS:
        return True
    if problem.sums > 1 and along_k == WARPGROUPS and ctas > 2:
        return tile[1] <= MOST_OF_GATED_FLOATS
    return problem.transpose_b or ctas < 4 or tile[1] <= MOST_OF_FLOATS


def _ctas(problem: Problem, device: Device, tile: tuple[int, int]) -> Iterator[int]:
    """Yields how many CTAs may share tiles: each number leaves less for each than a smaller one."""
    yield 1
    least = _tiles_of_cta(problem, tile, 1, device)
    shared = SHARED_OF_GROUPS if problem.groups else SHARED
    for ctas in CTAS_OF_GROUPS if problem.groups else CTAS:
        own = _tiles_of_cta(problem, tile, ctas, device)
        if own < least and own * problem.k >= shared:
            least = own
            yield ctas


def _tiles(problem: Problem, tile: tuple[int, int]) -> int:
    """How many tiles there are, but of groups."""
    return -(-problem.n * problem.sums // tile[0]) * -(-problem.m // tile[1]) * problem.batch


def _tiles_of_cta(problem: Problem, tile: tuple[int, int], ctas: int, device: Device) -> float:
    """How many tiles the CTA computes that has the most; it may share some with others."""
    tiles = 1 if problem.groups else _tiles(problem, tile)
    return -(-tiles // device.coresident_clusters(ctas)) / ctas


def _columns(problem: Problem, device: Device) -> list[int]:
    """How many rows of the result a tile may have: all, or such as leave few beyond the edge."""
    m = problem.m
    whole = -(-m // 8) * 8
    if whole <= MOST_WHOLE:
        return [whole]
    if whole <= MOST_PARTED:
        return [-(-m // (8 * parts)) * 8 for parts in (3, 2, 1)]
    wide = {min(whole, MOST_COLUMNS), 128, -(-m // (-(-m // MOST_COLUMNS) * 16)) * 16}
    if _tiles(problem, WIDE) < device.sms:
        wide |= {-(-m // (-(-m // most) * 8)) * 8 for most in NARROWER}
    return sorted(wide)


def _columns_of_groups(problem: Problem) -> list[int]:
    """How many rows of a group a tile may have: those of a large group, or a part of them."""
    rows = _groups(problem)[1]
    widths = {-(-rows // (8 * parts)) * 8 for parts in (1, 2, 3, 4)}
    return sorted({min(width, MOST_COLUMNS) for width in widths})


def _groups(problem: Problem) -> tuple[int, int]:
    """How many groups have rows at most, and how many rows a large one of them is taken to have."""
    count = min(problem.groups, problem.m)
    mean = problem.m / count
    return count, min(problem.m, math.ceil(mean + math.sqrt(mean)))


def _deepest(
    problem: Problem,
    device: Device,
    tile: tuple[int, int],
    warpgroups: tuple[int, int],
    ctas: int,
    step: int,
) -> WidenedConfig | None:
    """Returns a config with the most stages that fit, None if there is none."""
    consumers, along_k = warpgroups
    chunk = next((width for width in CHUNKS if width <= tile[1]), CHUNKS[-1])
    own = math.ceil(_tiles_of_cta(problem, tile, ctas, device) * -(-problem.k // step))
    most = min(MOST_STAGES, MAX_BARRIERS, max(2 * along_k, own))
    whole = problem.groups or _tiles(problem, tile) <= device.coresident_clusters(ctas)
    # For weights stored [n, k], clusters with several tiles of groups spill 32 to 56 bytes.
    persistent = not whole if ctas > 1 else problem.groups
    persistent = persistent or (problem.groups and not problem.transpose_b)
    for stages in range(most // along_k * along_k, 2 * along_k - 1, -along_k):
        try:
            config = WidenedConfig(
                tile=tile,
                stages=stages,
                step=step,
                consumers=consumers,
                along_k=along_k,
                ctas_along_k=ctas,
                store_columns=chunk,
                persistence="static" if persistent else "none",
            )
        except ValueError:
            return None
        if config.shared_memory_bytes(problem, device=device) <= device.shared_memory:
            return config
    return None


def seconds(problem: Problem, config: WidenedConfig, device: Device) -> float:
    """Predicts the time of a kernel."""
    own = config.as_computed(problem)
    (rows, cols), machine = config.tile, device.machine
    loaded = config.step * (rows * BITS[own.a_dtype] / 8 + cols * own.b_dtype.itemsize)
    wgmmas = rows // WGMMA_ROWS * config.step // WGMMA_DEPTH
    each = WGMMA_CYCLES * (1 if config.form(problem).turned else UNTURNED)
    each *= 1 + ALONE * max(0, WARPGROUPS - config.warpgroups)
    widened = wgmmas * (each + COLUMN_CYCLES * cols)
    # A warpgroup keeps the slot of its step, and of the one before whose WGMMAs are in flight.
    kept = config.along_k * (1 if config.form(problem).scales_sums else 2)
    step = STEP_CYCLES + max(
        loaded / LOAD_BYTES,
        widened + LATENCY_CYCLES * (kept == config.stages),
        LATENCY_CYCLES / max(1, config.stages - 1),
    )
    tiles = config.tiles(problem)
    if problem.groups:
        (down, _), (groups, length) = config.grid(problem), _groups(problem)
        tiles = min(tiles, down * groups * math.ceil(length / cols))
    ctas, fit = config.ctas_along_k, device.coresident_clusters(config.cluster_size)
    waves = math.ceil(tiles / fit)
    steps = math.ceil(waves * config.steps(problem) / ctas)
    end = END_CYCLES + ELEMENT_CYCLES * rows * cols * (1 + (ctas > 1))
    end += JOINED_CYCLES * (ctas > 1) + TURN_CYCLES * (config.along_k - 1)
    if config.shares_all:
        steps = math.ceil(tiles * config.steps(problem) / config.workers(problem, device))
        end += LEFT_CYCLES + LEFT_ELEMENT_CYCLES * rows * cols * fit / tiles
    # The ring runs on: only the last tile is finished while nothing is loaded.
    ends = 1 if config.persistence == "static" else waves
    busy = (steps * step + ends * end) / (CLOCK_SHARE * machine.clock_hz)
    memory = bytes_(problem) + _read_again(problem, config, device)
    memory /= MEMORY_SHARE * machine.dram_bytes_per_second
    launches = LAUNCH_SECONDS + FLAGS_SECONDS * config.shares_all
    return launches + (busy**SHARPNESS + memory**SHARPNESS) ** (1 / SHARPNESS)


def _read_again(problem: Problem, config: WidenedConfig, device: Device) -> float:
    """Bytes of the activations that are read again, for each wave of tiles, if no cache has them.

    CTAs that run at once have all rows beside a few columns. 16384 x 2048 x 2048 in int4 takes 271
    us on an H100, and 2048 cubed 26.
    """
    size = problem.batch * problem.m * problem.k * problem.a_dtype.itemsize
    if problem.groups or size <= CACHED_SHARE * device.machine.l2_bytes:
        return 0.0
    waves = math.ceil(config.tiles(problem) / device.coresident_clusters(config.cluster_size))
    return (waves - 1) * size * min(1.0, device.sms * config.tile[1] / (problem.batch * problem.m))


def bytes_(problem: Problem) -> float:
    """Bytes that are moved at least."""
    weights = problem.n * problem.k * BITS[problem.b_dtype] / 8
    weights += problem.n * problem.k // problem.blocks.k * 2 if problem.blocks else 0
    matrices = _groups(problem)[0] if problem.groups else problem.batch
    matrices = (1 if problem.shared_b else matrices) * problem.sums
    of_element = sum(x.itemsize for x in (*problem.result_dtypes, *problem.loaded_dtypes))
    each = problem.k * problem.a_dtype.itemsize + problem.n * of_element
    return matrices * weights + problem.batch * problem.m * each
