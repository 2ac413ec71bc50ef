"""Sums in registers, and what is added to them. Each register is a vector of one element."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels.hardware import WARPGROUP_THREADS
from pallas_gemm.kernels.ptx.operation import emit
from pallas_gemm.kernels.ptx.widen import Register

LAYOUT = plgpu.Layout.WGMMA
ACC = fragmented_array.WGMMA_LAYOUT_ACC_32BIT
"""The same, with a register for each number: as WGMMA adds to them."""
AT_ONCE = 4
"""Registers that a thread stores or loads at once, where CTAs share sums."""
LINE = 4 * AT_ONCE * WARPGROUP_THREADS
"""Bytes of that, of all threads."""


def type_of(total: Any) -> Any:
    """The type of sums as these, for Pallas."""
    return plgpu.ShapeDtypeStruct(total.shape, total.dtype, layout=LAYOUT)


def registers_of(total: Any) -> Any:
    """The registers of sums that lie as `LAYOUT`, one for each number."""
    return total.to_layout(ACC).registers


def array_of(registers: Any) -> Any:
    """The sums that lie as `LAYOUT`, of such registers."""
    acc = fragmented_array.FragmentedArray(_registers=registers, _layout=ACC, _is_signed=None)
    return acc.to_layout(LAYOUT.to_mgpu())


def values_of(sums: Any) -> list[Any]:
    """The numbers of registers."""
    llvm: Any = utils.llvm
    zero = utils.c(0, utils.ir.IntegerType.get_signless(32))
    return [llvm.extractelement(x, zero) for x in sums.flat]


def added(sums: Any, text: str, given: Sequence[Any], constraints: Sequence[str]) -> Any:
    """Emits what adds to sums, as `emit` does; returns registers as theirs."""
    llvm: Any = utils.llvm
    zero = utils.c(0, utils.ir.IntegerType.get_signless(32))
    made = emit(text, given, constraints, sums.size)
    empty = llvm.mlir_undef(sums.flat[0].type)
    found = np.empty_like(sums)
    for i, x in enumerate(made):
        found.flat[i] = llvm.insertelement(empty, x, zero)
    return found


def scaled(sums: Any, own: Any, scales: Sequence[Register]) -> Any:
    """Adds sums of a group to others, times a scale for each of two rows."""
    single, count = utils.ir.F32Type.get(), sums.size
    each = [utils.bitcast(x, single) for x in scales]
    # Of 8 columns, a thread has two of one row, then of the other.
    text = "".join(
        f"fma.rn.f32 ${i}, ${2 * count + i}, ${3 * count + i // 2 % 2}, ${count + i};"
        for i in range(count)
    )
    given = [*values_of(sums), *values_of(own), *each]
    return added(sums, text, given, [*map(str, range(count)), *["f"] * (count + 2)])
