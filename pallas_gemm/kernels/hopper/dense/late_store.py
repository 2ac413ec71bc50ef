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

from pallas_gemm.kernels import place
from pallas_gemm.kernels.hopper.config import UNROLLED_STEPS
from pallas_gemm.kernels.hopper.cta import Cta, tile_to_store
from pallas_gemm.kernels.hopper.dense import reduce, store
from pallas_gemm.kernels.hopper.plan import HopperPlan

Stores = list[tuple[int, Callable[[], None]]]
"""What to store in the k loop of a tile: (after which step, how)."""


def start(cta: Cta, me: Any) -> store.Tile | None:
    """What is left to be stored before the first tile: what gives the carry of a walk its type."""
    plan = cta.plan
    if not plan.config.late_store:
        return None
    nothing = [
        plgpu.layout_cast(
            jnp.zeros((chunk.rows, chunk.cols), plan.problem.out_dtype), plgpu.Layout.WGMMA
        )
        for chunk in plan.chunks
    ]
    nowhere = plan.coding.piece(jnp.int32(0), jnp.int32(0))
    return store.Tile(nothing, tile_to_store(cta, nowhere, me))


def stores(cta: Cta, me: Any, turn: Any, previous: Any) -> Stores:
    """What to store in the k loop of a tile."""
    if not cta.plan.config.late_store:
        return []

    def store_chunk(chunk: int) -> None:
        pl.when(turn > 0)(functools.partial(store.store_finished, cta, me, previous, chunk))

    return [
        (k, functools.partial(store_chunk, chunk)) for chunk, k in enumerate(store_steps(cta.plan))
    ]


def take(cta: Cta, me: Any, total: Any, at: place.Where) -> store.Tile | None:
    """Takes the sums of a tile, and returns what is left to be stored."""
    if cta.plan.config.late_store:
        return store.Tile(store.finish(cta, total, at), at)
    rows: reduce.Rows = ()
    for chunk in range(len(cta.plan.chunks)):
        rows = store.store_sums(cta, me, store.Tile(total, at), chunk, rows)
    reduce.leave_rows(cta, at, rows)
    return None


def end(cta: Cta, me: Any, turns: Any, last: store.Tile | None) -> None:
    """Stores what is left when the walk is over."""
    if last is None:
        return

    @pl.when(turns > 0)
    def _store_the_last() -> None:
        for chunk in range(len(cta.plan.chunks)):
            store.store_finished(cta, me, last, chunk)


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
