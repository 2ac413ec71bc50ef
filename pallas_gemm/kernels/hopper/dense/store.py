"""How a consumer finishes the sums of a tile and stores them, chunk by chunk.

    registers ──▶ store slot in shared memory ──▶ TMA, or the threads themselves ──▶ the result

A chunk waits until its slot's last store has been read. A residual is loaded by TMA into the slot
that its sum will take, or, of another type than the result, into one of its own.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import epilogue, place, smem
from pallas_gemm.kernels.hopper.cta import Cta
from pallas_gemm.kernels.hopper.dense import lines
from pallas_gemm.kernels.hopper.groups import group_rows
from pallas_gemm.kernels.hopper.plan import Chunk, HopperPlan
from pallas_gemm.kernels.ptx import arrays


class Tile(NamedTuple):
    """A consumer's part of a tile: sums, or what they are finished and rounded.

    Attributes:
        values: Sums in registers, or what adds them up where they are asked for (`join.Summands`);
            of a tile that is finished, its chunks.
        at: Where it lies.
    """

    values: Any
    at: place.Where


def store_sums(cta: Cta, me: Any, tile: Tile, number: int) -> None:
    """Finishes and stores one chunk of the sums of a tile.

    The registers that an epilogue needs are free only for a chunk at a time.
    """
    store_chunk(cta, me, tile, number)
    following = number + cta.plan.config.store_slots
    if following < len(cta.plan.chunks):
        fetch_residual(cta, me, tile.at, (following,))


def store_chunk(cta: Cta, me: Any, tile: Tile, number: int) -> None:
    """Finishes and stores one chunk of the sums of a tile, whose residual is on its way."""
    _store(cta, me, tile.at, number, _finish_chunk(cta, me, tile, number))


def store_finished(cta: Cta, me: Any, tile: Tile, number: int) -> None:
    """Stores one chunk of a tile that is finished."""
    _store(cta, me, tile.at, number, tile.values[number])


def finish(cta: Cta, total: Any, at: place.Where) -> list[Any]:
    """Finishes a whole tile, some columns at a time where the epilogue takes registers.

    Returns its chunks.
    """
    plan = cta.plan
    height, width = plan.consumer_out_tile
    whole = Chunk(0, height, 0, width)
    columns = [slice(0, width)] if plan.problem.epilogue.is_identity else plan.strips(width)
    sums = _sums(plan, total, whole, columns)
    strips = [_finish_part(cta, at, whole, *part) for part in zip(columns, sums, strict=True)]
    finished = strips[0] if len(strips) == 1 else lax.concatenate(strips, 1)
    return taken_apart(plan, finished, plan.chunks)


def _finish_chunk(cta: Cta, me: Any, tile: Tile, number: int) -> Any:
    """Finishes one chunk of a tile's sums, with its residual."""
    plan, chunk, at = cta.plan, cta.plan.chunks[number], tile.at
    strips = plan.strips(chunk.cols)
    finished, residual = [], []
    for strip, sums in zip(strips, _sums(plan, tile.values, chunk, strips), strict=True):
        values = _finish_part(cta, at, chunk, strip, sums)
        if plan.problem.epilogue.residual:
            if not residual:
                plgpu.barrier_wait(cta.barriers.residual.at[_residual_barrier(plan, me, number)])
                whole = _residual_slot(cta, me, number).tile[...]
                residual = _strips(plan, whole, strips)
            part = residual[len(finished)]
            values = epilogue.add_residual(plan.problem, cta.gmem, at.batch, values, part)
        finished.append(values)
    return finished[0] if len(finished) == 1 else lax.concatenate(finished, 1)


def _sums(
    plan: HopperPlan, total: Any, chunk: Chunk, strips: Sequence[slice]
) -> Iterable[tuple[Any, ...]]:
    """The sums of each strip of a chunk; two of each if the result is gated."""
    rows, beyond = slice(chunk.row, chunk.row + chunk.rows), plan.consumer_out_tile[1]
    firsts = [chunk.col + part * beyond for part in range(plan.problem.sums)]
    if plan.joins:
        # They are loaded when they are asked for.
        return (tuple(total[rows, f + s.start : f + s.stop] for f in firsts) for s in strips)
    parts = [total[rows, first : first + chunk.cols] for first in firsts]
    return zip(*(_strips(plan, part, strips) for part in parts), strict=True)


def _strips(plan: HopperPlan, values: Any, strips: Sequence[slice]) -> list[Any]:
    """The strips of a chunk in registers."""
    if plan.problem.epilogue.is_identity:
        return [values]
    widths = [strip.stop - strip.start for strip in strips]
    rows = values.shape[0]
    parts = [
        Chunk(0, rows, strip.start, width) for strip, width in zip(strips, widths, strict=True)
    ]
    return taken_apart(plan, values, parts)


def taken_apart(plan: HopperPlan, values: Any, parts: Sequence[Chunk]) -> list[Any]:
    """Parts of what is in registers."""
    places = [
        (slice(part.row, part.row + part.rows), slice(part.col, part.col + part.cols))
        for part in parts
    ]
    return arrays.taken_apart(plan, values, places, plgpu.Layout.WGMMA)


def _finish_part(cta: Cta, at: place.Where, chunk: Chunk, strip: slice, sums: Iterable[Any]) -> Any:
    """Applies the epilogue to the sums of a strip."""
    part = epilogue.Part(
        at.batch,
        (at.row + chunk.row, chunk.rows),
        (at.col + (chunk.col + strip.start), strip.stop - strip.start),
        plgpu.Layout.WGMMA,
    )
    return epilogue.finish(cta.plan.problem, cta.gmem, part, *sums)


def _store(cta: Cta, me: Any, at: place.Where, number: int, values: Any) -> None:
    by = _store_by_tma if cta.plan.stored_by_tma else _store_by_threads
    by = _store_twice if cta.plan.problem.symmetric else by
    by(cta, me, at, number, values)


def _store_by_tma(cta: Cta, me: Any, at: place.Where, number: int, values: Any) -> None:
    plan, slot = cta.plan, _slot(cta, me, number)
    if not plan.problem.epilogue.residual:
        plgpu.wait_smem_to_gmem(plan.stores_in_flight(number), wait_read_only=True)
    target = slot.tile.transpose((1, 0)) if plan.problem.transpose_out else slot.tile
    target[...] = values
    plgpu.commit_smem()

    def copy(out: Any) -> None:
        if at.end is None:
            there = _chunk(plan, out, at, number, transposed=plan.problem.transpose_out)
            plgpu.copy_smem_to_gmem(slot.box, there)
        else:
            group_rows.store(slot.box, out, group_rows.Place(plan.chunks[number], at))

    cta.rows.store(cta.out, at, copy)


def _store_twice(cta: Cta, me: Any, at: place.Where, number: int, values: Any) -> None:
    """Stores a chunk of a symmetric result where it is, and mirrored at the diagonal.

    What is above the diagonal is left to the chunk that it is the mirror image of. A copy that is
    not made counts as a store in flight, too.
    """
    plan, slot, mirrored = cta.plan, _slot(cta, me, number), _slot(cta, me, number, mirrored=True)
    if not plan.problem.epilogue.residual:
        plgpu.wait_smem_to_gmem(plan.stores_in_flight(number), wait_read_only=True)
    slot.tile[...] = values
    mirrored.tile.transpose((1, 0))[...] = values
    plgpu.commit_smem()
    chunk = plan.chunks[number]
    below = at.row + chunk.row - at.col - chunk.col
    here = below > -chunk.rows
    # A square chunk on the diagonal is its own mirror image; of others, a part is mirrored.
    there = below > (0 if plan.chunks_are_squares else -chunk.rows)
    for view, made, transposed in ((slot, here, False), (mirrored, there, True)):
        target = _chunk(plan, cta.out, at, number, transposed=transposed)
        arrays.store_if(plan, made, view.box, target)


def _store_by_threads(cta: Cta, me: Any, at: place.Where, number: int, values: Any) -> None:
    """Here, `commit_smem` is a barrier of the consumer's threads.

    A thread that is through the barrier of one chunk has read all that it stores of the chunk
    before, whose slot may then be used again.
    """
    plan, chunk = cta.plan, cta.plan.chunks[number]
    first, shape = (at.row + chunk.row, at.col + chunk.col), (chunk.rows, chunk.cols)
    if plan.problem.transpose_out:
        first, shape = first[::-1], shape[::-1]
    slot = cta.slots.lines.at[me, number % plan.config.store_slots, : shape[0], : shape[1]]
    if plan.stores_in_flight(number) == 0:
        plgpu.commit_smem()
    arrays.write_lines(plan, slot, values, transposed=plan.problem.transpose_out)
    plgpu.commit_smem()
    result = place.matrix(cta.out, at.batch)
    lines.store(plan, slot, result, first, plan.clipped_length(number))


def fetch_residual(cta: Cta, me: Any, at: place.Where, chunks: Iterable[int]) -> None:
    """Starts to load chunks of the residual, into the slots that wait for their sums."""
    plan = cta.plan
    if not plan.problem.epilogue.residual:
        return
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for chunk in chunks:
        if chunk < len(plan.chunks):
            plgpu.copy_gmem_to_smem(
                _chunk(plan, cta.gmem.residual, at, chunk, transposed=plan.problem.transpose_out),
                _residual_slot(cta, me, chunk).box,
                cta.barriers.residual.at[_residual_barrier(plan, me, chunk)],
            )


def _residual_barrier(plan: HopperPlan, me: Any, chunk: int) -> Any:
    return me * plan.config.store_slots + chunk % plan.config.store_slots


def _slot(cta: Cta, me: Any, number: int, *, mirrored: bool = False) -> smem.Boxed:
    """Both views of a chunk's slot, or of the slot of its mirror image."""
    return _slot_among(cta, me, number, cta.slots.mirrored if mirrored else cta.slots.out)


def _residual_slot(cta: Cta, me: Any, number: int) -> smem.Boxed:
    """Both views of the slot that a chunk's residual is loaded into."""
    return _slot_among(cta, me, number, cta.slots.residual or cta.slots.out)


def _slot_among(cta: Cta, me: Any, number: int, slots: Any) -> smem.Boxed:
    plan = cta.plan
    views = slots[plan.store_widths.index(plan.chunks[number].cols)]
    return smem.Boxed(*(view.at[me, plan.store_slot(number)] for view in views))


def _chunk(plan: HopperPlan, gmem: Any, at: place.Where, number: int, *, transposed: bool) -> Any:
    """The part of the result, or of the residual, that a chunk of a consumer's tile covers."""
    chunk = plan.chunks[number]
    rows, cols = pl.ds(at.row + chunk.row, chunk.rows), pl.ds(at.col + chunk.col, chunk.cols)
    here = (cols, rows) if transposed else (rows, cols)
    return place.matrix(gmem, at.batch).at[here]
