"""Sums over groups: what a step loads beyond its group is no part of the sum.

Operands of 16 bits are stored with the contracted elements first, and groups begin and end
anywhere. A group takes `parts` of 16 of each step: loads begin with a row of 8, and end with the
part in which the group ends (`short_step.py`). So the first part and the last one may have elements
of its neighbours, which may be infinite or no numbers at all: zeros are stored in their place, in
both operands, before they are multiplied.

A slot is made of panels, in which a contracted element has a row of 128 bytes. Swizzling changes
places within such a row alone, so that a whole one is zeroed wherever its elements are. Each
consumer zeroes all that it reads: to share what all read, they would have to wait for each other,
which takes longer.

All others are stored with them last: a step begins with a multiple of its length, and columns of a
slot are zeroed.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import work
from pallas_gemm.kernels.hardware import WGMMA_DEPTH, WGMMA_ROWS
from pallas_gemm.kernels.hopper.cta import Cta
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.kernels.ptx.zeros import Rows, zero, zero_columns
from pallas_gemm.kernels.traced import Scalar


def parts(plan: HopperPlan, left: Any) -> Any:
    """How many parts a step takes of a group of which so many elements are left: one at least."""
    reached = lax.div(left + (WGMMA_DEPTH - 1), jnp.int32(WGMMA_DEPTH))
    return jnp.clip(reached, 1, plan.tile_k // WGMMA_DEPTH)


def mask(cta: Cta, me: Scalar, within: tuple[Any, Any], slot: Scalar, k: Scalar) -> None:
    """Zeroes what is multiplied of step k beyond the elements that count.

    These are from the first one of `within` to the one before the second.
    """
    first, end = within
    start = work.aligned(first) + k * cta.plan.tile_k
    rows, last = Rows(first - start, end - start), parts(cta.plan, end - start) - 1
    begins, ends = rows.first > 0, rows.end < (last + 1) * WGMMA_DEPTH
    for is_cut, part in ((begins, jnp.int32(0)), (ends, last)):
        pl.when(is_cut)(functools.partial(_zero_part, cta, me, slot, part, rows))

    pl.when(begins | ends)(functools.partial(_before_it_is_read, cta))


def mask_last(cta: Cta, me: Scalar, within: tuple[Any, Any], slot: Scalar, k: Scalar) -> None:
    """Does the same to operands stored with the contracted elements last.

    Their steps begin with a multiple of their length.
    """
    plan = cta.plan
    start = work.aligned(within[0], plan.tile_k) + k * plan.tile_k
    counts = Rows(within[0] - start, within[1] - start)

    @pl.when((counts.first > 0) | (counts.end < plan.tile_k))
    def _zero() -> None:
        rows = plan.config.consumer_tile[0]
        zero_columns(plan, cta.slots.a.tile.at[0, slot, pl.ds(me * rows, rows)], counts)
        shared = functools.partial(zero_columns, plan, cta.slots.b.tile.at[0, slot], counts)
        pl.when(me == 0)(shared) if plan.simulated else shared()
        _before_it_is_read(cta)


def _before_it_is_read(cta: Cta) -> None:
    """Makes zeros that were stored visible to WGMMAs."""
    plgpu.commit_smem()
    if cta.plan.simulated:
        # It takes zeros that two consumers store for a race, so that one stores them for all.
        plgpu.barrier_arrive(cta.barriers.masked)
        plgpu.barrier_wait(cta.barriers.masked)


def panels_of_a(cta: Cta, me: Scalar, slot: Scalar) -> list[Any]:
    """The panels of the left operand that a consumer reads in a slot."""
    panels = cta.plan.config.consumer_tile[0] // WGMMA_ROWS
    return [cta.slots.a.tile.at[0, slot, me * panels + panel] for panel in range(panels)]


def _zero_part(cta: Cta, me: Scalar, slot: Scalar, part: Any, rows: Rows) -> None:
    """Zeroes, in a part of a step, the rows of both operands that do not count."""
    for panel in panels_of_a(cta, me, slot):
        zero(cta.plan, panel, part, rows)
    shared = functools.partial(zero, cta.plan, cta.slots.b.tile.at[0, slot], part, rows)
    pl.when(me == 0)(shared) if cta.plan.simulated else shared()
