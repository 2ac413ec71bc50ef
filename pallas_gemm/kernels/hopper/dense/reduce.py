"""Results that are reduced along rows or columns: what a consumer leaves of each of its tiles.

    along a row       reduced in registers, chunk after chunk: a value for each row of the tile
    along a column    reduced by each thread, strip after strip, then by each warp, once for a
                      chunk: a value for each column and warp

XLA reduces what all tiles leave, in a fixed order. A value that changes nothing replaces what lies
beyond the edges of the result.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import exponentials, place, words
from pallas_gemm.kernels.epilogue import Strip
from pallas_gemm.kernels.hopper.cta import Cta
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.kernels.ptx import arrays, quick
from pallas_gemm.kernels.ptx.reductions import REDUCTIONS, Vectors, in_threads, store_columns
from pallas_gemm.kernels.traced import Values
from pallas_gemm.program import ADDING, LOGSUMEXP, Result

Rows = tuple[Vectors, ...]
"""What has been reduced along the rows of a tile, for each result; empty before the first strip."""


def finished(plan: HopperPlan, left: Sequence[Any]) -> list[Any]:
    """Reduces what all tiles have left, without what lies beyond the edges of the result."""
    sizes = {"m": plan.problem.m, "n": plan.problem.n}
    found = []
    for own, vectors in zip(plan.problem.reductions, _of_each(plan, left), strict=True):
        within = tuple(x[..., : sizes[own.kind]] for x in vectors)
        in_order = plan.problem.adds_rows_in_order and own.reduction in ADDING
        how = (exponentials.in_pairs,) if in_order else ()
        found.append(REDUCTIONS[own.reduction].joined(within, *how))
    return found


def _of_each(plan: HopperPlan, left: Sequence[Any]) -> list[Vectors]:
    """Returns the arrays that tiles leave of each result that is reduced."""
    every = iter(left)
    return [tuple(itertools.islice(every, own.vectors)) for own in plan.problem.reductions]


class Taken(NamedTuple):
    """The values of a strip, reduced or whole.

    Attributes:
        whole: The values of the results that are not reduced.
        rows: The tile's rows so far, reduced, for each result.
        columns: The strip's columns, reduced by each thread, for each result.
    """

    whole: list[Any]
    rows: Rows
    columns: list[Any]


def take(cta: Cta, strip: Strip, values: Sequence[Any], rows: Rows) -> Taken:
    """Takes what is reduced out of the values of a strip; `rows` of the strips before it."""
    plan = cta.plan
    if not plan.problem.reductions:
        return Taken(list(values), rows, [])
    whole: list[Any] = []
    along_rows: list[Vectors] = []
    columns: list[Any] = []
    exp = functools.partial(quick.exp, plan, layout=strip.layout)
    reduced = _Reduced(plan, strip, exp)
    for result, x in zip(words.program(plan.problem).results, values, strict=True):
        if result.kind == "mn":
            whole.append(x)
            continue
        if result.kind == "m":
            along_rows.append(reduced.along_rows(result, x))
        else:
            columns.append(in_threads(plan, reduced.masked(result, x), result.reduction))
    if rows:
        kinds = [own.reduction for own in plan.problem.reductions if own.kind == "m"]
        both = zip(kinds, rows, along_rows, strict=True)
        exp = functools.partial(quick.exp, plan, layout=strip.layout.reduce(1))
        along_rows = [REDUCTIONS[kind].both(x, y, exp) for kind, x, y in both]
    return Taken(whole, tuple(along_rows), columns)


class _Reduced:
    """What is reduced of the values of a strip; nothing is masked or compared twice."""

    def __init__(self, plan: HopperPlan, strip: Strip, exp: Callable[[Any], Any]) -> None:
        self._plan, self._strip, self._exp = plan, strip, exp
        self._masked: dict[Any, Any] = {}
        self._largest: dict[int, Any] = {}

    def masked(self, result: Result, x: Any) -> Any:
        """Replaces what lies beyond the edge of the result, if tiles reach beyond it."""
        key = (result.value, result.kind, REDUCTIONS[result.reduction].neutral)
        if key not in self._masked:
            self._masked[key] = _masked(self._plan, self._strip, x, result)
        return self._masked[key]

    def along_rows(self, result: Result, x: Any) -> Vectors:
        """Reduces values along rows; the largest values of sums of exp are those of the values."""
        if result.reduction == "max" and result.value in self._largest:
            return (self._largest[result.value],)
        found = REDUCTIONS[result.reduction].along(self.masked(result, x), 1, self._exp)
        if result.reduction == LOGSUMEXP:
            self._largest[result.value] = found[0]
        return found


def _masked(plan: HopperPlan, strip: Strip, x: Any, result: Result) -> Any:
    """Replaces what lies beyond the edge of the result, if tiles reach beyond it."""
    axis = 1 if result.kind == "m" else 0
    size = (plan.problem.m, plan.problem.n)[axis]
    if size == plan.reach[axis]:
        return x
    first, length = (strip.rows, strip.cols)[axis]

    def replaced(x: Any) -> Any:
        counted = plgpu.broadcasted_iota(jnp.int32, x.shape, axis, layout=plgpu.Layout.WGMMA)
        neutral = jnp.full_like(x, REDUCTIONS[result.reduction].neutral)
        return jnp.where(counted < size - first, x, neutral)

    # Few strips reach beyond the edge, and the others have nothing to compare.
    return lax.cond(first + length > size, replaced, lambda x: x, x)


def leave_rows(cta: Cta, at: place.Where, rows: Rows) -> None:
    """Stores what has been reduced along the rows of a consumer's tile."""
    plan = cta.plan
    height, width = plan.consumer_out_tile
    pairs = zip(_of_each(plan, cta.left), plan.problem.reductions, strict=True)
    left = itertools.chain(*(targets for targets, own in pairs if own.kind == "m"))
    for target, x in zip(left, itertools.chain(*rows), strict=True):
        mine = place.vector(target.at[lax.div(at.col, jnp.int32(width))], at.batch)
        rows_of_tile, layout = mine.at[pl.ds(at.row, height)], plgpu.Layout.WGMMA.reduce(1)
        if at.end is None:
            arrays.write_directly(plan, rows_of_tile, x, layout)
        else:
            arrays.write_first(plan, rows_of_tile, x, at.end - at.row, layout)


def leave_columns(cta: Cta, chunk: Strip, strips: Sequence[Sequence[Values]]) -> None:
    """Stores what has been reduced along the columns of a chunk, of each of its strips."""
    plan = cta.plan
    pairs = zip(_of_each(plan, cta.left), plan.problem.reductions, strict=True)
    left = [(*targets, own.reduction) for targets, own in pairs if own.kind == "n"]
    # Consumers' tiles lie one below the other, and a chunk has all rows of one.
    tile = lax.div(chunk.rows[0], jnp.int32(plan.consumer_out_tile[0]))
    here, columns = pl.ds(tile * plan.warps_reducing, plan.warps_reducing), pl.ds(*chunk.cols)
    for (target, name), own in zip(left, zip(*strips, strict=True), strict=True):
        mine = target.at[here]
        mine = mine.at[:, columns] if chunk.batch is None else mine.at[:, chunk.batch, columns]
        store_columns(plan, mine, own, name)
