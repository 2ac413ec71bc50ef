"""Values in registers that a warpgroup reduces and stores."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, scf, vector

from pallas_gemm.kernels.functions import exponentials, places
from pallas_gemm.kernels.hardware import (
    LANES,
    WARPGROUP_THREADS,
    WARPS,
    WGMMA_COLUMNS,
    WGMMA_ROWS,
)
from pallas_gemm.kernels.ptx import quick
from pallas_gemm.kernels.ptx.operation import (
    NUMBER,
    REF,
    Operation,
    as_it_is,
    like,
    number_in,
    word_of,
)
from pallas_gemm.kernels.traced import Ref, Values
from pallas_gemm.program import ARGMAX, LOGSUMEXP

Vectors = tuple[Any, ...]
"""The results of a reduction, each with a value for every row or column."""


class Reduction(NamedTuple):
    """How values are reduced.

    Attributes:
        along: Reduces an axis of values; returns what is left of them, one vector or several.
        joined: Reduces the first axis of what is left of several parts; returns an array. Its
            second argument may be the function that adds up.
        neutral: The value that changes nothing.
        both: Reduces two values; None where more than one vector is left.
        of_registers: The same of two registers.
    """

    along: Callable[..., Vectors]
    joined: Callable[..., Any]
    neutral: float
    both: Any = None
    of_registers: Any = None


def _simple(along: Callable[..., Any], *others: Any) -> Reduction:
    """Returns a reduction that leaves one vector."""
    return Reduction(
        lambda x, axis: (along(x, axis=axis),),
        lambda left, along=along: along(*left, axis=0),
        *others,
    )


REDUCTIONS = {
    "sum": _simple(jnp.sum, 0.0, jnp.add, arith.addf),
    "max": _simple(jnp.max, -math.inf, jnp.maximum, arith.maximumf),
    "min": _simple(jnp.min, math.inf, jnp.minimum, arith.minimumf),
    LOGSUMEXP: Reduction(exponentials.along, exponentials.joined, -math.inf),
    ARGMAX: Reduction(places.along, places.joined, -math.inf),
}
"""By the names that `Result.reduction` has for them."""


@Operation
def in_threads(values: Values, name: str) -> Any:
    """Reduces along columns what each thread holds, `[WGMMA_ROWS, columns]`.

    A thread holds two of every 8 columns, in some rows. Afterwards all of its rows are the same.
    """
    shape = (WGMMA_ROWS, values.shape[1])
    out = plgpu.ShapeDtypeStruct(shape, values.dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=out)
    def inline(_: Any, values: Values) -> Any:
        both = REDUCTIONS[name].of_registers
        rows, columns = values.shape
        blocks = columns // WGMMA_COLUMNS
        registers = values.registers.reshape(rows // WGMMA_ROWS, blocks, 2)
        found = np.empty((1, *values.registers.shape[1:]), object)
        each = found.reshape(blocks, 2)
        for block in range(blocks):
            each[block] = functools.reduce(both, registers[:, block].ravel())
        return like(values, found)

    return inline(values)


@in_threads.meaning
def _(values: Values, name: str) -> Any:
    # The simulator has no threads that share rows: here all of them have every row.
    (reduced,) = REDUCTIONS[name].along(values, 0)
    return lax.broadcast_in_dim(reduced, (WGMMA_ROWS, values.shape[1]), (1,))


@Operation
def rows_in_threads(values: Values, name: str) -> Any:
    """Reduces along rows what each thread holds, `[rows, columns]`.

    Four threads share a row. They are to hold the same then, and do not before `across_threads`:
    they need exchange values only once for a tile.
    """

    def of_row(registers: Sequence[Any]) -> Any:
        return functools.reduce(REDUCTIONS[name].of_registers, registers)

    return _of_rows(of_row, REDUCTIONS[name].of_registers, values)


@rows_in_threads.meaning
def _(values: Values, name: str) -> Any:
    (reduced,) = REDUCTIONS[name].along(values, 1)
    return reduced


@Operation
def exp_in_threads(values: Values, beside: Values) -> Any:
    """Adds up `exp(values - beside)` likewise; `beside` has one value for each row."""

    def of_row(registers: Sequence[Any], beside: Any) -> Any:
        pair = vector.broadcast(registers[0].type, number_in(beside))
        each = (quick.of_register(quick.EXP_BESIDE, [x, pair]) for x in registers)
        return functools.reduce(arith.addf, each)

    return _of_rows(of_row, arith.addf, values, beside)


@exp_in_threads.meaning
def _(values: Values, beside: Values) -> Any:
    return jnp.sum(jnp.exp(values - beside[:, None]), 1)


@Operation
def picked_in_threads(values: Values, columns: Values, limit: Any, before: Values) -> Any:
    """Returns what was picked before, or the value in the column of each row, as threads hold it.

    Few threads have any such column, and the others compare nothing more.

    Args:
        values: `[rows, columns]`.
        columns: A column for each row; if it is not from 0 to below the limit, it is none.
        limit: The limit.
        before: The values that were picked before, or zeros.
    """
    layout, of_rows = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
    out = plgpu.ShapeDtypeStruct(before.shape, before.dtype, layout=of_rows)

    @plgpu.inline_mgpu(arg_types=(layout, of_rows, NUMBER, of_rows), return_type=out)
    def inline(_: Any, values: Values, columns: Values, limit: Any, before: Values) -> Any:
        tiles, blocks, *_ = values.registers.shape
        registers = values.registers.reshape(tiles, blocks, 2)
        int32 = ir.IntegerType.get_signless(32)
        number = functools.partial(utils.c, ty=int32)
        pair = arith.muli(arith.remui(utils.thread_idx(), number(4)), number(2))
        own, inside = [], []
        for x in columns.registers.ravel():
            column = number_in(x)
            inside.append(arith.cmpi(arith.CmpIPredicate.ult, column, word_of(limit)))
            mine = arith.subi(column, pair)
            own.append(arith.select(inside[-1], mine, number(-1)))
        kept = [number_in(x) for x in before.registers.ravel()]
        any_inside = functools.reduce(arith.ori, inside)
        choice: Any = scf.IfOp(any_inside, [x.type for x in kept], has_else=True)
        with ir.InsertionPoint(choice.then_block):
            found = list(kept)
            for row, (tile, half) in enumerate(np.ndindex(tiles, 2)):
                for block, place in np.ndindex(blocks, 2):
                    here = number(WGMMA_COLUMNS * block + place)
                    is_it = arith.cmpi(arith.CmpIPredicate.eq, own[row], here)
                    x = number_in(registers[tile, block, half], place)
                    found[row] = arith.select(is_it, x, found[row])
            scf.yield_(found)
        with ir.InsertionPoint(choice.else_block):
            scf.yield_(kept)
        result = np.empty_like(before.registers)
        for place, x in zip(np.ndindex(result.shape), choice.results, strict=True):
            result[place] = vector.broadcast(before.registers[place].type, x)
        return like(before, result)

    return inline(values, columns, limit, before)


@picked_in_threads.meaning
def _(values: Values, columns: Values, limit: Any, before: Values) -> Any:
    own = jnp.where((columns >= 0) & (columns < limit), columns, -1)
    counted = lax.broadcasted_iota(jnp.int32, values.shape, 1)
    return before + jnp.sum(jnp.where(counted == own[:, None], values, 0), 1)


@Operation
def across_threads(values: Values, name: str) -> Any:
    """Reduces what the four threads of a row hold of it: then they hold the same."""
    layout = plgpu.Layout.WGMMA.reduce(1)
    out = plgpu.ShapeDtypeStruct(values.shape, values.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=out)
    def inline(_: Any, values: Values) -> Any:
        both = REDUCTIONS[name].of_registers
        found = np.empty_like(values.registers)
        for place, x in np.ndenumerate(values.registers):
            own = number_in(x)
            for distance in (1, 2):
                own = both(own, utils.shfl_bfly(own, distance))
            found[place] = vector.broadcast(x.type, own)
        return like(values, found)

    return inline(values)


across_threads.meaning(as_it_is)


def _of_rows(
    of_row: Callable[..., Any], both: Callable[..., Any], values: Values, *others: Values
) -> Any:
    """Reduces the registers that a thread has of each row to pairs, and these to a number.

    `of_row` takes these registers, and the thread's own of the others.
    """
    layout, of_rows = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
    out = plgpu.ShapeDtypeStruct(values.shape[:1], values.dtype, layout=of_rows)

    @plgpu.inline_mgpu(arg_types=(layout, *[of_rows] * len(others)), return_type=out)
    def inline(_: Any, values: Values, *others: Values) -> Any:
        tiles, blocks, *_ = values.registers.shape
        each = values.registers.reshape(tiles, blocks, 2)
        own = [x.registers.reshape(tiles, 2) for x in others]
        whole = of_rows.to_mgpu()
        found = np.empty(whole.registers_shape((values.shape[0],)), object)
        for place in np.ndindex(tiles, 2):
            tile, half = place
            pair = of_row(each[tile, :, half], *(x[place] for x in own))
            x = both(number_in(pair, 0), number_in(pair, 1))
            found.reshape(tiles, 2)[place] = vector.broadcast(ir.VectorType.get((1,), x.type), x)
        return mgpu.FragmentedArray(_registers=found, _layout=whole, _is_signed=values.is_signed)

    return inline(values, *others)


@Operation
def reduce_warps(target: Ref, strips: Sequence[Values], name: str) -> None:
    """Reduces what threads hold of columns, each warp its own rows; stores `[warps, columns]`.

    The 8 threads of a warp that hold the same columns hold all rows of their warp. They share the
    columns out while they reduce them: each exchange leaves a thread half of its columns.

    Args:
        target: Where it is stored, in shared memory.
        strips: The results of `in_threads`, side by side.
        name: The reduction.
    """

    @plgpu.inline_mgpu(arg_types=(REF, *[plgpu.Layout.WGMMA] * len(strips)))
    def inline(_: Any, target: Ref, *strips: Values) -> None:
        both = REDUCTIONS[name].of_registers
        pairs = [x.registers.reshape(x.shape[1] // WGMMA_COLUMNS, 2) for x in strips]
        mine = [block[0] for own in pairs for block in own]
        thread = utils.thread_idx()
        number = functools.partial(utils.c, ty=thread.type)
        lane = arith.remui(thread, number(LANES))
        mine, first = _shared_out(mine, lane, both)
        warp = arith.remui(arith.divui(thread, number(LANES)), number(WARPS))
        pair = arith.muli(arith.remui(lane, number(4)), number(2))
        index = functools.partial(arith.index_cast, ir.IndexType.get())
        for i, x in enumerate(mine):
            block = arith.addi(first, number(i))
            column = arith.addi(arith.muli(block, number(WGMMA_COLUMNS)), pair)
            vector.store(x, target, [index(warp), index(column)])

    inline(target, *strips)


@reduce_warps.meaning
def _(target: Ref, strips: Sequence[Values], name: str) -> None:
    # The simulator has no warps: one row of the target is for all.
    del name
    target[...] = jnp.concatenate([x[:1] for x in strips], 1)


@Operation
def store_columns(target: Ref, kept: Ref, name: str) -> None:
    """Reduces what the warps of a warpgroup kept, `[warps, columns]`, and stores it.

    They wait for each other before, and before anything else is kept there.
    """

    @plgpu.inline_mgpu(arg_types=(REF, REF))
    def inline(_: Any, target: Ref, kept: Ref) -> None:
        index = ir.IndexType.get()
        number: Any = functools.partial(utils.c, ty=index)
        thread: Any = arith.index_cast(index, utils.thread_idx())
        thread = arith.remui(thread, number(WARPGROUP_THREADS))
        float32 = ir.VectorType.get((1,), ir.F32Type.get())
        warps, columns = ir.MemRefType(kept.type).shape

        def store_one(column: Any) -> None:
            each = (vector.load(float32, kept, [number(warp), column]) for warp in range(warps))
            vector.store(functools.reduce(REDUCTIONS[name].of_registers, each), target, [column])

        utils.warpgroup_barrier()
        for first in range(0, columns, WARPGROUP_THREADS):
            # Threads past the last column store it again. LLVM moves barriers into a branch for the
            # others, as it does not know what they are, and a warp that parted there hangs.
            column = arith.addi(thread, number(first))
            store_one(arith.minui(column, number(columns - 1)))
        utils.warpgroup_barrier()

    inline(target, kept)


@store_columns.meaning
def _(target: Ref, kept: Ref, name: str) -> None:
    del name
    target[...] = kept[0]


def _shared_out(mine: list[Any], lane: Any, both: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """Reduces registers over the 8 threads that hold the same columns.

    Returns what this thread has of them at the end, and the number of the first.
    """
    number = functools.partial(utils.c, ty=lane.type)
    first, count = number(0), len(mine)
    for distance in (16, 8, 4):
        if count == 1:
            mine = [both(x, utils.shfl_bfly(x, distance)) for x in mine]
            continue
        count //= 2
        bit = arith.andi(lane, number(distance))
        upper = arith.cmpi(arith.CmpIPredicate.ne, bit, number(0))
        halves = list(zip(mine[:count], mine[count:], strict=True))
        kept = [arith.select(upper, high, low) for low, high in halves]
        sent = [arith.select(upper, low, high) for low, high in halves]
        pairs = zip(kept, sent, strict=True)
        mine = [both(x, utils.shfl_bfly(y, distance)) for x, y in pairs]
        first = arith.addi(first, arith.select(upper, number(count), number(0)))
    return mine, first
