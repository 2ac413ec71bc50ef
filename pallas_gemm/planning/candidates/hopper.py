"""The configs of the Hopper kernel that the heuristics choose among."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from pallas_gemm.config import STEP_BYTES
from pallas_gemm.device import Device
from pallas_gemm.kernels.hardware import MAX_BARRIERS
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.problems import stored_by_tma
from pallas_gemm.kernels.operand import PANEL
from pallas_gemm.kernels.work import TABLE_BITS
from pallas_gemm.planning.candidates import cuts
from pallas_gemm.planning.candidates.draft import Draft
from pallas_gemm.planning.candidates.partial import fewest_sums
from pallas_gemm.problem import Problem
from schedules import Split

# Rows of a tile, and its columns: with these, 94 products drawn at random take 0.5% longer on an
# H200 than with the best of 41 tiles. One of the right width makes the last wave a full one, narrow
# ones are for results of few rows. 256 x 128 is never the best: two WGMMAs of 128 columns for each
# consumer take 4 to 10% longer than one of 256.
COLUMNS = {
    256: (208, 192),
    192: (192, 160, 144),
    128: (256, 240, 224, 208, 192, 176, 160, 144, 128, 112, 96, 16),
    64: (256, 240, 224, 208, 192, 176, 160, 128, 64, 32, 16),
}
IN_TURNS = (128, 128)
"""The tile that a consumer stores while the other one multiplies its own, where no consumer can
store under its next tile. 24 products of 1024 x 4096 x 1024 with a residual take 295 us so on an
H200. In tiles of 128 x 256 and 256 x 192, they take 321 and 334 us. A symmetric result is stored
twice, and in larger tiles a third of 4096 cubed would be beyond the diagonal or in a wave that is
not full."""
MUCH_IN_TURNS = ((64, 256), (64, 224))
"""The same where two arrays are loaded and two or three stored. The derivative of SwiGLU takes 2706
us so on an H200 for 16384 x 14336 x 4096, and 3050 us in tiles of 128 x 192. With one more result
it takes 2884 us, and 3208 us in tiles of 128 x 128."""
MUCH_COLUMNS = 16
WIDE_IN_TURNS = (128, 192)
"""The same for float32 results of 16-bit operands: it reads less of the L2. Logits of 8192 x 32000
with K=4096 take 2644 us so on an H200, and 3089 us in tiles of 128 x 128 in turns. Stored at once,
they take 2731 us in tiles of 128 x 256 and 2753 us in 256 x 192. With K=1024, it is 711, 749 and
791 us. A tile of 128 x 256 takes 128 KB, as much as four slots of operands."""
WIDE_COLUMNS = 16
"""The columns of their store slots where the right operand is stored [k, n]: a fifth stage fits. On
an H200, 8192 x 32000 with K=1024 takes 695 us so, and 705 us with 32 columns; with K=4096 both take
2637 us. Stored [n, k], it is 731 and 704 us, and 2774 and 2644."""
LEFT_COLUMNS = 32
"""Columns that are finished at a time of tiles that leave nothing but what is reduced. With labels'
logits, the log-sum-exp of 8192 x 151936 with K=2048 takes 6.34 ms in turns on an H200, and 6.69 ms
in tiles of 128 x 256. The bare product takes 6.29 ms."""
FILLING = (240, 224)
"""Columns of tiles of 128 rows that only count where they are few waves, of which they fill the
last one: 2688 cubed takes 51.0 us on an H200 in tiles of 128 x 224, 54.0 in those of 128 x 160."""
FEW_WAVES = 8
"""5120 cubed, seven of them, takes 342 us in float16 instead of 345, 6144 cubed 619 instead of 575.
"""
ONE_SLOT_STEPS = 16
"""Steps of k from which on tiles in turns have one store slot, and a longer ring for it: while a
consumer stores, the other one multiplies. With a residual, 24 of 1024 x 4096 x 1024 take 295 us so
on an H200, and 300 with two slots. 8192 x 8192 x 1024 takes 198 and 203, and 16384 x 4096 x 2048
365 and 371. But 16 of 2048 x 2048 x 512 take 124 and 119."""
OF_BLOCKS = (
    *((128, 256, 2), (256, 128, 2), (128, 128, 2), (128, 64, 2)),
    *((64, 256, 2), (64, 128, 2), (64, 128, 1), (64, 64, 1), (64, 32, 1)),
)
"""Tiles where blocks have scales, and how many warpgroups share one: the sum of a block takes
registers, too. 64 x 18432 x 7168 takes 36 us on an H200 in tiles of 64 x 256, 45 us in 64 x 128.
Of two that are predicted to take as long, the first is chosen: 8192 cubed takes 824 us in tiles of
128 x 256 and 858 us in 256 x 128, 4096 x 2048 x 7168 92.1 and 96.0. Tiles of 192 x 128, which three
warpgroups share, were the fastest of no product: 8192 cubed takes 905 us in them, and sums over 32
groups of 2880 x 2880 take 464 us, 340 in tiles of 256 x 128."""
CONSUMERS = {256: 2, 192: 3, 128: 2, 64: 1}
"""Warpgroups that share a tile, by its rows."""
FEWEST_STAGES = 3
"""Of a ring, unless nothing else fits: narrower store slots make room for another stage."""
FEWEST_WHOLE_STEPS = 56
"""Of a tile, for the last ones to be cut: 27296 x 3712 x 3584 (TN), 56 steps, takes 920 us on an
H200 so and 931 us whole, 2560 x 2560 x 8192 148 us and 154."""
FEWEST_ROWS_OF_LAST = 128
"""Or columns, below which only memory counts: 117 x 8960 x 49152 takes 237 us so and 221 us whole,
150 x 10240 x 28672 165 us and 172."""
MOST_PIECES_OF_LAST = 16
"""The most pieces of each of the last tiles."""
HANDED_OVER_STEPS = 14
"""As long as it takes to hand over a piece: 1920 x 2560 x 32768 takes 394 us on an H200 with the
last 18 tiles in 7 pieces, one wave of them, and 404 us in 14."""
SHORTER = 0.985
"""At most this share of the waves is left where the last tiles are cut, as in all that was
measured."""
FULL_ACCUMULATOR = 128
"""Registers of a sum, with which a late store has the fewest others."""
MOST_STAGES = 12
"""More than cover the latency of memory, and are slower: 21 x 1792 x 1536 takes 4.55 us on an H200
with 12 and 5.0 with 20, 4 x 4096 x 14336 29.0 us with 13 and 30.8 with 20. So are more than a CTA's
only tile has steps: 6 x 1152 x 448, seven steps, takes 2.27 us with 7 and 2.37 with 12."""
STREAMED = 11 * 2**20
"""Bytes that all CTAs await of an operand that each reads for itself. More are in each other's way:
4 x 6144 x 4096 takes 13.8 us on an H200 with 9 MB under way, 14.3 with 10 and 15.7 with 16. 4 x
28672 x 8192 takes 105.7 us with 15 MB and 108.5 with 18."""
FEWEST_STREAMED_STAGES = 4
ROWS_OF_GROUPS = 128
"""Of a tile where groups have as many on average: fewer would be read from the L2 too often."""
STORE_BOUND_STEPS = 2
"""Steps of k that are over before two store slots are empty again: 32 products of 2048 x 2048 x 128
take 92 us on an H200 with two slots and four stages. With four slots and three stages they take 84
us, as XLA's do. With four steps, two slots are the better choice."""


_config = functools.lru_cache(maxsize=4096)(HopperConfig)
_replaced = functools.lru_cache(maxsize=4096)(dataclasses.replace)
"""Other products have the same drafts, and to check a config takes longer than to find it."""


def drafts(
    problem: Problem, device: Device, split: Split | None = None
) -> Iterator[Draft[HopperConfig]]:
    """Yields, for each tile, the draft of a config with all stages that fit into shared memory.

    Whole, and cut along k where that may be faster; or only as a caller says.
    """
    for form in _forms(problem):
        slots: dict[str, Any] = {
            "store_columns": _widest(problem),
            "store_slots": _store_slots(problem, form),
        }
        config = _config(
            stages=2,
            late_store=False,
            # Groups differ in size.
            persistence="dynamic" if problem.ragged_k else "static",
            **(slots | form),
        )
        fills = config.tile[1] in FILLING and not config.pingpong
        if fills and config.tiles(problem) > FEW_WAVES * device.sms:
            continue
        config = _ordered(config, problem, device)
        for pieces, last in (split[1:],) if split else _ways(config, problem, device):
            if pieces > 1 and config.pingpong:
                continue
            own = _accurate(_divided(config, pieces, last), problem, device)
            if own is not None:
                finish = functools.partial(_finished, config, pieces, last, problem, device)
                yield Draft(own, finish)


def _finished(
    config: HopperConfig, pieces: int, last: int | None, problem: Problem, device: Device
) -> HopperConfig | None:
    """Returns the config with all stages that fit, and cut along k; None if too few do."""
    ready = _with_ring(config, problem, device)
    if ready is None:
        return None
    ready = _divided(ready, pieces, last)
    if ready.cuts_all_tiles:
        chunks = ready.tiles(problem) * ready.stores_per_tile(problem)
        fit = device.coresident_clusters(config.cluster_size)
        ready = cuts.joined_by_all(ready, problem, chunks, fit)
        ready = _streaming(deepest(ready, problem, device) or ready, problem, device)
    return _accurate(ready, problem, device)


def _with_ring(config: HopperConfig, problem: Problem, device: Device) -> HopperConfig | None:
    """Returns the config, whole, with all stages that fit; None if too few do."""
    ready = deepest(config, problem, device)
    of_blocks = problem.blocks is not None
    if _stages(ready) < FEWEST_STAGES + of_blocks:
        fewest = 1 if of_blocks else config.store_slots
        columns = max(16, _widest(problem) // 2)
        narrow = _replaced(config, store_columns=columns, store_slots=fewest)
        ready = max(ready, deepest(narrow, problem, device), key=_stages)
    if ready is None or _has_too_few_stages(ready, problem):
        return None
    ready = _streaming(_loading_ahead(ready, problem, device), problem, device)
    return _addressed(ready, problem)


def _widest(problem: Problem) -> int:
    """Returns how many columns are stored at a time, unless a tile has its reason for others."""
    return min([64, *(STEP_BYTES // dtype.itemsize for dtype in problem.stored_dtypes)])


def _store_slots(problem: Problem, form: Mapping[str, Any]) -> int:
    """Returns how many chunks of a tile may be on their way to memory."""
    if not stored_by_tma(problem):
        # Threads wait for what they store.
        return 1
    if _is_short(problem):
        return 4
    long = problem.k * problem.a_dtype.itemsize >= ONE_SLOT_STEPS * STEP_BYTES
    return 1 if "pingpong" in form and long and not problem.symmetric else 2


def _loading_ahead(config: HopperConfig, problem: Problem, device: Device) -> HopperConfig:
    """Returns the config with a slot for each chunk of a tile, if the ring stays long enough.

    Then all that the epilogue loads arrives while the tile is multiplied. With a residual and the
    sum of squares of each row, 8192 cubed takes 1381 us so on an H200, and 1408 us with two slots.
    """
    slots = config.stores_per_tile(problem)
    few = slots <= config.store_slots
    if few or not problem.loaded_dtypes or config.pingpong or not stored_by_tma(problem):
        return config
    ahead = deepest(_replaced(config, store_slots=slots), problem, device)
    return ahead if ahead and ahead.stages >= FEWEST_STAGES else config


def _addressed(config: HopperConfig, problem: Problem) -> HopperConfig:
    """Returns the config whose addresses registers hold, where the ring turns just twice.

    The compiler then keeps the addresses of all slots, of the ring and of the store. With two slots
    of the store, a tile of 128 x 256 that is stored late spills 8 bytes.
    """
    steps = -(-problem.large_k // config.tile_k(problem))
    twice = steps == 2 * config.stages and config.late_store and not config.pingpong
    full = config.accumulator_registers >= FULL_ACCUMULATOR
    is_one = twice and full and config.store_slots == 2
    return _replaced(config, store_slots=1) if is_one else config


def _forms(problem: Problem) -> Iterator[dict[str, Any]]:
    """Yields what is particular about each: its tile, and how consumers share it."""
    if problem.blocks is not None:
        yield from _forms_of_blocks(problem)
        return
    ways = (False,) if problem.symmetric else (False, True)
    for mirrored, rows in itertools.product(ways, COLUMNS):
        for columns in COLUMNS[rows]:
            if _is_below_groups(rows, problem):
                continue
            if _is_part_of_a_panel(columns, problem, mirrored=mirrored):
                continue
            if _is_filled(rows, columns, problem, mirrored=mirrored):
                consumers = CONSUMERS[rows]
                yield {"tile": (rows, columns), "consumers": consumers, "mirrored": mirrored}
    if problem.symmetric or _is_stored_early(problem):
        yield {"tile": IN_TURNS, "pingpong": True}
    if _is_much(problem):
        narrow = {"store_columns": MUCH_COLUMNS, "store_slots": 2}
        yield from ({"tile": tile, "pingpong": True} | narrow for tile in MUCH_IN_TURNS)
    if _is_left(problem):
        narrow = {"store_columns": LEFT_COLUMNS}
        yield {"tile": WIDE_IN_TURNS, "pingpong": True, "store_slots": 1} | narrow
    if _is_wide(problem):
        narrow = {} if problem.transpose_b else {"store_columns": WIDE_COLUMNS}
        yield {"tile": WIDE_IN_TURNS, "pingpong": True, "store_slots": 1} | narrow


def _ways(
    config: HopperConfig, problem: Problem, device: Device
) -> Iterator[tuple[int, int | None]]:
    """Yields into how many pieces tiles may be cut, and how many tiles; first, that none are."""
    yield 1, None
    if problem.parts:
        yield from ((pieces, None) for pieces in cuts.promised_pieces(problem, device))
    elif cuts.may_be_cut(problem, device):
        yield from ((pieces, None) for pieces in cuts.pieces(config, problem, device))
        yield from _last_ways(config, problem, device)


def _divided(config: HopperConfig, pieces: int, last: int | None) -> HopperConfig:
    """Returns the config with the k loop of its tiles cut, or of the last ones."""
    if last is not None:
        return _replaced(config, split_k=pieces, split_last=last)
    if pieces == 1:
        return config
    online = "online_swizzle:8"
    return _replaced(config, split_k=pieces, late_store=False, schedule=online)


def _last_ways(
    config: HopperConfig, problem: Problem, device: Device
) -> Iterator[tuple[int, int | None]]:
    """Yields how the tiles may be cut that would be a wave that is not full.

    They are cut into pieces that make a wave, or two or three: those that take the smallest part of
    one. Rows that threads store were not measured. With two results, 768 x 3072 x 8192 gains 1%.
    """
    fit = device.coresident_clusters(config.cluster_size)
    full, last = divmod(config.tiles(problem), fit)
    steps = -(-problem.k // config.tile_k(problem))
    few = min(problem.m, problem.n) < FEWEST_ROWS_OF_LAST or steps < FEWEST_WHOLE_STEPS
    if few or not full or not last or not stored_by_tma(problem) or len(problem.result_dtypes) > 1:
        return
    most = min(MOST_PIECES_OF_LAST, steps // cuts.FEWEST_STEPS)
    ways = [(waves, min(waves * fit // last, most)) for waves in range(1, cuts.MOST_WAVES + 1)]
    share, pieces = min(
        (waves * (1 / pieces + HANDED_OVER_STEPS / steps), pieces) for waves, pieces in ways
    )
    if pieces > 1 and full + share < SHORTER * (full + 1):
        yield pieces, last


def _streaming(config: HopperConfig, problem: Problem, device: Device) -> HopperConfig:
    """Returns the config with the stages that keep memory busy, where few rows are streamed.

    A row of tiles that is all of the result reads each part of the other operand once.
    """
    if 1 not in config.grid(problem) or min(problem.m, problem.n) > cuts.FEW_ROWS:
        return config
    rows, cols = config.tile
    stage = (cols if config.grid(problem)[0] == 1 else rows) * STEP_BYTES
    most = STREAMED // (stage * config.workers(problem, device))
    return _replaced(config, stages=min(config.stages, max(FEWEST_STREAMED_STAGES, most)))


def _accurate(config: HopperConfig, problem: Problem, device: Device) -> HopperConfig | None:
    """Returns the config with the partial sums that it takes; None if registers hold no two.

    Where they do not, tiles are so large that XLA leaves no SMs idle either.
    """
    most = -(-problem.large_k // config.tile_k(problem)) // config.split_k
    cut = 1 if config.split_last else config.split_k
    parts = min(most, -(-fewest_sums(problem, device) // cut))
    if problem.parts:
        parts = problem.parts // config.split_k
    if parts <= 1:
        return config
    try:
        return _replaced(config, partial_sums=parts, late_store=False)
    except ValueError:
        return None


def _forms_of_blocks(problem: Problem) -> Iterator[dict[str, Any]]:
    """Yields the same where blocks have scales."""
    for rows, columns, consumers in OF_BLOCKS:
        below = _is_below_groups(rows, problem)
        if not below and _is_filled(rows, columns, problem, mirrored=False):
            yield {"tile": (rows, columns), "consumers": consumers}


def _is_below_groups(rows: int, problem: Problem) -> bool:
    """Whether groups have more rows on average than a tile that would be read from the L2 often."""
    return rows < ROWS_OF_GROUPS and problem.m >= ROWS_OF_GROUPS * problem.groups > 0


def _is_filled(rows: int, columns: int, problem: Problem, *, mirrored: bool) -> bool:
    """Whether at least half of a tile is not beyond the edge, or it is the smallest."""
    across = problem.sums * problem.n
    m, n = (across, problem.m) if mirrored else (problem.m, across)
    return (rows < 2 * m or rows == min(COLUMNS)) and (columns < 2 * n or columns == 16)


def _is_part_of_a_panel(columns: int, problem: Problem, *, mirrored: bool) -> bool:
    """Whether a tile with these columns reads a part of a panel of its right operand."""
    in_panels = problem.transpose_a if mirrored else not problem.transpose_b
    return in_panels and columns % PANEL > 0


def _has_too_few_stages(config: HopperConfig, problem: Problem) -> bool:
    """Whether a ring of two slots is filled again and again.

    TMA fills one while the other is multiplied, which takes about as long as the latency: with two
    results, 2560 x 2560 x 16384 takes 436 us so on an H200, where 275 are predicted.
    """
    steps = -(-problem.large_k // config.tile_k(problem))
    return problem.blocks is None and config.stages < min(FEWEST_STAGES, steps)


def _stages(config: HopperConfig | None) -> int:
    return config.stages if config else 0


def _ordered(config: HopperConfig, problem: Problem, device: Device) -> HopperConfig:
    """Stores late where that is possible, and computes the order where nothing is gained by it.

    With a tile per CTA there is no next tile to store it under. Half a microsecond is gained by not
    waiting for the first entry of a table: 2048 cubed takes 23.5 us on an H200 instead of 24.0. A
    large batch has more rows of tiles than an entry has bits for.
    """
    few = config.tiles(problem) <= device.sms
    many = max(config.stacked_grid(problem)) >= 1 << TABLE_BITS
    if (few or many) and not problem.symmetric:
        return _replaced(config, schedule="online_swizzle:8")
    if _is_short(problem) or not config.allows_late_store(config.as_computed(problem)):
        return config
    return _replaced(config, late_store=True)


def _is_stored_early(problem: Problem) -> bool:
    """Whether no tile is small enough to be stored under the next one by the same consumer."""
    smallest = HopperConfig(tile=(64, 128), consumers=1)
    return not smallest.allows_late_store(problem)


def _is_left(problem: Problem) -> bool:
    """Whether tiles of 16-bit operands leave nothing but what is reduced."""
    is_plain = not problem.symmetric and not problem.in_groups and problem.sums == 1
    return problem.a_dtype.itemsize == 2 and not problem.stored_dtypes and is_plain


def _is_much(problem: Problem) -> bool:
    """Whether two arrays of the result's shape are loaded, and two or more stored."""
    is_plain = not problem.symmetric and not problem.in_groups and problem.sums == 1
    is_much = len(problem.loaded_dtypes) == 2 <= len(problem.stored_dtypes)
    return problem.a_dtype.itemsize == 2 and is_plain and is_much


def _is_wide(problem: Problem) -> bool:
    """Whether results take twice the bytes of operands, and nothing else is loaded or stored."""
    widths = problem.a_dtype.itemsize, problem.out_dtype.itemsize
    is_one = len(problem.stored_dtypes) == 1 and not problem.symmetric and not problem.in_groups
    return widths == (2, 4) and is_one


def _is_short(problem: Problem) -> bool:
    """Whether a tile is stored more slowly than it is computed."""
    return problem.k * problem.a_dtype.itemsize <= STORE_BOUND_STEPS * STEP_BYTES


def deepest(
    config: HopperConfig, problem: Problem, device: Device, fewest: int = 2
) -> HopperConfig | None:
    """Returns the config with all stages that fit into shared memory, None if too few do."""
    two, three = (config.shared_memory_bytes(problem, stages) for stages in (2, 3))
    fit = 2 + (device.shared_memory - two) // (three - two)
    most = min(MOST_STAGES, MAX_BARRIERS // (2 if config.pingpong else 1))
    if config.pieces(problem) <= device.coresident_clusters(config.cluster_size):
        steps = -(-problem.k // config.tile_k(problem))
        most = min(most, max(fewest, -(-steps // config.split_k)))
    for stages in range(min(most, fit), fewest - 1, -1):
        # Barriers take a little more.
        if config.shared_memory_bytes(problem, stages) <= device.shared_memory:
            return _replaced(config, stages=stages)
    return None
