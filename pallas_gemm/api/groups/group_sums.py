"""`group_sums`: the product of what each group has of the contracted elements."""

import dataclasses
from typing import Any

import jax

from pallas_gemm.api import arguments, blocks, extras
from pallas_gemm.api.blocks import Factor
from pallas_gemm.api.eager import compiled
from pallas_gemm.api.gemm import Order
from pallas_gemm.api.groups import groups
from pallas_gemm.call import Numerics, Operands
from pallas_gemm.config import GemmConfig
from pallas_gemm.planning import numerics as planned
from pallas_gemm.problem import SCALES, Epilogue


def _check_started(given: Any) -> None:
    groups.check_values(given["group_sizes"], given["a"].shape[1])


@compiled("a", "b", "group_sizes", "row_scale", "col_scale", check=_check_started)
def group_sums(  # noqa: PLR0913 - each is a keyword
    a: jax.Array,
    b: jax.Array,
    group_sizes: jax.Array,
    *,
    row_scale: jax.Array | None = None,
    col_scale: jax.Array | None = None,
    preferred_element_type: Any = None,
    precision: Any = None,
    transpose_b: bool = False,
    schedule: Order = None,
    config: GemmConfig | None = None,
    implementation: str | None = None,
    numerics: Numerics | None = None,
) -> jax.Array:
    """Computes `a[:, group] @ b[group]` for each group: the gradients of the matrices of experts.

    The columns of `a` and the rows of `b` are those of the groups, one group after the other.
    Columns in no group are no part of any sum, and a group without any has zeros.

    >>> sums = group_sums(x.T, x, jnp.array([20, 0, 40]))
    >>> sums.shape
    (3, 16, 16)

    Scales are those of blocks, as for `gemm`. Blocks are counted from the first column on, wherever
    groups begin: a block that lies in two groups has one scale for both, and is multiplied for
    both. `quantize(..., group_sizes=sizes)` fills each group up to whole blocks.

    Args:
        a: The left operand, `[m, k]`.
        b: The right operand, `[k, n]`.
        group_sizes: How many of the k contracted elements each group has.
        row_scale: A scale for each block of `a`: `[m, k / g]` or `[m / r, k / g]`.
        col_scale: A scale for each block of `b`: `[k / g, n]` or `[k / g, n / c]`.
        preferred_element_type: As for `gemm`.
        precision: As for `gemm`.
        transpose_b: `b` is stored `[n, k]`. Kernels read it so if there are scales, or if elements
            have 8 or 32 bits. Else they read `a` stored `[k, m]` and `b` stored `[k, n]`.
        schedule: As for `grouped_gemm`.
        config: As for `gemm`.
        implementation: As for `gemm`.
        numerics: As for `gemm`.

    Returns:
        The sums, `[groups, m, n]`.

    Raises:
        TypeError: The operands are of shapes or types that have no such product.
        ValueError: A scale's shape matches no blocks; or as for `ragged_dot`.
    """
    transpose_b = arguments.flag("transpose_b", transpose_b)
    a, b, sizes = groups.arrays(a, b, group_sizes, ("a", "b"))
    for name, x in (("a", a), ("b", b)):
        if x.ndim != 2:
            raise TypeError(f"{name} must be a matrix, got shape {list(x.shape)}")
    deep = 1 if transpose_b else 0
    if sizes.ndim != 1:
        raise TypeError(f"group_sizes must be [groups], got shape {list(sizes.shape)}")
    if a.shape[1] != b.shape[deep]:
        raise TypeError(
            f"a and b must agree in the contracted size, got {a.shape[1]} columns of a and"
            f" {b.shape[deep]} {'columns' if transpose_b else 'rows'} of b"
        )
    groups.check_values(group_sizes, a.shape[1])
    options = planned.stated(arguments.options(implementation, config, schedule, numerics))
    call = groups.call_of(a, b, sizes, preferred_element_type, precision, options)
    k, columns = a.shape[1], b.shape[1 - deep]
    factors = Factor("a", (), a.shape[0], k), Factor("b", (), columns, k)
    scales = _scales({SCALES[0]: row_scale, SCALES[1]: col_scale}, factors)
    # With scales the contracted dimension is last, and else first. A kernel of 8 or 32 bits
    # transposes both again: XLA makes no pass of two transpositions.
    last = scales.row_blocks is not None or scales.col_blocks is not None
    a, b = (a if last else a.T), (b if last == transpose_b else b.T)
    formula = Epilogue(
        row_blocks=scales.row_blocks is not None, col_blocks=scales.col_blocks is not None
    )
    arguments.epilogue_dtype(formula, (a.dtype, b.dtype), call.out_dtype)
    call = dataclasses.replace(call, contracted=True, transpose_b=last, epilogue=formula)
    every = (a, b, sizes, *(getattr(scales, name) for name in formula.operands))
    return groups.answer(call, every)


def _scales(given: dict[str, Any], factors: tuple[Factor, Factor]) -> Operands:
    """Checks the scales of blocks, and returns them as operands.

    Raises:
        ValueError: One matches no blocks.
        TypeError: One is of another type.
    """
    found = Operands(None, None)
    for (name, x), factor in zip(given.items(), factors, strict=True):
        if x is None:
            continue
        scale = extras.floating(name, arguments.array(name, x))
        if scale.ndim != 2:
            raise ValueError(
                f"{name} must have a value for each block of {factor.name}, of two dimensions, got"
                f" shape {list(scale.shape)}"
            )
        own = blocks.checked(name, scale, factor, left=factor.name == "a")
        found = found._replace(**{blocks.OF_SCALES[name]: own})
    return blocks.alike(found)
