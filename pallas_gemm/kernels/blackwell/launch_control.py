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

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import protocol, tiles, work
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


def scratch(roles: int, axis: str) -> Requests:
    """What a CTA with so many roles, in a cluster along `axis`, needs of shared memory."""
    return Requests(
        answers=plgpu.TryClusterCancelResult(IN_FLIGHT),
        answered=plgpu.Barrier(num_arrivals=protocol.answer_arrivals(), num_barriers=IN_FLIGHT),
        # Ordering the tensor core is not what it is for: such a barrier also makes the four warps
        # of a role wait for each other before one thread of them arrives.
        read=plgpu.ClusterBarrier(
            collective_axes=(axis,),
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


@dataclasses.dataclass(frozen=True)
class LaunchedSource(tiles.TileSource):
    """Tiles taken over from clusters that have not started.

    The answer about the next tile is read after the work on the current one: the producer is a
    whole ring of slots ahead of everybody else, and that covers the look-up in the table.

    Attributes:
        table_gmem: Every tile in visiting order.
        requests: The answers and their barriers.
        worker: This cluster.
        coding: How the entries are written.
        asks: Whether this role makes the requests; one of them does.
        axes: The names of the grid's axis and of the cluster's.
        simulated: Whether the kernel runs in the simulator, which knows no fences.
    """

    table_gmem: Any
    requests: Requests
    worker: tiles.Scalar
    coding: work.Coding
    asks: bool
    axes: tuple[str, str]
    simulated: bool = False

    def walk(
        self,
        compute: tiles.Compute,
        carry: Any,
        *,
        first: tiles.Scalar | int = 0,
        every: int = 1,
    ) -> tuple[tiles.Scalar, Any]:
        """See `TileSource.walk`; every turn in order is the only way that tiles are taken over."""
        if (first, every) != (0, 1):
            raise ValueError(f"tiles are taken over one by one, got {first=} and {every=}")
        requests, asks = self.requests, self.asks

        def step(state: tuple[Any, Taken, Any]) -> Any:
            turn, taken, carry = state
            piece = self.coding.unpack(self.table_gmem[taken.cluster])
            carry = compute(turn, piece, carry)
            taken = take_next(requests, taken, self.axes, asks=asks, simulated=self.simulated)
            return turn + 1, taken, carry

        first_taken = start(requests, self.worker, self.axes[1], asks=asks)
        state = (jnp.int32(0), first_taken, carry)
        turns, _, carry = lax.while_loop(lambda state: state[1].granted, step, state)
        return turns, carry


def start(requests: Requests, cluster: Any, axis: str, *, asks: bool) -> Taken:
    """Makes the first requests; what comes first is the cluster that runs.

    Args:
        requests: Where the answers go.
        cluster: The number of this cluster.
        axis: The cluster's axis; every CTA along it has to ask.
        asks: Whether this role is the one of its CTA that makes the requests.
    """
    if asks:
        for request in range(IN_FLIGHT):
            ask(requests, jnp.int32(request), axis)
    return Taken(cluster, jnp.bool_(True), jnp.int32(0), jnp.int32(IN_FLIGHT))


def take_next(
    requests: Requests, taken: Taken, axes: tuple[str, str], *, asks: bool, simulated: bool
) -> Taken:
    """Reads answers until a request was granted or none is in flight, and asks again.

    Args:
        requests: Where the answers are.
        taken: What was taken last.
        axes: The names of the grid's axis and of the cluster's.
        asks: Whether this role makes the requests.
        simulated: Whether the kernel runs in the simulator, which knows no fences.
    """
    grid_axis, cluster_axis = axes

    def read_one(taken: Taken) -> Taken:
        cluster, granted = answer(requests, taken.read, grid_axis)
        no_refusal_yet = granted & (taken.made - taken.read == IN_FLIGHT)

        @pl.when(no_refusal_yet)
        def _ask_again() -> None:
            release(requests, taken.read, simulated=simulated)
            if asks:
                await_readers(requests, taken.read, simulated=simulated)
                ask(requests, taken.made, cluster_axis)

        made = taken.made + no_refusal_yet.astype(jnp.int32)
        return Taken(cluster, granted, taken.read + 1, made)

    return lax.while_loop(is_open, read_one, taken._replace(granted=jnp.bool_(False)))


def is_open(taken: Taken) -> Any:
    """Whether nothing was granted yet, and something still may be."""
    return ~taken.granted & (taken.read < taken.made)


def ask(requests: Requests, request: Any, axis: str) -> None:
    """Makes a request, whose slot is free; every CTA along `axis` has to."""
    slot = _slot(request)
    plgpu.try_cluster_cancel(
        requests.answers.at[slot], requests.answered.at[slot], collective_axes=(axis,)
    )


def answer(requests: Requests, request: Any, grid_axis: str) -> tuple[Any, Any]:
    """Waits for a request's answer and returns (number of the cluster, whether it is granted)."""
    slot = _slot(request)
    plgpu.barrier_wait(requests.answered.at[slot])
    (number,), granted = plgpu.query_cluster_cancel(
        requests.answers.at[slot], grid_names=(grid_axis,)
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
