"""How consumers hand over the summands of a tile and join them; see `kernels/joining.py`."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import joining, launch, place, windows, work
from pallas_gemm.kernels.hopper import early_launch
from pallas_gemm.kernels.hopper.cta import (
    CLUSTER,
    Barriers,
    Cta,
    Smem,
    first_of,
    part_of_tile,
    store_scratch,
    views,
)
from pallas_gemm.kernels.hopper.dense import store
from pallas_gemm.kernels.hopper.devices import remote
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.kernels.traced import Scalar, Values, divided


def hand_over(cta: Cta, me: Scalar, piece: work.Piece, total: Values) -> None:
    """Stores a consumer's part of the sum of a piece as a summand."""
    plan = cta.plan
    tile = joining.tile_of(plan, piece)
    rank = lax.axis_index(CLUSTER[0]) * plan.config.cluster[1] + lax.axis_index(CLUSTER[1])
    corner = first_of(plan, me)
    joining.Summands(plan, cta.summands, (tile, rank), corner, plgpu.Layout.WGMMA).leave(
        piece, total
    )


def summand(plan: HopperPlan, piece: work.Piece) -> Any:
    """The number of the summand that is the last one of a piece.

    The first piece adds up its parts, which are the first ones of the sum. Each of the others
    leaves every part for itself: together they would be added in another order.
    """
    parts = plan.parts_of_piece
    return piece.summand if parts == 1 else piece.summand * parts


def kernel(plan: HopperPlan) -> Callable[[launch.Inputs], Any]:
    """Returns the kernel that joins what the kernel of a plan has handed over."""
    buffers, residual = store_scratch(plan)
    return joining.kernel(
        plan,
        functools.partial(_body, plan),
        name="pallas_gemm_hopper_join",
        chunks=math.prod(_counts(plan)),
        warpgroups=plan.config.consumers,
        axes=CLUSTER,
        results=launch.results(plan.problem, plan.out_shape),
        scratch=(buffers, Barriers(residual=residual)),
        approx_math=plan.approx_math,
    )


def _body(
    plan: HopperPlan, gmem: launch.Inputs, out: tuple[Any, ...], buffers: Smem, barriers: Barriers
) -> None:
    """What each warpgroup of a CTA does: it joins one chunk."""
    early_launch.begin(plan)
    early_launch.end(plan)
    slots, me = views(plan, buffers), lax.axis_index(launch.WARPGROUP)
    gmem = windows.with_halves(plan.window, gmem)
    cta = Cta(plan, gmem, out, (), remote.Rows(), slots, barriers, gmem.summands)
    chunks, consumers, cluster_size, _ = _counts(plan)
    number = lax.axis_index(launch.WORKER) * plan.config.consumers + me
    rest, number = divided(number, chunks)
    rest, consumer = divided(rest, consumers)
    tile, rank = divided(rest, cluster_size)
    at, corner = _place(cta, tile, rank, consumer), first_of(plan, consumer)

    def join_one_of(alike: range) -> None:
        # One part of the program is for all of them: the first one, moved to where it is.
        first = plan.chunks[alike.start]
        across, down = divided(number - alike.start, plan.consumer_out_tile[0] // first.rows)
        down, across = down * first.rows, across * first.cols
        here = at._replace(row=at.row + down, col=at.col + across)
        part = corner[0] + down, corner[1] + across
        sums = joining.Summands(plan, gmem.summands, (tile, rank), part, plgpu.Layout.WGMMA)
        store.fetch(cta, me, here, (alike.start,))
        store.store_chunk(cta, me, store.Tile(sums, here), alike.start)

    for alike in _alike(plan):
        here = (number >= alike.start) & (number < alike.stop)
        pl.when(here)(functools.partial(join_one_of, alike))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _counts(plan: HopperPlan) -> tuple[int, int, int, int]:
    """Chunks of a consumer's part of a tile, consumers, CTAs of a cluster, and cut tiles."""
    config = plan.config
    return len(plan.chunks), config.consumers, config.cluster_size, plan.cut_tiles


def _alike(plan: HopperPlan) -> list[range]:
    """Chunks that follow each other and differ only in where they lie.

    Threads clip each chunk at another place, the end of the lines: no two are alike then.
    """
    chunks = range(len(plan.chunks))
    if not plan.stored_by_tma:
        return [range(chunk, chunk + 1) for chunk in chunks]
    firsts = [n for n in chunks if not n or plan.chunks[n].cols != plan.chunks[n - 1].cols]
    return list(itertools.starmap(range, itertools.pairwise([*firsts, len(chunks)])))


def _place(cta: Cta, tile: Any, rank: Scalar, consumer: Scalar) -> place.Where:
    """Where in the result a consumer's part of a CTA's tile lies."""
    plan = cta.plan
    at = joining.locate(plan, cta.gmem.order, tile)
    rows, columns = plan.config.out_tile(plan.problem)
    down, along = divided(rank, plan.config.cluster[1])
    at = at._replace(row=at.row + down * rows, col=at.col + along * columns)
    return part_of_tile(plan, at, consumer)
