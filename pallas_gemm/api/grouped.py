"""Products of groups of rows: what mixture-of-experts layers are made of."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gemm.api import arguments, request
from pallas_gemm.api.eager import compiled
from pallas_gemm.kernels import element_types
from pallas_gemm.op.contraction import normal_dimension_numbers
from pallas_gemm.op.grouped import grouped
from pallas_gemm.planning import precision as precisions
from pallas_gemm.planning.call import GroupedCall, Options
from pallas_gemm.planning.targeting import known_target
from pallas_gemm.planning.xla_groups import ROWS
from pallas_gemm.problem import element_type

ARRAYS = ("lhs", "rhs", "group_sizes", "group_offset")


@compiled(*ARRAYS)
def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: jax.Array | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Computes `lax.ragged_dot`, with the same arguments: each row with its own group's matrix.

    The rows of a group lie together, one group after the other. How many each has is known to the
    running program alone: nothing is compiled again, padded or copied when it changes, and the
    values of other groups' rows, of rows in no group and of matrices without rows never show.

    Args:
        lhs: The rows, `[m, k]`.
        rhs: A matrix for each group, `[groups, k, n]`.
        group_sizes: How many rows each group has; what is left of m are zeros in the result.
        precision: As for `lax.ragged_dot`.
        preferred_element_type: Type of the result.
        group_offset: None; JAX does not compute anything else either.
        out_sharding: As for `lax.ragged_dot`, which then computes it.

    Returns:
        The result, `[m, n]`.

    Raises:
        TypeError: The operands are of shapes or types that have no such product.
        ValueError: Sizes that are known while tracing are negative, or more than there are rows.
    """
    for name, x, rank, like in (("lhs", lhs, 2, "[m, k]"), ("rhs", rhs, 3, "[groups, k, n]")):
        if np.ndim(x) != rank:
            raise TypeError(f"{name} must be {like}, got shape {list(np.shape(x))}")
    given = (lhs, rhs, group_sizes, ROWS, precision, preferred_element_type)
    return _general(*given, group_offset, out_sharding)


@compiled(*ARRAYS)
def ragged_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    ragged_dot_dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: jax.Array | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Computes `lax.ragged_dot_general`, with the same arguments.

    The products of matrices that `ragged_dot` and its gradients are of may be a kernel's; those
    with batch dimensions, and several dimensions of a kind, are JAX's.

    Args:
        lhs: The left operand.
        rhs: The right operand.
        group_sizes: The sizes of the groups along the ragged dimension.
        ragged_dot_dimension_numbers: As for `lax.ragged_dot_general`.
        precision: As for `ragged_dot`.
        preferred_element_type: As for `ragged_dot`.
        group_offset: As for `ragged_dot`.
        out_sharding: As for `ragged_dot`.

    Returns:
        The result.

    Raises:
        TypeError: As for `ragged_dot`.
        ValueError: As for `ragged_dot`.
    """
    given = (lhs, rhs, group_sizes, ragged_dot_dimension_numbers, precision, preferred_element_type)
    return _general(*given, group_offset, out_sharding)


def _general(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    numbers: Any,
    precision: Any,
    preferred: Any,
    group_offset: Any,
    out_sharding: Any,
) -> jax.Array:
    """Computes either."""
    lhs, rhs, sizes = _arrays(lhs, rhs, group_sizes)
    preferred = element_type(preferred)
    form = _form(numbers, lhs.ndim, rhs.ndim)
    if group_offset is not None:
        raise NotImplementedError("group_offset must be None: JAX does not compute it either")
    if form is None or out_sharding is not None:
        return lax.ragged_dot_general(
            *(lhs, rhs, sizes, numbers, precision, preferred), out_sharding=out_sharding
        )
    contracted, transposed = form
    _check(lhs, rhs, sizes, contracted=contracted, transposed=transposed)
    _check_values(group_sizes, lhs.shape[0])
    resolved = precisions.resolve(precision)
    dtype = arguments.result_type(lhs, rhs, preferred, lax.dot, resolved).dtype
    operands = {np.dtype(lhs.dtype), np.dtype(rhs.dtype)}
    call = GroupedCall(
        dtype,
        transpose_b=transposed,
        precision=resolved,
        options=Options(target=known_target(lhs, rhs, sizes)),
        contracted=contracted,
    )
    if element_types.why_no_kernel(operands, call.out_dtype) or request.is_explicit(lhs, rhs):
        return lax.ragged_dot_general(lhs, rhs, sizes, numbers, precision, preferred)
    return grouped(call, lhs, rhs, sizes)


def _arrays(lhs: Any, rhs: Any, group_sizes: Any) -> tuple[Any, Any, Any]:
    """Returns the operands as arrays.

    Raises:
        TypeError: One is none, or the sizes are no integers.
    """
    sizes = arguments.array("group_sizes", group_sizes)
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise TypeError(f"group_sizes must be integers, got {sizes.dtype}")
    return arguments.array("lhs", lhs), arguments.array("rhs", rhs), sizes


def _form(numbers: Any, lhs_rank: int, rhs_rank: int) -> tuple[bool, bool] | None:
    """Returns whether groups are contracted, and the right operand is transposed, or None."""
    contracting, batch = normal_dimension_numbers(numbers.dot_dimension_numbers)
    if lhs_rank != 2 or batch != ((), ()) or tuple(numbers.lhs_ragged_dimensions) != (0,):
        return None
    group = tuple(numbers.rhs_group_dimensions)
    if rhs_rank == 3 and group == (0,) and contracting in (((1,), (1,)), ((1,), (2,))):
        return False, contracting[1] == (2,)
    if rhs_rank == 2 and not group and contracting == ((0,), (0,)):
        return True, False
    return None


def _check(lhs: Any, rhs: Any, sizes: Any, *, contracted: bool, transposed: bool) -> None:
    """Checks shapes.

    Raises:
        TypeError: They have no such product.
    """
    if sizes.ndim != 1:
        raise TypeError(f"group_sizes must be [groups], got shape {list(sizes.shape)}")
    axes = (0, 0) if contracted else (1, 2 if transposed else 1)
    if lhs.shape[axes[0]] != rhs.shape[axes[1]]:
        raise TypeError(
            "lhs and rhs must agree in the contracted size, got"
            f" {lhs.shape[axes[0]]} in lhs{list(lhs.shape)} (dimension {axes[0]}) and"
            f" {rhs.shape[axes[1]]} in rhs{list(rhs.shape)} (dimension {axes[1]})"
        )
    if not contracted and sizes.shape[0] != rhs.shape[0]:
        raise TypeError(
            f"group_sizes must have a size for each group of rhs{list(rhs.shape)}, which are"
            f" {rhs.shape[0]}, got {sizes.shape[0]}"
        )


def _check_values(sizes: Any, rows: int) -> None:
    """Checks sizes that are known: those of a NumPy array, for which no GPU has to be asked.

    Raises:
        ValueError: One is negative, or they are more than all rows.
    """
    if not isinstance(sizes, np.ndarray):
        return
    if sizes.size and sizes.min() < 0:
        raise ValueError(
            f"group_sizes must not be negative, got {sizes.min()} for group {sizes.argmin()}"
        )
    total = sizes.sum(dtype=np.int64)
    if total > rows:
        raise ValueError(f"group_sizes must be at most all {rows} rows together, got {total}")
