"""The configs of the Hopper kernel that the heuristics choose among."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from pallas_gemm.config import STEP_BYTES
from pallas_gemm.device import Device
from pallas_gemm.kernels.hardware import MAX_BARRIERS
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.problems import stored_by_tma
from pallas_gemm.kernels.work import TABLE_BITS
from pallas_gemm.planning.candidates import cuts
from pallas_gemm.planning.candidates.draft import Draft
from pallas_gemm.planning.candidates.hopper_tiles import forms, stored_columns, widest
from pallas_gemm.planning.candidates.partial import fewest_sums, sums_of_8_bits
from pallas_gemm.problem import Problem
from schedules import Split

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
    for form in forms(problem):
        slots: dict[str, Any] = {
            "store_columns": stored_columns(problem, form),
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
        columns = max(16, widest(problem) // 2)
        narrow = _replaced(config, store_columns=columns, store_slots=fewest)
        ready = max(ready, deepest(narrow, problem, device), key=_stages)
    if ready is None or _has_too_few_stages(ready, problem):
        return None
    ready = _streaming(_loading_ahead(ready, problem, device), problem, device)
    return _addressed(ready, problem)


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
    needed = fewest_sums(problem, device)
    if problem.parts:
        return _in_parts(config, problem.parts // config.split_k)
    cut = 1 if config.split_last else config.split_k
    most = -(-problem.large_k // config.tile_k(problem)) // config.split_k

    def in_sums(count: int) -> HopperConfig | None:
        return _in_parts(config, min(most, -(-count // cut)))

    # More sums than it needs are for a config that gives nothing up for them.
    wanted = 1 if config.late_store or config.pingpong else sums_of_8_bits(problem)
    return in_sums(max(needed, wanted)) or in_sums(needed)


def _in_parts(config: HopperConfig, parts: int) -> HopperConfig | None:
    if parts <= 1:
        return config
    try:
        return _replaced(config, partial_sums=parts, late_store=False)
    except ValueError:
        return None


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
