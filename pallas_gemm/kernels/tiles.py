"""Which tile a worker computes next: the one place where a kernel meets a schedule.

A *worker* is one cluster of CTAs. Every role of a kernel walks the same pieces of work in the same
order, and reads the entry of the next one before it starts on the current one, so that the latency
of that read is hidden behind a whole tile of work:

    load entry 0 | load entry 1, compute piece 0 | load entry 2, compute piece 1 | ...

A turn is the number of a piece in its worker's own sequence.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gemm.kernels import work
from schedules import PADDING, OnlineSchedule, Schedule

Scalar = Any
"""A traced int32."""

Compute = Callable[[Scalar, work.Piece, Any], Any]
"""`carry = compute(turn, piece, carry)`: what a role does for one piece."""


class TileSource(abc.ABC):
    """Where the pieces of one worker come from."""

    @abc.abstractmethod
    def walk(
        self, compute: Compute, carry: Any, *, first: Scalar | int = 0, every: int = 1
    ) -> tuple[Scalar, Any]:
        """Computes the pieces of the turns `first`, `first + every`, ...

        Returns:
            How many turns the worker has, and the last carry.
        """


class CountedSource(TileSource):
    """A source that knows how many turns there are before the first one."""

    @abc.abstractmethod
    def count(self) -> Scalar:
        """How many pieces the worker computes."""

    @abc.abstractmethod
    def load(self, turn: Scalar) -> Scalar:
        """Starts to read the entry of a turn; up to two past the last are allowed."""

    @abc.abstractmethod
    def piece(self, entry: Scalar) -> work.Piece:
        """The piece that a loaded entry stands for."""

    def walk(
        self, compute: Compute, carry: Any, *, first: Scalar | int = 0, every: int = 1
    ) -> tuple[Scalar, Any]:
        """See `TileSource.walk`."""
        first = jnp.int32(first)
        count = self.count()
        mine = lax.div(count - first + jnp.int32(every - 1), jnp.int32(every))

        def step(i: Scalar, state: tuple[Scalar, Any]) -> tuple[Scalar, Any]:
            entry, carry = state
            turn = first + i * every
            upcoming = self.load(turn + every)
            return upcoming, compute(turn, self.piece(entry), carry)

        return count, lax.fori_loop(0, mine, step, (self.load(first), carry))[1]


@dataclasses.dataclass(frozen=True)
class TableSource(CountedSource):
    """A dealt table in global memory: row `worker` is a count, then entries."""

    table_gmem: Any
    worker: Scalar
    coding: work.Coding

    def count(self) -> Scalar:
        """See `CountedSource`."""
        return self.table_gmem[self.worker, 0]

    def load(self, turn: Scalar) -> Scalar:
        """See `CountedSource`."""
        return self.table_gmem[self.worker, turn + 1]

    def piece(self, entry: Scalar) -> work.Piece:
        """See `CountedSource`."""
        return self.coding.unpack(entry)


@dataclasses.dataclass(frozen=True)
class OnlineSource(CountedSource):
    """An order that is computed: no table, dealt round-robin."""

    order: OnlineSchedule
    worker: Scalar
    workers: int
    coding: work.Coding

    def count(self) -> Scalar:
        """See `CountedSource`."""
        most = jnp.int32(len(self.order) + self.workers - 1)
        return lax.div(most - self.worker, jnp.int32(self.workers))

    def load(self, turn: Scalar) -> Scalar:
        """See `CountedSource`."""
        return self.worker + turn * self.workers

    def piece(self, entry: Scalar) -> work.Piece:
        """See `CountedSource`."""
        return self.coding.piece(*self.order(entry))


def dealt_table(schedule: Schedule, workers: int) -> np.ndarray:
    """Returns the operand that `TableSource` reads, int32 `[workers, 1 + longest share + 2]`.

    Column 0 is the worker's number of tiles. Two columns of padding at the end let a walk, which
    steps by two for ping-pong consumers, read one step past the last entry.
    """
    dealt = work.deal(work.Coding().pack(schedule), workers)
    counts = (dealt != PADDING).sum(axis=1, dtype=np.int32)
    padding = np.full((workers, 2), PADDING, np.int32)
    return np.concatenate([counts[:, None], dealt, padding], axis=1)


def order_operand(schedule: Schedule | OnlineSchedule, workers: int) -> jax.Array | None:
    """Returns the operand by which a kernel is told an order; None if it computes the order."""
    if isinstance(schedule, OnlineSchedule):
        return None
    return jnp.asarray(dealt_table(schedule, workers))


def source(
    schedule: Schedule | OnlineSchedule,
    order_gmem: Any,
    worker: Scalar,
    workers: int,
    coding: work.Coding,
) -> CountedSource:
    """Returns the source of a worker's share, given the operand that `order_operand` made."""
    if isinstance(schedule, OnlineSchedule):
        return OnlineSource(schedule, worker, workers, coding)
    return TableSource(order_gmem, worker, coding)
