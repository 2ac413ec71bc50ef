"""Zeros in place of what does not count of a slot: rows of it, or columns."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels.hardware import WARPGROUP_THREADS, WGMMA_DEPTH
from pallas_gemm.kernels.operand import PANEL
from pallas_gemm.kernels.ptx.operation import NUMBER, Operation, address_of, word_of
from pallas_gemm.kernels.ptx.wgmma import TILED
from pallas_gemm.kernels.smem import ATOM_BYTES, ATOM_ROWS, tile_transforms
from pallas_gemm.kernels.traced import Ref

WORD = 16
"""Bytes that a thread stores at a time: 128 threads take the 16 rows of a part in one panel."""


class Rows(NamedTuple):
    """Which rows of a step count, or which columns: from `first` on, up to `end`."""

    first: Any
    end: Any


@Operation
def zero(ref: Ref, part: Any, rows: Rows) -> None:
    """Zeroes rows of a part of `[rows, columns]`: each thread a word of each panel."""
    panels = ref.shape[1] // PANEL
    atom = ATOM_ROWS * ATOM_BYTES
    stores = [
        f"@outside st.shared.v4.b32 [address + {panel * atom}], {{zero, zero, zero, zero}};"
        for panel in range(panels)
    ]
    # The same atom of every panel comes before the next atom.
    program = f"""{{
        .reg .pred outside; .reg .u32 thread, row, address; .reg .b32 zero;
        mov.b32 zero, 0;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, {WARPGROUP_THREADS - 1};
        shr.u32 row, thread, {(ATOM_BYTES // WORD).bit_length() - 1};
        mad.lo.u32 row, $1, {WGMMA_DEPTH}, row;
        setp.lt.s32 outside, row, $2;
        setp.ge.or.s32 outside, row, $3, outside;
        shr.u32 row, row, {ATOM_ROWS.bit_length() - 1};
        mad.lo.u32 address, row, {panels * atom}, $0;
        and.b32 thread, thread, {atom // WORD - 1};
        mad.lo.u32 address, thread, {WORD}, address;
        {" ".join(stores)}
    }}"""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(TILED), NUMBER, NUMBER, NUMBER))
    def inline(_: Any, ref: Ref, *numbers: Any) -> None:
        utils.inline_ptx(program, address_of(ref), *map(word_of, numbers), has_side_effects=True)

    inline(ref, part, *rows)


@zero.meaning
def _(ref: Ref, part: Any, rows: Rows) -> None:
    top = part * WGMMA_DEPTH
    here = ref.at[pl.ds(top, WGMMA_DEPTH)]
    row = top + lax.broadcasted_iota(jnp.int32, here.shape, 0)
    here[...] = jnp.where((rows.first <= row) & (row < rows.end), here[...], jnp.zeros_like(here))


@Operation
def zero_columns(ref: Ref, columns: Rows) -> None:
    """Zeroes columns of rows of 128 bytes: each thread 16 bytes of every sixteenth row."""
    words, each = 4, WARPGROUP_THREADS * WORD
    masks = [
        f"""
        add.s32 place, first_of, {4 * word};
        sub.s32 shift, $1, place; max.s32 shift, shift, 0; min.s32 shift, shift, 4;
        shl.b32 shift, shift, 3; shl.b32 m{word}, ones, shift;
        sub.s32 shift, $2, place; max.s32 shift, shift, 0; min.s32 shift, shift, 4;
        shl.b32 shift, shift, 3; shl.b32 after, ones, shift;
        not.b32 after, after; and.b32 m{word}, m{word}, after; and.b32 every, every, m{word};"""
        for word in range(words)
    ]
    some = ", ".join(f"w{word}" for word in range(words))
    changes = [
        f"@outside ld.shared.v4.b32 {{{some}}}, [address + {start}];"
        + "".join(f" and.b32 w{word}, w{word}, m{word};" for word in range(words))
        + f" @outside st.shared.v4.b32 [address + {start}], {{{some}}};"
        for start in range(0, ref.shape[0] * ATOM_BYTES, each)
    ]
    names = ", ".join(f"{name}{word}" for name in "mw" for word in range(words))
    # Swizzling changes places of 16 bytes within a row, by the row's place in its atom.
    program = f"""{{
        .reg .pred outside; .reg .b32 thread, row, chunk, first_of, place, shift, address;
        .reg .b32 ones, every, after, {names};
        mov.b32 ones, -1; mov.b32 every, -1;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, {WARPGROUP_THREADS - 1};
        shr.u32 row, thread, {(ATOM_BYTES // WORD).bit_length() - 1};
        and.b32 chunk, thread, {ATOM_BYTES // WORD - 1};
        shl.b32 first_of, chunk, {WORD.bit_length() - 1};
        {" ".join(masks)}
        setp.ne.b32 outside, every, -1;
        mad.lo.u32 address, row, {ATOM_BYTES}, $0;
        and.b32 row, row, {ATOM_ROWS - 1};
        xor.b32 chunk, chunk, row;
        mad.lo.u32 address, chunk, {WORD}, address;
        {" ".join(changes)}
    }}"""
    tiled = plgpu.RefType(tile_transforms(ATOM_BYTES, ref.dtype))

    @plgpu.inline_mgpu(arg_types=(tiled, NUMBER, NUMBER))
    def inline(_: Any, ref: Ref, *numbers: Any) -> None:
        utils.inline_ptx(program, address_of(ref), *map(word_of, numbers), has_side_effects=True)

    size = jnp.dtype(ref.dtype).itemsize
    inline(ref, *(column * size for column in columns) if size > 1 else columns)


@zero_columns.meaning
def _(ref: Ref, columns: Rows) -> None:
    column = lax.broadcasted_iota(jnp.int32, ref.shape, 1)
    counts = (columns.first <= column) & (column < columns.end)
    ref[...] = jnp.where(counts, ref[...], jnp.zeros_like(ref))
