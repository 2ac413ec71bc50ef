"""Any elementwise function of JAX as part of a kernel.

A kernel is never differentiated itself, and Mosaic does not lower functions that bring derivative
rules of their own, as `jax.nn.relu` does, nor every function of one number. `plain` traces the
function, drops the rules and rewrites the rest.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

_WITH_RULES = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "jit": "jaxpr"}
"""Calls that are replaced by what they call, and the parameter that holds it."""


# Cephes, ndtrf.c: erf of less than 1, and erfc of less and of more than 2, highest power first.
_ERF = (
    7.853861353153693e-5,
    -8.010193625184903e-4,
    5.188327685732524e-3,
    -2.685381193529856e-2,
    1.128358514861418e-1,
    -3.761262582423300e-1,
    1.128379165726710e0,
)
_ERFC_NEAR = (
    2.326819970068386e-2,
    -1.387039388740657e-1,
    3.687424674597105e-1,
    -5.824733027278666e-1,
    6.210004621745983e-1,
    -4.944515323274145e-1,
    3.404879937665872e-1,
    -2.741127028184656e-1,
    5.638259427386472e-1,
)
_ERFC_FAR = (
    -1.047766399936249e1,
    1.297719955372516e1,
    -7.495518717768503e0,
    2.921019019210786e0,
    -1.015265279202700e0,
    4.218463358204948e-1,
    -2.820767439740514e-1,
    5.641895067754075e-1,
)


def _polynomial(coefficients: Sequence[float], x: Any) -> Any:
    total = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total


def _erf_inside(x: Any) -> Any:
    return x * _polynomial(_ERF, x * x)


def _erfc_outside(x: Any) -> Any:
    size = jnp.maximum(jnp.abs(x), 1)
    inverse = 1 / size
    square = inverse * inverse
    near, far = _polynomial(_ERFC_NEAR, square), _polynomial(_ERFC_FAR, square)
    right = jnp.exp(-size * size) * inverse * jnp.where(size < 2, near, far)
    return jnp.where(x >= 0, right, 2 - right)


def _erf(x: Any) -> Any:
    return jnp.where(jnp.abs(x) < 1, _erf_inside(x), 1 - _erfc_outside(x))


def _erfc(x: Any) -> Any:
    return jnp.where(jnp.abs(x) < 1, 1 - _erf_inside(x), _erfc_outside(x))


_DIVIDING = frozenset(("div", "logistic"))
_BRANCHING = frozenset(("cos", "log", "rsqrt", "sin", "sqrt"))
"""What takes, like a division, branches for some numbers, across which the assembler moves nothing;
and more instructions than a division."""

_REWRITTEN = {
    "copy": lambda x: x,
    "erf": _erf,
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
        closed = _traced(function, x.shape, x.dtype)
        results: Sequence[Any] = closed.out_avals
        if len(results) != 1 or (results[0].shape, results[0].dtype) != (x.shape, x.dtype):
            raise ValueError(
                f"activation must return an array of the {x.dtype}[{x.shape}] that it is given,"
                f" got {', '.join(map(str, results))}"
            )
        return _run(closed.jaxpr, closed.consts, [x])[0]

    return run


@functools.lru_cache(maxsize=256)
def _traced(function: Callable[[Any], Any], shape: tuple[int, ...], dtype: Any) -> core.ClosedJaxpr:
    return jax.make_jaxpr(function)(jax.ShapeDtypeStruct(shape, dtype))


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


@functools.lru_cache(maxsize=256)
def live_arrays(function: Callable[[Any], Any]) -> int:
    """Returns how many arrays are in use at a time, at most, while a function is computed."""
    return _live_arrays(_example(function))


def divides(function: Callable[[Any], Any]) -> bool:
    """Returns whether a function divides by what it is given."""
    return not _DIVIDING.isdisjoint(_primitives(function))


def branches(function: Callable[[Any], Any]) -> bool:
    """Returns whether a function takes more branches in a kernel than those of a division."""
    return not _BRANCHING.isdisjoint(_primitives(function))


@functools.lru_cache(maxsize=256)
def _primitives(function: Callable[[Any], Any]) -> frozenset[str]:
    return frozenset(equation.primitive.name for equation in _example(function).eqns)


def _example(function: Callable[[Any], Any]) -> core.Jaxpr:
    return jax.make_jaxpr(plain(function))(jax.ShapeDtypeStruct((8, 8), jnp.float32)).jaxpr


def _live_arrays(jaxpr: core.Jaxpr) -> int:
    ends = {v: i for i, equation in enumerate(jaxpr.eqns) for v in equation.invars if _is_array(v)}
    ends |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if _is_array(v)}
    live = {v for v in jaxpr.invars if v in ends}
    most = len(live)
    for i, equation in enumerate(jaxpr.eqns):
        inside = map(_live_arrays, core.jaxprs_in_params(equation.params))
        taken = len({v for v in equation.invars if _is_array(v)})
        most = max(most, len(live) + max((count - taken for count in inside), default=0))
        live = {v for v in live if ends[v] > i} | {v for v in equation.outvars if v in ends}
        most = max(most, len(live))
    return most


def _is_array(atom: Any) -> bool:
    return isinstance(atom, core.Var) and getattr(atom.aval, "shape", ()) != ()
