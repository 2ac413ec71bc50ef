"""Records of few bits as operands of products: taken apart, or widened first."""

import re
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_gemm.api import arguments, blocks
from pallas_gemm.api.few_bits.weights import QuantizedWeight
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


def taken_apart(given: Operands, names: Sequence[str], transposed: Any) -> Operands:
    """Returns the operands of a product with the arrays of its records.

    Args:
        given: The operands; right ones may be records.
        names: The caller's names for the first right operand, and for the second.
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
            f"{' and '.join(names)} must both be a QuantizedWeight, or both arrays, got"
            f" {type(given.b).__name__} and {type(given.up).__name__}"
        )
    found: dict[str, Any] = {}
    for own, w in held.items():
        called, kind = (names[1], "up") if own == "up" else (names[0], "col")
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


def _activations(x: Any) -> Any:
    x = arguments.array("a", x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"a must be of a floating-point type beside a QuantizedWeight, got dtype {x.dtype}"
        )
    return x
