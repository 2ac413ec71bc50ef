"""How the sums of a tile are joined, finished and stored.

consumers that took other steps ──▶ shared memory ──▶ the first of them
CTAs of a cluster               ──▶ shared memory of the first CTA ──▶ its first consumers
sums ──▶ epilogue ──▶ a slot, transposed ──▶ TMA ──▶ the result
"""

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
from pallas_gemm.kernels.ptx import arrays, cluster, fences, fragments
from pallas_gemm.kernels.traced import Scalar, Values


def widths(plan: WidenedPlan) -> tuple[int, ...]:
    """The different numbers of columns of sums that are stored at a time, most first."""
    return tuple(sorted({width for _, width in plan.config.store_chunks()}, reverse=True))


def apart_shape(plan: WidenedPlan) -> tuple[int, ...]:
    """The shape of the sums that other CTAs of the cluster hand over, of each thread its own."""
    config = plan.config
    return (config.ctas_along_k - 1, config.consumers, config.sum_registers, WARPGROUP_THREADS)


def meet(plan: WidenedPlan) -> None:
    """Where a warpgroup that has no sums waits for those of its cluster."""
    if plan.config.ctas_along_k > 1:
        cluster.meet(plan)


def join_and_store(cta: Any, me: Scalar, part: Scalar, before: Scalar, total: Values) -> None:
    """Hands over a consumer's sums; or adds up what others hand over, and stores it.

    Args:
        cta: The CTA.
        me: Which of the consumers this is that share the columns.
        part: Which of those that take the steps in turns.
        before: The steps of the tiles before.
        total: Its sums.
    """
    plan, config = cta.plan, cta.plan.config
    if config.along_k > 1:
        total = _join_steps(cta, me, part, before, total)
    if config.ctas_along_k > 1:
        sends = (cta.rank > 0) & (part == 0)
        total = cluster.joined(plan, total, cta.slots.apart, cta.rank, me, sends)
    stores = (part == 0) & (cta.rank == 0)

    @pl.when(stores)
    def _store() -> None:
        own = total if plan.form.k_last else fragments.in_order(plan, total)
        store(cta, me, own)

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _join_steps(cta: Any, me: Scalar, part: Scalar, before: Scalar, total: Values) -> Values:
    """Adds up the sums of consumers that took other steps, in the first of them."""
    plan, joined, taken = cta.plan, cta.barriers.joined.at[me], cta.barriers.taken

    @pl.when(part > 0)
    def _hand_over() -> None:
        if taken is not None:
            pl.when(before > 0)(lambda: plgpu.barrier_wait(taken.at[me]))
        arrays.write_blocks(plan, cta.slots.joined.at[part - 1, me], total, fragments.LAYOUT)
        plgpu.commit_smem()
        plgpu.barrier_arrive(joined)

    def add_up(total: Values) -> Values:
        plgpu.barrier_wait(joined)
        for other in range(plan.config.along_k - 1):
            own = cta.slots.joined.at[other, me]
            total += arrays.read_blocks(plan, own, total.dtype, fragments.LAYOUT)
        if taken is not None:
            fences.after_loads(plan)
            plgpu.barrier_arrive(taken.at[me])
        return total

    return lax.cond(part == 0, add_up, lambda total: total, total)


def store(cta: Any, me: Scalar, total: Values) -> None:
    """Finishes sums and stores them, chunk by chunk."""
    plan, at = cta.plan, cta.at
    chunks = _chunks(plan)
    places = [(slice(x.row, x.row + x.rows), slice(x.col, x.col + x.cols)) for x in chunks]
    parts = arrays.taken_apart(plan, total, places, fragments.LAYOUT)
    for number, (chunk, part) in enumerate(zip(chunks, parts, strict=True)):
        row = at.row + me * plan.form.rows + chunk.row
        cols = at.col + chunk.col, chunk.cols
        strip = epilogue.Strip(at.product, (row, chunk.rows), cols, fragments.LAYOUT)
        (values,) = epilogue.finish(plan, cta.gmem, strip, [part], _nothing_to_read)
        _put(cta, me, number, chunk, values)


def store_zeros(cta: Any, me: Scalar) -> None:
    """Stores zeros for rows that are in no group."""
    plan = cta.plan
    for number, chunk in enumerate(_chunks(plan)):
        nothing = jnp.zeros((chunk.rows, chunk.cols), plan.problem.out_dtype)
        values = arrays.in_registers(plan, nothing, fragments.LAYOUT)
        _put(cta, me, number, chunk, values)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _chunks(plan: WidenedPlan) -> list[Chunk]:
    """The parts of a consumer's sums that are stored at a time."""
    return [
        Chunk(top * WGMMA_ROWS, WGMMA_ROWS, first, width)
        for top in range(plan.tops)
        for first, width in plan.config.store_chunks()
    ]


def _put(cta: Any, me: Scalar, number: int, chunk: Chunk, values: Values) -> None:
    """Stores a chunk that is finished."""
    plan, config, at = cta.plan, cta.plan.config, cta.at
    plgpu.wait_smem_to_gmem(config.store_slots - 1, wait_read_only=True)
    slot, width = number % config.store_slots, chunk.cols
    if plan.problem.out_dtype.itemsize == 2:
        views = smem.views(cta.slots.out, simulated=plan.simulated)[widths(plan).index(width)]
        slot *= config.store_columns // width
        box, tile = (view.at[me, slot] for view in views)
        tile.transpose((1, 0))[...] = values
    else:
        box = cta.slots.out.at[me, slot, pl.ds(0, width)]
        fragments.write_turned(plan, box, values)
    plgpu.commit_smem()
    first_row = at.row + me * plan.form.rows + chunk.row
    out = place.matrix(cta.out, at.product)
    if at.end is None:
        there = pl.ds(at.col + chunk.col, width), pl.ds(first_row, WGMMA_ROWS)
        plgpu.copy_smem_to_gmem(box, out.at[there])
        return
    where = place.Where(None, at.col, first_row, end=at.end)
    turned = Chunk(chunk.col, width, 0, WGMMA_ROWS)
    group_rows.store(box, out, group_rows.Place(turned, where))


def _nothing_to_read(number: int) -> Any:
    """No operand of such an epilogue passes through shared memory."""
    raise AssertionError(number)
