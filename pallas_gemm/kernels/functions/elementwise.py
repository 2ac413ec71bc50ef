"""Elementwise operations of JAX in a kernel: what they become where Mosaic does not lower them."""

import functools
import math
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_gemm.kernels.element_types import FLOATS_16
from pallas_gemm.kernels.functions import flat

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


def _log1p(x: Any) -> Any:
    """Returns log(1 + x). Small x take its series: 1 + x would lose most of their digits."""
    series = x * _polynomial((1 / 3, -1 / 2, 1), x)
    return jnp.where(jnp.abs(x) < 1 / 128, series, jnp.log(1 + x))


def _not(x: Any) -> Any:
    return x ^ (True if x.dtype == jnp.bool_ else -1)


def _rounded_away(x: Any) -> Any:
    """Returns the nearest whole numbers, and of two the one that is farther from 0."""
    size = jnp.abs(x)
    whole = jnp.floor(size)
    whole = jnp.where(size - whole < 0.5, whole, whole + 1)
    return jnp.where(x < 0, -whole, whole)


def _chosen(which: Any, *cases: Any) -> Any:
    """Returns the case of a number, as `lax.switch` of a batch has it, by true and false alone."""
    which, found = which.astype(jnp.int32), cases[-1]
    for place in reversed(range(len(cases) - 1)):
        found = lax.select(jnp.broadcast_to(which <= place, found.shape), cases[place], found)
    return found


_FLOATS_OF_8 = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))
_NARROW_WHOLE = frozenset(map(jnp.dtype, (jnp.int4, jnp.uint4, jnp.int8, jnp.uint8)))
_DIVIDING = frozenset(("div", "logistic"))
_BRANCHING = frozenset(("log", "rsqrt", "sqrt"))
"""Operations that branch for some numbers, as a division does: the assembler moves nothing across
the branches. They take more instructions than a division."""

TRANSCENDENTAL = frozenset(
    ("cos", "exp", "exp2", "expm1", "log", "logistic", "rsqrt", "sin", "tanh")
)
"""Operations that are more than a few additions and multiplications."""

_OF_FLOAT32 = TRANSCENDENTAL | frozenset(
    ("ceil", "erf", "erfc", "floor", "log1p", "log2", "round", "sqrt")
)
"""Operations on floats that Mosaic lowers for float32 alone."""
_OF_BYTES = frozenset(("and", "convert_element_type", "copy", "not", "or", "xor"))
"""Operations that Mosaic lowers for 8 bits, too."""
_OF_TRUTH = {"max": lax.bitwise_or, "min": lax.bitwise_and}
"""Operations that Mosaic does not lower for true and false."""

REWRITTEN = {
    "add_any": lambda x, y: x + y,
    "copy": lambda x: x,
    "erf": _erf,
    "erfc": _erfc,
    "is_finite": lambda x: jnp.abs(x) < jnp.inf,
    "log1p": _log1p,
    "log2": lambda x: jnp.log(x) * math.log2(math.e),
    "not": _not,
    "one_minus_square": lambda x: 1 - x * x,
}
"""Operations that Mosaic does not lower, in terms of those that it does."""


def rewritten(equation: flat.Equation, types: Sequence[Any]) -> flat.Flat | None:
    """Returns an operation in terms of those that Mosaic lowers; None if it is one.

    Args:
        equation: The operation.
        types: The types of what it takes.
    """
    name, params = equation.primitive.name, equation.params
    function = REWRITTEN.get(name)
    if name == "select_n" and types[0].dtype != jnp.bool_:
        function = _chosen
    elif any(_is_narrow(name, x.dtype) for x in types):
        function = _in_32_bits(equation.primitive, tuple(params.items()))
    elif types[0].dtype == jnp.bool_ and name in _OF_TRUTH:
        function = _OF_TRUTH[name]
    elif name == "round" and params["rounding_method"] == lax.RoundingMethod.AWAY_FROM_ZERO:
        function = _rounded_away
    elif name == "integer_pow":
        function = _power(params["y"])
    elif name == "convert_element_type":
        function = _cast(types[0].dtype, params["new_dtype"])
    return None if function is None else _traced(function, tuple(types))


def _is_narrow(name: str, dtype: Any) -> bool:
    """Whether Mosaic lowers an operation for wider types alone."""
    if dtype in FLOATS_16:
        return name in _OF_FLOAT32
    return dtype.itemsize == 1 and dtype != jnp.bool_ and name not in _OF_BYTES


@functools.lru_cache(maxsize=64)
def _in_32_bits(primitive: Any, params: tuple[Any, ...]) -> Callable[..., Any]:
    """Returns an operation that is computed in 32 bits and rounded, as XLA does it."""
    known = REWRITTEN.get(primitive.name)
    function = known or functools.partial(primitive.bind, **dict(params))

    def run(*inputs: Any) -> Any:
        # The first of three may be a truth value, by which one of the others is chosen.
        own = inputs[-1].dtype
        wide = jnp.int32 if jnp.issubdtype(own, jnp.integer) else jnp.float32
        result = function(*(x if x.dtype == jnp.bool_ else x.astype(wide) for x in inputs))
        return result.astype(own) if result.dtype == wide else result

    return run


def _wide(x: Any) -> Any:
    """Returns numbers as float32; Mosaic would join a cast of whole numbers with the next cast."""
    if x.dtype == jnp.bool_:
        return jnp.where(x, 1.0, 0.0)
    wide = x.astype(jnp.float32)
    return wide + 0.0 if jnp.issubdtype(x.dtype, jnp.integer) else wide


@functools.lru_cache(maxsize=64)
def _cast(old: Any, new: Any) -> Callable[[Any], Any] | None:
    """Returns a cast that Mosaic does not lower, in terms of operations that it does."""
    if new == jnp.bool_ and old != jnp.bool_:
        return lambda x: x != 0
    if jnp.issubdtype(old, jnp.floating) and new in _NARROW_WHOLE:
        # An instruction clips to 16 or 32 bits. To LLVM, numbers beyond 8 bits are impossible.
        limits = jnp.iinfo(new)
        return lambda x: jnp.clip(_wide(x).astype(jnp.int32), limits.min, limits.max).astype(new)
    if new == jnp.float32 and jnp.issubdtype(old, jnp.integer):
        return _wide
    if new in _FLOATS_OF_8 and old not in (new, jnp.float32):
        return lambda x: _wide(x).astype(new)
    if old in _FLOATS_OF_8 and new != jnp.float32:
        return lambda x: x.astype(jnp.float32).astype(new)
    return None


@functools.lru_cache(maxsize=64)
def _power(y: int) -> Callable[[Any], Any] | None:
    """Returns a power that Mosaic does not lower, in terms of those that it does."""
    if y > 1:
        return None
    if y == 1:
        return lambda x: x
    return lambda x: 1 / (x if y == -1 else x**-y)


@functools.lru_cache(maxsize=256)
def _traced(function: Callable[..., Any], types: tuple[Any, ...]) -> flat.Flat:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in types]
    return flat.flat(jax.make_jaxpr(function)(*shapes))


def divides(primitives: AbstractSet[str]) -> bool:
    """Returns whether operations divide by what they are given."""
    return not _DIVIDING.isdisjoint(primitives)


def branches(primitives: AbstractSet[str]) -> bool:
    """Returns whether operations take more branches in a kernel than those of a division."""
    return not _BRANCHING.isdisjoint(primitives)
