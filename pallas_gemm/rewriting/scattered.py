"""One number for a place of each row of zeros, as a choice for each element.

The derivative of a label's logit is such an array. JAX adds the numbers to zeros, for which XLA
makes a pass of its own. A choice becomes a part of the pass that reads it.

    jnp.take_along_axis(z, labels[:, None], -1)        the rows are a batch
    jax.vmap(lambda row, label: row[label])(z, labels)
    z[jnp.arange(len(z)), labels]                      places that begin with the row
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend import core

from pallas_gemm.kernels.functions.axes import ELEMENTWISE
from pallas_gemm.rewriting.level import renamed, variables

MODE = lax.GatherScatterMode
MODES = MODE.FILL_OR_DROP, MODE.PROMISE_IN_BOUNDS, MODE.CLIP
"""A number whose place is beyond the row is dropped, or there is none, or it is at the end."""
SAME = frozenset(("convert_element_type", "stop_gradient", "copy"))
"""Operations after which whole numbers are the same ones."""


class _Numbers(NamedTuple):
    """Numbers that are added to zeros, one in each row.

    Attributes:
        equation: The addition.
        places: Their places in the rows.
    """

    equation: Any
    places: Any


def chosen(jaxpr: core.Jaxpr, equations: Sequence[Any]) -> Sequence[Any]:
    """Returns the equations of a function with choices in the place of such additions.

    Args:
        jaxpr: The function.
        equations: Its equations.
    """
    makers = {x: e for e in equations for x in e.outvars}
    found = (_of_each_row(e, makers) for e in equations)
    added = {own.equation.outvars[0]: own for own in found if own is not None}
    if not added:
        return equations
    kept = {x for x in jaxpr.outvars if isinstance(x, core.Var)}
    for equation in equations:
        if equation.primitive.name not in ELEMENTWISE:
            kept.update(variables(equation))
    changed: list[Any] = []
    for equation in equations:
        own = added.get(equation.outvars[0]) if equation.outvars else None
        is_left = own is None or equation.outvars[0] in kept
        changed += (equation,) if is_left else _choice(own)
    return changed


def _is_of_zeros(equation: Any) -> bool:
    if equation is None or equation.primitive.name != "broadcast_in_dim":
        return False
    (zero,) = equation.invars
    return isinstance(zero, core.Literal) and zero.val == 0


def _of_each_row(equation: Any, makers: Mapping[Any, Any]) -> _Numbers | None:
    """Returns what an equation adds to zeros if it is a number in each row, along the last axis."""
    if equation.primitive is not lax.scatter_add_p or equation.effects:
        return None
    into, places, numbers = equation.invars
    if not into.aval.shape or not _is_of_zeros(makers.get(into)):
        return None
    if equation.params["mode"] not in MODES:
        return None
    rows, rank = into.aval.shape[:-1], len(into.aval.shape) - 1
    dims, batch, last = equation.params["dimension_numbers"], tuple(range(rank)), (rank,)
    own = (dims.update_window_dims, dims.inserted_window_dims, dims.scatter_dims_to_operand_dims)
    others = (dims.operand_batching_dims, dims.scatter_indices_batching_dims)
    given = tuple(map(tuple, (*own, *others)))
    shapes = places.aval.shape, numbers.aval.shape
    if shapes == ((*rows, 1, 1), (*rows, 1)) and given == ((), last, last, batch, batch):
        return _Numbers(equation, places)
    if shapes == ((*rows, 1), (*rows, 1)) and given == (last, (), last, batch, batch):
        return _Numbers(equation, places)
    every = (*batch, *last)
    if shapes == ((*rows, rank + 1), rows) and given == ((), every, every, (), ()):
        counted = _after_counts(makers.get(places), makers, rank)
        return None if counted is None else _Numbers(equation, counted)
    return None


def _after_counts(joined: Any, makers: Mapping[Any, Any], rank: int) -> Any:
    """Returns the places in the rows of places that begin with the row; None if they do not."""
    if joined is None or joined.primitive.name != "concatenate":
        return None
    if joined.params["dimension"] != rank or len(joined.invars) != rank + 1:
        return None
    *first, last = joined.invars
    is_counted = all(_counted(x, makers) == axis for axis, x in enumerate(first))
    return last if is_counted else None


def _counted(x: Any, makers: Mapping[Any, Any]) -> int | None:
    """Returns the axis along which the elements of a value count from 0; None if none does."""
    maker = makers.get(x) if isinstance(x, core.Var) else None
    if maker is None:
        return None
    name = maker.primitive.name
    if name == "iota":
        return int(maker.params["dimension"])
    if name in SAME:
        return _counted(maker.invars[0], makers)
    if name == "select_n":
        # JAX counts negative places from the end: there is none.
        asked, own, _ = maker.invars
        return _counted(own, makers) if _is_below_zero(makers.get(asked), own) else None
    if name == "broadcast_in_dim":
        axis = _counted(maker.invars[0], makers)
        if axis is None:
            return None
        after = int(maker.params["broadcast_dimensions"][axis])
        return after if x.aval.shape[after] == maker.invars[0].aval.shape[axis] else None
    return None


def _is_below_zero(asked: Any, x: Any) -> bool:
    """Whether an equation asks of a value whether it is below 0."""
    if asked is None or asked.primitive is not lax.lt_p:
        return False
    one, zero = asked.invars
    return one is x and isinstance(zero, core.Literal) and zero.val == 0


def _choice(own: _Numbers) -> tuple[Any, ...]:
    """Returns the equations of the choice."""
    zeros, _, numbers = own.equation.invars
    is_clipped = own.equation.params["mode"] == MODE.CLIP

    def choose(zeros: Any, places: Any, numbers: Any) -> Any:
        shape, axes = zeros.shape, tuple(range(zeros.ndim - 1))
        # Types of 8 and 16 bits have fewer numbers than a row may have places.
        dtype = places.dtype if places.dtype.itemsize >= 4 else np.dtype(np.int32)
        place = lax.reshape(places, shape[:-1]).astype(dtype)
        if is_clipped:
            place = lax.clamp(dtype.type(0), place, dtype.type(shape[-1] - 1))
        columns = lax.broadcasted_iota(dtype, shape, zeros.ndim - 1)
        chosen = lax.broadcast_in_dim(lax.reshape(numbers, shape[:-1]), shape, axes)
        is_there = lax.eq(columns, lax.broadcast_in_dim(place, shape, axes))
        return lax.select(is_there, chosen, zeros)

    given = (zeros, own.places, numbers)
    types = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in given]
    with own.equation.ctx.manager:
        program = jax.make_jaxpr(choose)(*types)
    return renamed(program.jaxpr, given, own.equation.outvars, own.equation)
