"""Rows of sums of weights stored [k, rows], in the order of WGMMA.

A thread has rows that lie side by side in memory, as `weights.py` says. Where a warp has those of
its own, its threads exchange them. Else all threads of the warpgroup do, in shared memory.
"""

from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels.hardware import WGMMA_ROWS
from pallas_gemm.kernels.ptx.form import MOST_COLUMNS, Form
from pallas_gemm.kernels.ptx.operation import REF, Operation, address_of, as_it_is
from pallas_gemm.kernels.ptx.sums import LAYOUT, array_of, registers_of, type_of
from pallas_gemm.kernels.ptx.widen import Register, run
from pallas_gemm.kernels.traced import Ref, Values


@Operation
def in_order(total: Values) -> Any:
    """Puts the rows of each warp in order where two of a thread's were side by side."""

    @plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=type_of(total))
    def inline(_: Any, total: Values) -> Any:
        # Of 64 rows and 8 columns, a thread has four sums: two columns of one row, then of another.
        registers = registers_of(total).copy()
        flat = registers.reshape(-1, 2, 2)
        for block in flat:
            for column in range(2):
                block[:, column] = _exchanged(*block[:, column])
        return array_of(flat.reshape(registers.shape))

    return inline(total)


in_order.meaning(as_it_is)

_EXCHANGE = """{
    .reg .pred odd, low; .reg .b32 lane, source, one, two, here, there, bit;
    mov.u32 lane, %laneid;
    and.b32 bit, lane, 4;
    setp.ne.u32 odd, bit, 0;
    setp.lt.u32 low, lane, 16;
    shr.b32 source, lane, 3;
    shl.b32 source, source, 2;
    and.b32 bit, lane, 3;
    or.b32 source, source, bit;
    selp.b32 here, $2, $3, low;
    selp.b32 there, $3, $2, low;
    @odd add.u32 source, source, 16;
    shfl.sync.idx.b32 one, here, source, 31, 0xffffffff;
    xor.b32 source, source, 16;
    shfl.sync.idx.b32 two, there, source, 31, 0xffffffff;
    selp.b32 $0, two, one, odd;
    selp.b32 $1, one, two, odd;
}"""
"""A row of 16 has 2 * (lane / 4), and the next; the other order, lane / 4, and 8 below. An even row
comes from the first of a lane's two, an odd one from the second, half as far down."""


def _exchanged(first: Any, second: Any) -> tuple[Any, Any]:
    """Two sums of a thread after the exchange of rows, as vectors of one element."""
    word = utils.ir.IntegerType.get_signless(32)
    given = [utils.bitcast(x, word) for x in (first, second)]
    found = utils.inline_ptx(
        _EXCHANGE, *given, result_types=[word] * 2, has_side_effects=True, convergent=True
    )
    one, two = (utils.bitcast(x, first.type) for x in found)
    return one, two


@Operation
def across_warps(total: Values, scratch: Ref, form: Form) -> Any:
    """Puts the rows of a warpgroup in order where each warp has rows of others.

    Args:
        total: The sums.
        scratch: Shared memory of this warpgroup: `form.scratch` numbers.
        form: How the weights lay.
    """

    @plgpu.inline_mgpu(arg_types=(LAYOUT, REF), return_type=type_of(total))
    def inline(_: Any, total: Values, scratch: Ref) -> Any:
        registers = registers_of(total).copy()
        # Of each 64 rows and 8 columns: two columns of one row, then of another.
        lines = registers.reshape(-1, form.tops_of_line, form.cols // 8, 2, 2)
        for number, own in enumerate(lines):
            if number:
                utils.warpgroup_barrier()
            exchange(own, address_of(scratch), form)
        return array_of(lines.reshape(registers.shape))

    return inline(total, scratch)


across_warps.meaning(as_it_is)


def exchange(sums: Any, start: Register, form: Form) -> None:
    """Exchanges sums, in their place: [top, block of 8 columns, row, column]."""
    places, width = _places(start, form), min(form.cols, MOST_COLUMNS) // 8
    for first in range(0, form.cols // 8, width):
        if first:
            utils.warpgroup_barrier()
        _exchange_some(sums[:, first : first + width], places, form)


def _places(start: Register, form: Form) -> tuple[Register, Register]:
    """Where the first row of a thread begins: of those that it summed up, and that it is to get."""
    own = 16 * form.tops_of_line
    text = "{{ .reg .b32 lane, warp, row; mov.u32 lane, %laneid; mov.u32 warp, %tid.x;"
    text += " shr.b32 warp, warp, 5; and.b32 warp, warp, 3; shr.b32 row, lane, 2;"
    text += " mul.lo.u32 row, row, {}; mad.lo.u32 row, warp, {}, row;"
    text += " and.b32 lane, lane, 3; mad.lo.u32 $0, lane, 8, $1;"
    text += f" mad.lo.u32 $0, row, {4 * form.scratch_line}, $0; }}}}"
    return run(text.format(own // 8, own), start), run(text.format(1, 16), start)


def _exchange_some(sums: Any, places: tuple[Register, Register], form: Form) -> None:
    """Exchanges the sums of some columns."""
    word, line = utils.ir.IntegerType.get_signless(32), 4 * form.scratch_line
    written, read = places
    for top, block, below in np.ndindex(sums.shape[:3]):
        pair = [utils.bitcast(x, word) for x in sums[top, block, below]]
        offset = form.row_offset(top, below) * line + 32 * block
        text = f"st.shared.v2.b32 [$0+{offset}], {{$1, $2}};"
        utils.inline_ptx(text, written, *pair, has_side_effects=True)
    utils.warpgroup_barrier()
    for top, block, below in np.ndindex(sums.shape[:3]):
        offset = (top * WGMMA_ROWS + 8 * below) * line + 32 * block
        pair = utils.inline_ptx(
            f"ld.shared.v2.b32 {{$0, $1}}, [$2+{offset}];",
            read,
            result_types=[word] * 2,
            has_side_effects=True,
        )
        for beside, x in enumerate(pair):
            like = sums[top, block, below, beside].type
            sums[top, block, below, beside] = utils.bitcast(x, like)
