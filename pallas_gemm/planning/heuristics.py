"""Which config computes a problem: enumerate, fit, score in seconds, pick the fastest legal one."""

import dataclasses
import functools
import heapq
import math
from collections.abc import Iterator
from typing import Any

from pallas_gemm.call import Order
from pallas_gemm.config import GemmConfig
from pallas_gemm.device import Device
from pallas_gemm.planning import bands
from pallas_gemm.planning.architectures import Architecture
from pallas_gemm.planning.candidates import cuts
from pallas_gemm.planning.candidates.draft import Draft, complete, finished
from pallas_gemm.planning.prediction import seconds
from pallas_gemm.problem import Problem
from schedules import OnlineSchedule, Pieces, Schedule, unsplit
from schedules.spec import ONLINE

FULL_WAVES = 0.96
"""At least this share of the clusters that fit is launched for waves to be full."""
LEAST_GAIN = 1.1
"""How much faster tiles must be predicted to be cut along k than whole: small tiles with a long k
are predicted to take up to 20% too long. On an H200, 1024 x 1024 x 32768 takes 91.9 us cut and 90.1
us whole, where 90.8 and 98.5 are predicted."""
LEAST_GAIN_IN_BLOCKS = 1.4
"""The same where blocks have scales. On an H200, 64 x 7168 x 18432 takes 37.9 us whole in 64 x 64.
In 4 pieces of 64 x 256, it takes 42.7 us, and 35 are predicted. In 2 of 64 x 128, it takes
49.5 us, and 34 are predicted.
"""
SECOND_KERNEL_SECONDS = 0.5e-6
"""What it takes to begin the kernel that joins, beside its own time: on an H200 1.2 us in a stream,
nothing in a CUDA graph. Six products of 2 to 38 rows that are cut without it take 1% longer whole,
as the sum of kernels, and in a stream 10% less."""
MORE_KERNELS_SECONDS = 4e-6
"""The same of two more kernels, where the last tiles are cut. Without it, the choice for 56
products of 60 us to 3 ms on an H200 is 0.6% slower. With half of it, it is as fast."""
UNTRIED_GAIN = 1.03
"""How much faster a tile must be predicted than the article's, where nobody has measured any. At
4096 cubed on a B200, 256 x 192 by a pair is predicted to take 93.1 us. 256 x 256 is predicted to
take 94.9, and took 90.0 in the article."""
WRITTEN = 128
"""Operations for each byte of the result, up to which it takes longest to write it."""


def rank(
    problem: Problem,
    device: Device,
    architecture: Architecture,
    schedule: Order = None,
) -> tuple[GemmConfig, ...]:
    """Returns every legal candidate for a problem, fastest first.

    Args:
        problem: The product.
        device: The GPU that it is for.
        architecture: The architecture of the kernel.
        schedule: The order of tiles or of pieces; None for the one that suits each candidate.
    """
    return tuple(_legal(problem, device, architecture, schedule))


@functools.lru_cache(maxsize=4096)
def best(
    problem: Problem,
    device: Device,
    architecture: Architecture,
    schedule: Order = None,
) -> GemmConfig | None:
    """Returns the first of `rank`, None if there is none."""
    return next(_legal(problem, device, architecture, schedule), None)


def _legal(
    problem: Problem,
    device: Device,
    architecture: Architecture,
    schedule: Order,
) -> Iterator[GemmConfig]:
    """Yields legal candidates, fastest first.

    To say what one takes at least is quicker than to finish it, which is done where it may be next.
    To score one is quicker than to check it.
    """
    heap: list[tuple[float, bool, int, Any]] = [
        (score(problem, draft.config, device, architecture, at_least=True), False, place, draft)
        for place, draft in enumerate(_drafts(problem, device, architecture, schedule))
    ]
    heapq.heapify(heap)
    while heap:
        _, is_finished, place, own = heapq.heappop(heap)
        if is_finished:
            if own.takes(problem, device):
                yield own
        elif (config := own.finish()) is not None:
            config = fitted(problem, config, device, schedule)
            predicted = score(problem, config, device, architecture)
            heapq.heappush(heap, (predicted, True, place, config))


def considered(
    problem: Problem, device: Device, architecture: Architecture, schedule: Order = None
) -> Iterator[GemmConfig]:
    """Yields every candidate, legal or not, with the order that is given."""
    return finished(_drafts(problem, device, architecture, schedule))


def _drafts(
    problem: Problem, device: Device, architecture: Architecture, schedule: Order
) -> Iterator[Draft[GemmConfig]]:
    """Yields every candidate, legal or not, with the order that is given.

    Where that is one of pieces: those alone of whose tiles these are the pieces.
    """
    if schedule is None:
        return iter(architecture.drafts(problem, device))
    return complete(_reordered)(problem, device, architecture, schedule)


def _reordered(
    problem: Problem,
    device: Device,
    architecture: Architecture,
    schedule: str | Schedule | OnlineSchedule | Pieces,
) -> Iterator[GemmConfig]:
    if isinstance(schedule, Pieces):
        split = unsplit(schedule)
        for config in finished(architecture.drafts(problem, device, split)):
            if not any(config.mismatches(schedule, problem)):
                yield config.reordered(split.tiles)
    else:
        for config in finished(architecture.drafts(problem, device)):
            yield config.reordered(schedule)


def score(
    problem: Problem,
    config: GemmConfig,
    device: Device,
    architecture: Architecture,
    *,
    at_least: bool = False,
) -> float:
    """Returns what configs are ranked by: the predicted time, or more where that is in doubt.

    Args:
        problem: The product.
        config: The config.
        device: The GPU that it is for.
        architecture: The architecture of the kernel.
        at_least: Returns no more than with any stages, CTAs and order.
    """
    predicted, doubt = seconds(problem, config, device, architecture, at_least=at_least), 1.0
    if config.cuts_all_tiles and min(problem.m, problem.n) >= cuts.FEW_ROWS:
        doubt = LEAST_GAIN_IN_BLOCKS if problem.blocks else LEAST_GAIN
    elif config.cuts_all_tiles:
        predicted += SECOND_KERNEL_SECONDS
    if config.split_last:
        predicted += MORE_KERNELS_SECONDS
    usual = architecture.config
    if architecture.needs_proof and (config.tile, config.cluster) != (usual.tile, usual.cluster):
        doubt *= UNTRIED_GAIN
    return predicted * doubt


def fitted(
    problem: Problem,
    config: GemmConfig,
    device: Device,
    schedule: Order = None,
) -> GemmConfig:
    """Returns the config with balanced CTAs and, unless it is given, the order that suits it."""
    if config.OWN_ORDER:
        return config
    config = dataclasses.replace(config, ctas=balanced_ctas(problem, config, device))
    if schedule is not None:
        return config
    kind = ONLINE if config.is_online else ""
    return dataclasses.replace(config, schedule=kind + bands.order(problem, config, device))


def balanced_ctas(problem: Problem, config: GemmConfig, device: Device) -> int:
    """Returns how many CTAs it takes for as few waves as possible: more would only draw power.

    A few less that make all waves full are better still: bands then begin where waves do. But all
    of them write a result faster than some: 32 products of 2048 x 2048 x 128 take 84 us on an H200
    with 132 CTAs, and 88 us with 128. Nor do tiles in turns begin together: 8192 x 8192 x 1024 with
    a residual takes 203 us with 132, and 207 with 128.
    """
    tiles = config.pieces(problem)
    most = device.coresident_clusters(config.cluster_size)
    if config.split_last is not None:
        # The waves of whole tiles are full, and pieces are as many as fill the last one.
        return most * config.cluster_size
    if problem.in_groups:
        # How many tiles there are, or how long they are, is known when the kernel starts.
        return min(tiles, most) * config.cluster_size
    is_written = 2 * problem.k * problem.sums <= WRITTEN * problem.out_dtype.itemsize
    in_turns = config.overlap == "turns" and not problem.symmetric
    if tiles > most and (is_written or in_turns):
        return most * config.cluster_size
    waves = math.ceil(tiles / most)
    fewest = math.ceil(FULL_WAVES * most)
    full = next((size for size in range(most, fewest, -1) if tiles % size == 0), None)
    return (full or math.ceil(tiles / waves)) * config.cluster_size
