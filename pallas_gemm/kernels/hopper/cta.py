"""What the roles of one CTA share: shared memory, barriers, and where the CTA's tiles lie."""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import launch, place, protocol, smem, work
from pallas_gemm.kernels.hardware import WARPS
from pallas_gemm.kernels.hopper.devices import remote
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.kernels.hopper.tiling import TOLD_SLOTS
from pallas_gemm.kernels.traced import Scalar

CLUSTER = ("cluster_row", "cluster_col")
"""The axes of a cluster."""


class Smem(NamedTuple):
    """The ring of operand slots, and the store slots of the epilogue.

    Attributes:
        a: Slots of the left operand.
        b: Slots of the right operand.
        out: Store slots for TMA of each result, for each width of a chunk; none if threads store
            the result and no operand of its type is loaded.
        lines: Store slots of each result for threads; none if TMA stores them.
        mirrored: Store slots for what is stored a second time, on the other side of the diagonal.
        loaded: Slots of operands of the epilogue that have their own, like `out`.
        columns: The columns of a tile as each warp has reduced them, or None.
        told: Words in which the roles are told of pieces in groups (`told.py`), or None.
        scales: Scales of columns on their way to the threads that need them, or None.
    """

    a: Any = None
    b: Any = None
    out: Any = ()
    lines: Any = ()
    mirrored: Any = None
    loaded: Any = ()
    columns: Any = None
    told: Any = None
    scales: Any = None


class Barriers(NamedTuple):
    """See the table in the docstring of `kernel.py`; None for what a kernel has not."""

    full: Any = None
    empty: Any = None
    baton: Any = None
    residual: Any = None
    masked: Any = None
    counted: Any = None
    wanted: Any = None
    told: Any = None
    taken: Any = None


class Cta(NamedTuple):
    """All that the roles of a CTA know.

    Attributes:
        plan: The plan of the kernel.
        gmem: The operands in global memory.
        out: The results in global memory.
        left: The parts of reduced results that tiles leave in global memory (`reduce.py`).
        rows: Where rows of the left operand come from, and rows of the result go to.
        slots: Both views of every buffer in shared memory.
        barriers: The barriers.
        summands: The sums of all pieces in global memory, if tiles are cut along k; see
            `joining.py`.
    """

    plan: HopperPlan
    gmem: launch.Inputs
    out: tuple[Any, ...]
    left: tuple[Any, ...]
    rows: remote.Rows
    slots: Smem
    barriers: Barriers
    summands: Any = None


def scratch(plan: HopperPlan) -> tuple[Smem, Barriers]:
    """The buffers and barriers of a CTA."""
    config = plan.config
    # What is cut along k is stored by another kernel.
    stores, residual = (Smem(), None) if plan.joins else store_scratch(plan)
    buffers = stores._replace(a=plan.a.ring(config.stages), b=plan.b.ring(config.stages))
    handed = protocol.baton_arrivals()
    baton = plgpu.Barrier(num_arrivals=handed, num_barriers=config.consumers)
    words = config.told_words(plan.problem)
    barriers = Barriers(
        full=plgpu.Barrier(num_arrivals=plan.full_arrivals, num_barriers=config.ring_barriers),
        empty=plgpu.ClusterBarrier(
            collective_axes=CLUSTER,
            num_arrivals=plan.empty_arrivals,
            num_barriers=config.ring_barriers,
        ),
        baton=baton if config.pingpong else None,
        residual=residual,
        masked=plgpu.Barrier(num_arrivals=protocol.masked_arrivals(config.consumers))
        if plan.problem.ragged_k and plan.simulated
        else None,
        counted=plgpu.Barrier() if plan.problem.groups else None,
        wanted=plgpu.Barrier(num_barriers=TOLD_SLOTS) if plan.problem.ragged_k else None,
        told=plgpu.Barrier(num_barriers=TOLD_SLOTS) if words else None,
        taken=plgpu.Barrier(
            num_arrivals=protocol.taken_arrivals(config.consumers, pingpong=config.pingpong),
            num_barriers=TOLD_SLOTS,
        )
        if words
        else None,
    )
    staged = config.staged_shape(plan.problem, config.stages)
    buffers = buffers._replace(
        told=plgpu.SMEM((words,), jnp.int32) if words else None,
        scales=plgpu.SMEM(staged, jnp.float32) if math.prod(staged) else None,
    )
    return buffers, barriers


def store_scratch(plan: HopperPlan) -> tuple[Smem, Any]:
    """The buffers of the epilogue, and the barrier of what it loads, if it loads anything."""
    config, problem = plan.config, plan.problem
    transposed = plan.problem.transpose_out
    by_tma = [plan.store_shape(width, transposed=transposed) for width in plan.store_widths]
    boxed = functools.partial(smem.boxed, simulated=plan.simulated)
    uses_out = plan.stored_by_tma or plan.loads_into_results
    mirrored = [plan.store_shape(width, transposed=True) for width in plan.store_widths]
    lines = (config.consumers, config.store_slots, *config.store_slot_shape(problem))
    reduced = sum(own.kind == "n" for own in problem.reductions)
    # What warps leave of columns; the simulator has none.
    columns = config.consumers, reduced, 1 if plan.simulated else WARPS, plan.consumer_out_tile[1]
    buffers = Smem(
        columns=plgpu.SMEM(columns, jnp.float32) if reduced else None,
        out=tuple(boxed(by_tma, dtype) for dtype in problem.result_dtypes) if uses_out else (),
        lines=()
        if plan.stored_by_tma
        else tuple(plgpu.SMEM(lines, dtype) for dtype in problem.result_dtypes),
        mirrored=boxed(mirrored, problem.out_dtype) if problem.symmetric else None,
        loaded=tuple(boxed(by_tma, dtype) for dtype in problem.own_dtypes),
    )
    loads = len(problem.loaded_dtypes)
    slots = config.consumers * config.store_slots
    return buffers, plgpu.Barrier(num_arrivals=loads, num_barriers=slots) if loads else None


def views(plan: HopperPlan, buffers: Smem) -> Smem:
    """Both views of every buffer that was made as `scratch` or `store_scratch` says."""
    boxes = functools.partial(smem.views, simulated=plan.simulated)
    out, loaded = (tuple(map(boxes, slots)) for slots in (buffers.out, buffers.loaded))
    mirrored = () if buffers.mirrored is None else boxes(buffers.mirrored)
    a, b = (
        None if slots is None else operand.views(slots)
        for operand, slots in ((plan.a, buffers.a), (plan.b, buffers.b))
    )
    return buffers._replace(a=a, b=b, out=out, mirrored=mirrored, loaded=loaded)


def tile_to_load(cta: Cta, piece: work.Piece) -> place.Where:
    """Where the operands of this CTA's tile of a piece begin."""
    return _tile(cta.plan, piece, *cta.rows.to_load(piece.row))


def tile_to_store(cta: Cta, piece: work.Piece, consumer: Scalar) -> place.Where:
    """Where a consumer's part of this CTA's tile of a piece begins in the result."""
    tile = _tile(cta.plan, piece, *cta.rows.to_store(piece.row))
    return part_of_tile(cta.plan, tile, consumer)


def _tile(plan: HopperPlan, piece: work.Piece, row: Scalar, share: Scalar) -> place.Where:
    """The tile of this CTA, in the row of cluster tiles that the exchange of rows left."""
    piece = piece._replace(row=row)
    return place.locate(plan.config, plan.problem, piece, CLUSTER)._replace(share=share)


def first_of(plan: HopperPlan, consumer: Scalar) -> tuple[Any, Any]:
    """The first row and column of a consumer's part of the operands of a tile."""
    rows, cols = plan.config.consumer_tile
    if plan.config.pingpong:
        return 0, 0
    return (consumer * rows, 0) if plan.config.split_rows else (0, consumer * cols)


def part_of_tile(plan: HopperPlan, tile: place.Where, consumer: Scalar) -> place.Where:
    """The part of a tile that a consumer holds: all of it, or its share of rows or columns."""
    rows, cols = plan.consumer_out_tile
    if plan.config.pingpong:
        return tile
    if plan.config.split_rows:
        return tile._replace(row=tile.row + consumer * rows)
    return tile._replace(col=tile.col + consumer * cols)
