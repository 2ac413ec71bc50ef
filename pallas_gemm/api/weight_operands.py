"""Records of few bits as operands of products: taken apart, or widened first."""

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gemm.api import arguments, blocks
from pallas_gemm.api.weights import QuantizedWeight
from pallas_gemm.call import Operands
from pallas_gemm.kernels.element_types import is_widened


def as_operand(name: str, x: Any) -> Any:
    """Returns a record as it is, and all else as an array."""
    return x if isinstance(x, QuantizedWeight) else arguments.array(name, x)


def widened(x: Any, beside: Any) -> Any:
    """Returns what a record stands for, in the type of what it is multiplied by; else `x`."""
    if not isinstance(x, QuantizedWeight):
        return x
    return x.widened(_activations(beside).dtype)


def arrays(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns operands with what records stand for, in the type of the first that is none."""
    others = [x for x in operands if not isinstance(x, QuantizedWeight)]
    if not others or len(others) == len(operands):
        return operands
    return tuple(widened(x, others[0]) for x in operands)


def contracted_axis(subscripts: Any, operands: Sequence[Any]) -> int | None:
    """Returns the contracted dimension of a record in an einsum that is a product of matrices.

    Args:
        subscripts: As for `einsum`.
        operands: The operands; a record is the second of two.

    Returns:
        -2 or -1; None of any other einsum, and where the record is contracted along its columns.
    """
    if len(operands) != 2 or not isinstance(subscripts, str):
        return None
    record = operands[1]
    if not isinstance(record, QuantizedWeight) or record.ndim != 2:
        return None
    found = re.fullmatch(r"(\w*)(\w),(\w)(\w)->(\w*)(\w)", subscripts.replace(" ", ""))
    if found is None:
        return None
    rows, k, *own, same_rows, n = found.groups()
    letters = [*rows, k, n]
    is_product = rows == same_rows and len({*letters}) == len(letters)
    axis = {f"{k}{n}": -2, f"{n}{k}": -1}.get("".join(own))
    return axis if is_product and axis == record.axis else None


def taken_apart(given: Operands, name: str, transposed: Any) -> Operands:
    """Returns the operands of a product with the arrays of its records.

    Args:
        given: The operands; right ones may be records.
        name: The caller's name for the first right operand.
        transposed: Whether the caller says that right operands are stored `[n, k]`.

    Raises:
        TypeError: The left operand is no array of floats, or one right operand alone is a record.
        ValueError: A record and the arguments contradict each other.
    """
    each = {"b": given.b, "up": given.up}
    held = {x: w for x, w in each.items() if isinstance(w, QuantizedWeight)}
    if not held:
        return given
    left = _activations(given.a)
    if len(held) == 1 and given.up is not None:
        raise TypeError(
            f"{name} and w_up must both be a QuantizedWeight, or both arrays, got"
            f" {type(given.b).__name__} and {type(given.up).__name__}"
        )
    found: dict[str, Any] = {}
    for own, w in held.items():
        called, kind = ("w_up", "up") if own == "up" else (name, "col")
        w.check(called, transposed)
        if getattr(given, f"{kind}_zeros") is not None:
            raise ValueError(
                f"the zero points of {called} must be None beside a QuantizedWeight, which has its"
                " own"
            )
        k, groups = w.shape[w.axis], w.scale.shape[-2]
        is_cut = blocks.block(k, groups, blocks.SHORTEST) * groups == k
        if not (is_cut and is_widened(left.dtype, w.values.dtype)):
            found[own] = w.widened(left.dtype)
            continue
        found |= {own: w.values, f"{kind}_blocks": w.scale, f"{kind}_zeros": w.zero}
    return given._replace(a=left, **found)


def of_groups(a: Any, name: str, given: tuple[Any, Any, Any], transposed: bool) -> tuple[Any, Any]:
    """Returns matrices of experts that kernels multiply, and the scales of their columns.

    Weights of few bits become matrices of the type of the rows. So do their groups of scales and
    zero points; one scale for each column stays a scale of the sums.

    Args:
        a: The rows.
        name: The caller's name for the matrices.
        given: The matrices or a record, their scales, and their zero points.
        transposed: They are stored `[groups, n, k]`.

    Raises:
        TypeError: The rows are no floats beside a record, or an array is of another type.
        ValueError: An array is of another shape, or a record has what is also given.
    """
    b, scale, zero = given
    if isinstance(b, QuantizedWeight):
        if scale is not None or zero is not None:
            raise ValueError(
                f"the scales and zero points of {name} must be None beside a QuantizedWeight, which"
                " has its own"
            )
        left, record = _activations(a), b
        record.check(name, transposed)
        if record.scale.shape[-2] == 1 and record.zero is None:
            return record.values.astype(left.dtype), record.scale[..., 0, :]
        return record.widened(left.dtype), None
    if b is None:
        return b, scale
    left, b = arguments.array("a", a), arguments.array(name, b)
    in_groups = getattr(scale, "ndim", 0) == 3
    if not (in_groups or zero is not None):
        narrow = scale is not None and is_widened(left.dtype, b.dtype)
        return b.astype(left.dtype) if narrow else b, scale
    if not is_widened(left.dtype, b.dtype):
        if zero is None:
            return b, scale
        raise TypeError(
            f"zero points are for {name} of few bits beside rows of bfloat16, float16 or float32,"
            f" got {left.dtype} and {b.dtype}"
        )
    if scale is None:
        raise ValueError(f"the zero points of {name} need scales of the same groups")
    scale, zero = (x if x is None or x.ndim == 3 else _of_each(x, b) for x in (scale, zero))
    record = QuantizedWeight(b, scale, zero, -1 if transposed else -2, left.dtype)
    record.check(name, transposed)
    return record.widened(), None


def _of_each(x: jax.Array, b: jax.Array) -> jax.Array:
    """Returns one value per column, of all experts or each, as that of one group of each."""
    return jnp.broadcast_to(x[..., None, :], (b.shape[0], 1, x.shape[-1]))


def _activations(x: Any) -> Any:
    x = arguments.array("a", x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"a must be of a floating-point type beside a QuantizedWeight, got dtype {x.dtype}"
        )
    return x
