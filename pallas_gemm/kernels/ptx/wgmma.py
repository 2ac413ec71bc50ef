"""A WGMMA that contracts 16 elements: Pallas has none so short.

It takes the sum in registers and returns it. Both operands lie in atoms. The simulator does not
know Mosaic, but it knows WGMMA of any length.
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
from pallas_gemm.kernels.ptx.operation import Operation, like
from pallas_gemm.kernels.ptx.sums import ACC, LAYOUT, type_of
from pallas_gemm.kernels.smem import ATOM_BYTES
from pallas_gemm.kernels.traced import Values

TILED = smem.tile_transforms(ATOM_BYTES, jnp.bfloat16)
"""How a slot lies in shared memory: atoms of 8 rows of a panel."""


@Operation
def add_part(total: Values, b: Any, panels: Sequence[Any]) -> Any:
    """Adds the product of 16 contracted elements, and waits for it: a WGMMA for each panel."""

    @plgpu.inline_mgpu(
        arg_types=(LAYOUT, *(1 + len(panels)) * (plgpu.RefType(TILED),)), return_type=type_of(total)
    )
    def inline(_: Any, total: Values, b: Any, *panels: Any) -> Any:
        acc = total.to_layout(ACC)
        turned = [utils.memref_transpose(panel, (1, 0, 3, 2)) for panel in panels]
        done = _issue(acc, turned, b)
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


def _issue(acc: Any, lefts: Sequence[Any], right: Any) -> Any:
    """Issues a group of WGMMAs, as Mosaic's `wgmma` does; returns the registers that it adds to.

    Args:
        acc: The sum, in registers as WGMMA has them.
        lefts: The left operands, 64 rows each.
        right: The right operand.
    """
    kind = utils.ir.MemRefType(right.type).element_type
    describe: Callable[..., Any] = functools.partial(create_descriptor, swizzle=ATOM_BYTES)
    (b, (_, b_strides)), _, b_along = describe(
        right, group_size=(WGMMA_DEPTH, PANEL), logical_k_major=True
    )
    acc = wgmma_fence(acc)
    sums = acc.registers.copy()
    for number, left in enumerate(lefts):
        (a, (_, a_strides)), _, a_along = describe(
            left, group_size=(PANEL, WGMMA_DEPTH), logical_k_major=False
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
            swizzle=WGMMA_DEPTH * utils.bytewidth(kind),  # It issues WGMMAs for so many bytes.
            a_element_type=kind,
            b_element_type=kind,
        )
    utils.nvvm.wgmma_commit_group_sync_aligned()
    return like(acc, sums)
