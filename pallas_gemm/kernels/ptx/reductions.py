"""What a warpgroup reduces of values in registers, and stores."""

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
from jax.extend.mlir.dialects import arith, vector

from pallas_gemm.kernels import exponentials
from pallas_gemm.kernels.hardware import LANES, WARPS, WGMMA_COLUMNS, WGMMA_ROWS
from pallas_gemm.kernels.ptx.operation import REF, Operation
from pallas_gemm.kernels.traced import Ref, Values
from pallas_gemm.program import LOGSUMEXP

Vectors = tuple[Any, ...]
"""The results of a reduction, each with a value for every row or column."""


class Reduction(NamedTuple):
    """How values are reduced.

    Attributes:
        along: Reduces an axis of values; returns what is left of them, one vector or several. The
            function that computes `exp` may be its third argument.
        both: Reduces what is left of some values, and of others, likewise.
        joined: Reduces the first axis of what is left of several parts; returns an array. Its
            second argument may be the function that adds up.
        neutral: The value that changes nothing.
        of_registers: Reduces two registers; None where nothing is reduced along columns.
    """

    along: Callable[..., Vectors]
    both: Callable[..., Vectors]
    joined: Callable[..., Any]
    neutral: float
    of_registers: Any = None


def _simple(along: Callable[..., Any], both: Callable[[Any, Any], Any], *others: Any) -> Reduction:
    """Returns a reduction that leaves one vector."""
    return Reduction(
        lambda x, axis, _=None: (along(x, axis=axis),),
        lambda one, other, _=None: (both(*one, *other),),
        lambda left, along=along: along(*left, axis=0),
        *others,
    )


REDUCTIONS = {
    "sum": _simple(jnp.sum, jnp.add, 0.0, arith.addf),
    "max": _simple(jnp.max, jnp.maximum, -math.inf, arith.maximumf),
    "min": _simple(jnp.min, jnp.minimum, math.inf, arith.minimumf),
    LOGSUMEXP: Reduction(exponentials.along, exponentials.of_both, exponentials.joined, -math.inf),
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
        return mgpu.FragmentedArray(
            _registers=found, _layout=values.layout, _is_signed=values.is_signed
        )

    return inline(values)


@in_threads.meaning
def _(values: Values, name: str) -> Any:
    # The simulator has no threads that share rows: here all of them have every row.
    (reduced,) = REDUCTIONS[name].along(values, 0)
    return lax.broadcast_in_dim(reduced, (WGMMA_ROWS, values.shape[1]), (1,))


@Operation
def store_columns(target: Ref, strips: Sequence[Values], name: str) -> None:
    """Reduces what threads hold of columns, each warp its own rows; stores `[warps, columns]`.

    The 8 threads of a warp that hold the same columns hold all rows of their warp. They share the
    columns out while they reduce them: each exchange leaves a thread half of its columns.

    Args:
        target: Where it is stored.
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


@store_columns.meaning
def _(target: Ref, strips: Sequence[Values], name: str) -> None:
    # The simulator has no warps: one row of the target is for all.
    del name
    target[...] = jnp.concatenate([x[:1] for x in strips], 1)


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
