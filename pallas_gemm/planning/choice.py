"""Which config a kernel gets: the one that is named, a tuned one, or the best by the heuristics."""

import dataclasses
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from pallas_gemm.call import Options, Order
from pallas_gemm.config import GemmConfig
from pallas_gemm.device import Device
from pallas_gemm.planning import heuristics, tables
from pallas_gemm.planning.architectures import Architecture
from pallas_gemm.planning.candidates.draft import finished
from pallas_gemm.problem import Problem
from schedules import Pieces, unsplit

Reasons = tuple[str, ...]

NAMED_GRIDS = 4
"""How many of the grids that an order could have been made for are named."""


class Chosen(NamedTuple):
    """A config, or why there is none, and what a `Plan` says of it besides."""

    config: GemmConfig | Reasons
    source: str
    over_xla: float | None = None


def choose(
    options: Options, problem: Problem, device: Device, architecture: Architecture
) -> Chosen:
    """Chooses the config that is named, tuned or best by the heuristics."""
    if options.config is not None:
        return Chosen(_named_config(options, problem, device, architecture), "argument")
    schedule, simulated = options.schedule, options.implementation == "interpret"
    is_free = schedule is None and not simulated
    if is_free and architecture.tuned and tables.may_be_tuned(problem):
        # A sum of products takes the steps of one product.
        found = tables.find(dataclasses.replace(problem, terms=()), device)
        if found is not None:
            return Chosen(found.entry.config, f"tuned ({found.source})", found.entry.over_xla)
    if simulated:
        # The simulator's time goes with the size of the tiles, and it knows no pairs of CTAs.
        ranked = heuristics.rank(problem, device, architecture, schedule)
        best = min(ranked, key=lambda c: (c.cluster_size, math.prod(c.tile)), default=None)
    else:
        best = heuristics.best(problem, device, architecture, schedule)
    return Chosen(best or _why_no_config(schedule, problem, device, architecture), "heuristics")


def _named_config(
    options: Options, problem: Problem, device: Device, architecture: Architecture
) -> GemmConfig | Reasons:
    config, kind = options.config, architecture.config
    if not isinstance(config, kind):
        return (f"it takes a {kind.__name__}, got a {type(config).__name__}",)
    schedule = options.schedule
    if isinstance(schedule, Pieces):
        if reasons := tuple(config.mismatches(schedule, problem)):
            return reasons
        schedule = unsplit(schedule).tiles
    if schedule is not None:
        config = dataclasses.replace(config, schedule=schedule)
    return config.refusals(problem, device) or config


def _why_no_config(
    schedule: Order,
    problem: Problem,
    device: Device,
    architecture: Architecture,
) -> Reasons:
    """Says what all configs lack, or the one that comes nearest; or which grids an order fits."""
    if schedule is None or isinstance(schedule, Pieces):
        considered = heuristics.considered(problem, device, architecture, schedule)
        refused = [config.refusals(problem, device) for config in considered]
        fewest = min(refused, key=len, default=("no config is considered",))
        if refused or schedule is None:
            shared = (why for why in fewest if all(why in others for others in refused))
            return tuple(shared) or fewest
    grids: dict[tuple[int, int], str] = {}
    for config in heuristics.rank(problem, device, architecture):
        mirrored = " mirrored" if config.as_computed(problem) != problem else ""
        grid = config.stacked_grid(problem)
        grids.setdefault(grid, f"{grid} for{mirrored} tiles of {config.tile}")
    if isinstance(schedule, str):
        return (f"schedule={schedule!r} fits none of the grids {', '.join(grids.values())}",)
    nearest = _nearest(schedule.grid, grids)
    legal = ", ".join(grids[grid] for grid in nearest[:NAMED_GRIDS])
    more = f" and {len(nearest) - NAMED_GRIDS} others" if len(nearest) > NAMED_GRIDS else ""
    other_grid = f"schedule is made for the grid {schedule.grid}; legal are {legal}{more}"
    if not isinstance(schedule, Pieces):
        return (other_grid,)
    cut = finished(architecture.drafts(problem, device, unsplit(schedule)))
    why = {c.stacked_grid(problem): tuple(c.mismatches(schedule, problem)) for c in cut}
    _, *other_steps = min(why.values(), key=len, default=(other_grid,))
    return why.get(schedule.grid, (other_grid, *other_steps))


def _nearest(grid: tuple[int, int], others: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns other grids, those first whose sides differ by the smallest factors."""
    return sorted(others, key=lambda other: np.abs(np.log(np.divide(other, grid))).sum())
