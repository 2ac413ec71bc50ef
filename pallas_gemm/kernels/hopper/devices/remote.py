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
from pallas_gemm.kernels.exchange import on_device
from pallas_gemm.kernels.hopper.devices import send_rows
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.kernels.ptx import fences
from pallas_gemm.kernels.traced import Scalar, divided


class Results(NamedTuple):
    """The arrays that a kernel returns.

    Attributes:
        out: The results; none if another kernel joins them.
        left: The parts of reduced results that tiles leave (`reduce.py`).
        every: The gathered rows if it gathers any.
        summands: The sums of pieces of k, for that other kernel or handed on in this one.
    """

    out: tuple[Any, ...] = ()
    left: tuple[Any, ...] = ()
    every: Any = None
    summands: Any = None


class Rows:
    """Where rows come from and go to: to and from this device alone."""

    def to_load(self, row: Scalar) -> tuple[Any, Any]:
        """The row of cluster tiles of the operands, and its share, for a piece's row."""
        return row, None

    def to_store(self, row: Scalar) -> tuple[Any, Any]:
        """The row of cluster tiles of the result where it is stored, and its share."""
        return self.to_load(row)

    def await_rows(self, at: place.Where) -> None:
        """Waits until the rows of a tile are here."""

    def load(self, a: Any, at: place.Where, copy: Callable[[Any, Any], None]) -> None:
        """Loads a tile's rows of the left operand by `copy(from what, first row)`."""
        copy(a, at.row)

    def store(self, out: Any, at: place.Where, copy: Callable[[Any], None]) -> None:
        """Stores a part of a tile of the result by `copy(to what)`."""
        del at
        copy(out)

    def send(self, warp: Scalar) -> None:
        """Sends rows, in a warp that loads nothing."""


class _Exchanged(Rows):
    """Rows of several devices.

    Attributes:
        exchange: The devices.
        rank: Which of them this one is.
        tiles: Rows of cluster tiles of each share.
    """

    def __init__(self, plan: HopperPlan) -> None:
        self.exchange, self.rank = plan.exchange, plan.exchange.rank()
        self.tiles = plan.config.grid(plan.problem)[0] // self.exchange.size

    def to_load(self, row: Scalar) -> tuple[Any, Any]:
        """See `Rows`."""
        row, share = self.split(row)
        return self.exchange.owner(self.rank, share) * self.tiles + row, share

    def split(self, row: Scalar) -> tuple[Any, Any]:
        """The row of cluster tiles among those of its share, and its share."""
        share, row = divided(row, self.tiles)
        return row, share


class Gathered(_Exchanged):
    """The left operand's rows are those of several devices.

    Attributes:
        transfer: The rows here and there, and the counters of what is sent.
    """

    def __init__(self, plan: HopperPlan, gmem: launch.Inputs, every: Any) -> None:
        super().__init__(plan)
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((self.exchange.size,)))
        self.transfer = send_rows.Transfer(gmem.factors[0].a, every, arrived, gmem.sent)

    def await_rows(self, at: place.Where) -> None:
        """See `Rows`."""
        own, _, arrived, _ = self.transfer

        @pl.when(at.share > 0)
        def _await_others() -> None:
            owner = self.exchange.owner(self.rank, at.share)
            pl.semaphore_wait(arrived.at[owner], send_rows.loads_of(own), decrement=False)
            fences.after_arrival()

    def load(self, a: Any, at: place.Where, copy: Callable[[Any, Any], None]) -> None:
        """See `Rows`."""
        del a
        own, every, _, _ = self.transfer
        row = lax.rem(at.row, jnp.int32(own.shape[0]))
        pl.when(at.share == 0)(lambda: copy(own, row))
        pl.when(at.share > 0)(lambda: copy(every, at.row))

    def send(self, warp: Scalar) -> None:
        """See `Rows`."""
        run = functools.partial(send_rows.send, self.exchange, self.rank, self.transfer)
        pl.when(warp > 0)(run)


class Scattered(_Exchanged):
    """The result's rows go to several devices.

    Attributes:
        owners: Each share's device, as JAX takes it.
    """

    def __init__(self, plan: HopperPlan) -> None:
        super().__init__(plan)
        shares = range(self.exchange.size)
        owners = (self.exchange.owner(self.rank, share) for share in shares)
        self.owners = tuple(map(self.exchange.device, owners))

    def to_store(self, row: Scalar) -> tuple[Any, Any]:
        """See `Rows`."""
        return self.split(row)

    def store(self, out: Any, at: place.Where, copy: Callable[[Any], None]) -> None:
        """See `Rows`."""
        # A TMA descriptor reaches the memory of one device, so there is a copy for each.
        for share, owner in enumerate(self.owners):

            @pl.when(at.share == share)
            def _store_there(owner: Any = owner) -> None:
                copy(on_device(out, owner).at[self.rank])


def results(plan: HopperPlan) -> Results:
    """The types of what a kernel returns."""
    if plan.joins:
        return Results(summands=joining.summands(plan))
    if plan.window.writes:
        return Results((), plan.left_of_tiles)
    out = launch.results(plan.problem, plan.out_shape)
    if plan.relay:
        sums = jax.ShapeDtypeStruct(plan.summands_shape, plan.problem.accumulator_dtype)
        return Results(out, summands=sums)
    if not plan.gathers:
        return Results(out, plan.left_of_tiles)
    every = jax.ShapeDtypeStruct(plan.problem.a_shape, plan.problem.a_dtype)
    return Results(out, every=every)


def counter(plan: HopperPlan) -> Any:
    """The counter from which loads of rows are claimed; None if none are sent."""
    return jax.new_ref(jnp.zeros(plan.exchange.size, jnp.int32)) if plan.gathers else None


def rows(plan: HopperPlan, gmem: launch.Inputs, every: Any) -> Rows:
    """Where rows come from and go to, inside of a kernel."""
    if plan.gathers:
        return Gathered(plan, gmem, every)
    return Scattered(plan) if plan.scatters else Rows()
