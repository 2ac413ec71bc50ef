"""Rows in groups: which piece of work comes next, found while those before it are computed.

    sizes in global memory ──▶ the guide ──▶ words in shared memory ──▶ producer and consumers

The guide (`told.py`) adds up the sizes of the groups, from which follows how many pieces there are.
Then it finds its worker's, one after another. The order says in which row of tiles a piece is. The
guide goes on, or back, from the group of the piece before to the group that has this row. It is up
to `TOLD_SLOTS` pieces ahead of those who compute them, so that only the first one is waited for.
Each CTA of a cluster has its own guide, and all of them find the same.

    barrier     who arrives                                      who waits
    counted     the guide, when it knows how many pieces         each role that computes pieces

A tile has rows of one group alone. Negative sizes are those of empty groups. Sizes may say more
than there are rows: then groups end past the last one, where nothing is read or stored.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import launch, tiles, work
from pallas_gemm.kernels.hopper.cta import Cta
from pallas_gemm.kernels.hopper.groups import told
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.kernels.hopper.tiling import TOLD_HEADER
from pallas_gemm.kernels.ptx.find_group import BEYOND, At, Groups, find
from pallas_gemm.kernels.traced import Scalar

PIECES, LAST_ROW = range(TOLD_HEADER)
"""The words before those of all slots: how many pieces there are, and the row after all groups."""
CODING = work.GroupCoding()
LOW = 64
"""The most rows of a tile that is multiplied faster than memory delivers its matrix."""


def share(cta: Cta, *, producing: bool) -> tiles.Share:
    """The pieces of this CTA's worker, for a role that computes them."""
    return _share_of_producer(cta) if producing else _share_of_consumer(cta)


def _share_of_producer(cta: Cta) -> tiles.Share:
    """It is told of a piece when it comes to it: the loads of the first await no second one."""

    def take(turn: Scalar) -> work.Piece:
        return CODING.unpack(*told.take(cta, turn))

    return tiles.Share(lambda: _count(cta), lambda turn: (turn,), take)


def _share_of_consumer(cta: Cta) -> tiles.Share:
    """It is told of a piece before it computes the one before, and waits for no word of it."""
    turns, every = _count(cta), cta.plan.config.ring_readers

    def load(turn: Scalar) -> tuple[Any, ...]:
        @pl.when(turn >= every)
        def _take_the_one_before() -> None:
            plgpu.barrier_arrive(cta.barriers.taken.at[told.slot(turn - every)])

        # Past the last piece nobody is told anything, and nobody looks at the words.
        @pl.when(turn < turns)
        def _until_told() -> None:
            plgpu.barrier_wait(cta.barriers.told.at[told.slot(turn)])

        return told.words(cta, turn)

    return tiles.Share(lambda: turns, load, CODING.unpack)


def _count(cta: Cta) -> Any:
    """How many pieces the worker has."""
    plgpu.barrier_wait(cta.barriers.counted)
    return told.read(cta, PIECES)


def last_row(cta: Cta) -> Any:
    """The row after all groups, for roles that know how many pieces they have."""
    return told.read(cta, LAST_ROW)


def guide(cta: Cta) -> None:
    """Finds the pieces of this CTA's worker, and tells the roles of each."""
    plan = cta.plan
    order: Any = plan.schedule
    worker = lax.axis_index(launch.WORKER)
    limit, height = jnp.int32(plan.problem.m), _height(plan)
    known = Groups(plan.problem.groups, plan.problem.m, height)
    start = At(*(jnp.int32(0),) * 4)
    end = find(plan, cta.gmem.order, start, jnp.int32(BEYOND), known)
    rows = lax.min(end.tile, jnp.int32(order.grid[0]))
    sharing = _sharing(plan, rows)
    pieces = _up(rows * order.grid[1] - worker, sharing)
    pieces = lax.select(worker < sharing, pieces, jnp.int32(0))
    told.write(cta, PIECES, pieces)
    told.write(cta, LAST_ROW, lax.min(end.row, limit))
    plgpu.barrier_arrive(cta.barriers.counted)

    def tell(turn: Scalar, at: At) -> At:
        place = (worker + turn * sharing).astype(jnp.uint32)
        tile, col = (x.astype(jnp.int32) for x in order(place, rows.astype(jnp.uint32)))
        at = find(plan, cta.gmem.order, at, tile, known)
        first_row = at.row + (tile - at.tile) * height
        end_row = lax.min(at.row + at.rows, limit)
        told.tell(cta, turn, CODING.pack_group(at.group, col, first_row, end_row))
        return at

    lax.fori_loop(0, pieces, tell, start)
    told.until_all_are_taken(cta, pieces)


def _sharing(plan: HopperPlan, rows: Any) -> Any:
    """Returns how many workers share the pieces of these rows of tiles.

    No more than it takes for none of them to have a piece more, in whole rows of tiles: who
    computes a row at one time reads it once. Where tiles are low, it is memory that they wait for,
    and all are needed to keep it busy.
    """
    workers, columns = plan.workers, plan.schedule.grid[1]
    if _height(plan) <= LOW:
        return jnp.int32(workers)
    pieces = lax.max(rows, jnp.int32(1)) * columns
    turns = _up(pieces, workers)
    return lax.min(_up(_up(pieces, turns), columns) * columns, jnp.int32(workers))


def _up(number: Any, divisor: Any) -> Any:
    """Divides, and rounds up."""
    divisor = jnp.asarray(divisor, jnp.int32)
    return lax.div(number + (divisor - 1), divisor)


def _height(plan: HopperPlan) -> int:
    """Rows of a cluster's tile."""
    return plan.config.out_tile(plan.problem)[0] * plan.config.cluster[0]
