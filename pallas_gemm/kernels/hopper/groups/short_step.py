"""The last step of a sum over a group, of which only what the group reaches into is multiplied.

    a step     has 64 contracted elements: 4 parts of 16, which is what one WGMMA contracts
    a whole    reaches into the last part; Pallas multiplies it, of which no WGMMA is shorter
    one
    a short    is loaded up to the part in which the group ends. When the others are done, it is
    one        added to their sum in registers, part by part

Only the last step of a group can be short, so that a group has one at most, and may have no other.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import work
from pallas_gemm.kernels.hardware import WGMMA_DEPTH
from pallas_gemm.kernels.hopper import ring
from pallas_gemm.kernels.hopper.cta import Cta
from pallas_gemm.kernels.hopper.dense.multiply import Mask
from pallas_gemm.kernels.hopper.groups import group_sums
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.kernels.ptx import wgmma
from pallas_gemm.kernels.traced import Scalar, Values


class Divided(NamedTuple):
    """The steps of a piece.

    Attributes:
        whole: How many are whole.
        parts: The parts that the short one has; 0 without one.
    """

    whole: Any
    parts: Any


def divided(plan: HopperPlan, piece: work.Piece) -> Divided:
    """Tells the whole steps of a piece from the short one."""
    before = piece.steps - 1
    left = piece.end_k - work.aligned(piece.first_k) - before * plan.tile_k
    parts = group_sums.parts(plan, left)
    is_short = parts < plan.tile_k // WGMMA_DEPTH
    return Divided(
        lax.select(is_short, before, piece.steps), lax.select(is_short, parts, jnp.int32(0))
    )


def add(cta: Cta, me: Scalar, steps: Divided, mask: Mask, done: tuple[Any, Any]) -> tuple[Any, Any]:
    """Adds the short step, if there is one, to the sum of the whole ones.

    Takes and returns this sum, and the slot of the last step.
    """
    total, slot = done
    is_short = steps.parts > 0
    slot = lax.select(is_short & (steps.whole > 0), ring.following(cta.plan, slot), slot)

    @pl.when(is_short)
    def _await() -> None:
        plgpu.barrier_wait(cta.barriers.full.at[slot])
        mask(slot, steps.whole)

    def one_part(part: Any, total: Values) -> Any:
        deep = pl.ds(part * WGMMA_DEPTH, WGMMA_DEPTH)
        a = [panel.at[deep] for panel in group_sums.panels_of_a(cta, me, slot)]
        return wgmma.add_part(cta.plan, total, cta.slots.b.tile.at[0, slot, deep], a)

    total = lax.fori_loop(0, steps.parts, one_part, total)

    @pl.when(is_short)
    def _release() -> None:
        plgpu.barrier_arrive(cta.barriers.empty.at[slot])

    return total, slot
