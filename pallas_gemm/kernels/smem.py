"""Shared memory that TMA and the tensor cores both understand.

The tensor cores read an operand as a stack of *atoms*: 8 rows of 32, 64 or 128 bytes, swizzled so
that no two rows of an atom share a bank. TMA can write that layout in two ways:

* as a 4-D box, when the array in global memory is itself a whole number of atoms in both
  directions; or
* as a plain 2-D box that is exactly one atom wide, for any array whose rows are 16-byte aligned.
  Then what lies beyond the array's edge is filled with zeros on the way in and clipped on the way
  out, and ragged shapes need no mask.

`Boxed` is the second way: one buffer with two views, `box` for TMA and `tile` for the tensor cores
and the registers. The bytes of the two views coincide because the box is one atom wide.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels.traced import Ref

ATOM_ROWS = 8
ATOM_BYTES = 128
"""The widest atom, used for every operand."""


class Boxed(NamedTuple):
    """The two views of one buffer."""

    box: Ref
    tile: Any


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns a buffer that TMA fills with 4-D boxes; its last dimension is whole atoms."""
    return plgpu.SMEM(shape, dtype, transforms=tile_transforms(ATOM_BYTES, dtype))


def boxed(shapes: Sequence[tuple[int, ...]], dtype: Any, *, simulated: bool) -> Any:
    """Returns a buffer whose last dimension is one atom; `views` gives its two views.

    Buffers of several shapes lie in the same memory, and are never used at the same time. The
    simulator knows nothing of swizzling. It rightly refuses to read through one view what was
    written through the other. So there each buffer has one view, and its own memory.
    """
    both = [_both_views(shape, dtype) for shape in shapes]
    if simulated:
        return tuple(buffer.tile for buffer in both)
    return plgpu.RefUnion(*itertools.chain(*both))


def views(refs: Any, *, simulated: bool) -> tuple[Boxed, ...]:
    """Returns both views of each buffer that was allocated with `boxed`."""
    if simulated:
        return tuple(Boxed(ref, ref) for ref in refs)
    return tuple(itertools.starmap(Boxed, itertools.batched(refs, 2)))


def _both_views(shape: tuple[int, ...], dtype: Any) -> Boxed:
    width = shape[-1] * np.dtype(dtype).itemsize
    return Boxed(
        box=plgpu.SMEM(shape, dtype, transforms=(plgpu.SwizzleTransform(width),)),
        tile=plgpu.SMEM(shape, dtype, transforms=tile_transforms(width, dtype)),
    )


def tile_transforms(width: int, dtype: Any) -> tuple[Any, ...]:
    """Returns how atoms of this width in bytes are seen as an array."""
    elements = width // np.dtype(dtype).itemsize
    return plgpu.TilingTransform((ATOM_ROWS, elements)), plgpu.SwizzleTransform(width)
