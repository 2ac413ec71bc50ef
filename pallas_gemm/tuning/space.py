"""The configs that tuning tries: more than the heuristics consider, fewer than there are.

Nothing runs here. Configs that a kernel refuses are left out, and those that the heuristics predict
to be much slower. Half of the rest are the best of different tiles, because predictions can tell
these apart. The other half are configs that they cannot tell apart: other modes of these tiles, and
the heuristics' choice with another order, cluster, kind of persistence or store.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from pallas_gemm.config import STEP_BYTES, GemmConfig
from pallas_gemm.device import Device
from pallas_gemm.kernels.blackwell.config import BlackwellConfig
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.planning import heuristics, prediction
from pallas_gemm.planning.architectures import Architecture
from pallas_gemm.planning.candidates.hopper import FEWEST_STAGES, deepest
from pallas_gemm.planning.candidates.hopper_tiles import CONSUMERS
from pallas_gemm.problem import Problem

MOST = 12
"""Configs of a problem that are tried, unless the caller says otherwise."""

HOPELESS = 1.3
"""How much slower than the best a config may be predicted and still be tried."""

TILE_COLUMNS = tuple(range(64, 257, 16))


def configs(
    problem: Problem, device: Device, architecture: Architecture, most: int = MOST
) -> list[GemmConfig]:
    """Returns the configs to try, the heuristics' own choice first.

    Args:
        problem: The product to compute.
        device: The GPU that it is for.
        architecture: The architecture of the kernel.
        most: How many configs are returned at most.
    """
    considered = list(heuristics.rank(problem, device, architecture))
    if not considered:
        return []
    first = considered[0]
    more = considered + [
        heuristics.fitted(problem, config, device)
        for config in _structures(first, problem, device)
        if not config.refusals(problem, device)
    ]
    seconds = {config: prediction.seconds(problem, config, device, architecture) for config in more}
    hopeful = [config for config in seconds if seconds[config] <= HOPELESS * min(seconds.values())]
    hopeful.sort(key=lambda config: seconds[config])
    tiles, modes = _split_by_tile([first, *hopeful])
    wholes = (config for config in considered if config.split_k == 1)
    whole = first if first.split_last is None else next(wholes, first)
    varied = [*_other_parts(first, problem, device), *_variations(whole, problem, device)]
    shares = (1 + most * 5 // 12, most * 2 // 12, most * 4 // 12)
    parts = (tiles, _other_modes_first(first, modes), varied)
    kept = [config for part, share in zip(parts, shares, strict=True) for config in part[:share]]
    left = [config for part, share in zip(parts, shares, strict=True) for config in part[share:]]
    return list(dict.fromkeys([*kept, *left]))[:most]


def _structures(first: GemmConfig, problem: Problem, device: Device) -> Iterator[HopperConfig]:
    """Yields, where the kernel is Hopper's, each tile as it is, mirrored, and in ping-pong."""
    if not isinstance(first, HopperConfig):
        return
    modes = ((False, False), (True, False), (False, True))
    for rows, cols, (mirrored, pingpong) in itertools.product(
        sorted(CONSUMERS), TILE_COLUMNS, modes
    ):
        try:
            config = HopperConfig(
                tile=(rows, cols),
                consumers=2 if pingpong else CONSUMERS[rows],
                pingpong=pingpong,
                mirrored=mirrored,
                late_store=False,
                store_columns=min(64, STEP_BYTES // problem.out_dtype.itemsize),
            )
        except ValueError:
            # Too large for the registers of its consumers.
            continue
        if config.tiles(problem) <= device.sms and not problem.symmetric:
            # A tile for each CTA: a table would only be waited for.
            config = dataclasses.replace(config, schedule="online_swizzle:8")
        late = config.allows_late_store(config.as_computed(problem))
        stored_late = dataclasses.replace(config, late_store=late)
        # Narrower store slots make room for another stage of the largest tiles.
        narrow = dataclasses.replace(config, store_columns=config.store_columns // 2)
        either = (deepest(each, problem, device, FEWEST_STAGES) for each in (stored_late, narrow))
        if deep := next(filter(None, either), None):
            yield deep


def _split_by_tile(
    candidates: Iterable[GemmConfig],
) -> tuple[list[GemmConfig], list[GemmConfig]]:
    """Returns the first config of each tile, and the others."""
    tiles: dict[tuple[int, int], GemmConfig] = {}
    others = [
        config
        for config in dict.fromkeys(candidates)
        if tiles.setdefault(config.tile, config) is not config
    ]
    return list(tiles.values()), others


def _other_modes_first(first: GemmConfig, configs: Iterable[GemmConfig]) -> list[GemmConfig]:
    """Returns configs with the first of each mode that is not that of `first` in front."""

    def mode(config: GemmConfig) -> tuple[Any, ...]:
        return tuple(getattr(config, field, None) for field in ("mirrored", "pingpong"))

    firsts: dict[tuple[Any, ...], GemmConfig] = {mode(first): first}
    rest = [c for c in configs if firsts.setdefault(mode(c), c) is not c]
    return [*list(firsts.values())[1:], *rest]


def _other_parts(config: GemmConfig, problem: Problem, device: Device) -> Iterator[GemmConfig]:
    """Yields the config with half and with twice its pieces along k, if it is cut."""
    for parts in (config.split_k // 2, 2 * config.split_k) if config.split_k > 1 else ():
        other = _changed(config, split_k=parts, ctas=config.ctas if config.split_last else None)
        if other != config and not other.refusals(problem, device):
            yield other


def _variations(config: GemmConfig, problem: Problem, device: Device) -> Iterator[GemmConfig]:
    """Yields configs that differ in one field whose effect the prediction does not see."""
    clusters = ((2, 1), (1, 2))
    # How many CTAs there are is found anew: those of one cluster may be too few for another.
    shared = (_changed(config, cluster=cluster, ctas=None) for cluster in clusters)
    along_rows, along_cols = (
        heuristics.fitted(problem, other, device) if not other.refusals(problem, device) else config
        for other in shared
    )
    tabled = [_changed(config, schedule=name) for name in ("swizzle:8", "hilbert", "raster")]
    others = [
        along_rows,
        _with_more_slots(config, problem, device),
        _changed(config, persistence="static" if config.persistence == "dynamic" else "dynamic"),
        _dealt_by_die(config, problem, device),
        tabled[0],
        _changed(config, ctas=None),
        along_cols,
        *tabled[1:],
    ]
    same = _changed(config, ctas=None)
    if same.workers(problem, device) == config.workers(problem, device):
        others.remove(same)
    for other in others:
        if other != config and not other.refusals(problem, device):
            yield other


def _dealt_by_die(config: GemmConfig, problem: Problem, device: Device) -> GemmConfig:
    """Returns a Blackwell config in which each die has a run of tiles, and others as they are.

    Only tiles that are dealt can have such an order: launch control hands out one sequence to both.
    """
    dies, order = device.machine.l2_partitions, config.schedule
    if not isinstance(config, BlackwellConfig) or not isinstance(order, str) or config.is_online:
        return config
    # All tiles of a worker are of one die only if each die has as many workers.
    workers = config.workers(problem, device) // dies * dies
    changes = {"ctas": workers * config.cluster_size, "schedule": f"by_die:{dies}:{order}"}
    return _changed(config, persistence="static", **changes)


def _changed(config: GemmConfig, **changes: Any) -> GemmConfig:
    """Returns the config with changes, as it is where its architecture has no such config."""
    try:
        return dataclasses.replace(config, **changes)
    except ValueError:
        return config


def _with_more_slots(config: GemmConfig, problem: Problem, device: Device) -> GemmConfig:
    """Returns the config with twice the store slots and the stages that then still fit."""
    more = dataclasses.replace(config, store_slots=2 * config.store_slots)
    if not isinstance(more, HopperConfig):
        return more
    return deepest(more, problem, device, FEWEST_STAGES) or config
