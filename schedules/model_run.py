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

    Attributes:
        operands: The stripes of A and of B that a tile reads.
        stretches: Stretches along K of every tile.
        first_output: The block of the first output tile; the others follow in visiting order.
        output_size: Size of the output of one tile.
        groups: For each worker, the group of SMs it belongs to.
        dealt: Whether tile t is worker `t % workers`'s own; else the first that is free takes it.
    """

    operands: tuple[Stripes, ...]
    stretches: int
    first_output: int
    output_size: int
    groups: list[int]
    dealt: bool


def simulate(launch: Launch, pace: Pace, cache: SplitCache) -> list[int]:
    """Runs the launch through the cache, whose counters hold the result.

    Each worker is an event in a queue ordered by time: it reads one stretch of both operands, and
    comes back when that stretch is computed.

    Returns:
        For each tile in visiting order, the size of what device memory answered.
    """
    workers, tiles = len(launch.groups), len(pace.tile)
    queue = [(0.0, worker) for worker in range(workers)]
    tile = [worker - workers for worker in range(workers)]
    stretch = [launch.stretches] * workers
    next_free = itertools.count()
    from_memory = [0] * tiles
    while queue:
        now, worker = queue[0]
        if stretch[worker] == launch.stretches:
            if tile[worker] >= 0:
                cache.store(launch.first_output + tile[worker], launch.output_size)
            tile[worker] = tile[worker] + workers if launch.dealt else next(next_free)
            stretch[worker] = 0
            if tile[worker] >= tiles:
                heapq.heappop(queue)
                continue
        current = tile[worker]
        stall = 0.0
        for operand in launch.operands:
            block = operand.first_block[current] + stretch[worker]
            until = now + pace.under_way if operand.joinable else now
            if cache.load(block, operand.size, launch.groups[worker], now, until) == DRAM:
                stall += operand.share * pace.stall
                from_memory[current] += operand.size
        stretch[worker] += 1
        busy = pace.worker[worker] * pace.tile[current] + stall
        heapq.heapreplace(queue, (now + busy / launch.stretches, worker))
    return from_memory
