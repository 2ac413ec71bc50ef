"""Results whose rows TMA cannot store, because their length is no multiple of 16 bytes.

The threads of a consumer store them instead. A finished chunk lies in shared memory line by line: a
*line* is a row of the result as it is stored. Each line is a little apart from the next, so that
threads that write down a column of it meet in no bank. From there it goes to global memory in
*strips*, a few lines high, in which neighbouring threads take neighbouring elements.

Nothing is masked. A chunk at the last line is stored in whole strips and then in single lines. A
chunk at the end of the lines is stored in two strips of a power of two columns. They may overlap,
and then store the same values twice.
"""

import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array

from pallas_gemm.kernels.hardware import LANES, WARPS
from pallas_gemm.kernels.plan import KernelPlan
from pallas_gemm.kernels.ptx import arrays
from pallas_gemm.kernels.traced import Ref, Scalar
from pallas_gemm.problem import ROW_BYTES

STRIP_LINES = 8
"""Lines of a strip: it takes a register of each thread for every 128 elements."""


def store(
    plan: KernelPlan, source: Ref, target: Ref, first: tuple[Scalar, Scalar], clipped: int
) -> None:
    """Stores a chunk, without what lies beyond the edges of the result.

    Args:
        plan: The plan of the kernel.
        source: The chunk in shared memory, `[lines, length]`.
        target: The result in global memory, one matrix.
        first: Where in the result the chunk begins: line, and element of the line.
        clipped: How many elements of its lines are left of a chunk that the end of the lines cuts;
            0 if it cuts none.
    """
    lines, length = source.shape
    all_lines, all_length = target.shape
    lines_left = lax.max(lax.min(all_lines - first[0], jnp.int32(lines)), jnp.int32(0))
    left = all_length - first[1]
    for width, here in ((length, left >= length), (clipped, left == clipped)):
        if width:
            run = functools.partial(_store_width, plan, source, target, first, lines_left, width)
            pl.when(here)(run)


def _store_width(
    plan: KernelPlan,
    source: Ref,
    target: Ref,
    first: tuple[Scalar, Scalar],
    lines_left: Scalar,
    width: int,
) -> None:
    """Stores the first `width` elements of some lines."""
    together = math.gcd(target.shape[1], ROW_BYTES // target.dtype.itemsize)
    strip = 1 << width.bit_length() - 1
    starts = (0,) if strip == width else (0, width - strip)

    def store_strip(line: Scalar, height: int) -> None:
        layout = _layout(height, strip, together)
        for start in starts:
            here = pl.ds(first[0] + line, height), pl.ds(first[1] + start, strip)
            part = source.at[pl.ds(line, height), start : start + strip]
            arrays.copy(plan, part, target.at[here], layout)

    strips = lax.div(lines_left, jnp.int32(STRIP_LINES))
    pl.loop(0, strips)(lambda i: store_strip(i * STRIP_LINES, STRIP_LINES))
    pl.loop(strips * STRIP_LINES, lines_left)(lambda line: store_strip(line, 1))


def _layout(height: int, width: int, together: int) -> mgpu.TiledLayout:
    """Which thread holds what of a strip: lanes lie along the lines, then warps across them.

    All are powers of two. Where there are more threads than pieces, several hold the same one.
    """
    along = min(LANES, width // together)
    across = min(LANES // along, height)
    warps = min(WARPS, height // across)
    return mgpu.TiledLayout(
        fragmented_array.Tiling(
            ((warps * across, along * together), (across, along * together), (together,))
        ),
        warp_dims=(-5, fragmented_array.Replicated(WARPS // warps)),
        lane_dims=(-3, -2, fragmented_array.Replicated(LANES // (along * across))),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()
