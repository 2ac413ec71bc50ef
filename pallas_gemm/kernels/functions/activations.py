"""Activations by name, and what a function must be to serve as one.

Each is a function of the float32 value that the result is made of. The kernels apply it to the
accumulator, XLA to the sum.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

Activation = Callable[[Any], Any]


def gelu_tanh(x: jax.Array) -> jax.Array:
    """`jax.nn.gelu(x)`: the approximation by a hyperbolic tangent."""
    return jax.nn.gelu(x, approximate=True)


def gelu_exact(x: jax.Array) -> jax.Array:
    """`jax.nn.gelu(x, approximate=False)`: with the error function."""
    return jax.nn.gelu(x, approximate=False)


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "relu": jax.nn.relu,
        "gelu": gelu_tanh,
        "gelu_tanh": gelu_tanh,
        "gelu_exact": gelu_exact,
        "silu": jax.nn.silu,
        "swish": jax.nn.silu,
        "sigmoid": jax.nn.sigmoid,
        "tanh": jnp.tanh,
    }
)
"""The names that `activation=` knows; "gelu" is JAX's default, the one with tanh."""

KERNEL_PRIMITIVES = frozenset(
    (
        *("abs", "add", "add_any", "and", "ceil", "clamp", "convert_element_type", "copy", "cos"),
        *("custom_jvp_call", "custom_vjp_call", "div", "eq", "erf", "erfc", "exp", "exp2"),
        *("expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "jit", "le", "log", "log1p"),
        *("log2", "logistic", "lt", "max", "min", "mul", "name", "ne", "neg", "not"),
        *("one_minus_square", "or", "round", "rsqrt", "select_n", "sign", "sin", "sqrt", "square"),
        *("stop_gradient", "sub", "tanh", "xor"),
    )
)
"""The functions that a kernel can apply to its accumulator; XLA applies all others."""

_MIXING = frozenset(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "rev", "sort"))
"""Primitives that keep the shape but do not treat each element by itself."""

_PROBE = (2, 3)


def resolve(activation: str | Activation | None) -> Activation | None:
    """Returns the function that `activation=` stands for.

    Raises:
        ValueError: There is no activation of that name.
        TypeError: It is no elementwise function of a float32 array, or it captures an array.
    """
    if activation is None:
        return None
    if isinstance(activation, str):
        if activation in ACTIVATIONS:
            return ACTIVATIONS[activation]
        close = difflib.get_close_matches(activation.lower(), ACTIVATIONS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(
            f"activation={activation!r} is unknown; {hint}legal: {', '.join(ACTIVATIONS)}, or a"
            " function"
        )
    if not callable(activation):
        raise TypeError(f"activation must be a name or a function, got {activation!r}")
    _primitives(activation)
    return activation


def kernel_refusal(activation: Activation | None) -> str | None:
    """Returns why no kernel can apply an activation, None if one can."""
    if activation is None:
        return None
    foreign = sorted(_primitives(activation) - KERNEL_PRIMITIVES)
    if not foreign:
        return None
    name = getattr(activation, "__name__", "activation")
    return (
        f"{name} uses {', '.join(foreign)}, which kernels do not have; a function of arithmetic,"
        " exp, log, tanh, erf and max would fit"
    )


@functools.lru_cache(maxsize=256)
def as_derived(activation: Activation) -> Activation:
    """Returns an activation where it is derived: a `jax.custom_vjp` in it runs its forward rule.

    JAX derives that rule for a second derivative, and not the user's gradient.
    """
    if "custom_vjp_call" not in _primitives(activation):
        return activation
    return functools.wraps(activation)(lambda x: jax.vjp(activation, x)[0])


@functools.lru_cache(maxsize=256)
def _primitives(activation: Activation) -> frozenset[str]:
    """Returns the names of all primitives of an activation, having checked what it is."""
    try:
        probe = jax.ShapeDtypeStruct(_PROBE, jnp.float32)
        jaxpr, returned = jax.make_jaxpr(activation, return_shape=True)(probe)
    except jax.errors.TracerArrayConversionError:
        numpy_name = activation.__name__ if isinstance(activation, np.ufunc) else "maximum"
        raise TypeError(
            f"activation={activation!r} computes with NumPy, which knows no traced arrays: it must"
            f" be a function of JAX, such as jnp.{numpy_name} for np.{numpy_name}"
        ) from None
    except Exception as error:
        _refuse_captured(activation, _arrays_around(activation))
        raise TypeError(
            f"activation={activation!r} must be a function of one float32 array that can be traced,"
            f" but tracing it raised {type(error).__name__}: {error}"
        ) from error
    _refuse_captured(activation, jaxpr.consts)
    results: list[Any] = jaxpr.out_avals
    is_one = jax.tree.structure(returned) == jax.tree.structure(probe)
    if not is_one or [(x.shape, x.dtype) for x in results] != [(_PROBE, jnp.float32)]:
        kind = f"a {type(returned).__name__} of " if isinstance(returned, tuple | list) else ""
        shown = ", ".join(map(str, results)) or "nothing"
        raise TypeError(
            f"activation={activation!r} must turn a float32 array into one of the same shape, but"
            f" it turns float32{list(_PROBE)} into {kind}{shown}"
        )
    names = set()
    for equation in _equations(jaxpr.jaxpr):
        before, after = map(_shapes, (equation.invars, equation.outvars))
        if equation.primitive.name == "broadcast_in_dim" and before == {()}:
            # The same number everywhere.
            continue
        names.add(equation.primitive.name)
        shrinks = _PROBE in before and after != {_PROBE}
        if equation.primitive.name in _MIXING or shrinks or not before | after <= {(), _PROBE}:
            raise TypeError(
                f"activation={activation!r} must be elementwise, but it uses"
                f" {equation.primitive.name}"
            )
    return frozenset(names)


def _refuse_captured(activation: Activation, arrays: Sequence[Any]) -> None:
    if arrays:
        shapes = ", ".join(str(list(jnp.shape(x))) for x in arrays)
        raise TypeError(
            f"activation={activation!r} captures arrays of shapes {shapes}; only Python numbers can"
            " be built into a kernel: epilogue= takes a function of arrays, operands= the arrays"
        )


def _arrays_around(activation: Activation) -> list[Any]:
    """Returns the arrays among the variables that a function takes from where it was defined."""
    try:
        found = inspect.getclosurevars(activation)
    except (TypeError, ValueError):
        return []
    around = (*found.nonlocals.values(), *found.globals.values())
    return [x for x in around if isinstance(x, jax.Array | np.ndarray)]


def _shapes(variables: Iterable[Any]) -> set[tuple[int, ...]]:
    return {variable.aval.shape for variable in variables}


def _equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """Yields the equations of a program and of the functions that it calls, not its derivatives."""
    for equation in jaxpr.eqns:
        yield equation
        for name in ("jaxpr", "call_jaxpr"):
            if (inner := equation.params.get(name)) is not None:
                yield from _equations(getattr(inner, "jaxpr", inner))
