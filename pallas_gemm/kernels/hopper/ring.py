"""The ring of operand slots, as its producer and its consumers walk around it.

Steps of the k loop are numbered through all tiles of a worker, and step s uses slot s mod stages.
Whoever walks keeps the slot and counts it on, back to 0 after the last: of a division for each step
the compiler makes one of 64 bits where it can tell that the number of the step is never negative,
as in an order that is computed. Only a consumer that stores late has no register left to keep the
slot in, and divides; its order is always read from a table, and its divisions have 32 bits.

Whoever waits on a barrier has to wait for each of its phases. Ping-pong consumers use a slot only
in their own turns, so that each of them has barriers of its own for every slot.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_gemm.kernels.hopper.plan import HopperPlan

Scalar = Any
"""A traced int32."""

Reached = Scalar | None
"""The slot that a consumer has reached, or None where it does not keep it."""


class Head(NamedTuple):
    """Where the producer is: the slot that it fills next, and who read each slot last.

    Attributes:
        slot: The slot.
        readers: Bit s is the ping-pong consumer that the last step in slot s was for; None if all
            consumers read every slot.
    """

    slot: Scalar
    readers: Scalar | None


def first_slot(plan: HopperPlan, turn: Scalar) -> Scalar:
    """The slot of the first step of a worker's tile number `turn`."""
    return _slot(plan, turn, jnp.int32(0))


def step(plan: HopperPlan, turn: Scalar, k: Scalar, before: Reached) -> tuple[Scalar, Scalar]:
    """The slots of step k - 1 and of step k of a tile."""
    if before is None:
        return _slot(plan, turn, k - 1), _slot(plan, turn, k)
    return before, following(plan, before)


def reached(plan: HopperPlan, slot: Scalar) -> Reached:
    """What a consumer keeps of the slot that it has reached."""
    return None if plan.config.late_store else slot


def last_slot(plan: HopperPlan, turn: Scalar, before: Reached) -> Scalar:
    """The slot of the last step of a tile."""
    return _slot(plan, turn, jnp.int32(plan.k_steps - 1)) if before is None else before


def following(plan: HopperPlan, slot: Scalar) -> Scalar:
    """The slot after a slot."""
    upcoming = slot + 1
    return lax.select(upcoming == plan.config.stages, jnp.int32(0), upcoming)


def _slot(plan: HopperPlan, turn: Scalar, k: Scalar) -> Scalar:
    return lax.rem(turn * plan.k_steps + k, jnp.int32(plan.config.stages))


def barrier(plan: HopperPlan, slot: Scalar, reader: Scalar) -> Scalar:
    """The index of the barriers of a slot, for a consumer that reads it."""
    return reader * plan.config.stages + slot if plan.config.pingpong else slot


def start(plan: HopperPlan) -> Head:
    """The producer before its first step."""
    return Head(jnp.int32(0), jnp.int32(0) if plan.config.pingpong else None)


def last_barrier(plan: HopperPlan, slot: Scalar, readers: Scalar | None) -> Scalar:
    """The index of the barriers of a slot, for the consumer that read it last."""
    return slot if readers is None else barrier(plan, slot, _reader(readers, slot))


def advance(plan: HopperPlan, head: Head, reader: Scalar) -> Head:
    """The producer after it has filled a slot for a consumer."""
    slot, readers = head
    if readers is not None:
        readers = readers + lax.shift_left(reader - _reader(readers, slot), slot)
    return Head(following(plan, slot), readers)


def _reader(readers: Scalar, slot: Scalar) -> Scalar:
    return lax.shift_right_logical(readers, slot) & 1
