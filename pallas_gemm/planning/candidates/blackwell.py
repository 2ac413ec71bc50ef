"""The configs of the Blackwell kernel that the heuristics choose among."""

import dataclasses
import math
from collections.abc import Iterator

from pallas_gemm.config import STEP_BYTES, Persistence
from pallas_gemm.device import Device
from pallas_gemm.kernels.blackwell.config import PAIR, BlackwellConfig
from pallas_gemm.planning.candidates import cuts
from pallas_gemm.problem import Problem
from schedules import Split

# (rows, columns) of the tile, the cluster, and the bytes of a step. Pairs read half as much of the
# right operand, so they come first among equals. A step of 128 bytes of the smallest tile is 128
# cycles of MMAs, and 118 of issuing them.
SHAPES = (
    ((128, 256), PAIR, 128),
    ((128, 192), PAIR, 128),
    ((128, 128), PAIR, 128),
    ((128, 256), (1, 1), 128),
    ((128, 128), (1, 1), 128),
    ((128, 64), (1, 1), 256),
    ((128, 64), (1, 1), 128),
)
MOST_STAGES = 12
"""Enough to cover the latency of memory with the smallest tile."""
DYNAMIC_FROM_CYCLES = 6000
"""Of the MMAs of a tile, from which on tiles go to whoever is free: 3.2 us, k = 768 for 256 x 256
by a pair. The tile after the next one is asked for when the one before is stored, about half a tile
before it is needed. This time has to be enough for an answer and the first loads. An answer takes
about a microsecond, which nobody has measured here."""
BYTES_PER_CYCLE = 8192
"""Of products of rows, that the tensor cores of an SM multiply: 4096 of 16 bits, 8192 of 8."""
FEWEST_DYNAMIC_WAVES = 2
"""Tiles for each worker, up to which they are dealt: the cluster that asked first would be granted
all tiles in flight, and others none."""


def candidates(
    problem: Problem, device: Device, split: Split | None = None
) -> Iterator[BlackwellConfig]:
    """Yields, for each tile, the configs with the most stages that fit into shared memory.

    Few tiles with a long k are also cut along k. Where there are more tiles than run at once, both
    kinds of persistence, the one first that k speaks for: tiles go to whichever cluster is free,
    unless one is over before it would be known who gets the next. Or they are cut only as a caller
    says.
    """
    widest = min(64, *(STEP_BYTES // dtype.itemsize for dtype in problem.stored_dtypes))
    for tile, cluster, step_bytes in SHAPES:
        config = BlackwellConfig(
            tile=tile,
            cluster=cluster,
            step_bytes=step_bytes,
            store_columns=math.gcd(tile[1] // problem.sums, widest),
        )
        deepest = _deepest(config, problem, device)
        if deepest is None:
            continue
        for pieces, last in (split[1:],) if split else _ways(deepest, problem, device):
            if pieces == 1:
                for persistence in _persistence(problem, deepest, device):
                    yield dataclasses.replace(deepest, persistence=persistence)
            else:
                yield _cut(deepest, pieces, last, problem, device)


def _deepest(config: BlackwellConfig, problem: Problem, device: Device) -> BlackwellConfig | None:
    """Returns the config with the most stages that fit into shared memory, None if two do not."""
    for stages in range(MOST_STAGES, 1, -1):
        deeper = dataclasses.replace(config, stages=stages)
        if deeper.shared_memory_bytes(problem) <= device.shared_memory:
            return deeper
    return None


def _ways(
    config: BlackwellConfig, problem: Problem, device: Device
) -> Iterator[tuple[int, int | None]]:
    """Yields into how many pieces tiles may be cut, and how many tiles; first, that none are."""
    if problem.parts:
        yield problem.parts, None
        return
    yield 1, None
    if cuts.may_be_cut(problem, device):
        yield from ((pieces, None) for pieces in cuts.pieces(config, problem, device))


def _cut(
    config: BlackwellConfig, pieces: int, last: int | None, problem: Problem, device: Device
) -> BlackwellConfig:
    """Returns the config with the k loop of its tiles cut, or of the last ones."""
    if last is not None:
        return dataclasses.replace(config, split_k=pieces, split_last=last)
    cut = dataclasses.replace(config, split_k=pieces, schedule="online_swizzle:8")
    chunks = cut.tiles(problem) * cut.cluster_size * cut.joined(problem).chunks
    cut = cuts.joined_by_all(cut, problem, chunks, device.sms)
    return _deepest(cut, problem, device) or cut


def _persistence(
    problem: Problem, config: BlackwellConfig, device: Device
) -> tuple[Persistence, ...]:
    """Returns the kinds of persistence that a config may have, the likely better one first."""
    tiles, workers = config.tiles(problem), config.workers(problem, device)
    if tiles <= workers:
        return ("static",)
    multiplied = math.prod(config.tile) * problem.k * problem.a_dtype.itemsize
    long = multiplied >= DYNAMIC_FROM_CYCLES * BYTES_PER_CYCLE
    many = tiles > FEWEST_DYNAMIC_WAVES * workers
    return ("dynamic", "static") if long and many else ("static", "dynamic")
