"""One number for a place of each row of zeros, as a choice for each element.

The derivative of a label's logit is such an array. JAX adds the numbers to zeros, for which XLA
makes a pass of its own. A choice becomes a part of the pass that reads it.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from pallas_gemm.kernels.split import ELEMENTWISE
from pallas_gemm.rewriting.level import Level

NAMES = frozenset(("scatter-add", "scatter_add"))
"""JAX's names of the operation."""
MODES = (lax.GatherScatterMode.FILL_OR_DROP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)
"""A number whose place is beyond the row is dropped, or there is none."""


def chosen(jaxpr: core.Jaxpr, equations: Sequence[Any]) -> Sequence[Any]:
    """Returns the equations of a function with choices in the place of such additions.

    Args:
        jaxpr: The function.
        equations: Its equations.
    """
    if not any(e.primitive.name in NAMES for e in equations):
        return equations
    level = Level(jaxpr, equations)
    found: list[Any] = []
    for equation in equations:
        found += _choice(equation) if _is_one_of_each_row(level, equation) else [equation]
    return found


def _is_one_of_each_row(level: Level, equation: Any) -> bool:
    if equation.primitive.name not in NAMES or equation.effects:
        return False
    zeros, places, numbers = equation.invars
    made, (out,) = level.maker(zeros), equation.outvars
    rows = zeros.aval.shape[:-1]
    if (places.aval.shape, numbers.aval.shape) != ((*rows, 1, 1), (*rows, 1)):
        return False
    if made is None or made.primitive.name != "broadcast_in_dim":
        return False
    (zero,) = made.invars
    if not isinstance(zero, core.Literal) or zero.val != 0:
        return False
    readers = level.readers(out)
    if out in level.results or not all(e.primitive.name in ELEMENTWISE for e in readers):
        return False
    dims, batch = equation.params["dimension_numbers"], tuple(range(len(rows)))
    own = (dims.update_window_dims, dims.inserted_window_dims, dims.scatter_dims_to_operand_dims)
    last = (len(rows),)
    is_along_rows = tuple(map(tuple, own)) == ((), last, last)
    others = (dims.operand_batching_dims, dims.scatter_indices_batching_dims)
    is_along_rows = is_along_rows and tuple(map(tuple, others)) == (batch, batch)
    return is_along_rows and equation.params["mode"] in MODES


def _choice(equation: Any) -> list[Any]:
    """Returns the equations of the choice."""
    zeros, places, numbers = equation.invars

    def choose(zeros: Any, places: Any, numbers: Any) -> Any:
        shape, axes = zeros.shape, tuple(range(zeros.ndim))
        columns = lax.broadcasted_iota(places.dtype, shape, axes[-1])
        place = lax.broadcast_in_dim(lax.squeeze(places, (zeros.ndim,)), shape, axes)
        chosen = lax.broadcast_in_dim(numbers, shape, axes)
        return lax.select(lax.eq(columns, place), chosen, zeros)

    given = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars]
    with equation.ctx.manager:
        program = jax.make_jaxpr(choose)(*given)
    known = dict(zip(program.jaxpr.invars, (zeros, places, numbers), strict=True))
    known |= dict(zip(program.jaxpr.outvars, equation.outvars, strict=True))
    return [
        own.replace(
            invars=[x if isinstance(x, core.Literal) else known[x] for x in own.invars],
            outvars=[known.setdefault(x, core.Var(x.aval)) for x in own.outvars],
            source_info=equation.source_info,
        )
        for own in program.jaxpr.eqns
    ]
