"""One number for a place of each row of zeros, as a choice for each element.

The derivative of a label's logit is such an array. JAX adds the numbers to zeros, for which XLA
makes a pass of its own. A choice becomes a part of the pass that reads it.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from pallas_gemm.kernels.functions.split import ELEMENTWISE
from pallas_gemm.rewriting.level import renamed, variables

MODES = (lax.GatherScatterMode.FILL_OR_DROP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)
"""A number whose place is beyond the row is dropped, or there is none."""


def chosen(jaxpr: core.Jaxpr, equations: Sequence[Any]) -> Sequence[Any]:
    """Returns the equations of a function with choices in the place of such additions.

    Args:
        jaxpr: The function.
        equations: Its equations.
    """
    added = {e.outvars[0]: e for e in equations if _is_one_of_each_row(e)}
    if not added:
        return equations
    kept = {x for x in jaxpr.outvars if isinstance(x, core.Var)}
    empty: set[Any] = set()
    for equation in equations:
        if equation.primitive.name not in ELEMENTWISE:
            kept.update(variables(equation))
        if _is_of_zeros(equation):
            empty.update(equation.outvars)
    found: list[Any] = []
    for equation in equations:
        own = equation.outvars[0] if equation.outvars else None
        is_chosen = own in added and own not in kept and equation.invars[0] in empty
        found += _choice(equation) if is_chosen else (equation,)
    return found


def _is_of_zeros(equation: Any) -> bool:
    if equation.primitive.name != "broadcast_in_dim":
        return False
    (zero,) = equation.invars
    return isinstance(zero, core.Literal) and zero.val == 0


def _is_one_of_each_row(equation: Any) -> bool:
    """Whether an equation adds one number to each row of an array, along its last dimension."""
    if equation.primitive is not lax.scatter_add_p or equation.effects:
        return False
    into, places, numbers = (x.aval.shape for x in equation.invars)
    rows = into[:-1]
    if not into or (places, numbers) != ((*rows, 1, 1), (*rows, 1)):
        return False
    dims, batch, last = equation.params["dimension_numbers"], tuple(range(len(rows))), (len(rows),)
    own = (dims.update_window_dims, dims.inserted_window_dims, dims.scatter_dims_to_operand_dims)
    others = (dims.operand_batching_dims, dims.scatter_indices_batching_dims)
    is_along_rows = tuple(map(tuple, (*own, *others))) == ((), last, last, batch, batch)
    return is_along_rows and equation.params["mode"] in MODES


def _choice(equation: Any) -> tuple[Any, ...]:
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
    return renamed(program.jaxpr, (zeros, places, numbers), equation.outvars, equation)
