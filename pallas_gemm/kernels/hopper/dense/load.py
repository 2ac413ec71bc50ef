"""The loads of the Hopper kernel's producer in one step of the k loop."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import launch, place, smem
from pallas_gemm.kernels.hopper.cta import Cta
from pallas_gemm.kernels.operand import PANEL, OperandPlan
from pallas_gemm.kernels.smem import ATOM_ROWS
from pallas_gemm.kernels.traced import Scalar


class Target(NamedTuple):
    """The slot that the loads of one step fill, and the elements that fill it.

    Attributes:
        batch: Which product of the batch; None without one.
        k_start: The first contracted element.
        slot: The slot of the ring.
        full: The barrier that the loads complete.
        depth: How many contracted elements.
    """

    batch: Any
    k_start: Any
    slot: Scalar
    full: Any
    depth: int


def step(cta: Cta, factors: launch.Factors, at: place.Where, target: Target) -> None:
    """Starts the loads of one step."""
    plan = cta.plan
    load_left = functools.partial(
        _load, plan.a, cta.slots.a, target, ends_anywhere=at.end is not None
    )
    cta.rows.load(factors.a, at, load_left)
    for part, b in enumerate(factors.b):
        _load(plan.b, cta.slots.b, target, b, at.col, part=part)


def _load(
    operand: OperandPlan,
    slots: smem.Boxed,
    target: Target,
    whole: Any,
    start: Any,
    *,
    part: int = 0,
    ends_anywhere: bool = False,
) -> None:
    """Starts to load a tile of an operand.

    Args:
        operand: How it is loaded.
        slots: Where to.
        target: The step.
        whole: The operand.
        start: The first row or column of the tile.
        part: Which of several right operands it is.
        ends_anywhere: The rows of the tile that count may end at any.
    """
    batch, k_start, slot, full, depth = target
    along, deep = pl.ds(start, operand.tile), pl.ds(k_start, depth)
    first, matrix = pl.ds(0, depth), place.matrix(whole, batch)
    copy = functools.partial(plgpu.copy_gmem_to_smem, collective_axes=operand.multicast_axis)
    if operand.k_major:
        # Whole tiles of a group: what is past its last row is another group's, or beyond the edge.
        end = operand.tile if ends_anywhere else matrix.shape[0]
        for rows, are_there in _rows(operand, end, start):
            box = slots.box.at[part, slot, pl.ds(0, rows)]
            load = functools.partial(copy, matrix.at[pl.ds(start, rows), deep], box, full)
            load() if are_there is None else pl.when(are_there)(load)
    elif not operand.paneled:
        copy(matrix.at[deep, along], slots.box.at[part, slot, first], full)
    else:
        for panel in range(operand.tile // PANEL):
            columns = pl.ds(start + panel * PANEL, PANEL)
            copy(matrix.at[deep, columns], slots.box.at[part, slot, panel, first], full)


def _rows(operand: OperandPlan, end: int, start: Any) -> Iterator[tuple[int, Any]]:
    """Yields (how many rows of a tile to load, on what condition): of the last, those there are.

    TMA would fill up the tile with zeros, and that takes long: 146 x 6784 x 14784 in mirrored tiles
    of 64 x 256 takes 149 us on an H200 with them, and 79 us without. The slot holds other elements
    in their place. They get into rows and columns of the sums that are never stored.
    """
    tile, last = operand.tile, -(-(end % operand.tile) // ATOM_ROWS) * ATOM_ROWS
    if not last or operand.multicast_axis is not None:
        yield tile, None
    elif end < tile:
        yield last, None
    else:
        yield tile, start + tile <= end
        yield last, start + tile > end
