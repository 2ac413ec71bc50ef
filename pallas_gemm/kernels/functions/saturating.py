"""A program without the clipping that a conversion to 8 bits does anyway.

The instruction that makes float8 of float32 gives the largest number where the type holds no such
value, and NaN for NaN. `clip(x, -448, 448)` before it takes two instructions for nothing.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from pallas_gemm.program import Constant, Program, Step

SATURATED = core.Primitive("saturated")
"""x clipped to what a type holds, in that type, `new_dtype`."""

LARGEST = {
    np.dtype(dtype): float(jnp.finfo(dtype).max) for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2)
}
"""The largest number of each type that float32 is converted to so."""


@functools.lru_cache(maxsize=1024)
def saturating(program: Program) -> Program:
    """Returns the program with each clip and conversion as one step."""
    first = program.sums + len(program.operands)
    steps = list(program.steps)
    for i, step in enumerate(steps):
        clipped = _unclipped(step, lambda x: steps[x - first] if x >= first else None)
        if clipped is not None:
            steps[i] = Step(SATURATED, step.params, (clipped,))
    return program if steps == list(program.steps) else _without_unused(program, first, steps)


def _unclipped(step: Step, made_by: Callable[[int], Step | None]) -> int | None:
    """Returns x of a step that converts clip(x, -largest, largest); None of another one."""
    if step.primitive is not lax.convert_element_type_p:
        return None
    largest = LARGEST.get(np.dtype(dict(step.params)["new_dtype"]))
    if largest is None:
        return None
    left = {lax.max_p: -largest, lax.min_p: largest}
    (x,) = step.inputs
    while left and isinstance(x, int) and (own := made_by(x)):
        bounds = [each for each in own.inputs if isinstance(each, Constant)]
        others = [each for each in own.inputs if isinstance(each, int)]
        if own.primitive not in left or len(bounds) != 1:
            return None
        if (bounds[0].value, bounds[0].dtype) != (left.pop(own.primitive), np.float32):
            return None
        (x,) = others
    return x if isinstance(x, int) and not left else None


def _without_unused(program: Program, first: int, steps: list[Step]) -> Program:
    """Returns a program of the steps that its results need."""
    needed = {own.value for own in program.results}
    for number, step in reversed(list(enumerate(steps, first))):
        if number in needed:
            needed |= {x for x in step.inputs if isinstance(x, int)}
    kept = {number: step for number, step in enumerate(steps, first) if number in needed}
    return program.with_steps(kept)
