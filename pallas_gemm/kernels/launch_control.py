"""Dynamic persistence on Blackwell: a running cluster takes over a cluster that still waits.

The grid has a cluster for every tile, and the hardware starts as many as fit. One that runs asks
the hardware to cancel one that has not started (`try_cancel`) and, if there is one left, is told
its number, which indexes the same table of tiles as any other order. A tile thus goes to whoever is
free first.

    request for turn t ──▶ answers[t % 2] ──▶ every role of every CTA reads it ──▶ request for t + 2

Two requests are in flight, so that the answer for the next turn is there before it is needed. One
role of each CTA asks; in a pair the hardware takes the request of the first CTA, and writes the
answer into the shared memory of both.

A refused request means that no cluster is left. Nothing may be asked after a refusal has been seen,
and the request that was already in flight has to be waited for, because its answer is written to
shared memory too.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

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


def ask(requests: Requests, turn: Any, axis: str) -> None:
    """Requests the cluster of a turn, whose slot is free; every CTA along `axis` has to ask."""
    slot = _slot(turn)
    plgpu.try_cluster_cancel(
        requests.answers.at[slot], requests.answered.at[slot], collective_axes=(axis,)
    )


def answer(requests: Requests, turn: Any, grid_axis: str) -> tuple[Any, Any]:
    """Waits for a turn's answer and returns (number of the cluster, whether there is one)."""
    slot = _slot(turn)
    plgpu.barrier_wait(requests.answered.at[slot])
    (number,), granted = plgpu.query_cluster_cancel(
        requests.answers.at[slot], grid_names=(grid_axis,)
    )
    return jnp.where(granted, number, jnp.int32(0)), granted


def release(requests: Requests, turn: Any, *, simulated: bool) -> None:
    """Says that this role has read the answer of a turn."""
    if not simulated:
        _inline(_FENCE_AFTER_READING)
    plgpu.barrier_arrive(requests.read.at[_slot(turn)])


def await_readers(requests: Requests, turn: Any, *, simulated: bool) -> None:
    """Waits until every role has read the answer of a turn."""
    plgpu.barrier_wait(requests.read.at[_slot(turn)])
    if not simulated:
        _inline(_FENCE_BEFORE_ASKING)


def drain(requests: Requests, turn: Any) -> None:
    """Waits for the answers that were still in flight when the request of `turn` was refused."""
    for later in range(1, IN_FLIGHT):
        plgpu.barrier_wait(requests.answered.at[_slot(turn + later)])


def _slot(turn: Any) -> Any:
    return lax.rem(turn, jnp.int32(IN_FLIGHT))


def _inline(ptx: str) -> None:
    def emit(_: Any) -> None:
        utils.inline_ptx(ptx, has_side_effects=True)

    inlined: Callable[[], None] = plgpu.inline_mgpu()(emit)
    inlined()
