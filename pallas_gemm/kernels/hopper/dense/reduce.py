"""Results that are reduced along rows or columns: what a consumer leaves of each of its tiles.

    along a row       reduced by each thread, strip after strip, then by the four threads of a row,
                      once for a tile: a value for each row of the tile
    along a column    reduced by each thread, strip after strip, then by each warp, once for a
                      chunk, then by the warps, once for a tile: a value for each column of the tile

XLA reduces what all tiles leave, in a fixed order. A value that changes nothing replaces what lies
beyond the edges of the result. Where in a tile the last column may lie is known when the kernel is
built: strips before it compare nothing, and strips behind it are left out as a whole.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import epilogue, place
from pallas_gemm.kernels.epilogue import Strip
from pallas_gemm.kernels.functions import exponentials, places, words
from pallas_gemm.kernels.hopper.cta import Cta
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.kernels.ptx import arrays, quick
from pallas_gemm.kernels.ptx.largest import largest_across_threads, largest_in_threads
from pallas_gemm.kernels.ptx.reductions import (
    REDUCTIONS,
    Vectors,
    across_threads,
    exp_in_threads,
    in_threads,
    picked_in_threads,
    reduce_warps,
    rows_in_threads,
    store_columns,
)
from pallas_gemm.kernels.traced import Scalar, Values
from pallas_gemm.program import ADDING, ARGMAX, LOGSUMEXP, PAIRS, Pick, Result

Rows = tuple[Vectors, ...]
"""The rows of a tile as each thread has reduced them so far, for each result; empty at first."""


def finished(plan: HopperPlan, left: Sequence[Any]) -> list[Any]:
    """Reduces what all tiles have left, without what lies beyond the edges of the result."""
    sizes = {"m": plan.problem.m, "n": plan.problem.n}
    height, width = plan.consumer_out_tile
    # Tiles of a cluster may lie beyond the result as a whole.
    beside = {"m": pl.cdiv(plan.problem.n, width), "n": pl.cdiv(plan.problem.m, height)}
    found: list[Any] = []
    largest = {}
    for own, vectors in zip(plan.problem.reductions, _of_each(plan, left), strict=True):
        within = tuple(x[: beside[own.kind], ..., : sizes[own.kind]] for x in vectors)
        in_order = plan.problem.adds_rows_in_order and own.reduction in ADDING
        how = (exponentials.in_pairs,) if in_order else ()
        # The largest values that are a part of a pair are not left once more.
        found.append(REDUCTIONS[own.reduction].joined(within, *how) if within else None)
        if own.reduction in PAIRS:
            largest[own.value] = found[-1][0]
    pairs = zip(plan.problem.reductions, found, strict=True)
    return [largest[own.value] if x is None else x for own, x in pairs]


def _of_each(plan: HopperPlan, left: Sequence[Any]) -> list[Vectors]:
    """Returns the arrays that tiles leave of each result that is reduced."""
    every = iter(left)
    counts = map(words.program(plan.problem).vectors, plan.problem.reductions)
    return [tuple(itertools.islice(every, count)) for count in counts]


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


def take(cta: Cta, strip: Strip, values: Sequence[Any], rows: Rows, picked: Sequence[Any]) -> Taken:
    """Takes what is reduced out of the values of a strip.

    Args:
        cta: The CTA.
        strip: Where the strip lies.
        values: Its values, for each result; None where one is picked of each row.
        rows: The rows of the strips before it, reduced.
        picked: The values that have been picked in its chunk, or in those before.
    """
    plan = cta.plan
    if not plan.problem.reductions:
        return Taken(list(values), rows, [])
    whole: list[Any] = []
    along_rows: list[Vectors] = []
    columns: list[Any] = []
    reduced, before, chosen = _Reduced(plan, strip), iter(rows), iter(picked)
    for result, x in zip(words.program(plan.problem).results, values, strict=True):
        if result.kind == "mn":
            whole.append(x)
            continue
        if result.kind == "m":
            own = next(before, ())
            along_rows.append((next(chosen),) if x is None else reduced.along_rows(result, x, own))
        else:
            columns.append(in_threads(plan, reduced.masked(result, x), result.reduction))
    return Taken(whole, tuple(along_rows), columns)


class _Reduced:
    """The values of a strip that are reduced; nothing is masked or compared twice."""

    def __init__(self, plan: HopperPlan, strip: Strip) -> None:
        self._plan, self._strip = plan, strip
        self._masked: dict[Any, Any] = {}

    def masked(self, result: Result, x: Any) -> Any:
        """Replaces what lies beyond the edge of the result, if that may lie in the strip."""
        key = (result.value, result.kind, REDUCTIONS[result.reduction].neutral)
        if key not in self._masked:
            self._masked[key] = _masked(self._plan, self._strip, x, result)
        return self._masked[key]

    def along_rows(self, result: Result, x: Any, before: Vectors) -> Vectors:
        """Reduces values along rows, and what is left of the strips before.

        A strip beyond the edge is left out.
        """
        plan, strip = self._plan, self._strip
        if not words.program(plan.problem).vectors(result):
            return ()
        run = functools.partial(self._along_rows, result, self.masked(result, x), before)
        if plan.ends[1] and strip.start >= plan.ends[1]:
            return lax.cond(strip.cols[0] < plan.problem.n, run, lambda: before)
        return run()

    def _along_rows(self, result: Result, x: Any, before: Vectors) -> Vectors:
        if result.reduction == LOGSUMEXP:
            return _sums_of_exp(self._plan, x, before)
        if result.reduction == ARGMAX:
            return _places(self._plan, self._strip, x, before)
        found = rows_in_threads(self._plan, x, result.reduction)
        return (REDUCTIONS[result.reduction].both(*before, found) if before else found,)


def pick(cta: Cta, strip: Strip, sums: Sequence[Any], rows: Rows) -> list[Any]:
    """Picks sums of a chunk, or of a tile, before its strips are taken: then they are not needed.

    Returns those of each result of which one is picked in each row.
    """
    plan, (first, limit) = cta.plan, strip.cols
    limit = jnp.int32(limit)
    if plan.ends[1]:
        limit = jnp.minimum(limit, plan.problem.n - first)
    nothing = plgpu.layout_cast(jnp.zeros(strip.rows[1]), plgpu.Layout.WGMMA.reduce(1))
    found = []
    for i, own in enumerate(epilogue.picks(plan.problem)):
        if own:
            columns = epilogue.columns(plan.problem, cta.gmem, strip, own)
            (before,) = rows[i] if rows else (nothing,)
            found.append(picked_in_threads(plan, sums[own.value], columns, limit, before))
    return found


def _sums_of_exp(plan: HopperPlan, x: Any, before: Vectors) -> Vectors:
    """Returns the largest values, and sums of exp beside them."""
    largest = rows_in_threads(plan, x, "max")
    if before:
        largest = jnp.maximum(before[0], largest)
    beside = exponentials.bounded(largest)
    sums = exp_in_threads(plan, x, beside)
    if before:
        sums += before[1] * _exp(plan, exponentials.bounded(before[0]) - beside)
    return largest, sums


def _places(plan: HopperPlan, strip: Strip, x: Any, before: Vectors) -> Vectors:
    """Returns the largest values, and their columns in the result."""
    largest, found = largest_in_threads(plan, x)
    own = largest, found + jnp.int32(strip.cols[0]).astype(found.dtype)
    return places.both(before, own) if before else own


def _exp(plan: HopperPlan, x: Any) -> Any:
    return quick.exp(plan, x, plgpu.Layout.WGMMA.reduce(1))


def _ended(plan: HopperPlan, name: str, own: Vectors) -> Vectors:
    """Reduces what threads have of the rows of a tile."""
    if not own:
        return ()
    if name == ARGMAX:
        return largest_across_threads(plan, *own)
    if name != LOGSUMEXP:
        return (across_threads(plan, *own, name),)
    largest, sums = own
    of_row = across_threads(plan, largest, "max")
    weights = _exp(plan, exponentials.bounded(largest) - exponentials.bounded(of_row))
    return of_row, across_threads(plan, sums * weights, "sum")


def _masked(plan: HopperPlan, strip: Strip, x: Any, result: Result) -> Any:
    """Replaces what lies beyond the edge of the result, if that may lie in the strip."""
    axis = 1 if result.kind == "m" else 0
    end = plan.ends[axis]
    if not (strip.start < end < strip.start + strip.cols[1] if axis else end):
        return x
    size, first = (plan.problem.m, plan.problem.n)[axis], (strip.rows, strip.cols)[axis][0]
    counted = arrays.counted(plan, jnp.int32, x.shape, axis, plgpu.Layout.WGMMA)
    neutral = jnp.full_like(x, REDUCTIONS[result.reduction].neutral)
    return jnp.where(counted < size - first, x, neutral)


def leave_rows(cta: Cta, at: place.Where, rows: Rows) -> None:
    """Stores what has been reduced along the rows of a consumer's tile."""
    plan = cta.plan
    height, width = plan.consumer_out_tile
    pairs = zip(_of_each(plan, cta.left), plan.problem.reductions, strict=True)
    left = [(targets, own) for targets, own in pairs if own.kind == "m"]
    ended = [_ended(plan, own.reduction, x) for (_, own), x in zip(left, rows, strict=True)]
    picks = epilogue.picks(plan.problem)
    once = picks if any(plan.stored_once) else [None] * len(picks)
    layout = plgpu.Layout.WGMMA.reduce(1)
    for (targets, _), own, pick in zip(left, ended, once, strict=True):
        if pick:
            chosen = _whose(cta, at, pick)
            mine = place.vector(targets[0].at[0], at.batch).at[pl.ds(at.row, height)]
            arrays.write_some(plan, mine, own[0], chosen, layout)
    targets = itertools.chain(*(x for (x, _), pick in zip(left, once, strict=True) if not pick))
    others = itertools.chain(*(x for x, pick in zip(ended, once, strict=True) if not pick))
    for target, x in zip(targets, others, strict=True):
        mine = place.vector(target.at[lax.div(at.col, jnp.int32(width))], at.batch)
        rows_of_tile = mine.at[pl.ds(at.row, height)]
        if at.end is None:
            arrays.write_directly(plan, rows_of_tile, x, layout)
        else:
            arrays.write_first(plan, rows_of_tile, x, at.end - at.row, layout)


def _whose(cta: Cta, at: place.Where, pick: Pick) -> Any:
    """Returns 1 for each row whose element a consumer's tile stores, and 0 for the others.

    The first tile stores a zero for a row none of whose columns is picked.
    """
    plan = cta.plan
    height, width = plan.consumer_out_tile
    strip = Strip(at.batch, (at.row, height), (at.col, width), plgpu.Layout.WGMMA)
    own = epilogue.columns(plan.problem, cta.gmem, strip, pick)
    end = jnp.int32(plan.problem.n) - at.col
    is_first = (at.col == 0).astype(jnp.int32)
    is_one = (own >= -at.col) & (own < end)
    is_here = (own >= 0) & (own < jnp.minimum(jnp.int32(width), end))
    return jnp.where(is_one, is_here.astype(jnp.int32), is_first)


def keep_columns(cta: Cta, me: Scalar, first: int, strips: Sequence[Sequence[Values]]) -> None:
    """Keeps what each warp has reduced of some columns of a tile, of each of their strips.

    Args:
        cta: The CTA.
        me: Which of its consumers.
        first: The first column in the tile.
        strips: The results of `in_threads`, for each strip and result.
    """
    names = [own.reduction for own in cta.plan.problem.reductions if own.kind == "n"]
    for number, (name, own) in enumerate(zip(names, zip(*strips, strict=True), strict=True)):
        width = sum(x.shape[1] for x in own)
        kept = cta.slots.columns.at[me, number, :, pl.ds(first, width)]
        reduce_warps(cta.plan, kept, own, name)


def leave_columns(cta: Cta, me: Scalar, at: place.Where) -> None:
    """Stores what has been reduced along the columns of a consumer's tile."""
    plan = cta.plan
    pairs = zip(_of_each(plan, cta.left), plan.problem.reductions, strict=True)
    left = [(*targets, own.reduction) for targets, own in pairs if own.kind == "n"]
    height, width = plan.consumer_out_tile
    for number, (target, name) in enumerate(left):
        # Consumers' tiles lie one below the other.
        of_tile = place.vector(target.at[lax.div(at.row, jnp.int32(height))], at.batch)
        kept = cta.slots.columns.at[me, number]
        store_columns(plan, of_tile.at[pl.ds(at.col, width)], kept, name)
