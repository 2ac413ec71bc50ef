"""What every product of groups begins with: its operands checked, and what is fixed of its call."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jax.lax import dot

from pallas_gemm.api import arguments, notes, request
from pallas_gemm.call import GroupedCall, Options, signature_of
from pallas_gemm.kernels import element_types
from pallas_gemm.op.grouped import grouped
from pallas_gemm.planning import dispatch, numerics, scheme
from pallas_gemm.planning import precision as precisions
from pallas_gemm.planning.by_xla import xla_groups
from pallas_gemm.planning.targeting import known_target
from pallas_gemm.problem import element_type

OF_LAX = ("lhs", "rhs")
"""The names of the factors in `lax.ragged_dot`."""


def why_jax(call: GroupedCall, operands: Any) -> str | None:
    """Returns why JAX's own function computes a product; None if it does not.

    Weights of few bits beside wider rows are multiplied in the type of these.
    """
    left, right = (np.dtype(x.dtype) for x in operands[:2])
    is_widened = not call.contracted and element_types.is_widened(left, right)
    types = {left} if is_widened else {left, right}
    multiplied = scheme.multiplied(call.precision, types, groups=True)
    if why := element_types.why_no_kernel(multiplied, call.out_dtype, widened=False):
        return why
    is_explicit = request.is_explicit(*operands)
    return "the types of the operands say how a mesh splits them" if is_explicit else None


def call_of(
    a: Any, b: Any, sizes: Any, preferred: Any, precision: Any, options: Options
) -> GroupedCall:
    """Returns the call for operands of these types."""
    resolved = precisions.resolve(precision)
    options = dataclasses.replace(options, target=known_target(a, b, sizes))
    dtype = arguments.result_type(a, b, element_type(preferred), dot, resolved).dtype
    return GroupedCall(dtype, precision=resolved, options=options)


def leave_to_jax(options: Options, factors: Any, out_dtype: Any, why: str) -> None:
    """Notes that JAX's own function computes a product.

    Raises:
        ValueError: Something is promised of it.
    """
    numerics.refuse_promised(options, why)
    notes.note_outside(factors, out_dtype, why)


def answer(call: GroupedCall, operands: Any) -> jax.Array:
    """Computes a product, by JAX's own function where no kernel does.

    Raises:
        ValueError: Something is named, or promised, that cannot be.
    """
    factors = operands[:2]
    if why := why_jax(call, operands):
        leave_to_jax(call.options, factors, call.out_dtype, why)
        return xla_groups.by_jax(call, *operands)
    call = numerics.resolved_groups(call, *factors)
    dispatch.check(call, signature_of(operands))
    return grouped(call, *operands)


def arrays(
    lhs: Any, rhs: Any, group_sizes: Any, names: tuple[str, str] = OF_LAX
) -> tuple[Any, Any, Any]:
    """Returns the operands as arrays.

    Raises:
        TypeError: One is none, the sizes are no integers, or nobody knows how many there are.
    """
    sizes = arguments.array("group_sizes", group_sizes)
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise TypeError(f"group_sizes must be integers, got {sizes.dtype}")
    if sizes.ndim and is_symbolic_dim(sizes.shape[-1]):
        raise TypeError(
            "group_sizes must have a known number of groups, got shape"
            f" [{', '.join(map(str, sizes.shape))}]: the number of rows alone may be symbolic"
        )
    return arguments.array(names[0], lhs), arguments.array(names[1], rhs), sizes


def up(x: Any, b: Any) -> Any:
    """Checks the second matrices: like the first.

    Raises:
        TypeError: They are of another shape or type.
    """
    x = arguments.array("up", x)
    if (x.shape, x.dtype) != (b.shape, b.dtype):
        raise TypeError(
            f"up must be like b, {b.dtype}{list(b.shape)}, got {x.dtype}{list(x.shape)}"
        )
    return x


def check_ranks(*operands: tuple[str, Any]) -> None:
    """Checks that there are rows, and a matrix for each group.

    Raises:
        TypeError: There are not.
    """
    for (name, x), rank, like in zip(operands, (2, 3), ("[m, k]", "[groups, k, n]"), strict=True):
        if np.ndim(x) != rank:
            raise TypeError(f"{name} must be {like}, got shape {list(np.shape(x))}")


def check(
    lhs: Any,
    rhs: Any,
    sizes: Any,
    *,
    contracted: bool,
    transposed: bool,
    names: tuple[str, str] = OF_LAX,
) -> None:
    """Checks shapes.

    Raises:
        TypeError: They have no such product.
    """
    left, right = names
    if sizes.ndim != 1:
        raise TypeError(f"group_sizes must be [groups], got shape {list(sizes.shape)}")
    axes = (0, 0) if contracted else (1, 2 if transposed else 1)
    if lhs.shape[axes[0]] != rhs.shape[axes[1]]:
        raise TypeError(
            f"{left} and {right} must agree in the contracted size, got"
            f" {lhs.shape[axes[0]]} in {left}{list(lhs.shape)} (dimension {axes[0]}) and"
            f" {rhs.shape[axes[1]]} in {right}{list(rhs.shape)} (dimension {axes[1]})"
        )
    if not contracted and sizes.shape[0] != rhs.shape[0]:
        raise TypeError(
            f"group_sizes must have {rhs.shape[0]} sizes, one for each matrix of"
            f" {right}{list(rhs.shape)}, got {sizes.shape[0]}"
        )


def check_values(sizes: Any, rows: int) -> None:
    """Checks sizes that are known, which those of a tracer are not.

    Raises:
        ValueError: One is negative, or they are more than all rows.
    """
    if (sizes := _known(sizes)) is None:
        return
    if sizes.size and sizes.min() < 0:
        raise ValueError(
            f"group_sizes must not be negative, got {sizes.min()} for group {sizes.argmin()}"
        )
    total = sizes.sum(dtype=np.int64)
    if total > rows:
        raise ValueError(f"group_sizes must add up to at most the {rows} rows, got {total}")


def _known(sizes: Any) -> np.ndarray | None:
    """Returns sizes as an array of NumPy, for which a GPU may be waited for; None if unknown."""
    if isinstance(sizes, jax.Array) and not isinstance(sizes, jax.core.Tracer):
        is_here = sizes.is_fully_addressable or sizes.is_fully_replicated
        return np.asarray(sizes) if is_here else None
    return sizes if isinstance(sizes, np.ndarray) else None
