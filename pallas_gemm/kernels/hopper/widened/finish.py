"""How the sums of a tile are joined, finished and stored.

consumers that took other steps ──▶ shared memory ──▶ the first of them
CTAs of a cluster               ──▶ shared memory of the CTA that stores ──▶ its first consumers
sums ──▶ epilogue ──▶ a slot, transposed ──▶ TMA ──▶ the result
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import epilogue, place, smem
from pallas_gemm.kernels.hardware import WARPGROUP_THREADS, WGMMA_ROWS
from pallas_gemm.kernels.hopper.groups import group_rows
from pallas_gemm.kernels.hopper.plan import Chunk
from pallas_gemm.kernels.hopper.widened.plan import WidenedPlan
from pallas_gemm.kernels.ptx import arrays, cluster, fences, left_sums, row_order, turned, words
from pallas_gemm.kernels.ptx.sums import AT_ONCE, LAYOUT
from pallas_gemm.kernels.traced import Scalar, Values


def widths(plan: WidenedPlan) -> tuple[int, ...]:
    """The different numbers of columns of sums that are stored at a time, most first."""
    return tuple(sorted({width for _, width in plan.config.store_chunks()}, reverse=True))


def apart_shape(plan: WidenedPlan) -> tuple[int, ...]:
    """The shape of the sums that other CTAs of the cluster hand over, of each thread its own."""
    config = plan.config
    lines = config.sum_registers // AT_ONCE
    return (plan.most_awaited, config.consumers, lines, WARPGROUP_THREADS, AT_ONCE)


def join_and_store(cta: Any, me: Scalar, part: Scalar, before: Scalar, total: Values) -> None:
    """Hands over a consumer's sums; or adds up what others hand over, and stores it.

    Args:
        cta: The CTA.
        me: Which of the consumers this is that share the columns.
        part: Which of those that take the steps in turns.
        before: The steps of the tiles before.
        total: Its sums.
    """
    config = cta.plan.config
    if config.along_k > 1:
        total = _join_steps(cta, me, part, before, total)
    if config.shares_all:
        total = _join_all(cta, me, part, total)
    elif config.ctas_along_k > 1:
        total = _join_ctas(cta, me, part, total)
    stores = is_stored(cta, part)

    @pl.when(stores)
    def _store() -> None:
        store(cta, me, _ordered(cta, me, total))

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def is_stored(cta: Any, part: Scalar) -> Scalar:
    """Whether this warpgroup stores its columns of the tile, when all sums are added."""
    first = part == 0
    return first if cta.at.piece is None else first & (cta.at.piece.to == cta.rank)


def _join_ctas(cta: Any, me: Scalar, part: Scalar, total: Values) -> Values:
    """Sends sums to the CTA that adds up the tile; there, adds what others have sent."""
    plan, piece, apart = cta.plan, cta.at.piece, (cta.slots.apart, cta.slots.arrivals)
    sends = (piece.to != cta.rank) & (part == 0)
    there = piece.to, piece.place
    pl.when(sends)(lambda: cluster.send(plan, total, *apart, me, *there))
    return cluster.with_others(plan, total, *apart, me, jnp.where(part == 0, piece.awaited, 0))


def _join_all(cta: Any, me: Scalar, part: Scalar, total: Values) -> Values:
    """Leaves sums for the CTA that adds up the tile; there, adds what others have left."""
    plan, piece, rank = cta.plan, cta.at.piece, cta.rank
    arrived, left = cta.gmem.sent, cta.gmem.summands

    @pl.when((piece.to != rank) & (part == 0))
    def _leave() -> None:
        left_sums.leave(plan, total, left.at[rank, me])
        words.arrive(plan, arrived.at[rank, me])

    def add(i: Scalar, total: Values) -> Values:
        other = rank + 1 + i
        words.await_arrivals(plan, arrived.at[other, me], jnp.int32(WARPGROUP_THREADS))
        return left_sums.with_left(plan, total, left.at[other, me])

    return lax.fori_loop(0, jnp.where(part == 0, piece.awaited, 0), add, total)


def _ordered(cta: Any, me: Scalar, total: Values) -> Values:
    """Sums whose rows are in the order of WGMMA."""
    plan, form = cta.plan, cta.plan.form
    if form.k_last:
        return total
    if form.crosses_warps:
        return row_order.across_warps(plan, total, cta.slots.scratch.at[me], form)
    return row_order.in_order(plan, total)


def _join_steps(cta: Any, me: Scalar, part: Scalar, before: Scalar, total: Values) -> Values:
    """Adds up the sums of consumers that took other steps, in the first of them."""
    plan, joined, taken = cta.plan, cta.barriers.joined.at[me], cta.barriers.taken

    @pl.when(part > 0)
    def _hand_over() -> None:
        if taken is not None:
            pl.when(before > 0)(lambda: plgpu.barrier_wait(taken.at[me]))
        arrays.write_blocks(plan, cta.slots.joined.at[part - 1, me], total, LAYOUT)
        plgpu.commit_smem()
        plgpu.barrier_arrive(joined)

    def add_up(total: Values) -> Values:
        plgpu.barrier_wait(joined)
        for other in range(plan.config.along_k - 1):
            own = cta.slots.joined.at[other, me]
            total += arrays.read_blocks(plan, own, total.dtype, LAYOUT)
        if taken is not None:
            fences.after_loads(plan)
            plgpu.barrier_arrive(taken.at[me])
        return total

    return lax.cond(part == 0, add_up, lambda total: total, total)


def store(cta: Any, me: Scalar, total: Values) -> None:
    """Finishes sums and stores them, chunk by chunk."""
    plan, at = cta.plan, cta.at
    chunks, beyond = _chunks(plan), plan.form.rows // plan.problem.sums
    places = [
        (slice(first + x.row, first + x.row + x.rows), slice(x.col, x.col + x.cols))
        for x in chunks
        for first in range(0, plan.form.rows, beyond)
    ]
    parts = itertools.batched(arrays.taken_apart(plan, total, places, LAYOUT), plan.problem.sums)
    for number, (chunk, sums) in enumerate(zip(chunks, parts, strict=True)):
        cols = at.col + chunk.col, chunk.cols
        row = at.row + me * beyond + chunk.row
        strip = epilogue.Strip(at.product, (row, chunk.rows), cols, LAYOUT)
        if plan.problem.loaded_dtypes:
            plgpu.barrier_wait(cta.barriers.loaded.at[_loaded_slot(plan, me, number)])
        read = functools.partial(_read, cta, me, number, chunk)
        values = epilogue.finish(plan, cta.gmem, strip, sums, read)
        _put(cta, me, number, chunk, values)
        if plan.problem.loaded_dtypes and number + plan.config.store_slots < len(chunks):
            _fetch(cta, me, number + plan.config.store_slots)


def store_zeros(cta: Any, me: Scalar) -> None:
    """Stores zeros for rows that are in no group."""
    plan = cta.plan
    for number, chunk in enumerate(_chunks(plan)):
        nothing = [jnp.zeros((chunk.rows, chunk.cols), x) for x in plan.problem.result_dtypes]
        values = [arrays.in_registers(plan, x, LAYOUT) for x in nothing]
        _put(cta, me, number, chunk, values)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def fetch_first(cta: Any, me: Scalar) -> None:
    """Starts the loads of what the first chunks take beside their sums."""
    for number in range(min(cta.plan.config.store_slots, len(_chunks(cta.plan)))):
        _fetch(cta, me, number)


def _fetch(cta: Any, me: Scalar, number: int) -> None:
    """Starts the loads of what a chunk takes beside its sums; its slots have been read."""
    plan, chunk = cta.plan, _chunks(cta.plan)[number]
    fences.after_loads(plan)
    full = cta.barriers.loaded.at[_loaded_slot(plan, me, number)]
    there = _place(cta, me, chunk)
    loaded = cta.gmem.loaded(plan.problem, cta.at.product)
    for x, slots in zip(loaded, cta.slots.loaded, strict=True):
        slot = slots.at[me, number % plan.config.store_slots, pl.ds(0, chunk.cols)]
        plgpu.copy_gmem_to_smem(x.at[there], slot, full)


def _read(cta: Any, me: Scalar, number: int, chunk: Chunk, operand: int) -> Values:
    """Reads what was loaded of an operand for a chunk."""
    slot = cta.slots.loaded[operand].at[me, number % cta.plan.config.store_slots]
    return turned.read(cta.plan, slot.at[pl.ds(0, chunk.cols)])


def _loaded_slot(plan: WidenedPlan, me: Scalar, number: int) -> Scalar:
    return me * plan.config.store_slots + number % plan.config.store_slots


def _place(cta: Any, me: Scalar, chunk: Chunk) -> tuple[Any, Any]:
    """Where a chunk lies in the result."""
    beyond = cta.plan.form.rows // cta.plan.problem.sums
    row = cta.at.row + me * beyond + chunk.row
    return pl.ds(cta.at.col + chunk.col, chunk.cols), pl.ds(row, WGMMA_ROWS)


def _chunks(plan: WidenedPlan) -> list[Chunk]:
    """The parts of a consumer's columns of the result that are stored at a time."""
    return [
        Chunk(top * WGMMA_ROWS, WGMMA_ROWS, first, width)
        for top in range(plan.tops)
        for first, width in plan.config.store_chunks()
    ]


def _put(cta: Any, me: Scalar, number: int, chunk: Chunk, values: Sequence[Values]) -> None:
    """Stores a chunk that is finished."""
    plan = cta.plan
    # Each box has a store of its own.
    stored = sum(map(panels, plan.problem.result_dtypes))
    plgpu.wait_smem_to_gmem((plan.config.store_slots - 1) * stored, wait_read_only=True)
    boxes = [
        _write(plan, slots, me, number % plan.config.store_slots, x)
        for slots, x in zip(cta.slots.out, values, strict=True)
    ]
    plgpu.commit_smem()
    for own, out in zip(boxes, cta.out, strict=True):
        for panel, box in enumerate(own):
            below = panel * (WGMMA_ROWS // len(own))
            _store(cta, me, chunk, below, box, place.matrix(out, cta.at.product))


def panels(dtype: Any) -> int:
    """How many boxes of TMA have 64 columns of a result."""
    return WGMMA_ROWS * dtype.itemsize // smem.ATOM_BYTES


def _write(plan: WidenedPlan, slots: Any, me: Scalar, slot: int, values: Values) -> list[Any]:
    """Writes values to a slot, transposed; returns what of it is stored."""
    width, count = values.shape[1], panels(values.dtype)
    if count > 1:
        turned.write(plan, slots.at[me, slot], values)
        return [slots.at[me, slot, panel, pl.ds(0, width)] for panel in range(count)]
    views = smem.views(slots, simulated=plan.simulated)[widths(plan).index(width)]
    slot *= plan.config.store_columns // width
    box, tile = (view.at[me, slot] for view in views)
    tile.transpose((1, 0))[...] = values
    return [box]


def _store(cta: Any, me: Scalar, chunk: Chunk, below: int, box: Any, out: Any) -> None:
    """Starts the store of a box so far below the first row of a chunk, as far as its group goes."""
    (cols, rows), at, width = _place(cta, me, chunk), cta.at, box.shape[1]
    row = rows.start + below
    if at.end is None:
        plgpu.copy_smem_to_gmem(box, out.at[cols, pl.ds(row, width)])
        return
    where = place.Where(None, at.col, row, end=at.end)
    own = Chunk(chunk.col, chunk.cols, 0, width)
    group_rows.store(box, out, group_rows.Place(own, where))
