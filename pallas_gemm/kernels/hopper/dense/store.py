"""How a consumer finishes the sums of a tile and stores them, chunk by chunk.

    registers ──▶ store slot in shared memory ──▶ TMA, or the threads themselves ──▶ the result

A chunk waits until its slot's last store has been read. Each result has slots of its own. TMA loads
an operand with a value for each element, such as a residual. It goes into the slot that a result of
its type will take, or into one of its own.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import epilogue, place, smem
from pallas_gemm.kernels.hopper.cta import Cta
from pallas_gemm.kernels.hopper.dense import lines, reduce
from pallas_gemm.kernels.hopper.groups import group_rows
from pallas_gemm.kernels.hopper.plan import Chunk, HopperPlan
from pallas_gemm.kernels.ptx import arrays
from pallas_gemm.kernels.traced import Ref, Scalar, Values


class Tile(NamedTuple):
    """A consumer's part of a tile: sums, or what they are finished and rounded.

    Attributes:
        values: Sums in registers, or what adds them up where they are asked for (`join.Summands`);
            of a tile that is finished, its chunks.
        at: Where it lies.
    """

    values: Values
    at: place.Where


def store_sums(cta: Cta, me: Scalar, tile: Tile, number: int, rows: reduce.Rows) -> reduce.Rows:
    """Finishes and stores one chunk of the sums of a tile.

    The registers that an epilogue needs are free only for a chunk at a time. Takes and returns what
    has been reduced along the tile's rows.
    """
    rows = store_chunk(cta, me, tile, number, rows)
    following = number + cta.plan.config.store_slots
    if following < len(cta.plan.chunks):
        fetch(cta, me, tile.at, (following,))
    return rows


def store_chunk(
    cta: Cta, me: Scalar, tile: Tile, number: int, rows: reduce.Rows = ()
) -> reduce.Rows:
    """Finishes and stores one chunk of the sums of a tile, whose operands are on their way."""
    results, rows = _finish_chunk(cta, me, tile, number, rows)
    _store(cta, me, tile.at, number, results)
    return rows


def store_finished(cta: Cta, me: Scalar, tile: Tile, number: int) -> None:
    """Stores one chunk of a tile that is finished."""
    _store(cta, me, tile.at, number, [tile.values[number]])


def finish(cta: Cta, me: Scalar, total: Values, at: place.Where) -> list[Any]:
    """Finishes a whole tile, some columns at a time where the epilogue takes registers.

    Returns its chunks; what is reduced is stored.
    """
    plan = cta.plan
    height, width = plan.consumer_out_tile
    whole = Chunk(0, height, 0, width)
    columns = plan.strips(width)
    columns = [slice(0, width)] if plan.problem.epilogue.is_identity else columns
    sums = _sums(plan, total, whole, columns)
    strips: list[Any] = []
    rows: reduce.Rows = ()
    picked = _pick(cta, Tile(total, at), whole, rows)
    for own, x in zip(columns, sums, strict=True):
        strip = _strip(at, whole, own)
        values = epilogue.finish(plan, cta.gmem, strip, x, _nothing_to_read)
        taken = reduce.take(cta, strip, values, rows, picked)
        (value,), rows = taken.whole, taken.rows
        strips.append(value)
        # Registers cannot hold the columns of all strips beside the sums.
        reduce.keep_columns(cta, me, own.start, [taken.columns])
    reduce.leave_rows(cta, at, rows)
    reduce.leave_columns(cta, me, at)
    return taken_apart(plan, _side_by_side(strips), plan.chunks)


def _nothing_to_read(number: int) -> Any:
    """Such a tile's epilogue takes no operand that passes through shared memory."""
    raise AssertionError(number)


def _side_by_side(strips: Sequence[Any]) -> Any:
    return strips[0] if len(strips) == 1 else lax.concatenate(strips, 1)


def _finish_chunk(
    cta: Cta, me: Scalar, tile: Tile, number: int, rows: reduce.Rows
) -> tuple[list[Any], reduce.Rows]:
    """Finishes one chunk of a tile's sums, strip by strip.

    Returns each result's values, and what has been reduced along rows; what is reduced along
    columns is stored.
    """
    plan, chunk, at = cta.plan, cta.plan.chunks[number], tile.at
    strips = plan.strips(chunk.cols)
    loaded: dict[int, list[Any]] = {}

    def read(strip: int, operand: int) -> Any:
        if not loaded:
            plgpu.barrier_wait(cta.barriers.residual.at[_loaded_barrier(plan, me, number)])
        if operand not in loaded:
            whole = _loaded_slot(cta, me, number, operand).tile[...]
            loaded[operand] = _strips(plan, whole, strips)
        return loaded[operand][strip]

    finished: list[list[Any]] = []
    reduced: list[Any] = []
    sums = _sums(plan, tile.values, chunk, strips)
    picked = _pick(cta, tile, chunk, rows)
    for i, (own, x) in enumerate(zip(strips, sums, strict=True)):
        strip = _strip(at, chunk, own)
        values = epilogue.finish(plan, cta.gmem, strip, x, functools.partial(read, i))
        taken = reduce.take(cta, strip, values, rows, picked)
        rows = taken.rows
        finished.append(taken.whole)
        reduced.append(taken.columns)
    reduce.keep_columns(cta, me, chunk.col, reduced)
    if not loaded and plan.problem.loaded_dtypes:
        plgpu.barrier_wait(cta.barriers.residual.at[_loaded_barrier(plan, me, number)])
    return [_side_by_side(strips) for strips in zip(*finished, strict=True)], rows


def _pick(cta: Cta, tile: Tile, chunk: Chunk, rows: reduce.Rows) -> list[Any]:
    """Picks sums of a chunk, if one is wanted of each row."""
    if not any(epilogue.picks(cta.plan.problem)):
        return []
    columns = slice(0, chunk.cols)
    ((*sums,),) = _sums(cta.plan, tile.values, chunk, [columns])
    return reduce.pick(cta, _strip(tile.at, chunk, columns), sums, rows)


def _sums(
    plan: HopperPlan, total: Values, chunk: Chunk, strips: Sequence[slice]
) -> Iterable[tuple[Any, ...]]:
    """The sums of each strip of a chunk; two of each if the result is gated."""
    rows, beyond = slice(chunk.row, chunk.row + chunk.rows), plan.consumer_out_tile[1]
    firsts = [chunk.col + part * beyond for part in range(plan.problem.sums)]
    if plan.joins:
        # They are loaded when they are asked for.
        return (tuple(total[rows, f + s.start : f + s.stop] for f in firsts) for s in strips)
    parts = [total[rows, first : first + chunk.cols] for first in firsts]
    return zip(*(_strips(plan, part, strips) for part in parts), strict=True)


def _strips(plan: HopperPlan, values: Values, strips: Sequence[slice]) -> list[Any]:
    """The strips of a chunk in registers."""
    if plan.problem.epilogue.is_identity:
        return [values]
    widths = [strip.stop - strip.start for strip in strips]
    rows = values.shape[0]
    parts = [
        Chunk(0, rows, strip.start, width) for strip, width in zip(strips, widths, strict=True)
    ]
    return taken_apart(plan, values, parts)


def taken_apart(plan: HopperPlan, values: Values, parts: Sequence[Chunk]) -> list[Any]:
    """Parts of what is in registers."""
    places = [
        (slice(part.row, part.row + part.rows), slice(part.col, part.col + part.cols))
        for part in parts
    ]
    return arrays.taken_apart(plan, values, places, plgpu.Layout.WGMMA)


def _strip(at: place.Where, chunk: Chunk, columns: slice) -> epilogue.Strip:
    """Some columns of a chunk of a consumer's tile."""
    start = chunk.col + columns.start
    return epilogue.Strip(
        at.batch,
        (at.row + chunk.row, chunk.rows),
        (at.col + start, columns.stop - columns.start),
        plgpu.Layout.WGMMA,
        start,
    )


def _store(cta: Cta, me: Scalar, at: place.Where, number: int, values: Sequence[Any]) -> None:
    if not values:
        if cta.plan.problem.loaded_dtypes:
            # It has been read by all threads before its slots are filled again.
            plgpu.commit_smem()
        return
    by = _store_by_tma if cta.plan.stored_by_tma else _store_by_threads
    by = _store_twice if cta.plan.problem.symmetric else by
    by(cta, me, at, number, *values)


def _store_by_tma(cta: Cta, me: Scalar, at: place.Where, number: int, *values: Values) -> None:
    plan = cta.plan
    slots = [_slot(cta, me, number, array) for array in range(len(values))]
    _await_slots(plan, number)
    for slot, x in zip(slots, values, strict=True):
        target = slot.tile.transpose((1, 0)) if plan.problem.transpose_out else slot.tile
        target[...] = x
    plgpu.commit_smem()

    def copy(box: Ref, out: Any) -> None:
        if at.end is None:
            own = place.matrix(out, at.batch)
            there = _chunk(plan, own, at, number, transposed=plan.problem.transpose_out)
            plgpu.copy_smem_to_gmem(box, there)
        else:
            group_rows.store(box, out, group_rows.Place(plan.chunks[number], at))

    for slot, out in zip(slots, cta.out, strict=True):
        cta.rows.store(out, at, functools.partial(copy, slot.box))


def _await_slots(plan: HopperPlan, number: int) -> None:
    """Waits until the last stores from a chunk's slots have been read.

    Where operands are loaded into slots of results, that was awaited before they were.
    """
    if not plan.loads_into_results:
        plgpu.wait_smem_to_gmem(plan.stores_in_flight(number), wait_read_only=True)


def _store_twice(cta: Cta, me: Scalar, at: place.Where, number: int, values: Values) -> None:
    """Stores a chunk of a symmetric result where it is, and mirrored at the diagonal.

    Elements above the diagonal are left to the chunk of which they are the mirror image. A copy
    that is not made counts as a store in flight, too.
    """
    plan, slot = cta.plan, _slot(cta, me, number, 0)
    mirrored = _slot_among(cta, me, number, cta.slots.mirrored)
    _await_slots(plan, number)
    slot.tile[...] = values
    mirrored.tile.transpose((1, 0))[...] = values
    plgpu.commit_smem()
    chunk = plan.chunks[number]
    below = at.row + chunk.row - at.col - chunk.col
    here = below > -chunk.rows
    # A square chunk on the diagonal is its own mirror image; of others, a part is mirrored.
    there = below > (0 if plan.chunks_are_squares else -chunk.rows)
    for view, made, transposed in ((slot, here, False), (mirrored, there, True)):
        out = place.matrix(cta.out[0], at.batch)
        target = _chunk(plan, out, at, number, transposed=transposed)
        arrays.store_if(plan, made, view.box, target)


def _store_by_threads(cta: Cta, me: Scalar, at: place.Where, number: int, *values: Values) -> None:
    """Here, `commit_smem` is a barrier of the consumer's threads.

    A thread that is through the barrier of one chunk has read all that it stores of the chunk
    before, whose slot may then be used again.
    """
    plan, chunk = cta.plan, cta.plan.chunks[number]
    first, shape = (at.row + chunk.row, at.col + chunk.col), (chunk.rows, chunk.cols)
    if plan.problem.transpose_out:
        first, shape = first[::-1], shape[::-1]
    here = me, number % plan.config.store_slots, slice(shape[0]), slice(shape[1])
    slots = [slots.at[here] for slots in cta.slots.lines]
    if plan.stores_in_flight(number) == 0:
        plgpu.commit_smem()
    for slot, x in zip(slots, values, strict=True):
        arrays.write_lines(plan, slot, x, transposed=plan.problem.transpose_out)
    plgpu.commit_smem()
    for slot, out in zip(slots, cta.out, strict=True):
        lines.store(plan, slot, place.matrix(out, at.batch), first, plan.clipped_length(number))


def fetch(cta: Cta, me: Scalar, at: place.Where, chunks: Iterable[int]) -> None:
    """Starts to load chunks of the epilogue's operands, into the slots that wait for their sums."""
    plan = cta.plan
    if not plan.problem.loaded_dtypes:
        return
    if plan.loads_into_results:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for chunk in chunks:
        if chunk >= len(plan.chunks):
            continue
        loaded = cta.barriers.residual.at[_loaded_barrier(plan, me, chunk)]
        for number, operand in enumerate(cta.gmem.loaded(plan.problem, at.batch)):
            plgpu.copy_gmem_to_smem(
                _chunk(plan, operand, at, chunk, transposed=plan.problem.transpose_out),
                _loaded_slot(cta, me, chunk, number).box,
                loaded,
            )


def _loaded_barrier(plan: HopperPlan, me: Scalar, chunk: int) -> Any:
    return me * plan.config.store_slots + chunk % plan.config.store_slots


def _slot(cta: Cta, me: Scalar, number: int, array: int) -> smem.Boxed:
    """Both views of the slot that a chunk of a result takes."""
    return _slot_among(cta, me, number, cta.slots.out[array])


def _loaded_slot(cta: Cta, me: Scalar, number: int, operand: int) -> smem.Boxed:
    """Both views of the slot that a chunk of an operand is loaded into."""
    own = cta.plan.problem.own_slots
    slots = cta.slots.loaded[sum(own[:operand])] if own[operand] else cta.slots.out[operand]
    return _slot_among(cta, me, number, slots)


def _slot_among(cta: Cta, me: Scalar, number: int, slots: Any) -> smem.Boxed:
    plan = cta.plan
    views = slots[plan.store_widths.index(plan.chunks[number].cols)]
    return smem.Boxed(*(view.at[me, plan.store_slot(number)] for view in views))


def _chunk(plan: HopperPlan, matrix: Ref, at: place.Where, number: int, *, transposed: bool) -> Any:
    """The part of a result, or of an operand, that a chunk of a consumer's tile covers."""
    chunk = plan.chunks[number]
    rows, cols = pl.ds(at.row + chunk.row, chunk.rows), pl.ds(at.col + chunk.col, chunk.cols)
    here = (cols, rows) if transposed else (rows, cols)
    return matrix.at[here]
