"""Transposed chunks in shared memory: a line has elements of a column of registers.

Operands have lines of 64 elements. Results of 32 bits have two panels, with lines of 32 elements
that are swizzled as TMA does: threads that write at once use different banks.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels.hardware import WGMMA_ROWS
from pallas_gemm.kernels.ptx import widen
from pallas_gemm.kernels.ptx.operation import REF, Operation, address_of
from pallas_gemm.kernels.ptx.sums import ACC, LAYOUT, array_of, registers_of
from pallas_gemm.kernels.ptx.widen import Register
from pallas_gemm.kernels.smem import ATOM_BYTES, ATOM_ROWS
from pallas_gemm.kernels.traced import Ref, Values


@Operation
def write(slot: Ref, values: Values) -> None:
    """Writes values of 32 bits of 64 rows to a slot: [panel, column, row]."""
    panel = plgpu.RefType((plgpu.SwizzleTransform(ATOM_BYTES),))

    @plgpu.inline_mgpu(arg_types=(panel, LAYOUT))
    def inline(_: Any, ref: Ref, values: Values) -> None:
        places = _places_in_panels(ref, slot.shape[1])
        for number, x in enumerate(registers_of(values).flat):
            word = utils.bitcast(x, utils.ir.IntegerType.get_signless(32))
            atom, place = number // 4 * ATOM_ROWS * ATOM_BYTES, places[number % 4]
            text = f"st.shared.b32 [$0+{atom}], $1;"
            utils.inline_ptx(text, place, word, has_side_effects=True)

    inline(slot, values)


@write.meaning
def _(slot: Ref, values: Values) -> None:
    for panel, rows in enumerate(jnp.split(values, slot.shape[0])):
        slot[panel, : values.shape[1]] = rows.T


def _places_in_panels(slot: Ref, columns: int) -> list[Register]:
    """Where a thread writes: two columns of a row, then the same of the row that is 8 below."""
    place = (
        "{{ .reg .b32 lane, warp, line, x; mov.u32 lane, %tid.x; shr.b32 warp, lane, 5;"
        " and.b32 warp, warp, 3; and.b32 lane, lane, 31;"
        " and.b32 line, lane, 3; mad.lo.u32 line, line, 2, {beside};"
        # The row within its panel, in bytes.
        " and.b32 x, warp, 1; mul.lo.u32 x, x, 16; shr.b32 lane, lane, 2; add.u32 x, x, lane;"
        " add.u32 x, x, {below}; mul.lo.u32 x, x, 4;"
        " shl.b32 $0, line, 4; xor.b32 x, x, $0;"
        f" mad.lo.u32 x, line, {ATOM_BYTES}, x;"
        f" shr.b32 warp, warp, 1; mad.lo.u32 x, warp, {columns * ATOM_BYTES}, x;"
        " add.u32 $0, x, $1; }}"
    )
    start = address_of(slot)
    both = [(below, beside) for below in (0, 8) for beside in range(2)]
    return [widen.run(place.format(below=x, beside=y), start) for x, y in both]


@Operation
def read(slot: Ref) -> Values:
    """Reads floats of 16 or 32 bits of 64 rows, transposed, as float32."""
    kind, (cols, _) = np.dtype(slot.dtype), slot.shape
    like = plgpu.ShapeDtypeStruct((WGMMA_ROWS, cols), jnp.dtype(jnp.float32), layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(REF,), return_type=like)
    def inline(_: Any, slot: Ref) -> Any:
        llvm: Any = utils.llvm
        ir, size = utils.ir, kind.itemsize
        start, single = _place_of_thread(slot, size), ir.F32Type.get()
        zero = utils.c(0, ir.IntegerType.get_signless(32))
        registers = np.empty(ACC.registers_shape((WGMMA_ROWS, cols)), object)
        for number in range(registers.size):
            word = widen.load(start, size * _offset(number), size)
            word = word if size == 4 else widen.scale(word, kind, widen.F32)
            vector = llvm.mlir_undef(ir.VectorType.get((1,), single))
            registers.flat[number] = llvm.insertelement(vector, utils.bitcast(word, single), zero)
        return array_of(registers)

    return inline(slot)


@read.meaning
def _(slot: Ref) -> Values:
    return slot[...].T.astype(jnp.float32)


def _place_of_thread(slot: Ref, size: int) -> Register:
    """Where the first element of a thread lies, of this many bytes each."""
    return widen.run(
        "{ .reg .b32 lane, warp; mov.u32 lane, %tid.x; shr.b32 warp, lane, 5;"
        " and.b32 warp, warp, 3; and.b32 lane, lane, 31; shr.b32 $0, lane, 2;"
        f" mad.lo.u32 $0, warp, 16, $0; mad.lo.u32 $0, $0, {size}, $1; and.b32 lane, lane, 3;"
        f" mad.lo.u32 $0, lane, {2 * size * WGMMA_ROWS}, $0; }}",
        address_of(slot),
    )


def _offset(number: int) -> int:
    """How many elements further a register of a thread lies: two columns of a row, then another."""
    block, (below, beside) = number // 4, divmod(number % 4, 2)
    return (8 * block + beside) * WGMMA_ROWS + 8 * below
