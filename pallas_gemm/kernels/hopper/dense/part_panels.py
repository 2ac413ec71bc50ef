"""Tiles whose columns are no whole number of the panels that the right operand lies in.

    stored [n, k]   a tile has as many columns as WGMMA takes
    stored [k, n]   columns lie in panels of 64, and a tile of 160 is loaded in three. WGMMA reads
                    half of the last one; Pallas has none that does (`ptx/wgmma.py`)

Such a sum is no reference of Pallas's. Every step takes its registers and returns them, with a
WGMMA in flight, and nothing else may touch them before `finished`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels.hardware import WGMMA_ROWS
from pallas_gemm.kernels.hopper.cta import Cta
from pallas_gemm.kernels.operand import PANEL
from pallas_gemm.kernels.ptx import arrays, wgmma
from pallas_gemm.kernels.traced import Scalar, Values

LAYOUT = plgpu.Layout.WGMMA


class Carried(NamedTuple):
    """A sum that is carried from step to step: see `multiply.Sum`."""

    cta: Cta
    me: Scalar
    before: Values | None = None

    def start(self) -> Any:
        """The sum before the first step: what was summed up before, or zeros."""
        plan, total = self.cta.plan, self.before
        if total is None:
            zeros = jnp.zeros(plan.config.consumer_tile, plan.problem.accumulator_dtype)
            total = arrays.in_registers(plan, zeros, LAYOUT)
        return arrays.fenced(plan, total, LAYOUT)

    def add(self, slot: Scalar, total: Values) -> Any:
        """Adds the product of a step to a consumer's sum, in a group of WGMMAs left in flight."""
        plan, a = self.cta.plan, self.cta.slots.a.tile
        rows, _ = plan.config.consumer_tile
        first = 0 if plan.config.pingpong else self.me * rows
        tops = [first + top for top in range(0, rows, WGMMA_ROWS)]
        if plan.a.k_major:
            lefts = [a.at[0, slot, pl.ds(top, WGMMA_ROWS)] for top in tops]
        else:
            lefts = [a.at[0, slot, top // PANEL] for top in tops]
        b = self.cta.slots.b.tile.at[0, slot]
        return wgmma.add_step(plan, total, b, lefts, k_major=plan.a.k_major)

    def finished(self, total: Values) -> Any:
        """The sum, when every WGMMA has ended."""
        plgpu.wgmma_wait(0)
        return arrays.fenced(self.cta.plan, total, LAYOUT)
