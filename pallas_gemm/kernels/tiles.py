"""Which output tile a worker computes next: the one place where a kernel meets a schedule.

A *worker* is one cluster of CTAs. Every role of a kernel walks the same tiles in the same order,
and reads the entry of the next tile before it starts on the current one, so that the latency of
that read is hidden behind a whole tile of work:

    load entry 0 | load entry 1, work on tile 0 | load entry 2, work on tile 1 | ...

A turn is the number of a tile in its worker's own sequence.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gemm.kernels.blackwell import launch_control
from pallas_gemm.kernels.hopper import claims
from schedules import PADDING, OnlineSchedule, Schedule

Scalar = Any
"""A traced int32."""

Work = Callable[[Scalar, Scalar, Scalar, Any], Any]
"""`carry = work(turn, row, col, carry)`: what a role does for one tile."""


class TileSource(abc.ABC):
    """Where the tiles of one worker come from."""

    @abc.abstractmethod
    def walk(
        self, work: Work, carry: Any, *, first: Scalar | int = 0, every: int = 1
    ) -> tuple[Scalar, Any]:
        """Does the work of the turns `first`, `first + every`, ...

        Returns:
            How many turns the worker has, and the last carry.
        """


class CountedSource(TileSource):
    """A source that knows how many turns there are before the first one."""

    @abc.abstractmethod
    def count(self) -> Scalar:
        """How many tiles the worker computes."""

    @abc.abstractmethod
    def load(self, turn: Scalar) -> Scalar:
        """Starts to read the entry of a turn; up to two past the last are allowed."""

    @abc.abstractmethod
    def decode(self, entry: Scalar) -> tuple[Scalar, Scalar]:
        """The (row, col) of a loaded entry, in tiles of a worker."""

    def walk(
        self, work: Work, carry: Any, *, first: Scalar | int = 0, every: int = 1
    ) -> tuple[Scalar, Any]:
        """See `TileSource.walk`."""
        first = jnp.int32(first)
        count = self.count()
        mine = lax.div(count - first + jnp.int32(every - 1), jnp.int32(every))

        def step(i: Scalar, state: tuple[Scalar, Any]) -> tuple[Scalar, Any]:
            entry, carry = state
            turn = first + i * every
            upcoming = self.load(turn + every)
            return upcoming, work(turn, *self.decode(entry), carry)

        return count, lax.fori_loop(0, mine, step, (self.load(first), carry))[1]


@dataclasses.dataclass(frozen=True)
class TableSource(CountedSource):
    """A dealt table in global memory: row `worker` is a count, then packed (row, col) entries."""

    table_gmem: Any
    worker: Scalar

    def count(self) -> Scalar:
        """See `CountedSource`."""
        return self.table_gmem[self.worker, 0]

    def load(self, turn: Scalar) -> Scalar:
        """See `CountedSource`."""
        return self.table_gmem[self.worker, turn + 1]

    def decode(self, entry: Scalar) -> tuple[Scalar, Scalar]:
        """See `CountedSource`."""
        return lax.shift_right_logical(entry, jnp.int32(16)), entry & jnp.int32(0xFFFF)


@dataclasses.dataclass(frozen=True)
class OnlineSource(CountedSource):
    """An order that is computed: no table, dealt round-robin."""

    order: OnlineSchedule
    worker: Scalar
    workers: int

    def count(self) -> Scalar:
        """See `CountedSource`."""
        most = jnp.int32(len(self.order) + self.workers - 1)
        return lax.div(most - self.worker, jnp.int32(self.workers))

    def load(self, turn: Scalar) -> Scalar:
        """See `CountedSource`."""
        return self.worker + turn * self.workers

    def decode(self, entry: Scalar) -> tuple[Scalar, Scalar]:
        """See `CountedSource`."""
        return self.order(entry)


@dataclasses.dataclass(frozen=True)
class ClaimedSource(TileSource):
    """Tiles handed out to whichever worker is free; see `claims.py`.

    Attributes:
        table_gmem: Every tile in visiting order, encoded by `claims.encode`.
        counter_gmem: How many tiles have been claimed beyond the first of each worker.
        mailbox_gmem: Where each worker's claims are published to its own roles.
        worker: This worker.
        workers: How many there are.
        claimant: Whether this thread block claims for the worker (one of them does), or None in
            roles that never claim.
    """

    table_gmem: Any
    counter_gmem: Any
    mailbox_gmem: Any
    worker: Scalar
    workers: int
    claimant: Scalar | None = None

    def walk(
        self, work: Work, carry: Any, *, first: Scalar | int = 0, every: int = 1
    ) -> tuple[Scalar, Any]:
        """See `TileSource.walk`; every turn in order is the only way that tiles are claimed."""
        if (first, every) != (0, 1):
            raise ValueError(f"claimed tiles are walked one by one, got {first=} and {every=}")
        mailbox = self.mailbox_gmem

        def running(state: tuple[Scalar, Scalar, Any]) -> Scalar:
            return (state[1] & jnp.int32(claims.END)) != jnp.int32(claims.END)

        def step(state: tuple[Scalar, Scalar, Any]) -> tuple[Scalar, Scalar, Any]:
            turn, entry, carry = state
            upcoming = mailbox.at[self.worker, claims.slot(turn + 1)]
            if self.claimant is not None:
                claims.claim(
                    self.counter_gmem,
                    self.table_gmem,
                    upcoming,
                    turn + 1,
                    self.workers,
                    self.claimant,
                )
            seen = claims.peek(upcoming)
            carry = work(turn, *claims.decode(entry), carry)
            return turn + 1, claims.resolve(upcoming, turn + 1, seen), carry

        start = (jnp.int32(0), self.table_gmem[self.worker], carry)
        turns, _, carry = lax.while_loop(running, step, start)
        return turns, carry


def dealt_table(schedule: Schedule, workers: int) -> np.ndarray:
    """Returns the operand that `TableSource` reads, int32 `[workers, 1 + longest share + 2]`.

    Column 0 is the worker's number of tiles. Two columns of padding at the end let a walk, which
    steps by two for ping-pong consumers, read one step past the last entry.
    """
    dealt = schedule.deal(workers)
    counts = (dealt != PADDING).sum(axis=1, dtype=np.int32)
    padding = np.full((workers, 2), PADDING, np.int32)
    return np.concatenate([counts[:, None], dealt, padding], axis=1)


@dataclasses.dataclass(frozen=True)
class LaunchedSource(TileSource):
    """Tiles taken over from clusters that have not started; see `launch_control.py`.

    The answer about the next tile is read after the work on the current one: the producer is a
    whole ring of slots ahead of everybody else, and that covers the look-up in the table.

    Attributes:
        table_gmem: Every tile in visiting order, packed.
        requests: The answers and their barriers.
        worker: This cluster.
        asks: Whether this role makes the requests; one of them does.
        axes: The names of the grid's axis and of the cluster's.
        simulated: Whether the kernel runs in the simulator, which knows no fences.
    """

    table_gmem: Any
    requests: launch_control.Requests
    worker: Scalar
    asks: bool
    axes: tuple[str, str]
    simulated: bool = False

    def walk(
        self, work: Work, carry: Any, *, first: Scalar | int = 0, every: int = 1
    ) -> tuple[Scalar, Any]:
        """See `TileSource.walk`; every turn in order is the only way that tiles are taken over."""
        if (first, every) != (0, 1):
            raise ValueError(f"tiles are taken over one by one, got {first=} and {every=}")
        requests, asks = self.requests, self.asks

        def step(state: tuple[Scalar, launch_control.Taken, Any]) -> Any:
            turn, taken, carry = state
            carry = work(turn, *unpack(self.table_gmem[taken.cluster]), carry)
            taken = launch_control.take_next(
                requests, taken, self.axes, asks=asks, simulated=self.simulated
            )
            return turn + 1, taken, carry

        first_taken = launch_control.start(requests, self.worker, self.axes[1], asks=asks)
        state = (jnp.int32(0), first_taken, carry)
        turns, _, carry = lax.while_loop(lambda state: state[1].granted, step, state)
        return turns, carry


def unpack(entry: Scalar) -> tuple[Scalar, Scalar]:
    """The (row, col) of a packed entry of a table."""
    return lax.shift_right_logical(entry, jnp.int32(16)), entry & jnp.int32(0xFFFF)
