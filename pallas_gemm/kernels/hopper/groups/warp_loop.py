"""A loop that one warp runs while a condition holds: Mosaic's dialect has none for a warp.

It is loops of a fixed length, one in another, which together are long enough, and in which the step
is left out when the condition is false: what is then left of them is a few turns each.

In each turn the condition is written to shared memory and read from there, both volatile, so that
ptxas cannot know it. If the condition is in registers, ptxas 13.0 leaves out a test in its machine
code. On a GPU the producer then ran one piece too many, and waited for ever.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_gemm.kernels.hopper.cta import Cta
from pallas_gemm.kernels.ptx import words

LOOPS = 4
"""One in another: of 10,000 turns each has 10."""


def run(
    cta: Cta,
    own_word: int,
    most: int,
    condition: Callable[[Any], Any],
    step: Callable[[Any], Any],
    state: Any,
) -> Any:
    """Returns what `lax.while_loop` does.

    Args:
        cta: The CTA whose shared memory it is.
        own_word: Which of the words that roles are told only this warp uses.
        most: How often the condition holds at most.
        condition: Whether there is another step.
        step: Does a step.
        state: The values that both take, and that a step returns.
    """
    each = 1
    while each**LOOPS < most:
        each += 1

    def goes_on(state: Any) -> Any:
        holds = condition(state).astype(jnp.int32)
        return words.looked_anew(cta.plan, cta.slots.told, own_word, holds) > 0

    def one(_: Any, state: Any) -> Any:
        return lax.cond(goes_on(state), step, lambda state: state, state)

    def repeated(inner: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def some(_: Any, state: Any) -> Any:
            return lax.fori_loop(0, lax.select(goes_on(state), each, 0), inner, state)

        return some

    for _ in range(LOOPS):
        one = repeated(one)
    return one(None, state)
