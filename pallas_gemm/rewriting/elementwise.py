"""Operations that compute each element of arrays of one shape by itself."""

import math
from typing import Any

import numpy as np

from pallas_gemm.rewriting.level import called
from pallas_gemm.rewriting.level import variables as variables

EXACT = frozenset(
    (
        *("abs", "add", "add_any", "and", "ceil", "clamp", "convert_element_type", "copy", "eq"),
        *("floor", "ge", "gt", "le", "lt", "max", "min", "mul", "name", "ne", "neg", "not", "or"),
        *("round", "select_n", "sign", "square", "stop_gradient", "sub", "xor"),
    )
)
"""Operations whose result is the exact value, rounded once, wherever they are computed."""
VARIES = frozenset(("pvary",))
"""It says in a type that a value may differ between the devices of a mesh, and does nothing."""


def bytes_of(x: Any) -> int:
    """Returns the size of a value in memory."""
    return math.prod(x.aval.shape) * np.dtype(x.aval.dtype).itemsize


def is_elementwise(equation: Any, shape: tuple[int, ...], allowed: frozenset[str]) -> bool:
    """Whether an equation computes each element of arrays of this shape by itself."""
    if equation.effects or any(x.aval.shape != shape for x in equation.outvars):
        return False
    return _computes_each(equation, shape, allowed)


def _computes_each(equation: Any, shape: tuple[int, ...], allowed: frozenset[str]) -> bool:
    name, inner = equation.primitive.name, called(equation)
    if inner is not None:
        within = allowed | VARIES
        may_be = not inner.constvars and all(_computes_each(e, shape, within) for e in inner.eqns)
    elif name == "broadcast_in_dim":
        may_be = all(x.aval.shape == () for x in equation.invars)
    else:
        is_number = name in VARIES and not variables(equation)
        may_be = name in allowed or is_number
    if not may_be:
        return False
    every = (x.aval for x in (*equation.invars, *equation.outvars))
    return all(_fits(x.shape, shape) and _is_plain(x.dtype) for x in every)


def _fits(own: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether an array of one shape stands for one of another in elementwise operations."""
    if not own or own == shape:
        return True
    same = len(own) == len(shape)
    return same and all(a in (1, b) for a, b in zip(own, shape, strict=True))


def _is_plain(dtype: Any) -> bool:
    """Whether values of a type can be in a register of a kernel."""
    if not isinstance(dtype, np.dtype):
        return False
    return dtype.itemsize <= 4 and dtype.kind in "biufV"
