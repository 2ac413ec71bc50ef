"""Dynamic persistence on Blackwell: a running cluster takes over a cluster that still waits.

The grid has a cluster for every tile, and the hardware starts as many as fit. One that runs asks
the hardware to cancel one that has not started (`try_cancel`) and, if the request is granted, is
told its number, which indexes the same table of tiles as any other order. A tile thus goes to
whoever is free first.

    request i ──▶ answers[i % 2] ──▶ every role of every CTA reads it ──▶ request i + 2

Two requests are in flight, so that the answer is there before it is needed. One role of each CTA
asks; in a pair the hardware takes the request of the first CTA, and writes the answer into the
shared memory of both.

A request is refused when no cluster is left, and also while a kernel of higher priority waits for
the SM: the clusters that are left start after it. Nothing may be asked after a refusal has been
seen. The request that was already in flight has to be read all the same: it may be granted, and
then nobody else computes that cluster's tile.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import launch, protocol, tiles, work
from pallas_gemm.kernels.blackwell.plan import PAIR_AXIS
from schedules import Schedule

IN_FLIGHT = 2
"""Requests that have been made and not yet read by all."""

# What was read by ordinary loads is about to be overwritten by the asynchronous unit.
_FENCE_AFTER_READING = "fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster;"
_FENCE_BEFORE_ASKING = "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;"


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
    """What a CTA with so many roles needs of shared memory."""
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
    """The cluster whose tile is next, and how far the requests are.

    Attributes:
        cluster: Its number; 0 if there is none.
        granted: Whether there is one.
        read: How many answers this role has read.
        made: How many requests have been made.
    """

    cluster: Any
    granted: Any
    read: Any
    made: Any


def walk(
    table: Any,
    requests: Requests,
    worker: Any,
    coding: work.Coding,
    asks: bool,
    simulated: bool,
    compute: tiles.Compute,
    carry: Any,
) -> tuple[Any, Any]:
    """See `tiles.Walk`; the pieces are those of clusters that have not started.

    The answer about the next piece is read after the work on the current one: the producer is a
    whole ring of slots ahead of everybody else, and that covers the look-up in the table.

    One role of each CTA `asks`. `worker` is this cluster; the simulator knows no fences.
    """

    def step(state: tuple[Any, Taken, Any]) -> Any:
        turn, taken, carry = state
        carry = compute(turn, coding.unpack(table[taken.cluster]), carry)
        taken = take_next(requests, taken, asks=asks, simulated=simulated)
        return turn + 1, taken, carry

    state = (jnp.int32(0), start(requests, worker, asks=asks), carry)
    turns, _, carry = lax.while_loop(lambda state: state[1].granted, step, state)
    return turns, carry


def start(requests: Requests, cluster: Any, *, asks: bool) -> Taken:
    """Makes the first requests, in the role that does; what comes first is this cluster."""
    if asks:
        for request in range(IN_FLIGHT):
            ask(requests, jnp.int32(request))
    return Taken(cluster, jnp.bool_(True), jnp.int32(0), jnp.int32(IN_FLIGHT))


def take_next(requests: Requests, taken: Taken, *, asks: bool, simulated: bool) -> Taken:
    """Reads answers until a request was granted or none is in flight, and asks again."""

    def read_one(taken: Taken) -> Taken:
        cluster, granted = answer(requests, taken.read)
        no_refusal_yet = granted & (taken.made - taken.read == IN_FLIGHT)

        @pl.when(no_refusal_yet)
        def _ask_again() -> None:
            release(requests, taken.read, simulated=simulated)
            if asks:
                await_readers(requests, taken.read, simulated=simulated)
                ask(requests, taken.made)

        made = taken.made + no_refusal_yet.astype(jnp.int32)
        return Taken(cluster, granted, taken.read + 1, made)

    return lax.while_loop(is_open, read_one, taken._replace(granted=jnp.bool_(False)))


def is_open(taken: Taken) -> Any:
    """Whether nothing was granted yet, and something still may be."""
    return ~taken.granted & (taken.read < taken.made)


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


def release(requests: Requests, request: Any, *, simulated: bool) -> None:
    """Says that this role has read the answer to a request."""
    if not simulated:
        _inline(_FENCE_AFTER_READING)
    plgpu.barrier_arrive(requests.read.at[_slot(request)])


def await_readers(requests: Requests, request: Any, *, simulated: bool) -> None:
    """Waits until every role has read the answer to a request."""
    plgpu.barrier_wait(requests.read.at[_slot(request)])
    if not simulated:
        _inline(_FENCE_BEFORE_ASKING)


def _slot(request: Any) -> Any:
    return lax.rem(request, jnp.int32(IN_FLIGHT))


def _inline(ptx: str) -> None:
    def emit(_: Any) -> None:
        utils.inline_ptx(ptx, has_side_effects=True)

    inlined: Callable[[], None] = plgpu.inline_mgpu()(emit)
    inlined()
