"""Sums over a crowded group: its tiles are cut along k, and their sums are handed on in a relay.

    worker 1    its piece of k ──▶ sums ──────────────────────────▶ global memory, float32
    worker 2    its piece of k ──▶ sums + what worker 1 handed on ──▶ global memory
    the last    its piece of k ──▶ sums + what came before ──▶ rounded, and stored

A tile whose group has much more of k than a worker's share of all would keep one worker busy while
others are idle. So the table of groups has such a group in several pieces, one after the other
(`groups/table.py`). A piece is added to those before it, always in this order, and a tile is
rounded once.

Each consumer hands on its own part of a tile, and counts in a flag: all of its threads add one when
they have stored. The next one waits for this number. It was claimed later, and the one before by a
worker that runs, so that nobody waits for ever. A worker that hands a tile on stores it beyond the
end of the result, where TMA stores nothing.

JAX's simulator knows no flags: there, groups are cut only for a worker that is alone, who hands on
to itself, unless it is taught to share words (`tests/ptx_simulator.py`).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import joining, place, work
from pallas_gemm.kernels.hardware import WARPGROUP_THREADS
from pallas_gemm.kernels.hopper.cta import Cta
from pallas_gemm.kernels.hopper.dense import store
from pallas_gemm.kernels.hopper.groups import table
from pallas_gemm.kernels.ptx import arrays, words
from pallas_gemm.kernels.traced import Scalar, Values


class Leg(NamedTuple):
    """The sums of a tile that a consumer hands on.

    Attributes:
        sums: Where the sums are handed on in global memory.
        corner: Row and column of the consumer's part in the tile.
        flag: Where it is counted who has handed on.
    """

    sums: Any
    corner: tuple[Any, int]
    flag: Any


def run(cta: Cta, me: Scalar, piece: work.Piece, total: Values) -> Any:
    """Adds what came before to a piece's sums, and hands them on unless the piece is the last."""
    plan = cta.plan
    rows, _ = plan.config.consumer_tile
    number = piece.cut_tile * plan.config.consumers + me
    leg = Leg(
        cta.summands.at[piece.cut_tile, 0, 0],
        (me * rows, 0),
        cta.gmem.order.at[table.flag(plan, number)],
    )

    def add(total: Values) -> Any:
        words.await_arrivals(plan, leg.flag, piece.summand * WARPGROUP_THREADS)
        parts = [
            values + joining.read(plan, joining.blocks(plan, leg.sums, *here), plgpu.Layout.WGMMA)
            for here, values in _parts(cta, leg, total)
        ]
        return lax.concatenate(parts, 1)

    total = lax.cond(piece.summand > 0, add, lambda total: total, total)
    pl.when(jnp.logical_not(piece.is_last))(lambda: hand_on(cta, leg, total))
    return total


def hand_on(cta: Cta, leg: Leg, total: Values) -> None:
    """Stores a consumer's sums for the next one, and says so."""
    store_sums(cta, leg, total)
    words.arrive(cta.plan, leg.flag)


def store_sums(cta: Cta, leg: Leg, total: Values) -> None:
    """Stores a consumer's sums where they are handed on."""
    plan = cta.plan
    for here, values in _parts(cta, leg, total):
        blocks = joining.blocks(plan, leg.sums, *here)
        arrays.write_blocks(plan, blocks, values, plgpu.Layout.WGMMA)


def where(cta: Cta, piece: work.Piece, at: place.Where) -> place.Where:
    """Where a piece's tile is stored: beyond the end of the result, unless it is the last."""
    plan = cta.plan
    beyond = plan.config.grid(plan.problem)[0] * plan.config.tile[0]
    return at._replace(row=at.row + lax.select(piece.is_last, jnp.int32(0), jnp.int32(beyond)))


def _parts(cta: Cta, leg: Leg, total: Values) -> Any:
    """Yields parts of sums: their rows and columns in the tile, as (first, count), and values."""
    chunks = cta.plan.chunks
    for chunk, values in zip(chunks, store.taken_apart(cta.plan, total, chunks), strict=True):
        row, col = leg.corner
        yield ((row + chunk.row, chunk.rows), (col + chunk.col, chunk.cols)), values
