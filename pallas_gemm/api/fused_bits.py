"""Which operation changes the bits of rows where each of them alone does not.

XLA computes several operations in one kernel, and may choose how by the number of rows: a norm is
an example. Where all results are kept there is no such kernel, and nothing differs. This module
cuts the program short after different operations, and keeps only the values that the rest takes:

    the first 40 operations     no bit differs
    the first 41                some do: the 41st is computed together with one before it
    with reduce_sum kept apart  no bit differs: it is that one
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from pallas_gemm.kernels.functions.flat import Equation, Flat, flat

MOST_TRIED = 16
"""Reductions that are kept apart one by one, the last ones first: each takes two programs."""
_REDUCING = ("reduce", "arg", "cum", "dot_general", "conv")

Compare = Callable[[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any]], tuple[int, int]]
"""The results of all rows and of some, their types and those of one row more: how many elements
differ, and of how many."""


class Together(NamedTuple):
    """Operations of one kernel that XLA makes otherwise for another number of rows.

    Attributes:
        reduction: The one whose result has other bits; None if keeping none apart helps.
        last: The last one.
        differing: How many elements of what they make differ.
        elements: How many were compared.
    """

    reduction: Equation | None
    last: Equation
    differing: int
    elements: int


def first(
    f: Callable[..., Any],
    arguments: tuple[Sequence[Any], Sequence[Any], Sequence[Any]],
    compare: Compare,
    compiled: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Together | None:
    """Returns the first operations whose bits differ as XLA computes them; None if none do.

    Args:
        f: A function of arrays.
        arguments: Its arguments: all rows, some of them, and the types of one row more.
        compare: Compares results.
        compiled: Compiles a function.
    """
    whole, some, longer = (flat(jax.make_jaxpr(f)(*own)) for own in arguments)
    if whole.names != some.names or whole.names != longer.names:
        return None

    def differing(count: int, apart: int | None = None) -> tuple[int, int]:
        results = [
            compiled(beginning(own, _kept(own, count), count, apart))(*given)
            for own, given in zip((whole, some), arguments[:2], strict=True)
        ]
        types = [[own.types[x] for x in _kept(own, count)] for own in (whole, longer)]
        return compare(*results, *types)

    alike, count = 0, len(whole.equations)
    found = differing(count)
    if not found[0]:
        return None
    while count - alike > 1:
        middle = (alike + count) // 2
        own = differing(middle)
        if own[0]:
            count, found = middle, own
        else:
            alike = middle
    reductions = [i for i in range(count - 1) if whole.names[i].startswith(_REDUCING)]
    healing = (i for i in reductions[: -MOST_TRIED - 1 : -1] if not differing(count, i)[0])
    own = next(healing, None)
    reduction = None if own is None else whole.equations[own]
    return Together(reduction, whole.equations[count - 1], *found)


def _kept(own: Flat, count: int) -> list[int]:
    """Returns the values of the first operations that the others, or the caller, take."""
    made = {x for e in own.equations[:count] for x in e.outputs}
    taken = [x for e in own.equations[count:] for x in e.inputs]
    later = {x for x in (*taken, *own.outputs) if isinstance(x, int)}
    return sorted(made & later)


def beginning(
    own: Flat, kept: Sequence[int], count: int | None = None, apart: int | None = None
) -> Callable[..., list[Any]]:
    """Returns what computes values of a function.

    Args:
        own: The function.
        kept: The values.
        count: How many of its operations are computed; None for all.
        apart: Which of them is kept apart from the others.
    """

    def run(*given: Any) -> list[Any]:
        values: dict[int, Any] = {**own.constants, **dict(zip(own.inputs, given, strict=True))}
        for i, e in enumerate(own.equations[:count]):
            inputs = [values[x] if isinstance(x, int) else x.val for x in e.inputs]
            params = e.primitive.get_bind_params(e.params)
            outputs = e.primitive.bind(*inputs, **params)
            outputs = outputs if e.primitive.multiple_results else [outputs]
            outputs = lax.optimization_barrier(outputs) if i == apart else outputs
            values.update(zip(e.outputs, outputs, strict=True))
        return [values[x] for x in kept]

    return run
