"""Where rows of the left operand come from, and rows of the result go to: here, or other devices.

    alone        all rows are here
    gathered     this device has some rows of the left operand; the others send theirs
    scattered    this device stores each tile in the memory of the device that has its rows

With several devices, a *share* is the rows of one of them. A table of pieces has all shares, one
after the other, in the order in which this device computes them; `Exchange.owner` says whose they
are.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import joining, launch, place
from pallas_gemm.kernels.exchange import ALONE, Exchange, on_device
from pallas_gemm.kernels.hopper.devices import send_rows
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.kernels.ptx import fences


class Results(NamedTuple):
    """What a kernel returns.

    Attributes:
        out: The results; none if another kernel joins them.
        left: What tiles leave of results that are reduced (`reduce.py`).
        every: The gathered rows if it gathers any.
        summands: The sums of pieces of k, for that other kernel or handed on in this one.
    """

    out: tuple[Any, ...] = ()
    left: tuple[Any, ...] = ()
    every: Any = None
    summands: Any = None


class Rows(NamedTuple):
    """Where rows come from and go to; by default, to and from this device alone.

    Attributes:
        exchange: The devices.
        rank: Which of them this one is.
        tiles: Rows of cluster tiles of each share.
        owners: Where rows of the result are scattered, each share's device, as JAX takes it.
        transfer: Where rows of the left operand are gathered, what they are sent with.
    """

    exchange: Exchange = ALONE
    rank: Any = None
    tiles: int = 0
    owners: tuple[Any, ...] = ()
    transfer: send_rows.Transfer | None = None

    def to_load(self, row: Any) -> tuple[Any, Any]:
        """The row of cluster tiles of the operands, and its share, for a piece's row."""
        if self.exchange.size == 1:
            return row, None
        row, share = self._split(row)
        return self.exchange.owner(self.rank, share) * self.tiles + row, share

    def to_store(self, row: Any) -> tuple[Any, Any]:
        """The row of cluster tiles of the result where it is stored, and its share."""
        return self._split(row) if self.owners else self.to_load(row)

    def _split(self, row: Any) -> tuple[Any, Any]:
        share = lax.div(row, jnp.int32(self.tiles))
        return lax.rem(row, jnp.int32(self.tiles)), share

    def await_rows(self, at: place.Where) -> None:
        """Waits until the rows of a tile are here."""
        if self.transfer is None:
            return
        own, _, arrived, _ = self.transfer

        @pl.when(at.share > 0)
        def _await_others() -> None:
            owner = self.exchange.owner(self.rank, at.share)
            pl.semaphore_wait(arrived.at[owner], send_rows.loads_of(own), decrement=False)
            fences.after_arrival()

    def load(self, a: Any, at: place.Where, copy: Callable[[Any, Any], None]) -> None:
        """Loads a tile's rows of the left operand by `copy(from what, first row)`."""
        if self.transfer is None:
            copy(a, at.row)
            return
        own, every, _, _ = self.transfer
        row = lax.rem(at.row, jnp.int32(own.shape[0]))
        pl.when(at.share == 0)(lambda: copy(own, row))
        pl.when(at.share > 0)(lambda: copy(every, at.row))

    def store(self, out: Any, at: place.Where, copy: Callable[[Any], None]) -> None:
        """Stores a part of a tile of the result by `copy(to what)`."""
        if not self.owners:
            copy(out)
        # A TMA descriptor reaches the memory of one device, so there is a copy for each.
        for share, owner in enumerate(self.owners):

            @pl.when(at.share == share)
            def _store_there(owner: Any = owner) -> None:
                copy(on_device(out, owner).at[self.rank])

    def send(self, warp: Any) -> None:
        """Sends rows, in a warp that loads nothing."""
        if self.transfer is not None:
            run = functools.partial(send_rows.send, self.exchange, self.rank, self.transfer)
            pl.when(warp > 0)(run)


def results(plan: HopperPlan) -> Results:
    """The types of what a kernel returns."""
    if plan.joins:
        return Results(summands=joining.summands(plan))
    out = tuple(jax.ShapeDtypeStruct(plan.out_shape, own) for own in plan.problem.result_dtypes)
    if plan.relay:
        sums = jax.ShapeDtypeStruct(plan.summands_shape, plan.problem.accumulator_dtype)
        return Results(out, summands=sums)
    if not plan.gathers:
        return Results(out, plan.left_of_tiles)
    every = jax.ShapeDtypeStruct(plan.problem.a_shape, plan.problem.a_dtype)
    return Results(out, every=every)


def counter(plan: HopperPlan) -> Any:
    """What loads of rows are claimed from; None if none are sent."""
    return jax.new_ref(jnp.zeros(plan.exchange.size, jnp.int32)) if plan.gathers else None


def rows(plan: HopperPlan, gmem: launch.Inputs, every: Any) -> Rows:
    """Where rows come from and go to, inside of a kernel."""
    exchange = plan.exchange
    if exchange.size == 1:
        return Rows()
    rank, tiles = exchange.rank(), plan.config.grid(plan.problem)[0] // exchange.size
    if plan.scatters:
        shares = range(exchange.size)
        owners = tuple(exchange.device(exchange.owner(rank, share)) for share in shares)
        return Rows(exchange, rank, tiles, owners)
    arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((exchange.size,)))
    transfer = send_rows.Transfer(gmem.factors[0].a, every, arrived, gmem.sent)
    return Rows(exchange, rank, tiles, transfer=transfer)
