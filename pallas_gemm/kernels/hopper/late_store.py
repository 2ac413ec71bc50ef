"""When a consumer stores a tile: at once, or late, during the k loop of the next one.

                 at once                          late (`HopperConfig.late_store`)
    finished     a chunk at a time                the whole tile, when its last WGMMA is done
    kept         nothing                          the tile, rounded, in registers, beside the next
                                                  tile's accumulator
    stored       when its last WGMMA is done      a chunk after each of the next tile's first k
                                                  steps, while its WGMMA runs; the last tile of all
                                                  when the walk is over
    slots        counted (`ring.py`)              divided for: no register is left to count in

What late stores take of the registers, and so which configs may store late, is for
`HopperConfig.allows_late_store` to say.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import place, work
from pallas_gemm.kernels.hopper import store
from pallas_gemm.kernels.hopper.config import UNROLLED_STEPS
from pallas_gemm.kernels.hopper.cta import Cta, tile_to_store
from pallas_gemm.kernels.hopper.plan import HopperPlan

Stores = list[tuple[int, Callable[[], None]]]
"""What to store in the k loop of a tile: (after which step, how)."""


class AtOnce:
    """Tiles that are stored when they are computed.

    Attributes:
        cta: The consumer's CTA.
        me: The consumer.
    """

    def __init__(self, cta: Cta, me: Any) -> None:
        self.cta, self.me = cta, me
        self.chunks = range(len(cta.plan.chunks))

    def start(self) -> store.Tile | None:
        """What is left to be stored before the first tile."""
        return None

    def stores(self, turn: Any, previous: Any) -> Stores:
        """What to store in the k loop of a tile."""
        del turn, previous
        return []

    def take(self, total: Any, at: place.Where) -> store.Tile | None:
        """Takes the sums of a tile, and returns what is left to be stored."""
        for chunk in self.chunks:
            store.store_sums(self.cta, self.me, store.Tile(total, at), chunk)
        return None

    def end(self, turns: Any, last: Any) -> None:
        """Stores what is left when the walk is over."""


class Late(AtOnce):
    """Tiles that are stored during the k loop of the next one."""

    def start(self) -> store.Tile:
        """See `AtOnce`; what is never stored gives the carry of the walk its type."""
        plan = self.cta.plan
        nothing = jnp.zeros(plan.consumer_out_tile, plan.problem.out_dtype)
        nothing = plgpu.layout_cast(nothing, plgpu.Layout.WGMMA)
        coding = work.coding(plan.config, plan.problem)
        nowhere = coding.piece(jnp.int32(0), jnp.int32(0))
        return store.Tile(nothing, tile_to_store(self.cta, nowhere, self.me))

    def stores(self, turn: Any, previous: Any) -> Stores:
        """See `AtOnce`."""

        def store_chunk(chunk: int) -> None:
            run = functools.partial(store.store_finished, self.cta, self.me, previous, chunk)
            pl.when(turn > 0)(run)

        steps = store_steps(self.cta.plan)
        return [
            (k, functools.partial(store_chunk, chunk))
            for chunk, k in zip(self.chunks, steps, strict=True)
        ]

    def take(self, total: Any, at: place.Where) -> store.Tile:
        """See `AtOnce`."""
        return store.Tile(store.finish(self.cta, total, at), at)

    def end(self, turns: Any, last: Any) -> None:
        """See `AtOnce`."""

        @pl.when(turns > 0)
        def _store_the_last() -> None:
            for chunk in self.chunks:
                store.store_finished(self.cta, self.me, last, chunk)


def storing(cta: Cta, me: Any) -> AtOnce:
    """Returns when a consumer stores its tiles."""
    return Late(cta, me) if cta.plan.config.late_store else AtOnce(cta, me)


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
