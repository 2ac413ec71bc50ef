"""How the roles of a CTA are told of the pieces they compute, where these are found while it runs.

    the guide ──▶ words in shared memory ──▶ producer and consumers

The *guide* is a warp of the producer's warpgroup that loads nothing. It finds the pieces of its
worker, one after another (`group_walk.py`, `sum_walk.py`), and writes the words of each into the
next of a ring of slots.

    barrier     who arrives                                      who waits
    told[s]     the guide, when slot s has the words of a piece  each role that computes it
    taken[s]    each such role, when it has read them            the guide, before it writes others
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels.hopper.cta import Cta
from pallas_gemm.kernels.hopper.tiling import TOLD_HEADER, TOLD_SLOTS
from pallas_gemm.kernels.ptx import words as ptx
from pallas_gemm.kernels.traced import Scalar

GUIDE = 1
"""The warp; warp 0 loads."""


def tell(cta: Cta, turn: Scalar, words: tuple[Any, ...]) -> None:
    """Tells the roles of a turn's piece, when the slot is free."""

    @pl.when(turn >= TOLD_SLOTS)
    def _until_taken() -> None:
        plgpu.barrier_wait(cta.barriers.taken.at[slot(turn)])

    for number, word in enumerate(words):
        write(cta, _place(cta, turn) + number, word)
    plgpu.barrier_arrive(cta.barriers.told.at[slot(turn)])


def until_all_are_taken(cta: Cta, told: Any) -> None:
    """Waits until all `told` are taken: a role that waits on a barrier has to see all phases."""
    pl.loop(lax.max(told - TOLD_SLOTS, jnp.int32(0)), told)(
        lambda turn: plgpu.barrier_wait(cta.barriers.taken.at[slot(turn)])
    )


def take(cta: Cta, turn: Scalar) -> tuple[Any, ...]:
    """Waits until a role is told of a turn's piece; returns the words, and frees the slot."""
    plgpu.barrier_wait(cta.barriers.told.at[slot(turn)])
    found = words(cta, turn)
    plgpu.barrier_arrive(cta.barriers.taken.at[slot(turn)])
    return found


def words(cta: Cta, turn: Scalar) -> tuple[Any, ...]:
    """The words of a turn's piece."""
    return tuple(read(cta, _place(cta, turn) + number) for number in range(cta.plan.coding.words))


def slot(turn: Scalar) -> Any:
    """The slot of a turn."""
    return turn & jnp.int32(TOLD_SLOTS - 1)


def _place(cta: Cta, turn: Scalar) -> Any:
    """Where the words of a turn's piece begin."""
    return TOLD_HEADER + slot(turn) * cta.plan.coding.words


def read(cta: Cta, word: Any) -> Any:
    """Reads a word."""
    return ptx.read(cta.plan, cta.slots.told, word)


def write(cta: Cta, word: Any, value: Any) -> None:
    """Writes a word."""
    ptx.write(cta.plan, cta.slots.told, word, value)
