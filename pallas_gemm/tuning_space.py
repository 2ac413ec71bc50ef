"""The configs that tuning tries: more than the heuristics consider, fewer than there are.

Nothing runs here. What a kernel refuses is left out, the rest is ranked by what the heuristics
predict, and of each size of tile only a few configs are kept, for predictions are closest to the
truth where two tiles differ, and blind to how a tile is stored.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from pallas_gemm import heuristics
from pallas_gemm.architectures import Architecture
from pallas_gemm.config import STEP_BYTES, GemmConfig
from pallas_gemm.device import Device
from pallas_gemm.hopper_config import MAX_BARRIERS, HopperConfig
from pallas_gemm.problem import Problem

MOST = 16
"""Configs of a problem that are tried, unless the caller says otherwise."""

PER_TILE = 2
"""Configs of one size of tile, besides those that vary the best of all."""

HOPELESS = 1.4
"""How much slower than the best a config may be predicted and still be tried."""

CONSUMERS = {64: 1, 128: 2, 192: 3, 256: 2}
"""Rows of a tile, and the warpgroups that share it."""

TILE_COLUMNS = tuple(range(64, 257, 16))
MOST_STAGES = 12


def configs(
    problem: Problem, device: Device, architecture: Architecture, most: int = MOST
) -> list[GemmConfig]:
    """Returns the configs to try, the heuristics' own choice first.

    Args:
        problem: What is to be computed.
        device: The GPU that it is for.
        architecture: Whose kernel it is.
        most: How many configs are returned at most.
    """
    considered = [choice.config for choice in heuristics.rank(problem, device, architecture)]
    if not considered:
        return []
    more = considered + [
        _fitted(config, problem, device)
        for config in _structures(problem, device)
        if not config.refusals(problem, device)
    ]
    seconds = {config: heuristics.seconds(problem, config, device) for config in more}
    hopeful = [config for config in seconds if seconds[config] <= HOPELESS * min(seconds.values())]
    hopeful.sort(key=lambda config: seconds[config])
    spread = list(_few_of_each_tile([considered[0], *hopeful]))
    varied = list(_variations(spread[0], problem, device))
    # What varies the best one comes to a third, for predictions cannot tell it apart at all.
    room = most - min(len(varied), most // 3)
    return list(dict.fromkeys([*spread[:room], *varied, *spread[room:]]))[:most]


def _structures(problem: Problem, device: Device) -> Iterator[HopperConfig]:
    """Yields a cooperative and a ping-pong config for each tile."""
    if device.compute_capability != (9, 0):
        return
    for rows, cols, pingpong in itertools.product(CONSUMERS, TILE_COLUMNS, (False, True)):
        config = HopperConfig(
            tile=(rows, cols),
            consumers=2 if pingpong else CONSUMERS[rows],
            pingpong=pingpong,
            late_store=False,
            store_columns=min(64, STEP_BYTES // problem.out_dtype.itemsize),
        )
        late = dataclasses.replace(config, late_store=config.allows_late_store(problem))
        # Narrower store slots make room for another stage of the largest tiles.
        narrow = dataclasses.replace(late, store_columns=late.store_columns // 2, late_store=False)
        if deep := _deepest(late, problem, device) or _deepest(narrow, problem, device):
            yield deep


def _deepest(config: HopperConfig, problem: Problem, device: Device) -> HopperConfig | None:
    """Returns the config with as many stages as fit into shared memory, None if three do not."""
    most = min(MOST_STAGES, MAX_BARRIERS // (2 if config.pingpong else 1))
    for stages in range(most, 2, -1):
        deeper = dataclasses.replace(config, stages=stages)
        if deeper.shared_memory_bytes(problem) <= device.shared_memory:
            return deeper
    return None


def _fitted(config: GemmConfig, problem: Problem, device: Device) -> GemmConfig:
    """Returns the config with balanced CTAs and an order that suits its tile."""
    return dataclasses.replace(
        config,
        ctas=heuristics.balanced_ctas(problem, config, device),
        schedule=heuristics.order(problem, config, device),
    )


def _few_of_each_tile(candidates: Iterable[GemmConfig]) -> Iterator[GemmConfig]:
    seen: dict[tuple[int, int], int] = {}
    for config in dict.fromkeys(candidates):
        seen[config.tile] = seen.get(config.tile, 0) + 1
        if seen[config.tile] <= PER_TILE:
            yield config


def _variations(config: GemmConfig, problem: Problem, device: Device) -> Iterator[GemmConfig]:
    """Yields what differs from a config in one thing that the prediction does not see."""
    clusters = ((2, 1), (1, 2))
    shared = (dataclasses.replace(config, cluster=cluster) for cluster in clusters)
    along_rows, along_cols = (
        _fitted(other, problem, device) if not other.refusals(problem, device) else config
        for other in shared
    )
    others = [
        along_rows,
        _with_more_slots(config, problem, device),
        dataclasses.replace(config, persistence="dynamic"),
        dataclasses.replace(config, ctas=None),
        dataclasses.replace(config, schedule="swizzle:8"),
        dataclasses.replace(config, schedule="hilbert"),
        along_cols,
        dataclasses.replace(config, schedule="swizzle:16"),
    ]
    for other in others:
        if other != config and not other.refusals(problem, device):
            yield other


def _with_more_slots(config: GemmConfig, problem: Problem, device: Device) -> GemmConfig:
    """Returns the config with twice the store slots and the stages that then still fit."""
    more = dataclasses.replace(config, store_slots=2 * config.store_slots)
    if not isinstance(more, HopperConfig):
        return more
    return _deepest(more, problem, device) or config
