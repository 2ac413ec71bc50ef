"""What the producer of the Hopper kernel loads in one step of the k loop."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import launch, place, smem
from pallas_gemm.kernels.hopper.cta import Cta
from pallas_gemm.kernels.operand import PANEL, OperandPlan
from pallas_gemm.kernels.smem import ATOM_ROWS


class Target(NamedTuple):
    """What the loads of one step fill, and with what.

    Attributes:
        batch: Which product of the batch; None without one.
        k_start: The first contracted element.
        slot: The slot of the ring.
        full: The barrier that the loads complete.
        depth: How many contracted elements.
    """

    batch: Any
    k_start: Any
    slot: Any
    full: Any
    depth: int


def step(cta: Cta, factors: launch.Factors, at: place.Where, target: Target) -> None:
    """Starts the loads of one step."""
    plan = cta.plan

    def load_left(a: Any, row: Any) -> None:
        _load(plan.a, (a,), cta.slots.a, row, target, ends_anywhere=at.end is not None)

    cta.rows.load(factors.a, at, load_left)
    _load(plan.b, factors.b, cta.slots.b, at.col, target)


def _load(
    operand: OperandPlan,
    gmem: Sequence[Any],
    slots: smem.Boxed,
    start: Any,
    target: Target,
    *,
    ends_anywhere: bool = False,
) -> None:
    batch, k_start, slot, full, depth = target
    along, deep = pl.ds(start, operand.tile), pl.ds(k_start, depth)
    first = pl.ds(0, depth)
    copy = functools.partial(plgpu.copy_gmem_to_smem, collective_axes=operand.multicast_axis)
    for part, whole in enumerate(gmem):
        matrix = place.matrix(whole, batch)
        if operand.k_major:

            def load_rows(rows: int, matrix: Any = matrix, part: int = part) -> None:
                box = slots.box.at[part, slot, pl.ds(0, rows)]
                copy(matrix.at[pl.ds(start, rows), deep], box, full)

            if ends_anywhere:
                load_rows(operand.tile)
            else:
                _for_rows_that_are_there(operand, matrix.shape[0], start, load_rows)
        elif not operand.paneled:
            copy(matrix.at[deep, along], slots.box.at[part, slot, first], full)
        else:
            for panel in range(operand.tile // PANEL):
                first_column = start + panel * PANEL
                if operand.rounded_up:
                    # TMA would fill a panel beyond the edge with zeros, and that takes long.
                    is_there = first_column < matrix.shape[1]
                    first_column = lax.select(is_there, first_column, start)
                columns = pl.ds(first_column, PANEL)
                copy(matrix.at[deep, columns], slots.box.at[part, slot, panel, first], full)


def _for_rows_that_are_there(
    operand: OperandPlan, rows: int, start: Any, load: Callable[[int], None]
) -> None:
    """Loads a tile by `load(how many rows)`: of the last tile, only those that there are.

    TMA would fill up the tile with zeros, and that takes long: 146 x 6784 x 14784 in mirrored tiles
    of 64 x 256 takes 149 us on an H200 with them, and 79 us without. What the slot holds in their
    place gets into rows and columns of the sums that are never stored.
    """
    last = -(-(rows % operand.tile) // ATOM_ROWS) * ATOM_ROWS
    if not last or operand.multicast_axis is not None:
        load(operand.tile)
    elif rows < operand.tile:
        load(last)
    else:
        pl.when(start + operand.tile <= rows)(lambda: load(operand.tile))
        pl.when(start + operand.tile > rows)(lambda: load(last))
