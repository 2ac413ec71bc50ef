"""The run that the model simulates: workers that walk along K and read through the L2."""

import dataclasses
import heapq
import itertools

from schedules.model_cache import DRAM, SplitCache
from schedules.model_pace import Pace


@dataclasses.dataclass(frozen=True)
class Stripes:
    """One operand as the workers read it: a stripe of it for each tile, in stretches along K.

    Attributes:
        first_block: For each tile in visiting order, the block of the first stretch of its stripe.
        size: Size of one block.
        share: Its part of all that a worker reads.
        joinable: Whether a read of it may join a request under way; a multicast does not.
    """

    first_block: list[int]
    size: int
    share: float
    joinable: bool


@dataclasses.dataclass(frozen=True)
class Launch:
    """What runs: tiles in visiting order, workers, and who gets the next tile.

    If tiles are cut along K, it visits their pieces.

    Attributes:
        kernels: How many tiles are visited by each kernel, of those that follow each other.
        operands: The stripes of A and of B that a tile reads.
        stretches: Stretches along K of every tile.
        spans: For each tile visited, its first stretch, and the one after its last.
        first_output: The block of the first output tile; the others follow in visiting order.
        output_sizes: For each tile visited, the size of what is stored.
        joined: For each tile that is cut, the numbers of its pieces.
        joined_size: Size of the output of one of those.
        groups: For each worker, the group of SMs it belongs to.
        dealt: Whether tile t is worker `t % workers`'s own; else the first that is free takes it.
    """

    kernels: tuple[int, ...]
    operands: tuple[Stripes, ...]
    stretches: int
    spans: list[tuple[int, int]]
    first_output: int
    output_sizes: list[int]
    joined: list[list[int]]
    joined_size: int
    groups: list[int]
    dealt: bool


def simulate(launch: Launch, pace: Pace, cache: SplitCache) -> list[int]:
    """Runs the launch through the cache, whose counters hold the result.

    When all tiles are done, what pieces have stored is read once, and stored as the sum that it
    makes.

    Returns:
        For each tile in visiting order, the size of the device memory's answers; for each tile that
        is joined, the size of the sums that the cache did not keep.
    """
    tiles, now = len(pace.tile), 0.0
    from_memory = [0] * (tiles + len(launch.joined))
    for first, last in itertools.pairwise(itertools.accumulate(launch.kernels, initial=0)):
        now = _visit(range(first, last), launch, pace, cache, from_memory, now)
    for place, pieces in enumerate(launch.joined):
        group = launch.groups[place % len(launch.groups)]
        for piece in pieces:
            block, size = launch.first_output + piece, launch.output_sizes[piece]
            if cache.load(block, size, group, now, now) == DRAM:
                from_memory[tiles + place] += size
        cache.store(launch.first_output + tiles + place, launch.joined_size)
    return from_memory


def _visit(
    visited: range,
    launch: Launch,
    pace: Pace,
    cache: SplitCache,
    from_memory: list[int],
    now: float,
) -> float:
    """Runs one kernel from a time on, and returns when it is done.

    Each worker is an event in a queue ordered by time: it reads one stretch of both operands, and
    comes back when that stretch is computed.
    """
    workers, stretches, groups = len(launch.groups), launch.stretches, launch.groups
    # For each operand: its blocks, their size, what a miss costs, and how long others may join.
    operands = [
        (x.first_block, x.size, x.share * pace.stall, pace.under_way if x.joinable else 0.0)
        for x in launch.operands
    ]
    queue = [(now, worker) for worker in range(workers)]
    tile = [visited.start + worker - workers for worker in range(workers)]
    stretch, end = [0] * workers, [0] * workers
    next_free = itertools.count(visited.start)
    while queue:
        now, worker = queue[0]
        if stretch[worker] == end[worker]:
            if tile[worker] >= visited.start:
                cache.store(launch.first_output + tile[worker], launch.output_sizes[tile[worker]])
            tile[worker] = tile[worker] + workers if launch.dealt else next(next_free)
            if tile[worker] >= visited.stop:
                heapq.heappop(queue)
                continue
            stretch[worker], end[worker] = launch.spans[tile[worker]]
        current = tile[worker]
        stall = 0.0
        for first_block, size, wait, under_way in operands:
            block = first_block[current] + stretch[worker]
            if cache.load(block, size, groups[worker], now, now + under_way) == DRAM:
                stall += wait
                from_memory[current] += size
        stretch[worker] += 1
        busy = pace.worker[worker] * pace.tile[current] + stall
        heapq.heapreplace(queue, (now + busy / stretches, worker))
    return now
