"""The ring of operand slots, as its producer and its consumers walk around it.

Steps of the k loop are numbered through all tiles of a worker. Step s uses slot s mod stages.

    who                           finds its slot by
    producer, most consumers      counting: the slot after the last one is 0. To divide costs more:
                                  the compiler makes a division of 64 bits of each that it knows to
                                  be of no negative number, as in an order that is computed
    consumer that stores late     dividing: it has no register left to keep the slot in. Its order
                                  is read from a table, so that its divisions have 32 bits

Where all tiles take the same number of steps, a tile's first step is known by its turn. Where
pieces of work say how many they take (`HopperPlan.own_steps`), it is counted from tile to tile.

A role that waits on a barrier has to wait for each of its phases. A ping-pong consumer uses a slot
in its own tiles only, so that each of the two has barriers of its own for every slot.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.kernels.traced import Scalar


class Head(NamedTuple):
    """Where the producer is: the slot that it fills next, and who read each slot last.

    Attributes:
        slot: The slot.
        readers: Bit s is the ping-pong consumer that the last step in slot s was for; None if all
            consumers read every slot.
        filled: How many steps it has filled slots for; None where turns say it.
    """

    slot: Scalar
    readers: Scalar | None
    filled: Scalar | None = None


def first_slot(plan: HopperPlan, turn: Scalar, upcoming: Scalar | None) -> Scalar:
    """The slot of the first step of a worker's tile number `turn`, unless it was counted."""
    return _divided(plan, turn, jnp.int32(0)) if upcoming is None else upcoming


def step(plan: HopperPlan, turn: Scalar, k: Scalar, kept: Scalar | None) -> tuple[Scalar, Scalar]:
    """The slots of step k - 1 and of step k of a tile, for a consumer that kept the first."""
    if kept is None:
        return _divided(plan, turn, k - 1), _divided(plan, turn, k)
    return kept, following(plan, kept)


def keep(plan: HopperPlan, slot: Scalar) -> Scalar | None:
    """What a consumer keeps from step to step: its slot, or None if it divides."""
    return None if plan.config.late_store and not plan.own_steps else slot


def last_slot(plan: HopperPlan, turn: Scalar, kept: Scalar | None) -> Scalar:
    """The slot of the last step of a tile, for a consumer that kept it."""
    return _divided(plan, turn, jnp.int32(plan.k_steps - 1)) if kept is None else kept


def following(plan: HopperPlan, slot: Scalar) -> Scalar:
    """The slot after a slot."""
    upcoming = slot + 1
    return lax.select(upcoming == plan.config.stages, jnp.int32(0), upcoming)


def later(plan: HopperPlan, slot: Scalar, steps: int) -> Scalar:
    """The slot that comes a number of steps after a slot."""
    return lax.rem(slot + steps, jnp.int32(plan.config.stages))


def _divided(plan: HopperPlan, turn: Scalar, k: Scalar) -> Scalar:
    return lax.rem(turn * plan.k_steps + k, jnp.int32(plan.config.stages))


def barrier(plan: HopperPlan, slot: Scalar, reader: Scalar) -> Scalar:
    """The index of the barriers of a slot, for a consumer that reads it."""
    return reader * plan.config.stages + slot if plan.config.pingpong else slot


def upcoming(plan: HopperPlan, slot: Scalar | None = None) -> Scalar | None:
    """The slot of a consumer's next tile, after one that ended with a slot; None if turns say it.

    Before the first tile there is no such slot.
    """
    if not plan.own_steps:
        return None
    return jnp.int32(0) if slot is None else following(plan, slot)


def start(plan: HopperPlan) -> Head:
    """The producer before its first step."""
    readers = jnp.int32(0) if plan.config.pingpong else None
    return Head(jnp.int32(0), readers, jnp.int32(0) if plan.own_steps else None)


def filled(plan: HopperPlan, turn: Scalar, k: Scalar | None, head: Head) -> Scalar:
    """How many steps the producer has filled slots for, before step k (or the first) of a turn."""
    if head.filled is not None:
        return head.filled
    return turn * plan.k_steps if k is None else turn * plan.k_steps + k


def last_barrier(plan: HopperPlan, slot: Scalar, readers: Scalar | None) -> Scalar:
    """The index of the barriers of a slot, for the consumer that read it last."""
    return slot if readers is None else barrier(plan, slot, _reader(readers, slot))


def advance(plan: HopperPlan, head: Head, reader: Scalar) -> Head:
    """The producer after it has filled a slot for a consumer."""
    slot, readers, steps = head
    if readers is not None:
        readers = readers + lax.shift_left(reader - _reader(readers, slot), slot)
    return Head(following(plan, slot), readers, None if steps is None else steps + 1)


def _reader(readers: Scalar, slot: Scalar) -> Scalar:
    return lax.shift_right_logical(readers, slot) & 1
