"""WGMMAs that Pallas has none of: of any depth of 16, and of any width of 8."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.mosaic.gpu.mma_utils import Dim, create_descriptor
from jax.experimental.mosaic.gpu.wgmma import wgmma_fence, wgmma_m64

from pallas_gemm.kernels.operand import PANEL
from pallas_gemm.kernels.smem import ATOM_BYTES


def issue(acc: Any, lefts: Sequence[Any], right: Any, depth: int, *, in_flight: bool) -> Any:
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
