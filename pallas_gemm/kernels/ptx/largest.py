"""The largest value of each row that a warpgroup holds, and where it is: see `places.py`."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, scf, vector

from pallas_gemm.kernels.functions import places
from pallas_gemm.kernels.hardware import WGMMA_COLUMNS
from pallas_gemm.kernels.ptx.operation import Operation, number_in
from pallas_gemm.kernels.traced import Values

Pair = tuple[Any, Any]
Is = arith.CmpFPredicate
OF_ROWS = plgpu.Layout.WGMMA.reduce(1)


@Operation
def largest_in_threads(values: Values) -> Pair:
    """Returns the largest values of rows, and their columns, of what each thread holds.

    Four threads share a row. They are to hold the same then, and do not before
    `largest_across_threads`.
    """
    rows = values.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=_types(rows))
    def inline(_: Any, values: Values) -> Pair:
        tiles, blocks, *_ = values.registers.shape
        registers = values.registers.reshape(tiles, blocks, 2)
        word = ir.IntegerType.get_signless(32)
        thread: Any = arith.remui(utils.thread_idx(), utils.c(4, word))
        first = arith.uitofp(ir.F32Type.get(), arith.muli(thread, utils.c(2, word)))
        each = [registers[tile, :, half] for tile, half in np.ndindex(tiles, 2)]
        largest, blocks_of = zip(*map(_largest, each), strict=True)
        blocks_of = _first_that_are_no_numbers(each, largest, blocks_of)
        pairs = map(_even_or_odd, largest, blocks_of)
        return _vectors(rows, [(x, arith.addf(column, first)) for x, column in pairs])

    return inline(values)


@largest_in_threads.meaning
def _(values: Values) -> Pair:
    return places.along(values, 1)


@Operation
def largest_across_threads(values: Values, columns: Values) -> Pair:
    """Reduces what the four threads of a row hold of it: then they hold the same."""
    rows = values.shape[0]

    @plgpu.inline_mgpu(arg_types=(OF_ROWS, OF_ROWS), return_type=_types(rows))
    def inline(_: Any, *vectors: Values) -> Pair:
        def of_row(*registers: Any) -> Pair:
            x, column = map(number_in, registers)
            for distance in (1, 2):
                others = (utils.shfl_bfly(x, distance), utils.shfl_bfly(column, distance))
                x, column = _both((x, column), others)
            return x, column

        return _vectors(rows, list(map(of_row, *(own.registers.ravel() for own in vectors))))

    return inline(values, columns)


@largest_across_threads.meaning
def _(values: Values, columns: Values) -> Pair:
    # The simulator has no threads that share rows: what each has reduced is whole.
    return values, columns


def _largest(registers: Any) -> Pair:
    """Returns the largest values of a row's even and odd columns, and the blocks of 8 they are in.

    The block is another one where the largest value is no number.
    """
    largest = registers[0]
    found = _block(largest.type, 0)
    for block, x in enumerate(registers[1:], 1):
        is_larger = arith.cmpf(Is.OGT, x, largest)
        found = arith.select(is_larger, _block(x.type, block), found)
        largest = arith.maximumf(largest, x)
    return largest, found


def _even_or_odd(largest: Any, found: Any) -> Pair:
    """Returns the largest value of a row, and its column if the thread is the row's first."""
    (even, odd), (first, second) = ([number_in(x, i) for i in range(2)] for x in (largest, found))
    return _both((even, first), (odd, arith.addf(second, _float(1))))


def _first_that_are_no_numbers(rows: Sequence[Any], largest: Any, found: Any) -> Any:
    """Returns the blocks that were found, or the first where a value is no number.

    Few threads have any, and the others look for none.
    """
    flags = [arith.cmpf(Is.UNO, x, x) for x in largest]
    any_is = functools.reduce(arith.ori, (number_in(x, i) for x in flags for i in range(2)))
    choice: Any = scf.IfOp(any_is, [x.type for x in found], has_else=True)
    with ir.InsertionPoint(choice.then_block):
        first = list(found)
        for row, registers in enumerate(rows):
            for block, x in reversed(list(enumerate(registers))):
                here = _block(x.type, block)
                first[row] = arith.select(arith.cmpf(Is.UNO, x, x), here, first[row])
        scf.yield_(first)
    with ir.InsertionPoint(choice.else_block):
        scf.yield_(list(found))
    return list(choice.results)


def _block(kind: Any, block: int) -> Any:
    """The first column of a block, for each of its registers' numbers."""
    return vector.broadcast(kind, _float(WGMMA_COLUMNS * block))


def _types(rows: int) -> tuple[Any, Any]:
    return (plgpu.ShapeDtypeStruct((rows,), np.dtype(np.float32), layout=OF_ROWS),) * 2


def _vectors(rows: int, pairs: Sequence[Pair]) -> Pair:
    """Returns two vectors, of the pairs that a thread has of its rows."""
    layout = OF_ROWS.to_mgpu()
    single = ir.VectorType.get((1,), ir.F32Type.get())

    def whole(numbers: Any) -> Any:
        found = np.empty(len(pairs), object)
        found[:] = [vector.broadcast(single, x) for x in numbers]
        found = found.reshape(layout.registers_shape((rows,)))
        return mgpu.FragmentedArray(_registers=found, _layout=layout, _is_signed=None)

    values, columns = zip(*pairs, strict=True)
    return whole(values), whole(columns)


def _both(one: Pair, other: Pair) -> Pair:
    """Returns the pair of two parts: `places.both` of registers."""
    (x, own), (y, others) = one, other
    same = arith.ori(
        arith.cmpf(Is.OEQ, x, y),
        arith.andi(arith.cmpf(Is.UNO, x, x), arith.cmpf(Is.UNO, y, y)),
    )
    is_first = arith.andi(same, arith.cmpf(Is.OLT, others, own))
    # A value that is no number is larger than each number.
    is_larger = arith.andi(arith.cmpf(Is.UGT, y, x), arith.cmpf(Is.ORD, x, x))
    is_taken = arith.ori(is_larger, is_first)
    return arith.select(is_taken, y, x), arith.select(is_taken, others, own)


def _float(number: float) -> Any:
    return utils.c(float(number), ir.F32Type.get())
