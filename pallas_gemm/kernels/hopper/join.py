"""How the sum of a tile that several workers computed is joined (`HopperConfig.split_k`).

    a piece is computed    its consumers store what they hold in global memory, in float32: summands
                           of the tile's sum, which stay in the L2. Each then adds one to
                           `arrived[tile]`
    all pieces of a        each consumer of all workers takes its share of all chunks. It waits
    worker are computed    until all summands of a chunk's tile have arrived, adds up those of the
                           chunk, finishes, rounds and stores it

Summands are added in the order of their steps, whoever arrives first: results are the same in every
run. No worker waits before it has computed all of its own pieces, and all workers run at the same
time, so that none waits for ever. `arrived` is made of zeros for every call, which stays pure.

The simulator runs one worker after the other and has no semaphores. There, a second kernel joins
what the first one has left in global memory (`HopperPlan.joins_apart`); what it adds and stores is
the same code.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import launch, place, work
from pallas_gemm.kernels.hopper import store
from pallas_gemm.kernels.hopper.config import WARPGROUP
from pallas_gemm.kernels.hopper.cta import CLUSTER, Cta, Join, part_of_tile
from pallas_gemm.kernels.hopper.plan import HopperPlan

LOADED_REGISTERS = 128
"""Of a thread, for summands that it loads at the same time: each load takes most of a microsecond.
"""


def hand_over(cta: Cta, me: Any, piece: work.Piece, total: Any) -> None:
    """Hands a consumer's part of the sum of a piece over to whoever joins it."""
    plan, tile = cta.plan, _number(cta.plan, piece)
    row, col = _corner(plan, me)
    rows, cols = plan.config.consumer_tile
    rank = lax.axis_index(CLUSTER[0]) * plan.config.cluster[1] + lax.axis_index(CLUSTER[1])
    summand = cta.join.summands.at[tile, piece.summand, rank]
    summand[pl.ds(row, rows), pl.ds(col, cols)] = total
    if cta.join.arrived is not None:
        plgpu.commit_smem()  # All threads of the consumer have stored, whichever signals.
        plgpu.semaphore_signal(cta.join.arrived.at[tile], memory_scope="gpu")


def join(cta: Cta, me: Any) -> None:
    """Joins this consumer's share of the chunks of all tiles."""
    plan, config = cta.plan, cta.plan.config
    counts = (len(plan.chunks), config.consumers, config.cluster_size, plan.tiles)
    chunks = math.prod(counts)
    ctas = plan.workers * config.cluster_size
    rank = lax.axis_index(CLUSTER[0]) * config.cluster[1] + lax.axis_index(CLUSTER[1])
    # Chunks that follow each other go to different SMs.
    mine = (me * config.cluster_size + rank) * plan.workers + lax.axis_index(launch.WORKER)
    every = config.consumers * ctas

    @pl.loop(0, lax.div(chunks - mine + every - 1, jnp.int32(every)))
    def _one_chunk(turn: Any) -> None:
        rest, (number, consumer, of_cluster) = mine + turn * every, (None,) * 3
        number, rest = lax.rem(rest, jnp.int32(counts[0])), lax.div(rest, jnp.int32(counts[0]))
        consumer, rest = lax.rem(rest, jnp.int32(counts[1])), lax.div(rest, jnp.int32(counts[1]))
        of_cluster, tile = lax.rem(rest, jnp.int32(counts[2])), lax.div(rest, jnp.int32(counts[2]))
        at = _place(plan, tile, of_cluster, consumer)
        if cta.join.arrived is not None:
            everyone = config.split_k * config.cluster_size * config.consumers
            plgpu.semaphore_wait(
                cta.join.arrived.at[tile], everyone, decrement=False, memory_scope="gpu"
            )
        # Chunks come in no order here, so that the last one's slot may be that of this one.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.commit_smem()
        summands = Summands(cta, tile, of_cluster, _corner(plan, consumer))
        for chunk in range(len(plan.chunks)):

            @pl.when(number == chunk)
            def _this_chunk(chunk: int = chunk) -> None:
                store.fetch_residual(cta, me, at, (chunk,))
                store.store_chunk(cta, me, store.Tile(summands, at), chunk)


@dataclasses.dataclass(frozen=True)
class Summands:
    """A consumer's part of a tile, of which each element's sum is made when it is asked for.

    Attributes:
        cta: All that the CTA knows.
        tile: Number of the cluster tile.
        of_cluster: Whose tile it is, of the CTAs of the cluster.
        corner: Row and column of the part in that tile.
    """

    cta: Cta
    tile: Any
    of_cluster: Any
    corner: tuple[Any, Any]

    def __getitem__(self, index: tuple[slice, slice]) -> Any:
        """Adds up the summands of some rows and columns, in the order of their steps."""
        rows, cols = index
        count = self.cta.plan.config.split_k
        size = rows.stop - rows.start, cols.stop - cols.start
        row, col = self.corner[0] + rows.start, self.corner[1] + cols.start

        def load(summand: Any) -> Any:
            there = self.cta.join.summands.at[self.tile, summand, self.of_cluster]
            part = there.at[pl.ds(row, size[0]), pl.ds(col, size[1])]
            return plgpu.load(part, layout=plgpu.Layout.WGMMA, optimized=False)

        def add(first: Any, together: int, total: Any) -> Any:
            for part in [load(first + summand) for summand in range(together)]:
                total = total + part
            return total

        together = max(1, LOADED_REGISTERS * WARPGROUP // (size[0] * size[1]))
        whole, rest = divmod(count - 1, together)
        total = load(0)
        if whole == 1:
            total = add(1, together, total)
        elif whole:
            total = lax.fori_loop(0, whole, lambda i, t: add(1 + i * together, together, t), total)
        return add(1 + whole * together, rest, total)


def place_of_summands(plan: HopperPlan, summands: Any) -> Join:
    """Where pieces hand their sums over, given the memory for it."""
    if not plan.joins:
        return Join()
    if plan.joins_apart:
        return Join(summands, None)
    return Join(summands, pl.get_global(plgpu.SemaphoreType.REGULAR((plan.tiles,))))


def _number(plan: HopperPlan, piece: work.Piece) -> Any:
    """The number of a piece's cluster tile in the grid of the whole batch."""
    rows, cols = plan.config.grid(plan.problem)
    row = piece.row if piece.batch is None else piece.batch * rows + piece.row
    return row * cols + piece.col


def _place(plan: HopperPlan, tile: Any, of_cluster: Any, consumer: Any) -> place.Where:
    """Where in the result a consumer's part of a CTA's tile lies."""
    cols = jnp.int32(plan.config.stacked_grid(plan.problem)[1])
    piece = plan.coding.piece(lax.div(tile, cols), lax.rem(tile, cols))
    at = place.locate(plan.config, plan.problem, piece)
    rows, columns = plan.config.out_tile(plan.problem)
    across = jnp.int32(plan.config.cluster[1])
    at = at._replace(
        row=at.row + lax.div(of_cluster, across) * rows,
        col=at.col + lax.rem(of_cluster, across) * columns,
    )
    return part_of_tile(plan, at, consumer)


def _corner(plan: HopperPlan, consumer: Any) -> tuple[Any, Any]:
    """Row and column of a consumer's part of a CTA's sums."""
    rows, cols = plan.config.consumer_tile
    return (consumer * rows, 0) if plan.config.split_rows else (0, consumer * cols)
