"""The caller's function as the epilogue of rows in groups: checked, and traced as one of rows."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from pallas_gemm.api import function
from pallas_gemm.api.groups import groups
from pallas_gemm.api.groups.rows import axes_of_rows
from pallas_gemm.call import GroupedCall, signature_of
from pallas_gemm.kernels.functions import flat
from pallas_gemm.op import fused_groups
from pallas_gemm.op.function_of_sums import Function
from pallas_gemm.op.fused_groups import OfRows
from pallas_gemm.op.mesh import mesh_context
from pallas_gemm.planning import numerics
from pallas_gemm.planning.by_xla import xla_groups
from pallas_gemm.problem import SCALES


def answer(call: GroupedCall, factors: Sequence[Any], epilogue: Any, given: Sequence[Any]) -> Any:
    """Computes a function of products of rows in groups.

    Args:
        call: The products, with scales and nothing else, in the type of the sums.
        factors: The rows, the one or two matrices of each group, the sizes, and the scales.
        epilogue: The function.
        given: The arrays that it takes besides. A row gets the values of its group.

    Raises:
        ValueError: An operand may be of rows or of groups, or a result has no value for each row.
    """
    own, sizes = call.unpack(factors), call.sizes(factors)
    sums = 1 + call.epilogue.gated
    shape = call.matrix_shape(own.a.shape, own.b.shape)
    scaled = function.Scaled.of(epilogue, own, sums)
    call = dataclasses.replace(call, epilogue=scaled.rest(call.epilogue))
    factors = call.packed(own._replace(**dict.fromkeys(scaled.names)), sizes)
    # A scale of columns is that of all groups, or has a row for each.
    scales = [(x, name != SCALES[0] and x.ndim == 2) for name, x in scaled.of_names]
    every = [*scales, *zip(given, _of_groups(given, shape, sizes.shape[0]), strict=True)]
    of_rows = [
        jax.ShapeDtypeStruct((shape[0], *x.shape[1:]), x.dtype) if many else x for x, many in every
    ]
    types = [jax.ShapeDtypeStruct(shape, call.out_dtype)] * sums
    run, tree = function.traced(scaled.function, types, of_rows)
    _check_rows(run, shape[0])
    taken, of_groups = zip(*every, strict=True) if every else ((), ())
    results = _computed(call, OfRows(run, of_groups), (*factors, *taken))
    return jax.tree.unflatten(tree, results)


def _computed(call: GroupedCall, of_rows: OfRows, operands: tuple[Any, ...]) -> list[jax.Array]:
    """Computes the results of a function of rows in groups.

    Raises:
        ValueError: Something is named, or promised, that cannot be.
    """
    a, b, *_ = operands
    if why := groups.why_jax(call, operands):
        groups.leave_to_jax(call.options, (a, b), call.out_dtype, why)
        return fused_groups.apart(call, of_rows, *operands, multiply=xla_groups.by_jax)
    call = numerics.resolved_groups(call, a, b, finished=True)
    on_mesh = mesh_context.is_on_mesh(*operands)
    if call.options.names_something and call.options.implementation != "xla" and not on_mesh:
        found = fused_groups.plan(call, of_rows, signature_of(operands))
        function.check_named(call.options, found)
    return fused_groups.fused_groups(call, of_rows, *operands)


def _of_groups(given: Sequence[Any], shape: tuple[int, int], count: int) -> tuple[bool, ...]:
    """Returns which operands have a row for each group, and not for each row.

    Raises:
        ValueError: One may have either.
    """
    (rows, columns), found = shape, []
    for i, x in enumerate(given):
        many = x.ndim == 2 and x.shape[0] == count > 1 and x.shape[1] in (1, columns)
        if many and count == rows:
            raise ValueError(
                f"operands[{i}] of shape {list(x.shape)} has a row for each of {rows} rows, and for"
                " each group: give those of groups as those of their rows, by x[group of each row]"
            )
        found.append(many)
    return tuple(found)


def _check_rows(own: Function, rows: int) -> None:
    """Refuses a function of rows in groups whose results are not those of rows.

    Raises:
        ValueError: One is not.
    """
    whole = flat.flat(own.closed)
    # One row mixes with no other.
    axes = {} if rows == 1 else axes_of_rows(whole, own.sums, rows)
    for i, (output, x) in enumerate(zip(whole.outputs, own.closed.out_avals, strict=True)):
        shape: Any = getattr(x, "shape", ())
        axis = axes.get(output, 0) if isinstance(output, int) else 0
        if isinstance(axis, str):
            raise ValueError(axis)
        if axis or shape[:1] != (rows,):
            raise ValueError(
                f"result {i} of epilogue, of shape {list(shape)}, must have a value, or values, for"
                f" each of the {rows} rows: what reduces rows would mix groups"
            )
