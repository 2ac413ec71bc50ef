"""Where rows of the left operand come from, and rows of the result go to: here, or other devices.

    OneDevice    all rows are here
    Gathered     this device has some rows of the left operand; the others send theirs
    Scattered    this device stores each tile in the memory of the device that has its rows

With several devices, a *share* is the rows of one of them. A table of pieces has all shares, one
after the other, in the order in which this device computes them; `Exchange.owner` says whose they
are.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import launch, place
from pallas_gemm.kernels.hopper import send_rows
from pallas_gemm.kernels.hopper.exchange import Exchange, on_device
from pallas_gemm.kernels.hopper.plan import HopperPlan


class Results(NamedTuple):
    """What a kernel returns: the result, and the gathered rows if it gathers any."""

    out: Any
    every: Any = None


class OneDevice:
    """All rows are here."""

    def to_load(self, row: Any) -> tuple[Any, Any]:
        """The row of cluster tiles of the operands, and its share, for a piece's row."""
        return row, None

    def to_store(self, row: Any) -> tuple[Any, Any]:
        """The row of cluster tiles of the result where it is stored, and its share."""
        return row, None

    def await_rows(self, at: place.Where) -> None:
        """Waits until the rows of a tile are here."""

    def load(self, a: Any, at: place.Where, copy: Callable[[Any, Any], None]) -> None:
        """Loads a tile's rows of the left operand by `copy(from what, first row)`."""
        copy(a, at.row)

    def store(self, out: Any, at: place.Where, copy: Callable[[Any], None]) -> None:
        """Stores a part of a tile of the result by `copy(to what)`."""
        del at
        copy(out)

    def send(self, warp: Any) -> None:
        """What the warps do that load nothing."""


@dataclasses.dataclass(frozen=True)
class _Shares(OneDevice):
    """Rows of several devices.

    Attributes:
        exchange: Who they are.
        rank: Which of them this one is.
        tiles: Rows of cluster tiles of each share.
    """

    exchange: Exchange
    rank: Any
    tiles: int

    def to_load(self, row: Any) -> tuple[Any, Any]:
        """See `OneDevice`."""
        row, share = self._split(row)
        return self.exchange.owner(self.rank, share) * self.tiles + row, share

    def _split(self, row: Any) -> tuple[Any, Any]:
        share = lax.div(row, jnp.int32(self.tiles))
        return lax.rem(row, jnp.int32(self.tiles)), share


@dataclasses.dataclass(frozen=True)
class Gathered(_Shares):
    """Each device multiplies all rows: its own first, then the others as they arrive.

    Attributes:
        transfer: What they are sent with.
    """

    transfer: send_rows.Transfer

    def to_store(self, row: Any) -> tuple[Any, Any]:
        """See `OneDevice`."""
        return self.to_load(row)

    def await_rows(self, at: place.Where) -> None:
        """See `OneDevice`."""

        @pl.when(at.share > 0)
        def _await_others() -> None:
            owner = self.exchange.owner(self.rank, at.share)
            loads = send_rows.loads_of(self.transfer.own)
            pl.semaphore_wait(self.transfer.arrived.at[owner], loads, decrement=False)

    def load(self, a: Any, at: place.Where, copy: Callable[[Any, Any], None]) -> None:
        """See `OneDevice`."""
        own = lax.rem(at.row, jnp.int32(a.shape[0]))
        pl.when(at.share == 0)(lambda: copy(a, own))
        pl.when(at.share > 0)(lambda: copy(self.transfer.every, at.row))

    def send(self, warp: Any) -> None:
        """See `OneDevice`."""
        pl.when(warp > 0)(lambda: send_rows.send(self.exchange, self.rank, self.transfer))


@dataclasses.dataclass(frozen=True)
class Scattered(_Shares):
    """Each device has a summand of all rows, and stores it where they belong.

    Attributes:
        owners: The number in the mesh of the device whose rows each share is.
    """

    owners: tuple[Any, ...]

    def to_store(self, row: Any) -> tuple[Any, Any]:
        """See `OneDevice`."""
        return self._split(row)

    def store(self, out: Any, at: place.Where, copy: Callable[[Any], None]) -> None:
        """See `OneDevice`; a TMA descriptor reaches one device, so there is a copy for each."""
        for share, owner in enumerate(self.owners):

            @pl.when(at.share == share)
            def _store_there(owner: Any = owner) -> None:
                copy(on_device(out, owner).at[self.rank])


Rows = OneDevice


def results(plan: HopperPlan) -> Results:
    """The types of what a kernel returns."""
    out = jax.ShapeDtypeStruct(plan.out_shape, plan.problem.out_dtype)
    if not plan.gathers:
        return Results(out)
    return Results(out, jax.ShapeDtypeStruct(plan.problem.a_shape, plan.problem.a_dtype))


def counter(plan: HopperPlan) -> Any:
    """What loads of rows are claimed from; None if none are sent."""
    return jax.new_ref(jnp.zeros(plan.exchange.size, jnp.int32)) if plan.gathers else None


def rows(plan: HopperPlan, gmem: launch.Inputs, every: Any) -> Rows:
    """Where rows come from and go to, inside of a kernel."""
    if plan.exchange.size == 1:
        return OneDevice()
    exchange, rank = plan.exchange, plan.exchange.rank()
    tiles = plan.config.grid(plan.problem)[0] // exchange.size
    if not plan.gathers:
        shares = range(exchange.size)
        owners = tuple(exchange.device(exchange.owner(rank, share)) for share in shares)
        return Scattered(exchange, rank, tiles, owners)
    arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((exchange.size,)))
    transfer = send_rows.Transfer(gmem.factors[0].a, every, arrived, gmem.sent)
    return Gathered(exchange, rank, tiles, transfer)
