"""Dynamic persistence on Blackwell: a running cluster takes over a cluster that still waits.

The grid has a cluster for every tile, and the hardware starts those that fit. A cluster that runs
asks the hardware to cancel one that has not started (`try_cancel`). If the request is granted, it
is told the number of that cluster, which indexes the same table of tiles as any other order. A tile
thus goes to the cluster that is free first.

    request i ──▶ answers[i % 2] ──▶ every role of every CTA reads it ──▶ request i + 2

    a role    compute tile 0 | read answers 0 and 1 | compute tile 1 | read answer 2 | ...
    who asks  0 and 1        | 2                    |                | 3             | ...

Before it computes a tile, a role reads which one comes after it, and starts to look it up in the
table: as in a dealt order, that look-up is hidden behind a tile of work. The number of tile t + 2
depends on nobody's work on tiles after t. Before tile 0 nothing is waited for.

No more is asked for than that: what a cluster has been granted, no other one computes when it is
free. One role of each CTA asks; in a pair the hardware takes the request of the first CTA, and
writes the answer into the shared memory of both.

A request is refused when no cluster is left, and also while a kernel of higher priority waits for
the SM: the clusters that are left start after it. Nothing may be asked after a refusal has been
seen. The request that was already in flight has to be read all the same: it may be granted, and
then nobody else computes that cluster's tile.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import launch, protocol, tiles, work
from pallas_gemm.kernels.blackwell.plan import PAIR_AXIS, BlackwellPlan
from pallas_gemm.kernels.ptx import fences
from pallas_gemm.kernels.traced import Scalar
from schedules import Schedule

IN_FLIGHT = 2
"""Requests that have been made and not yet read by all: one for each slot for answers."""
AHEAD = 2
"""Tiles that a role knows between two tiles: the next one, and the one after it."""


class Requests(NamedTuple):
    """The answers in shared memory, and their barriers.

    Attributes:
        answers: `IN_FLIGHT` answers of 16 bytes.
        answered: Completed when an answer has been written.
        read: Completed when every role of every CTA of the cluster has read an answer.
    """

    answers: Any
    answered: Any
    read: Any


def scratch(roles: int) -> Requests:
    """The shared memory that a CTA with this number of roles needs."""
    return Requests(
        answers=plgpu.TryClusterCancelResult(IN_FLIGHT),
        answered=plgpu.Barrier(num_arrivals=protocol.answer_arrivals(), num_barriers=IN_FLIGHT),
        # Ordering the tensor core is not what it is for: such a barrier also makes the four warps
        # of a role wait for each other before one thread of them arrives.
        read=plgpu.ClusterBarrier(
            collective_axes=(PAIR_AXIS,),
            num_arrivals=protocol.read_arrivals(roles),
            num_barriers=IN_FLIGHT,
            orders_tensor_core=True,
        ),
    )


def order_operand(schedule: Schedule) -> jax.Array:
    """Returns the operand by which a kernel is told an order: every tile, by its cluster."""
    return jnp.asarray(work.Coding().pack(schedule))


class Taken(NamedTuple):
    """The tiles of its cluster that a role knows, and how far the requests are.

    Attributes:
        first: The cluster whose tile comes next, if any is held.
        second: The cluster whose tile comes after it, if two are held; else one that there is.
        held: How many are.
        read: How many answers this role has read.
        made: How many requests have been made.
        refused: Whether an answer was a refusal.
    """

    first: Any
    second: Any
    held: Any
    read: Any
    made: Any
    refused: Any


def walk(
    table: Any,
    requests: Requests,
    worker: Scalar,
    coding: work.Coding,
    asks: bool,
    plan: BlackwellPlan,
    compute: tiles.Compute,
    carry: Any,
) -> tuple[Any, Any]:
    """See `tiles.Walk`; the pieces are those of clusters that have not started.

    One role of each CTA `asks`. `worker` is this cluster.
    """

    def step(state: tuple[Any, Any, Taken, Any]) -> Any:
        turn, entry, taken, carry = state
        upcoming, is_known = table[taken.second], taken.held == AHEAD
        carry = compute(turn, coding.unpack(entry), carry)
        taken = take(requests, taken, asks=asks, plan=plan)
        # What comes after tile 0 has not been looked up while that was computed.
        entry = lax.cond(is_known, lambda: upcoming, lambda: table[taken.first])
        return turn + 1, entry, taken, carry

    state = (jnp.int32(0), table[worker], start(requests, worker, asks=asks), carry)
    turns, _, taken, carry = lax.while_loop(lambda state: state[2].held > 0, step, state)
    if asks:
        drain(requests, taken)
    return turns, carry


def start(requests: Requests, cluster: Any, *, asks: bool) -> Taken:
    """Makes the first requests, in the role that does; what comes first is this cluster."""
    if asks:
        for request in range(IN_FLIGHT):
            ask(requests, jnp.int32(request))
    none = jnp.int32(0)
    return Taken(cluster, none, jnp.int32(1), none, jnp.int32(IN_FLIGHT), jnp.bool_(False))


def take(requests: Requests, taken: Taken, *, asks: bool, plan: BlackwellPlan) -> Taken:
    """Goes on to the next tile: reads answers until two are held or none is in flight, and asks."""

    def read_one(taken: Taken) -> Taken:
        cluster, granted = answer(requests, taken.read)
        release(requests, taken.read, plan=plan)
        return taken._replace(
            first=jnp.where(taken.held == 0, cluster, taken.first),
            second=cluster,
            held=taken.held + granted.astype(jnp.int32),
            read=taken.read + 1,
            refused=taken.refused | ~granted,
        )

    taken = taken._replace(first=taken.second, held=taken.held - 1)
    taken = lax.while_loop(wants_more, read_one, taken)
    if asks:

        @pl.when(~taken.refused)
        def _ask_for_one_more() -> None:
            await_readers(requests, taken.made - IN_FLIGHT)
            fences.before_asking(plan)
            ask(requests, taken.made)

    return taken._replace(made=taken.made + (~taken.refused).astype(jnp.int32))


def wants_more(taken: Taken) -> Any:
    """Whether fewer tiles are held than are wanted, and an answer is in flight."""
    return (taken.held < AHEAD) & (taken.read < taken.made)


def drain(requests: Requests, taken: Taken) -> None:
    """Waits for the readers of the last answers, who arrive in this CTA, too."""
    for request in range(IN_FLIGHT):
        await_readers(requests, taken.made - (IN_FLIGHT - request))


def ask(requests: Requests, request: Any) -> None:
    """Makes a request, whose slot is free; every CTA of the cluster has to."""
    slot = _slot(request)
    plgpu.try_cluster_cancel(
        requests.answers.at[slot], requests.answered.at[slot], collective_axes=(PAIR_AXIS,)
    )


def answer(requests: Requests, request: Any) -> tuple[Any, Any]:
    """Waits for a request's answer and returns (number of the cluster, whether it is granted)."""
    slot = _slot(request)
    plgpu.barrier_wait(requests.answered.at[slot])
    (number,), granted = plgpu.query_cluster_cancel(
        requests.answers.at[slot], grid_names=(launch.WORKER,)
    )
    return jnp.where(granted, number, jnp.int32(0)), granted


def release(requests: Requests, request: Any, *, plan: BlackwellPlan) -> None:
    """Says that this role has read the answer to a request."""
    fences.after_reading(plan)
    plgpu.barrier_arrive(requests.read.at[_slot(request)])


def await_readers(requests: Requests, request: Any) -> None:
    """Waits until every role has read the answer to a request."""
    plgpu.barrier_wait(requests.read.at[_slot(request)])


def _slot(request: Any) -> Any:
    return lax.rem(request, jnp.int32(IN_FLIGHT))
