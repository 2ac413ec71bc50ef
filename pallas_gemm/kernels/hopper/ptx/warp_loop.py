"""A loop that one warp runs while a condition holds: Mosaic's dialect has none for a warp.

It is loops of a fixed length, one in another, which together are long enough, and in which the step
is left out when the condition is false: what is then left of them is a few turns each.

In each turn the condition is written to shared memory and read from there, both volatile, so that
ptxas cannot know it. Of a condition in registers, ptxas 13.0 leaves out a test in its machine code:
on a GPU the producer ran one piece too many, and waited for ever.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

_LOOK_ANEW = "{ st.volatile.shared.b32 [$1], $2; ld.volatile.shared.b32 $0, [$1]; }"

LOOPS = 4
"""One in another: of 10,000 turns each has 10."""

_INT32 = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=plgpu.Layout.WG_SPLAT)


def run(
    most: int,
    own_word: Any,
    condition: Callable[[Any], Any],
    step: Callable[[Any], Any],
    state: Any,
) -> Any:
    """Returns what `lax.while_loop` does.

    Args:
        most: How often the condition holds at most.
        own_word: A word of shared memory that only this warp uses; None in the simulator.
        condition: Whether there is another step.
        step: What to do.
        state: What both take, and what a step returns.
    """
    each = 1
    while each**LOOPS < most:
        each += 1

    def goes_on(state: Any) -> Any:
        holds = condition(state)
        return holds if own_word is None else _look_anew(own_word, holds.astype(jnp.int32)) > 0

    def one(_: Any, state: Any) -> Any:
        return lax.cond(goes_on(state), step, lambda state: state, state)

    def repeated(inner: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def some(_: Any, state: Any) -> Any:
            return lax.fori_loop(0, lax.select(goes_on(state), each, 0), inner, state)

        return some

    for _ in range(LOOPS):
        one = repeated(one)
    return one(None, state)


def _look_anew(word: Any, value: Any) -> Any:
    """Returns the value by way of a word of shared memory."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT), return_type=_INT32)
    def inline(_: Any, word: Any, value: Any) -> Any:
        int32 = utils.ir.IntegerType.get_signless(32)
        where, written = utils.memref_ptr(word), value.registers.item()
        read = utils.inline_ptx(
            _LOOK_ANEW, where, written, result_types=int32, has_side_effects=True
        )
        return mgpu.FragmentedArray.splat(read, (), is_signed=True)

    return inline(word, value)
