"""A traced function as one list of equations, without calls of other functions.

A kernel is never differentiated, so a call that brings rules for its derivatives is replaced by the
function that it calls. Two equal computations become one equation.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from pallas_gemm.kernels.functions import lines

CALLS = {
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "jit": "jaxpr",
    "remat2": "jaxpr",
}
"""Primitives that call a function, and the parameter that holds it."""
NOTHING = frozenset(("name", "stop_gradient"))
"""Primitives whose result is what they are given."""


class Equation(NamedTuple):
    """One operation.

    Attributes:
        primitive: The operation.
        params: Its parameters.
        inputs: The numbers of the values that it takes; a literal stands for itself.
        outputs: The numbers of the values that it makes.
        source: Where in the user's program it stands, for messages.
    """

    primitive: core.Primitive
    params: Mapping[str, Any]
    inputs: tuple[Any, ...]
    outputs: tuple[int, ...]
    source: Any


class Flat(NamedTuple):
    """A function without calls.

    Attributes:
        types: The type of each value, by its number.
        constants: The values that the function brings along, by their numbers.
        inputs: The numbers of its arguments.
        equations: In order.
        outputs: The numbers of its results; a literal stands for itself.
    """

    types: Mapping[int, Any]
    constants: Mapping[int, Any]
    inputs: tuple[int, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Any, ...]

    @property
    def names(self) -> list[str]:
        """The names of the operations."""
        return [own.primitive.name for own in self.equations]


def flat(closed: core.ClosedJaxpr) -> Flat:
    """Returns a traced function without calls."""
    fresh = itertools.count()
    types: dict[int, Any] = {}
    constants: dict[int, Any] = {}
    equations: list[Equation] = []
    made: dict[Any, tuple[int, ...]] = {}

    def number(variable: Any) -> int:
        found = next(fresh)
        types[found] = variable.aval
        return found

    def run(
        jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any], caller: Any = None
    ) -> list[Any]:
        known: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
        for variable, value in zip(jaxpr.constvars, consts, strict=True):
            known[variable] = number(variable)
            constants[known[variable]] = value

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, core.Literal) else known[atom]

        for equation in jaxpr.eqns:
            inputs = [read(atom) for atom in equation.invars]
            # A call within the user's line stands on that line.
            source: Any = caller or equation.source_info
            called = _called(equation)
            if equation.primitive.name in NOTHING:
                outputs: Sequence[Any] = inputs
            elif called is not None:
                outputs = run(*called, inputs, source)
            else:
                key = _key(equation, inputs)
                if key is None or key not in made:
                    outputs = tuple(map(number, equation.outvars))
                    params, taken = dict(equation.params), tuple(inputs)
                    equations.append(Equation(equation.primitive, params, taken, outputs, source))
                    made[key] = outputs
                outputs = made[key]
            known |= dict(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    inputs = tuple(map(number, closed.jaxpr.invars))
    outputs = tuple(run(closed.jaxpr, closed.consts, inputs))
    return Flat(types, constants, inputs, tuple(equations), outputs)


def _called(equation: Any) -> tuple[core.Jaxpr, Sequence[Any]] | None:
    """Returns the function that stands for an operation, and its constants; None without one."""
    found: Any = _in_other_words(equation)
    found = found or equation.params.get(CALLS.get(equation.primitive.name, ""))
    if isinstance(found, core.ClosedJaxpr):
        return found.jaxpr, found.consts
    return None if found is None else (found, ())


def _in_other_words(equation: Any) -> core.ClosedJaxpr | None:
    """Returns what an operation is in terms of others; None if kernels know it as it is."""
    return _positions(equation) or _smallest(equation) or _power_of_nothing(equation)


def _power_of_nothing(equation: Any) -> core.ClosedJaxpr | None:
    """Returns x**0 as the number that it is: it depends on no x."""
    if equation.primitive.name != "integer_pow" or equation.params["y"] != 0:
        return None
    (x,) = (own.aval for own in equation.invars)
    return jax.make_jaxpr(jnp.ones_like)(jax.ShapeDtypeStruct(x.shape, x.dtype))


def _smallest(equation: Any) -> core.ClosedJaxpr | None:
    """Returns where the smallest value is as where the largest one is with the other sign."""
    if equation.primitive.name != "argmin":
        return None
    (x,) = (own.aval for own in equation.invars)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return None
    (axis,), dtype = equation.params["axes"], equation.params["index_dtype"]
    given = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.make_jaxpr(lambda own: lax.argmax(lax.neg(own), axis, dtype))(given)


def _positions(equation: Any) -> core.ClosedJaxpr | None:
    """Returns positions in an array as those along one dimension, broadcast; None of all else."""
    shape = equation.params.get("shape", ())
    if equation.primitive.name != "iota" or len(shape) < 2 or equation.invars:
        return None
    own, dtype = equation.params["dimension"], equation.params["dtype"]
    return jax.make_jaxpr(
        lambda: lax.broadcast_in_dim(lax.iota(dtype, shape[own]), shape, (own,))
    )()


def _key(equation: Any, inputs: Sequence[Any]) -> Any:
    """Returns what tells an operation from others; None if it is one of its kind.

    Positions are one of their kind: a square has the same numbers along rows and columns.
    """
    if equation.primitive.name == "iota":
        return None
    taken = ((str(x), str(x.aval)) if isinstance(x, core.Literal) else x for x in inputs)
    return key_of(equation, *taken)


def key_of(equation: Any, *taken: Any) -> Any:
    """Returns what operations that take the same have in common if they are equal, or None."""
    key = (equation.primitive, tuple(sorted(equation.params.items())), *taken)
    try:
        hash(key)
    except TypeError:
        return None
    return None if equation.effects else key


def where(equation: Equation) -> str:
    """Returns where an operation stands in the user's program, in words; "" if nobody knows."""
    line = lines.place(equation.source)
    return f" ({line})" if line else ""
