"""Which tile a worker computes next: the one place where a kernel meets a schedule.

A *worker* is one cluster of CTAs. Every role of a kernel walks the same pieces of work in the same
order. It reads the entry of the next one before it starts on the current one, so that a whole tile
of work hides the latency of that read. Sums over groups differ: `hopper/groups/sum_walk.py`.

    load entry 0 | load entry 1, compute piece 0 | load entry 2, compute piece 1 | ...

A turn is the number of a piece in its worker's own sequence.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gemm.kernels import work
from pallas_gemm.kernels.traced import Scalar, divided
from schedules import PADDING, OnlineSchedule, Pieces, Schedule

Compute = Callable[[Scalar, work.Piece, Any], Any]
"""`carry = compute(turn, piece, carry)`: what a role does for one piece."""

Walk = Callable[..., tuple[Scalar, Any]]
"""`turns, carry = walk(compute, carry)`: computes the pieces of a worker, and says how many."""


class Share(NamedTuple):
    """The pieces of a worker, where it is known before the first one how many there are.

    Attributes:
        count: Returns how many.
        load: Starts to read the words of a turn's entry; up to two past the last are allowed.
        piece: Returns the piece of an entry whose words are loaded.
    """

    count: Callable[[], Scalar]
    load: Callable[[Scalar], tuple[Scalar, ...]]
    piece: Callable[..., work.Piece]

    def walk(
        self, compute: Compute, carry: Any, *, first: Scalar | int = 0, every: int = 1
    ) -> tuple[Scalar, Any]:
        """See `Walk`; computes the pieces of the turns `first`, `first + every`, ..."""
        first = jnp.int32(first)
        turns = self.count()
        mine = lax.div(turns - first + jnp.int32(every - 1), jnp.int32(every))

        def step(i: Scalar, state: tuple[Any, Any]) -> tuple[Any, Any]:
            entry, carry = state
            turn = first + i * every
            upcoming = self.load(turn + every)
            return upcoming, compute(turn, self.piece(*entry), carry)

        return turns, lax.fori_loop(0, mine, step, (self.load(first), carry))[1]


def read(table_gmem: Any, worker: Scalar, coding: work.Coding) -> Share:
    """The share of a worker in a dealt table in global memory, which `dealt_table` makes."""

    def load(turn: Scalar) -> tuple[Scalar, ...]:
        if coding.words == 1:
            return (table_gmem[worker, turn + 1],)
        first = turn * coding.words + 1
        return tuple(table_gmem[worker, first + word] for word in range(coding.words))

    return Share(lambda: table_gmem[worker, 0], load, coding.unpack)


def computed(
    order: OnlineSchedule,
    worker: Scalar,
    workers: int,
    coding: work.Coding,
    cut: work.Cut | None = None,
) -> Share:
    """The share of a worker in an order that is computed: no table, dealt in turn."""

    def count() -> Scalar:
        most = jnp.int32(len(order) * (cut.pieces if cut else 1) + workers - 1)
        return lax.div(most - worker, jnp.int32(workers))

    def piece(place: Scalar) -> work.Piece:
        if cut is None:
            return coding.piece(*order(place))
        number, tile = divided(place, len(order))
        return cut.piece(coding.piece(*order(tile)), number)

    return Share(count, lambda turn: (worker + turn * workers,), piece)


def dealt_table(
    pieces: Schedule | Pieces | work.Listed, workers: int, spans: np.ndarray | None = None
) -> np.ndarray:
    """Returns the operand that `read` reads, int32 `[workers, 1 + longest share + 2]`.

    Column 0 is the worker's number of pieces. Two entries of padding at the end let a walk, which
    steps by two for ping-pong consumers, read one step past the last entry. Given the spans of
    `Coding.pack`, an entry takes a column for each of its words.
    """
    dealt = work.deal(work.Coding().pack(pieces, spans), workers)
    counts = np.bincount(np.arange(len(pieces)) % workers, minlength=workers).astype(np.int32)
    padding = np.full((workers, 2, *dealt.shape[2:]), PADDING, np.int32)
    entries = np.concatenate([dealt, padding], axis=1).reshape(workers, -1)
    return np.concatenate([counts[:, None], entries], axis=1)


def order_operand(
    pieces: Schedule | Pieces | work.Listed | OnlineSchedule,
    workers: int,
    spans: np.ndarray | None = None,
) -> jax.Array | None:
    """Returns the operand by which a kernel is told an order; None if it computes the order."""
    if isinstance(pieces, OnlineSchedule):
        return None
    return jnp.asarray(dealt_table(pieces, workers, spans))


def share(
    schedule: Schedule | OnlineSchedule,
    order_gmem: Any,
    worker: Scalar,
    workers: int,
    coding: work.Coding,
    cut: work.Cut | None = None,
) -> Share:
    """Returns the share of a worker, given the operand that `order_operand` made."""
    if isinstance(schedule, OnlineSchedule):
        return computed(schedule, worker, workers, coding, cut)
    return read(order_gmem, worker, coding)
