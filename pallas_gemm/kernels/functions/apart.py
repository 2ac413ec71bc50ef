"""A vector that lies along rows and along columns, as two values.

`i[:, None] > i` has one vector along both. Each operation that moves a vector has one of its own
here, so that each value has one place.
"""

import itertools
from typing import Any

from jax import lax

from pallas_gemm.kernels.functions import flat


def apart(function: flat.Flat, sums: int) -> flat.Flat:
    """Returns the same function, with vectors made again for each operation that moves them.

    Args:
        function: It takes the sums first.
        sums: How many there are.
    """
    types, found = dict(function.types), []
    fresh = itertools.count(max(types) + 1)
    depends = set(function.inputs[:sums])
    given = [x for x in function.inputs[sums:] if _is_vector(types[x])]
    makers = {x: _whole(x, types[x]) for x in given}

    def again(x: Any, known: dict[int, int]) -> Any:
        if not isinstance(x, int) or x not in makers:
            return x
        if x not in known:
            own, new = makers[x], next(fresh)
            types[new], known[x] = types[x], new
            inputs = own.inputs if x in given else tuple(again(y, known) for y in own.inputs)
            found.append(own._replace(inputs=inputs, outputs=(new,)))
        return known[x]

    for equation in function.equations:
        inputs = [x for x in equation.inputs if isinstance(x, int)]
        shapes = {(), *(types[x].shape for x in equation.outputs)}
        if any(types[x].shape not in shapes for x in inputs):
            moved = tuple(again(x, {}) for x in equation.inputs)
            found.append(equation._replace(inputs=moved))
        else:
            found.append(equation)
        if not depends.isdisjoint(inputs):
            depends.update(equation.outputs)
        elif len(equation.outputs) == 1 and _is_vector(types[equation.outputs[0]]):
            makers[equation.outputs[0]] = equation
    return function._replace(types=types, equations=tuple(found))


def _is_vector(aval: Any) -> bool:
    return sum(size != 1 for size in aval.shape) == 1


def _whole(number: int, aval: Any) -> flat.Equation:
    """Returns the operation that takes all of an argument: what it makes is another value."""
    params = {"start_indices": (0,) * len(aval.shape), "limit_indices": aval.shape, "strides": None}
    return flat.Equation(lax.slice_p, params, (number,), (), None)
