"""Any elementwise function of JAX as part of a kernel.

A kernel is never differentiated itself, and Mosaic does not lower functions that bring derivative
rules of their own, as `jax.nn.relu` does, nor every function of one number. `plain` traces the
function, drops the rules and rewrites the rest.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

_WITH_RULES = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "jit": "jaxpr"}
"""Calls that are replaced by what they call, and the parameter that holds it."""


def _erfc(x: Any) -> Any:
    """Formula 7.1.26 of Abramowitz and Stegun: within 1.5e-7 of erfc everywhere."""
    series = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
    t = 1 / (1 + 0.3275911 * jnp.abs(x))
    total = jnp.zeros_like(x)
    for coefficient in reversed(series):
        total = t * (coefficient + total)
    right = total * jnp.exp(-x * x)
    return jnp.where(x >= 0, right, 2 - right)


_REWRITTEN = {
    "copy": lambda x: x,
    "erf": lambda x: 1 - _erfc(x),
    "erfc": _erfc,
    "log1p": lambda x: jnp.log(1 + x),
}
"""What Mosaic does not lower, in terms of what it does."""


def plain(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns the same function of one array, without what Mosaic does not lower.

    Raises:
        ValueError: The function does not return one array of the shape and dtype that it was given.
    """

    def run(x: Any) -> Any:
        closed = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(x.shape, x.dtype))
        results = closed.out_avals
        if len(results) != 1 or (results[0].shape, results[0].dtype) != (x.shape, x.dtype):
            raise ValueError(
                f"activation must return an array of the {x.dtype}[{x.shape}] that it is given,"
                f" got {', '.join(map(str, results))}"
            )
        return _run(closed.jaxpr, closed.consts, [x])[0]

    return run


def _run(jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        inner = equation.params.get(_WITH_RULES.get(equation.primitive.name, ""))
        if isinstance(inner, core.ClosedJaxpr):
            outputs = _run(inner.jaxpr, inner.consts, inputs)
        elif inner is not None:
            outputs = _run(inner, (), inputs)
        elif equation.primitive.name in _REWRITTEN:
            outputs = [plain(_REWRITTEN[equation.primitive.name])(*inputs)]
        else:
            outputs = equation.primitive.bind(*inputs, **equation.params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]
