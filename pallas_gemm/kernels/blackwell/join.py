"""How the epilogue hands over the summands of a tile, and joins them; see `kernels/joining.py`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import joining, launch, work
from pallas_gemm.kernels.blackwell import store
from pallas_gemm.kernels.blackwell.cta import Barriers, Cta, Smem, store_scratch, sums_of, views
from pallas_gemm.kernels.blackwell.plan import PAIR_AXIS, BlackwellPlan
from pallas_gemm.kernels.traced import Ref, Scalar, divided


def hand_over(cta: Cta, piece: work.Piece, turn: Scalar) -> None:
    """Stores a CTA's sums of a piece as a summand, some columns at a time."""
    plan, width = cta.plan, cta.plan.config.store_columns
    chunks = plan.config.tile[1] // width
    tile = joining.tile_of(plan, piece), lax.axis_index(PAIR_AXIS)

    @pl.loop(0, chunks)
    def _one_chunk(chunk: Scalar) -> None:
        first = chunk * width
        values = plgpu.async_load_tmem(sums_of(cta, turn, first, width))
        store.free_when_read(cta, turn, chunk, chunks)
        _summands(plan, cta.summands, tile, first).leave(piece, values)


def kernel(plan: BlackwellPlan) -> Callable[[launch.Inputs], Any]:
    """Returns the kernel that joins what the kernel of a plan has handed over."""
    # A CTA stores one chunk.
    config = dataclasses.replace(plan.config, store_slots=1)
    plan = dataclasses.replace(plan, config=config)
    buffers, residual = store_scratch(plan)
    return joining.kernel(
        plan,
        functools.partial(_body, plan),
        name="pallas_gemm_blackwell_join",
        chunks=plan.cut_tiles * plan.ctas_per_mma * plan.chunks,
        warpgroups=1,
        axes=(PAIR_AXIS,),
        results=(jax.ShapeDtypeStruct(plan.stored.out_shape, plan.problem.out_dtype),),
        scratch=(buffers, Barriers(residual=residual)),
    )


def _body(
    plan: BlackwellPlan, gmem: launch.Inputs, out: tuple[Any], buffers: Smem, barriers: Barriers
) -> None:
    """What a CTA does: it joins one chunk."""
    cta = Cta(plan, gmem, out[0], views(plan, buffers), None, barriers)
    rest, chunk = divided(lax.axis_index(launch.WORKER), plan.chunks)
    tile, rank = divided(rest, plan.ctas_per_mma)
    at = joining.locate(plan, gmem.order, tile)
    rows, columns = plan.config.out_tile(plan.problem)
    at = at._replace(row=at.row + rank * rows)
    sums = _summands(plan, gmem.summands, (tile, rank), chunk * plan.config.store_columns)

    def load(first: int, width: int) -> tuple[Any, ...]:
        starts = range(first, first + plan.problem.sums * columns, columns)
        return tuple(sums[0:rows, start : start + width] for start in starts)

    store.fetch_residual(cta, at, 0, (chunk,))
    store.store(cta, at, 0, chunk, store.finish(cta, at, 0, chunk, load))
    if not plan.config.direct_store:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _summands(
    plan: BlackwellPlan, gmem: Ref, tile: tuple[Any, Any], first: Any
) -> joining.Summands:
    """The summands of a tile's columns from the first one on."""
    return joining.Summands(plan, gmem, tile, (0, first), plgpu.Layout.TCGEN05)
