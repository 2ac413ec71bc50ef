"""Tiles whose columns are no whole number of the panels that the right operand lies in.

    stored [n, k]   a tile has as many columns as WGMMA takes
    stored [k, n]   columns lie in panels of 64, and a tile of 160 is loaded in three. WGMMA reads
                    half of the last one; Pallas has none that does, so that it is Mosaic's own

Such a sum is no reference of Pallas's. Every step takes its registers and returns them, with a
WGMMA in flight, and nothing else may touch them before `finished`.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels.hopper.config import WGMMA_ROWS
from pallas_gemm.kernels.hopper.cta import Cta
from pallas_gemm.kernels.hopper.groups import group_sums
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.kernels.hopper.ptx import wgmma
from pallas_gemm.kernels.operand import PANEL

LAYOUT = plgpu.Layout.WGMMA


def start(plan: HopperPlan) -> Any:
    """The sum before the first step."""
    zeros = jnp.zeros(plan.config.consumer_tile, plan.problem.accumulator_dtype)
    return zeros if plan.simulated else _fenced(plgpu.layout_cast(zeros, LAYOUT))


def add(cta: Cta, me: Any, slot: Any, total: Any) -> Any:
    """Adds the product of a step to a consumer's sum, in a group of WGMMAs left in flight."""
    plan, a = cta.plan, cta.slots.a.tile
    rows, _ = plan.config.consumer_tile
    first = 0 if plan.config.pingpong else me * rows
    tops = [first + top for top in range(0, rows, WGMMA_ROWS)]
    if plan.a.k_major:
        lefts = [a.at[0, slot, pl.ds(top, WGMMA_ROWS)] for top in tops]
    else:
        lefts = [a.at[0, slot, top // PANEL] for top in tops]
    multiply = _multiply_simulated if plan.simulated else _multiply
    return multiply(plan, total, cta.slots.b.tile.at[0, slot], *lefts)


def finished(plan: HopperPlan, total: Any) -> Any:
    """The sum, when every WGMMA has ended."""
    plgpu.wgmma_wait(0)
    return total if plan.simulated else _fenced(total)


def _fenced(total: Any) -> Any:
    """Keeps the compiler from computing with the sum's registers on the other side."""
    out = plgpu.ShapeDtypeStruct(total.shape, total.dtype, layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=out)
    def emit(_: Any, total: Any) -> Any:
        return fragmented_array.optimization_barrier(total)

    return emit(total)


def _multiply(plan: HopperPlan, total: Any, b: Any, *lefts: Any) -> Any:
    refs = (1 + len(lefts)) * (plgpu.RefType(group_sums.TILED),)
    out = plgpu.ShapeDtypeStruct(total.shape, total.dtype, layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(LAYOUT, *refs), return_type=out)
    def emit(_: Any, total: Any, b: Any, *lefts: Any) -> Any:
        # Panels of [k, 64] columns, in atoms, as one array of [k, n].
        b = utils.memref_transpose(
            utils.memref_slice(b, (slice(None), slice(None), 0)), (1, 0, 2, 3)
        )
        if not plan.a.k_major:
            lefts = tuple(utils.memref_transpose(panel, (1, 0, 3, 2)) for panel in lefts)
        acc = total.to_layout(fragmented_array.WGMMA_LAYOUT_ACC_32BIT)
        return wgmma.issue(acc, lefts, b, plan.tile_k, in_flight=True).to_layout(total.layout)

    return emit(total, b, *lefts)


def _multiply_simulated(plan: HopperPlan, total: Any, b: Any, *lefts: Any) -> Any:
    """Adds the same product: the simulator knows no Mosaic, and WGMMA of a part of a panel."""
    columns = total.shape[1]

    def product(acc: Any) -> Any:
        for top, left in enumerate(lefts):
            a = left if plan.a.k_major else left.transpose((1, 0))
            for number, start in enumerate(range(0, columns, PANEL)):
                width = min(PANEL, columns - start)
                mine = acc.at[pl.ds(top * WGMMA_ROWS, WGMMA_ROWS), pl.ds(start, width)]
                plgpu.wgmma(mine, a, b.at[number, :, pl.ds(0, width)])
        return acc[...]

    return total + pl.run_scoped(product, plgpu.ACC(total.shape, total.dtype))
