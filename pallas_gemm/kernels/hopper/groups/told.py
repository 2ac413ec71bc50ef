"""What the roles of a CTA are told of the pieces they compute, where these are found while it runs.

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
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels.hopper.config import TOLD_HEADER, TOLD_SLOTS
from pallas_gemm.kernels.hopper.cta import Cta

GUIDE = 1
"""The warp; warp 0 loads."""

_INT32 = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=plgpu.Layout.WG_SPLAT)


def tell(cta: Cta, turn: Any, words: tuple[Any, ...]) -> None:
    """Tells the roles of a turn's piece, when the slot is free."""

    @pl.when(turn >= TOLD_SLOTS)
    def _until_taken() -> None:
        plgpu.barrier_wait(cta.barriers.taken.at[slot(turn)])

    for number, word in enumerate(words):
        write(cta, _place(cta, turn) + number, word)
    plgpu.barrier_arrive(cta.barriers.told.at[slot(turn)])


def until_all_are_taken(cta: Cta, told: Any) -> None:
    """Waits for what is left to be taken of so many: whoever waits on a barrier sees all phases."""
    pl.loop(lax.max(told - TOLD_SLOTS, jnp.int32(0)), told)(
        lambda turn: plgpu.barrier_wait(cta.barriers.taken.at[slot(turn)])
    )


def take(cta: Cta, turn: Any) -> tuple[Any, ...]:
    """Waits until a role is told of a turn's piece; returns the words, and frees the slot."""
    plgpu.barrier_wait(cta.barriers.told.at[slot(turn)])
    found = words(cta, turn)
    plgpu.barrier_arrive(cta.barriers.taken.at[slot(turn)])
    return found


def words(cta: Cta, turn: Any) -> tuple[Any, ...]:
    """The words of a turn's piece."""
    return tuple(read(cta, _place(cta, turn) + number) for number in range(cta.plan.coding.words))


def slot(turn: Any) -> Any:
    """The slot of a turn."""
    return turn & jnp.int32(TOLD_SLOTS - 1)


def _place(cta: Cta, turn: Any) -> Any:
    """Where the words of a turn's piece begin."""
    return TOLD_HEADER + slot(turn) * cta.plan.coding.words


def read(cta: Cta, word: Any) -> Any:
    """Reads a word; Pallas has no loads from shared memory in one warp."""
    told = cta.slots.told
    if cta.plan.simulated:
        return told[word]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_INT32)
    def inline(_: Any, told: Any) -> Any:
        int32 = utils.ir.IntegerType.get_signless(32)
        word = utils.inline_ptx(
            "ld.shared.b32 $0, [$1];",
            utils.memref_ptr(told),
            result_types=int32,
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(word, (), is_signed=True)

    return inline(told.at[word])


def write(cta: Cta, word: Any, value: Any) -> None:
    """Writes a word: all lanes the same. Pallas would read the old value, too."""
    told = cta.slots.told
    if cta.plan.simulated:
        told[word] = value
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))
    def inline(_: Any, told: Any, value: Any) -> None:
        where, word = utils.memref_ptr(told), value.registers.item()
        utils.inline_ptx("st.shared.b32 [$0], $1;", where, word, has_side_effects=True)

    inline(told.at[word], value)
