"""WGMMAs that Pallas has none of: of any depth of 16, and of any width of 8.

The sum is carried in registers; both operands lie in atoms. The simulator knows no Mosaic, but
WGMMA of any length.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.mosaic.gpu.mma_utils import Dim, create_descriptor
from jax.experimental.mosaic.gpu.wgmma import wgmma_fence, wgmma_m64
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import smem
from pallas_gemm.kernels.hardware import WGMMA_DEPTH, WGMMA_ROWS
from pallas_gemm.kernels.operand import PANEL
from pallas_gemm.kernels.ptx.operation import Operation
from pallas_gemm.kernels.smem import ATOM_BYTES
from pallas_gemm.kernels.traced import Values

TILED = smem.tile_transforms(ATOM_BYTES, jnp.bfloat16)
"""How a slot lies in shared memory: atoms of 8 rows of a panel."""
LAYOUT = plgpu.Layout.WGMMA


@Operation
def add_step(total: Values, b: Any, lefts: Sequence[Any], *, k_major: bool) -> Any:
    """Adds the product of a step, in a group of WGMMAs left in flight.

    Args:
        total: The sum.
        b: The right operand, in panels of [k, 64], of which the last may be read in part.
        lefts: What its rows are products of, 64 rows each.
        k_major: These are stored [rows, k]; else [k, rows].
    """
    depth = lefts[0].shape[1 if k_major else 0]

    @plgpu.inline_mgpu(
        arg_types=(LAYOUT, *(1 + len(lefts)) * (plgpu.RefType(TILED),)), return_type=_like(total)
    )
    def inline(_: Any, total: Values, b: Any, *lefts: Any) -> Any:
        # Panels of [k, 64] columns, in atoms, as one array of [k, n].
        b = utils.memref_transpose(
            utils.memref_slice(b, (slice(None), slice(None), 0)), (1, 0, 2, 3)
        )
        if not k_major:
            lefts = tuple(utils.memref_transpose(panel, (1, 0, 3, 2)) for panel in lefts)
        acc = total.to_layout(fragmented_array.WGMMA_LAYOUT_ACC_32BIT)
        return _issue(acc, lefts, b, depth, in_flight=True).to_layout(total.layout)

    return inline(total, b, *lefts)


@add_step.meaning
def _(total: Values, b: Any, lefts: Sequence[Any], *, k_major: bool) -> Any:
    columns = total.shape[1]

    def product(acc: Any) -> Any:
        for top, left in enumerate(lefts):
            a = left if k_major else left.transpose((1, 0))
            for number, start in enumerate(range(0, columns, PANEL)):
                width = min(PANEL, columns - start)
                mine = acc.at[pl.ds(top * WGMMA_ROWS, WGMMA_ROWS), pl.ds(start, width)]
                plgpu.wgmma(mine, a, b.at[number, :, pl.ds(0, width)])
        return acc[...]

    return total + pl.run_scoped(product, plgpu.ACC(total.shape, total.dtype))


@Operation
def add_part(total: Values, b: Any, panels: Sequence[Any]) -> Any:
    """Adds the product of 16 contracted elements, and waits for it: a WGMMA for each panel."""

    @plgpu.inline_mgpu(
        arg_types=(LAYOUT, *(1 + len(panels)) * (plgpu.RefType(TILED),)), return_type=_like(total)
    )
    def inline(_: Any, total: Values, b: Any, *panels: Any) -> Any:
        acc = total.to_layout(fragmented_array.WGMMA_LAYOUT_ACC_32BIT)
        turned = [utils.memref_transpose(panel, (1, 0, 3, 2)) for panel in panels]
        done = _issue(acc, turned, b, WGMMA_DEPTH, in_flight=False)
        utils.nvvm.wgmma_wait_group_sync_aligned(0)
        return fragmented_array.optimization_barrier(done).to_layout(total.layout)

    return inline(total, b, *panels)


@add_part.meaning
def _(total: Values, b: Any, panels: Sequence[Any]) -> Any:
    def product(acc: Any) -> Any:
        for number, panel in enumerate(panels):
            mine = acc.at[pl.ds(number * WGMMA_ROWS, WGMMA_ROWS)] if len(panels) > 1 else acc
            plgpu.wgmma(mine, panel.transpose((1, 0)), b)
        return acc[...]

    return total + pl.run_scoped(product, plgpu.ACC(total.shape, total.dtype))


def _like(total: Values) -> Any:
    return plgpu.ShapeDtypeStruct(total.shape, total.dtype, layout=LAYOUT)


def _issue(acc: Any, lefts: Sequence[Any], right: Any, depth: int, *, in_flight: bool) -> Any:
    """Issues a group of WGMMAs, as Mosaic's `wgmma` does; returns the registers that it adds to.

    Args:
        acc: The sum, in registers as WGMMA has them; its width says how much of `right` is read.
        lefts: What its rows are products of, 64 rows each.
        right: The right operand.
        depth: Contracted elements.
        in_flight: The sum is that of WGMMAs which may not have ended.
    """
    kind = utils.ir.MemRefType(right.type).element_type
    describe: Callable[..., Any] = functools.partial(create_descriptor, swizzle=ATOM_BYTES)
    (b, (_, b_strides)), _, b_along = describe(
        right, group_size=(depth, PANEL), logical_k_major=True
    )
    if in_flight:
        utils.nvvm.wgmma_fence_aligned()
    else:
        acc = wgmma_fence(acc)
    sums = acc.registers.copy()
    for number, left in enumerate(lefts):
        (a, (_, a_strides)), _, a_along = describe(
            left, group_size=(PANEL, depth), logical_k_major=False
        )
        sums[number : number + 1] = wgmma_m64(
            sums[number : number + 1],
            a,
            b,
            a_transpose=a_along != Dim.K,
            b_transpose=b_along != Dim.K,
            a_k_stride=a_strides[-1],
            b_k_stride=b_strides[-1],
            n=acc.shape[1],
            swizzle=depth * utils.bytewidth(kind),  # It issues WGMMAs for so many bytes.
            a_element_type=kind,
            b_element_type=kind,
        )
    utils.nvvm.wgmma_commit_group_sync_aligned()
    return fragmented_array.FragmentedArray(_registers=sums, _layout=acc.layout, _is_signed=None)
