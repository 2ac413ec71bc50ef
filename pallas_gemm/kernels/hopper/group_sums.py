"""Sums over groups: what a step loads beyond its group is no part of the sum.

Both operands are stored with the contracted elements first, and groups begin and end anywhere. So
the first and the last step of a group may load elements of its neighbours, which may be infinite or
no numbers at all: zeros are stored in their place, in both operands, before they are multiplied.

Consumers take turns at the columns of the right operand, and wait for each other.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import work
from pallas_gemm.kernels.hopper.config import WGMMA_ROWS
from pallas_gemm.kernels.hopper.cta import Cta
from pallas_gemm.kernels.operand import PANEL


def mask(cta: Cta, me: Any, slot: Any, k: Any, within: tuple[Any, Any]) -> None:
    """Zeroes what a slot holds of step k beyond the elements that count."""
    first, end = within
    if first is None:
        return
    plan, tile_k = cta.plan, cta.plan.tile_k
    start = work.aligned(first) + k * tile_k

    @pl.when((start < first) | (end < start + tile_k))
    def _mask() -> None:
        panels = plan.config.consumer_tile[0] // WGMMA_ROWS
        for panel in range(panels):
            _zero(cta.slots.a.tile.at[0, slot, me * panels + panel], first - start, end - start)
        right = cta.slots.b.tile.at[0, slot]
        for panel in range(plan.b.tile // PANEL):
            part = right.at[:, pl.ds(panel * PANEL, PANEL)]

            @pl.when(me == panel % plan.config.consumers)
            def _mine(part: Any = part) -> None:
                _zero(part, first - start, end - start)

        plgpu.commit_smem()
        plgpu.barrier_arrive(cta.barriers.masked)
        plgpu.barrier_wait(cta.barriers.masked)


def _zero(ref: Any, first: Any, end: Any) -> None:
    """Zeroes the rows of a part of a slot before `first`, and from `end` on."""
    values = plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)
    row = plgpu.broadcasted_iota(jnp.int32, ref.shape, 0, layout=plgpu.Layout.WGMMA)
    ref[...] = jnp.where((row >= first) & (row < end), values, jnp.zeros_like(values))
