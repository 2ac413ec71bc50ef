"""Sums over groups: what a step loads beyond its group is no part of the sum.

Both operands are stored with the contracted elements first, and groups begin and end anywhere. So
the first and the last step of a group may load elements of its neighbours, which may be infinite or
no numbers at all: zeros are stored in their place, in both operands, before they are multiplied.

A slot is made of panels, in which a contracted element has a row of 128 bytes. Swizzling changes
places within such a row alone, so that a whole one is zeroed wherever its elements are. Consumers
share what is to be zeroed, and wait for each other.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import work
from pallas_gemm.kernels.hopper.config import WARPGROUP, WGMMA_ROWS
from pallas_gemm.kernels.hopper.cta import Cta
from pallas_gemm.kernels.operand import PANEL
from pallas_gemm.kernels.smem import ATOM_BYTES, ATOM_ROWS

ROW_WORDS = ATOM_BYTES // 16
"""Words of 16 bytes, of which a thread stores one at a time, of a row of a panel."""


class Rows(NamedTuple):
    """Which rows of a step count: from `first` on, up to `end`."""

    first: Any
    end: Any


def mask(cta: Cta, me: Any, slot: Any, k: Any, within: tuple[Any, Any]) -> None:
    """Zeroes what a slot holds of step k beyond the elements that count."""
    first, end = within
    if first is None:
        return
    tile_k = cta.plan.tile_k
    start = work.aligned(first) + k * tile_k
    begins, ends = start < first, end < start + tile_k
    # A group begins in the first 8 rows of a step, and ends in any.
    cuts = (
        (begins, Rows(first - start, jnp.int32(ATOM_ROWS)), ATOM_ROWS),
        (ends, Rows(jnp.int32(0), end - start), tile_k),
    )
    for is_cut, rows, height in cuts:
        pl.when(is_cut)(functools.partial(_zero_both, cta, me, slot, rows, height))

    @pl.when(begins | ends)
    def _await_others() -> None:
        plgpu.commit_smem()
        plgpu.barrier_arrive(cta.barriers.masked)
        plgpu.barrier_wait(cta.barriers.masked)


def _zero_both(cta: Cta, me: Any, slot: Any, rows: Rows, height: int) -> None:
    """Zeroes a consumer's share of what does not count of both operands, in so many rows."""
    plan = cta.plan
    zero = _zero_simulated if plan.simulated else _zero
    panels, there = plan.config.consumer_tile[0] // WGMMA_ROWS, pl.ds(0, height)
    for panel in range(panels):
        zero(cta.slots.a.tile.at[0, slot, me * panels + panel, there], rows, jnp.int32(0), 1)
    zero(cta.slots.b.tile.at[0, slot, there], rows, me, plan.config.consumers)


def _zero(ref: Any, rows: Rows, share: Any, shares: int) -> None:
    """Zeroes a share of the rows of a part of a slot, `[rows, columns]`, that do not count."""
    height, width = ref.shape
    words = height * width // PANEL * ROW_WORDS
    program = _program(words, shares, width // PANEL)
    tiled = plgpu.TilingTransform((ATOM_ROWS, PANEL)), plgpu.SwizzleTransform(ATOM_BYTES)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(tiled), *(3 * (plgpu.Layout.WG_SPLAT,))))
    def emit(_: Any, ref: Any, *numbers: Any) -> None:
        int32 = utils.ir.IntegerType.get_signless(32)
        address = utils.llvm.ptrtoint(int32, utils.memref_ptr(ref))
        words = [number.registers.item() for number in numbers]
        utils.inline_ptx(program, address, *words, has_side_effects=True)

    emit(ref, rows.first, rows.end, share)


def _program(words: int, shares: int, panels: int) -> str:
    """Returns what each thread does: a word of zeros in each turn, unless its row counts.

    Words are numbered as they lie: those of a row of a panel, the rows of an atom, the same atom of
    every panel, and so on with the next atom.
    """
    stores = [
        f"""
        mad.lo.u32 number, $3, {WARPGROUP}, thread;
        add.u32 number, number, {turn * shares * WARPGROUP};
        shr.u32 row, number, {(ROW_WORDS * ATOM_ROWS).bit_length() - 1};
        div.u32 row, row, {panels};
        shl.b32 row, row, {ATOM_ROWS.bit_length() - 1};
        bfe.u32 within, number, {ROW_WORDS.bit_length() - 1}, {ATOM_ROWS.bit_length() - 1};
        add.u32 row, row, within;
        setp.lt.s32 outside, row, $1;
        setp.ge.or.s32 outside, row, $2, outside;
        setp.lt.and.u32 outside, number, {words}, outside;
        mad.lo.u32 address, number, 16, $0;
        @outside st.shared.v4.b32 [address], {{zero, zero, zero, zero}};"""
        for turn in range(-(-words // (WARPGROUP * shares)))
    ]
    return f"""{{
        .reg .pred outside; .reg .u32 thread, number, row, within, address; .reg .b32 zero;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, {WARPGROUP - 1};
        mov.b32 zero, 0;{"".join(stores)}
    }}"""


def _zero_simulated(ref: Any, rows: Rows, share: Any, shares: int) -> None:
    """Zeroes the same panel by panel: the simulator knows no PTX."""
    for panel in range(ref.shape[1] // PANEL):

        @pl.when(share == panel % shares)
        def _mine(panel: int = panel) -> None:
            part = ref.at[:, pl.ds(panel * PANEL, PANEL)]
            row = lax.broadcasted_iota(jnp.int32, part.shape, 0)
            inside = (rows.first <= row) & (row < rows.end)
            part[...] = jnp.where(inside, part[...], jnp.zeros_like(part))
