"""Sums over groups: what a step loads beyond its group is no part of the sum.

Both operands are stored with the contracted elements first, and groups begin and end anywhere. A
group takes `parts` of 16 of each step: loads begin with a row of 8, and end with the part in which
the group ends (`short_step.py`). So the first part and the last one may have elements of its
neighbours, which may be infinite or no numbers at all: zeros are stored in their place, in both
operands, before they are multiplied.

A slot is made of panels, in which a contracted element has a row of 128 bytes. Swizzling changes
places within such a row alone, so that a whole one is zeroed wherever its elements are. Each
consumer zeroes all that it reads: to share what all read, they would have to wait for each other,
which takes longer.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import smem, work
from pallas_gemm.kernels.hopper.config import WARPGROUP, WGMMA_DEPTH, WGMMA_ROWS
from pallas_gemm.kernels.hopper.cta import Cta
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.kernels.operand import PANEL
from pallas_gemm.kernels.smem import ATOM_BYTES, ATOM_ROWS

TILED = smem.tile_transforms(ATOM_BYTES, jnp.bfloat16)
"""How a slot lies in shared memory: atoms of 8 rows of a panel."""
WORD = 16
"""Bytes that a thread stores at a time: 128 threads take the 16 rows of a part in one panel."""


class Rows(NamedTuple):
    """Which rows of a step count: from `first` on, up to `end`."""

    first: Any
    end: Any


def parts(plan: HopperPlan, left: Any) -> Any:
    """How many parts a step takes of a group of which so many elements are left: one at least."""
    reached = lax.div(left + (WGMMA_DEPTH - 1), jnp.int32(WGMMA_DEPTH))
    return jnp.clip(reached, 1, plan.tile_k // WGMMA_DEPTH)


def mask(cta: Cta, me: Any, slot: Any, k: Any, within: tuple[Any, Any]) -> None:
    """Zeroes what is multiplied of step k beyond the elements that count."""
    first, end = within
    if first is None:
        return
    start = work.aligned(first) + k * cta.plan.tile_k
    rows, last = Rows(first - start, end - start), parts(cta.plan, end - start) - 1
    begins, ends = rows.first > 0, rows.end < (last + 1) * WGMMA_DEPTH
    for is_cut, part in ((begins, jnp.int32(0)), (ends, last)):
        pl.when(is_cut)(functools.partial(_zero_part, cta, me, slot, part, rows))

    @pl.when(begins | ends)
    def _before_it_is_read() -> None:
        plgpu.commit_smem()
        if cta.plan.simulated:
            # It takes zeros that two consumers store for a race, so that one stores them for all.
            plgpu.barrier_arrive(cta.barriers.masked)
            plgpu.barrier_wait(cta.barriers.masked)


def panels_of_a(cta: Cta, me: Any, slot: Any) -> list[Any]:
    """The panels of the left operand that a consumer reads in a slot."""
    panels = cta.plan.config.consumer_tile[0] // WGMMA_ROWS
    return [cta.slots.a.tile.at[0, slot, me * panels + panel] for panel in range(panels)]


def _zero_part(cta: Cta, me: Any, slot: Any, part: Any, rows: Rows) -> None:
    """Zeroes, in a part of a step, the rows of both operands that do not count."""
    zero = _zero_simulated if cta.plan.simulated else _zero
    for panel in panels_of_a(cta, me, slot):
        zero(panel, part, rows)
    shared = functools.partial(zero, cta.slots.b.tile.at[0, slot], part, rows)
    pl.when(me == 0)(shared) if cta.plan.simulated else shared()


def _zero(ref: Any, part: Any, rows: Rows) -> None:
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
        and.b32 thread, thread, {WARPGROUP - 1};
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

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(TILED), *(3 * (plgpu.Layout.WG_SPLAT,))))
    def emit(_: Any, ref: Any, *numbers: Any) -> None:
        int32 = utils.ir.IntegerType.get_signless(32)
        address = utils.llvm.ptrtoint(int32, utils.memref_ptr(ref))
        words = [number.registers.item() for number in numbers]
        utils.inline_ptx(program, address, *words, has_side_effects=True)

    emit(ref, part, *rows)


def _zero_simulated(ref: Any, part: Any, rows: Rows) -> None:
    """Zeroes the same: the simulator knows no PTX."""
    top = part * WGMMA_DEPTH
    here = ref.at[pl.ds(top, WGMMA_DEPTH)]
    row = top + lax.broadcasted_iota(jnp.int32, here.shape, 0)
    here[...] = jnp.where((rows.first <= row) & (row < rows.end), here[...], jnp.zeros_like(here))
