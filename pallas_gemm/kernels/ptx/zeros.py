"""Zeros in place of rows of a slot that do not count."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels.hardware import WARPGROUP_THREADS, WGMMA_DEPTH
from pallas_gemm.kernels.operand import PANEL
from pallas_gemm.kernels.ptx.operation import NUMBER, Operation, word_of
from pallas_gemm.kernels.ptx.wgmma import TILED
from pallas_gemm.kernels.smem import ATOM_BYTES, ATOM_ROWS
from pallas_gemm.kernels.traced import Ref

WORD = 16
"""Bytes that a thread stores at a time: 128 threads take the 16 rows of a part in one panel."""


class Rows(NamedTuple):
    """Which rows of a step count: from `first` on, up to `end`."""

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
        int32 = utils.ir.IntegerType.get_signless(32)
        address = utils.llvm.ptrtoint(int32, utils.memref_ptr(ref))
        utils.inline_ptx(program, address, *map(word_of, numbers), has_side_effects=True)

    inline(ref, part, *rows)


@zero.meaning
def _(ref: Ref, part: Any, rows: Rows) -> None:
    top = part * WGMMA_DEPTH
    here = ref.at[pl.ds(top, WGMMA_DEPTH)]
    row = top + lax.broadcasted_iota(jnp.int32, here.shape, 0)
    here[...] = jnp.where((rows.first <= row) & (row < rows.end), here[...], jnp.zeros_like(here))
