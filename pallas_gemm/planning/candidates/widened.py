"""The configs that are considered for weights that go through registers, and how long each takes.

Memory limits a product of few rows: the weights are read once, and enough warpgroups have to widen
them as fast as they come. The tensor cores limit a product of many rows.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pallas_gemm.device import LINE_BYTES, Device
from pallas_gemm.kernels.element_types import FLOATS_8, SINGLE, bits
from pallas_gemm.kernels.hardware import MAX_BARRIERS, WARPGROUP_THREADS, WGMMA_ROWS
from pallas_gemm.kernels.hopper.widened.config import MOST_SUMS, WidenedConfig
from pallas_gemm.problem import Problem
from schedules.model import SECTOR_BYTES

NARROW = 32
"""Rows of the result for which two warpgroups are too few to widen as fast as memory brings."""
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
MOST_ADDED = 240
"""Registers of sums, its own and those of other CTAs, that the only warpgroup of a CTA adds up: of
float32, it has all of them at once. With 256, 68 and 100 bytes are spilled, with 280 384."""
LEFT_CYCLES, LEFT_ELEMENT_CYCLES, FLAGS_SECONDS = 7000, 0.05, 2.5e-6
"""Where all CTAs share tiles, they take these to hand over their sums; and flags are set to 0."""
FEWEST_STEPS = 4
"""Each of these CTAs has at least."""
TURN_CYCLES = 400
"""From one warpgroup that takes steps in turns to the next, until its sums are added."""
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
MOST_STAGES = 16
CLOCK_SHARE = 0.92
"""The share of the highest clock that is left while all SMs multiply."""
CACHED_SHARE = 0.9
"""The share of the L2 that an operand may take up."""


class Kind(NamedTuple):
    """The choices for weights of a kind, and the times of their kernels.

    Attributes:
        narrow_forms: Columns of the result of a tile with few rows of it, consumers that share
            them, and those that take steps in turns.
        forms: The same with more rows.
        steps: Contracted elements of a step.
        chunks: Rows of the result that are stored at a time.
        persistent: CTAs take several tiles if there are more tiles than CTAs.
        launch_seconds: Until the first operands arrive.
        wgmma_cycles: A WGMMA of 64 rows.
        column_cycles: For each of its columns.
        unturned: WGMMAs take longer by this factor where the hardware does not turn weights.
        warpgroups: How many are enough to have weights ready for WGMMA.
        alone: WGMMAs take longer by this share for each warpgroup that lacks.
        step_cycles: Each step, whatever it does.
        end_cycles: From the last step of a tile to its end.
        element_cycles: For each of its elements.
        ends: The share of that between two tiles of a CTA, which loads the next one meanwhile.
        joined_cycles: CTAs of a cluster wait for each other, and hand over their sums.
        cta_cycles: For each of them but the first.
        latency_cycles: From a request for operands to their arrival.
        load_bytes: An SM loads these in a cycle.
        within_lines: The factor by which weights load more slowly if their rows begin within a line
            of the cache.
        within_sectors: The same if they begin within a sector.
        waits: A step takes at least this share of its load if the ring has one free slot, and half
            of it if the ring has two.
        memory_share: The share of the peak bandwidth of memory that is reached.
        sharpness: How little computing and reading memory hold each other up: the power of their
            norm.
    """

    narrow_forms: Sequence[tuple[int, int, int]]
    forms: Sequence[tuple[int, int, int]]
    steps: Sequence[int]
    chunks: Sequence[int]
    persistent: bool
    launch_seconds: float
    wgmma_cycles: float
    column_cycles: float
    unturned: float
    warpgroups: int
    alone: float
    step_cycles: float
    end_cycles: float
    element_cycles: float
    ends: float
    joined_cycles: float
    cta_cycles: float
    latency_cycles: float
    load_bytes: float
    within_lines: float
    within_sectors: float
    waits: float
    memory_share: float
    sharpness: float


FEW_BITS = Kind(
    narrow_forms=((64, 1, 4), (128, 1, 2), (128, 1, 3), (128, 1, 4), (256, 2, 2)),
    forms=((64, 1, 4), (128, 1, 1), (128, 1, 2), (128, 2, 1), (128, 2, 2), (256, 2, 1)),
    # Steps of 256 take 6% longer.
    steps=(64, 128),
    chunks=(64, 32, 16),
    persistent=False,
    launch_seconds=1.7e-6,
    wgmma_cycles=19.6,
    column_cycles=0.305,
    unturned=1.5,
    warpgroups=WARPGROUPS,
    alone=0.13,
    step_cycles=143,
    end_cycles=145,
    element_cycles=0.36,
    ends=0,
    joined_cycles=2950,
    cta_cycles=0,
    latency_cycles=1200,
    load_bytes=43,
    within_lines=1,
    within_sectors=1,
    waits=0,
    memory_share=0.95,
    sharpness=2.75,
)
"""The times were fitted together to 160 configs of 45 products with 1 to 256 rows on an H200. Their
predictions are off by 10%."""
_FORMS_OF_SINGLES = ((64, 1, 1), (64, 1, 2), (128, 2, 1), (256, 2, 1))
SINGLES = Kind(
    narrow_forms=_FORMS_OF_SINGLES,
    forms=_FORMS_OF_SINGLES,
    steps=(32, 64),
    chunks=(32, 16),
    persistent=True,
    launch_seconds=1.16e-6,
    wgmma_cycles=2.8,
    column_cycles=0.482,
    unturned=1,
    warpgroups=2,
    alone=3.0,
    step_cycles=53,
    end_cycles=622,
    element_cycles=0.257,
    ends=0.675,
    joined_cycles=1600,
    cta_cycles=194,
    latency_cycles=0,
    load_bytes=56.6,
    within_lines=1.19,
    within_sectors=2,
    waits=1.18,
    memory_share=0.97,
    sharpness=2.1,
)
"""Float32. The times were fitted together to 348 configs of 52 products with 16 to 65536 rows on an
H200: half of the predictions are within 5%. The factor for rows within a sector comes from five
products."""


def _kind(problem: Problem) -> Kind:
    return SINGLES if problem.b_dtype == SINGLE else FEW_BITS


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
    for cols in columns:
        for step, rows, consumers, along_k in _forms(problem, cols):
            tile = rows * problem.sums, cols
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


def _forms(problem: Problem, cols: int) -> list[tuple[int, int, int, int]]:
    """Returns the forms to consider: contracted elements of a step, then the numbers of a form.

    Few rows have forms of their own. If k is so short that some warpgroups of each such form would
    have no step, all forms count.
    """
    kind = _kind(problem)

    def fits(step: int, rows: int, consumers: int, along_k: int) -> bool:
        # A gated column has two rows of sums.
        most = consumers * _most_rows(problem, cols, (consumers, along_k), step)
        return along_k <= -(-problem.k // step) and rows * problem.sums <= most

    narrow, every = (
        [own for step in kind.steps for form in forms if fits(*(own := (step, *form)))]
        for forms in (kind.narrow_forms, kind.forms)
    )
    return narrow if cols <= NARROW and narrow else every


def _most_rows(problem: Problem, cols: int, warpgroups: tuple[int, int], step: int) -> int:
    """How many rows of sums a warpgroup may have, for which it has enough registers."""
    is_long = step == _kind(problem).steps[-1]
    lacks_registers = math.prod(warpgroups) == WARPGROUPS and cols > MOST_OF_FOUR and is_long
    is_packed = bits(problem.b_dtype) == 4 and not problem.transpose_b
    is_spared = is_packed and not problem.groups and cols <= NARROW and warpgroups == (2, 2)
    return MOST_ROWS // 2 if lacks_registers and not is_spared else MOST_ROWS


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
    """Whether a cluster has enough registers to share a tile, beside those of the weights."""
    consumers, along_k = warpgroups
    if problem.b_dtype == SINGLE and ctas > 1 and warpgroups == (1, 1):
        return ctas * math.prod(tile) <= MOST_ADDED * WARPGROUP_THREADS
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
    kind = _kind(problem)
    chunk = next((width for width in kind.chunks if width <= tile[1]), kind.chunks[-1])
    own = math.ceil(_tiles_of_cta(problem, tile, ctas, device) * -(-problem.k // step))
    slot = step * (tile[0] * bits(problem.b_dtype) // 8 + tile[1] * problem.a_dtype.itemsize)
    fit = device.shared_memory // slot
    most = min(MOST_STAGES, MAX_BARRIERS, max(2 * along_k, own), fit)
    whole = problem.groups or _tiles(problem, tile) <= device.coresident_clusters(ctas)
    # For weights stored [n, k], clusters with several tiles of groups spill 32 to 56 bytes.
    persistent = not whole if ctas > 1 or kind.persistent else problem.groups
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
    own, form = config.as_computed(problem), config.form(problem)
    (rows, cols), machine = config.tile, device.machine
    kind = _kind(problem)
    weights = rows * bits(own.a_dtype) / 8 * _parted(problem, kind)
    load = config.step * (weights + cols * own.b_dtype.itemsize) / kind.load_bytes
    wgmmas = rows // WGMMA_ROWS * config.step // form.wgmma_depth
    each = kind.wgmma_cycles * (1 if form.turned else kind.unturned)
    each *= 1 + kind.alone * max(0, kind.warpgroups - config.warpgroups)
    widened = wgmmas * (each + kind.column_cycles * cols)
    # A warpgroup keeps the slot of its step, and of the one before whose WGMMAs are in flight.
    free = config.stages - config.along_k * (1 if form.scales_sums else 2)
    if free:
        latency = kind.latency_cycles / max(1, config.stages - 1)
        held = max(widened, latency, kind.waits * load / free)
    else:
        held = widened + kind.latency_cycles + kind.waits * load
    step = kind.step_cycles + max(load, held)
    tiles = config.tiles(problem)
    if problem.groups:
        (down, _), (groups, length) = config.grid(problem), _groups(problem)
        tiles = min(tiles, down * groups * math.ceil(length / cols))
    ctas, fit = config.ctas_along_k, device.coresident_clusters(config.cluster_size)
    waves = math.ceil(tiles / fit)
    steps = math.ceil(waves * config.steps(problem) / ctas)
    end = kind.end_cycles + kind.element_cycles * rows * cols * (1 + (ctas > 1))
    end += kind.joined_cycles * (ctas > 1) + kind.cta_cycles * (ctas - 1)
    end += TURN_CYCLES * (config.along_k - 1)
    if config.shares_all:
        steps = math.ceil(tiles * config.steps(problem) / config.workers(problem, device))
        end += LEFT_CYCLES + LEFT_ELEMENT_CYCLES * rows * cols * fit / tiles
    # The ring runs on: only the last tile is finished while nothing is loaded.
    ends = 1 + (waves - 1) * kind.ends if config.persistence == "static" else waves
    busy = (steps * step + ends * end) / (CLOCK_SHARE * machine.clock_hz)
    memory = bytes_(problem) + _read_again(problem, config, device)
    memory /= kind.memory_share * machine.dram_bytes_per_second
    launches = kind.launch_seconds + FLAGS_SECONDS * config.shares_all
    power = kind.sharpness
    return launches + (busy**power + memory**power) ** (1 / power)


def _parted(problem: Problem, kind: Kind) -> float:
    """Returns the factor by which weights load more slowly because of where their rows begin."""
    row = (problem.k if problem.transpose_b else problem.n) * bits(problem.b_dtype) // 8
    if row % LINE_BYTES == 0:
        return 1
    return kind.within_sectors if row % SECTOR_BYTES else kind.within_lines


def _read_again(problem: Problem, config: WidenedConfig, device: Device) -> float:
    """Bytes of the smaller operand that each wave of tiles reads again, if no cache has them.

    CTAs that run at once have all of it beside a part of the larger one.
    """
    rows, columns = problem.batch * problem.m, problem.n * problem.sums
    factors = (rows, config.tile[1], problem.a_dtype), (columns, config.tile[0], problem.b_dtype)
    size, own = min((length * bits(dtype) / 8, tile / length) for length, tile, dtype in factors)
    size *= problem.k
    if problem.groups or size <= CACHED_SHARE * device.machine.l2_bytes:
        return 0.0
    waves = math.ceil(config.tiles(problem) / device.coresident_clusters(config.cluster_size))
    return (waves - 1) * size * min(1.0, device.sms * own)


def bytes_(problem: Problem) -> float:
    """Bytes that are moved at least."""
    weights = problem.n * problem.k * bits(problem.b_dtype) / 8
    weights += problem.n * problem.k // problem.blocks.k * 2 if problem.blocks else 0
    matrices = _groups(problem)[0] if problem.groups else problem.batch
    matrices = (1 if problem.shared_b else matrices) * problem.sums
    of_element = sum(x.itemsize for x in (*problem.result_dtypes, *problem.loaded_dtypes))
    each = problem.k * problem.a_dtype.itemsize + problem.n * of_element
    return matrices * weights + problem.batch * problem.m * each
