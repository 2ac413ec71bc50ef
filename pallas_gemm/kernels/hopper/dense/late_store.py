"""When a consumer stores a tile: at once, or late, during the k loop of the next one.

                 at once                          late (`HopperConfig.late_store`)
    finished     a chunk at a time                the whole tile, when its last WGMMA is done
    kept         nothing                          the tile, rounded, in registers, beside the next
                                                  tile's accumulator
    stored       when its last WGMMA is done      a chunk after each of the next tile's first k
                                                  steps, while its WGMMA runs; the last tile of all
                                                  when the walk is over
    slots        counted (`ring.py`)              divided for: no register is left to count in

`HopperConfig.allows_late_store` says how many registers late stores take, and so which configs may
store late.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import epilogue, place, work
from pallas_gemm.kernels.hopper.cta import Cta, tile_to_store
from pallas_gemm.kernels.hopper.dense import reduce, store
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.kernels.hopper.tiling import UNROLLED_STEPS
from pallas_gemm.kernels.traced import Scalar, Values

Stores = list[tuple[int, Callable[[], None]]]
"""The stores in the k loop of a tile: (after which step, how)."""


class AtOnce(NamedTuple):
    """Stores a tile when its sums are complete."""

    cta: Cta
    me: Scalar

    def start(self) -> store.Tile | None:
        """Returns the carry of the walk before the first tile: nothing is left to be stored."""
        return None

    def expect(self, at: place.Where) -> None:
        """Starts to load what the epilogue takes, before the tile is summed."""
        cta = self.cta
        height, width = cta.plan.consumer_out_tile
        tile = epilogue.Strip(at.batch, (at.row, height), (at.col, width), plgpu.Layout.WGMMA)
        epilogue.expect(cta.plan, cta.gmem, tile)
        store.fetch(cta, self.me, at, range(cta.plan.config.store_slots))

    def between(self, turn: Scalar, previous: store.Tile | None) -> Stores:
        """The stores in the k loop of a tile."""
        del turn, previous
        return []

    def take(self, piece: work.Piece, total: Values, at: place.Where) -> store.Tile | None:
        """Takes the sums of a tile, and returns what is left to be stored."""
        del piece
        cta, me = self.cta, self.me
        rows: reduce.Rows = ()
        for chunk in range(len(cta.plan.chunks)):
            rows = store.store_sums(cta, me, store.Tile(total, at), chunk, rows)
        reduce.leave_rows(cta, at, rows)
        reduce.leave_columns(cta, me, at)
        return None

    def end(self, turns: Scalar, last: store.Tile | None) -> None:
        """Stores what is left when the walk is over."""


class Late(AtOnce):
    """Stores a tile during the first steps of the next one."""

    def start(self) -> store.Tile:
        """See `AtOnce`: it gives the carry of a walk its type."""
        plan = self.cta.plan
        nothing = [
            plgpu.layout_cast(
                jnp.zeros((chunk.rows, chunk.cols), plan.problem.out_dtype), plgpu.Layout.WGMMA
            )
            for chunk in plan.chunks
        ]
        nowhere = plan.coding.piece(jnp.int32(0), jnp.int32(0))
        return store.Tile(nothing, tile_to_store(self.cta, nowhere, self.me))

    def between(self, turn: Scalar, previous: Any) -> Stores:
        """See `AtOnce`."""

        def store_chunk(chunk: int) -> None:
            run = functools.partial(store.store_finished, self.cta, self.me, previous, chunk)
            pl.when(turn > 0)(run)

        steps = enumerate(store_steps(self.cta.plan))
        return [(k, functools.partial(store_chunk, chunk)) for chunk, k in steps]

    def take(self, piece: work.Piece, total: Values, at: place.Where) -> store.Tile:
        """See `AtOnce`."""
        del piece
        return store.Tile(store.finish(self.cta, self.me, total, at), at)

    def end(self, turns: Scalar, last: Any) -> None:
        """See `AtOnce`."""

        @pl.when(turns > 0)
        def _store_the_last() -> None:
            for chunk in range(len(self.cta.plan.chunks)):
                store.store_finished(self.cta, self.me, last, chunk)


def store_steps(plan: HopperPlan) -> list[int]:
    """The k step after which each chunk of the previous tile is stored.

    The first ones, so that registers are free early. But what other devices are sent is spread
    over the tile: all CTAs send at the same time, and NVLink takes longer than the first steps.
    Where few steps lie between two chunks the compiler would unroll them, and spill.
    """
    chunks = len(plan.chunks)
    spacing = plan.k_steps // chunks
    spacing = spacing if plan.scatters and spacing > UNROLLED_STEPS else 1
    return [min(chunk * spacing, plan.k_steps - 1) for chunk in range(chunks)]
