"""Products of groups of rows as one primitive: each row with its own group's right operand.

Its derivatives are products of groups again, of both modes and any order:

    rows in groups    y = a @ b[group]         da = g @ b[group].T    db = a.T @ g, k in groups
    k in groups       y[group] = a.T @ b       da = b @ g[group].T    db = a @ g[group]

`group` is that of a row; what is transposed is read so, and not moved.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim
from jax.extend import core
from jax.interpreters import ad, mlir

from pallas_gemm.call import GroupedCall, Operands, signature_of
from pallas_gemm.kernels import groups
from pallas_gemm.kernels.element_types import is_widened
from pallas_gemm.op import linear, lowering
from pallas_gemm.op.autodiff import check_weights
from pallas_gemm.op.batching import one_by_one
from pallas_gemm.op.contraction import normal_dimension_numbers
from pallas_gemm.op.mesh import mesh_context
from pallas_gemm.op.mesh.grouped_partition import grouped_part_p, shared_groups
from pallas_gemm.op.product import computed_by, give_rules, lower_by
from pallas_gemm.planning import numerics
from pallas_gemm.planning.by_xla import xla, xla_groups
from pallas_gemm.problem import SCALES

grouped_p = core.Primitive("pallas_gemm_grouped")

NO_FORM = "no kernel takes groups with batch dimensions, or with several dimensions of a kind"
"""Why JAX computes what `form_of` has no answer for."""


class Mapped(NamedTuple):
    """A product of groups with a batch dimension, as one without it that is mapped.

    Attributes:
        numbers: The numbers of the product without it.
        lhs: Which dimension of the left operand is mapped.
        rhs: The same of the right operand.
        out: The same of the result.
    """

    numbers: Any
    lhs: int
    rhs: int
    out: int


def mapped_form(numbers: Any, lhs_rank: int, rhs_rank: int) -> Mapped | None:
    """Returns numbers of `lax.ragged_dot_general` without their first batch dimension.

    None if they have none, or `form_of` has no answer for what is mapped.
    """
    contracting, (lefts, rights) = normal_dimension_numbers(numbers.dot_dimension_numbers)
    if not lefts or set(numbers.lhs_ragged_dimensions) <= set(lefts):
        return None

    def without(gone: int, dims: Any) -> tuple[int, ...]:
        return tuple(d - (d > gone) for d in dims)

    (left, *more_left), (right, *more_right) = lefts, rights
    own = lax.RaggedDotDimensionNumbers(
        (
            (without(left, contracting[0]), without(right, contracting[1])),
            (without(left, more_left), without(right, more_right)),
        ),
        without(left, numbers.lhs_ragged_dimensions),
        without(right, numbers.rhs_group_dimensions),
    )
    ranks = lhs_rank - 1, rhs_rank - 1
    if form_of(own, *ranks) is None and mapped_form(own, *ranks) is None:
        return None
    # A result whose groups are contracted has them first.
    return Mapped(own, left, right, int(not numbers.rhs_group_dimensions))


def form_of(numbers: Any, lhs_rank: int, rhs_rank: int) -> tuple[bool, bool] | None:
    """Returns whether groups are contracted, and the right operand is transposed.

    None if numbers of `lax.ragged_dot_general` are of no such product of matrices.
    """
    contracting, batch = normal_dimension_numbers(numbers.dot_dimension_numbers)
    if lhs_rank != 2 or batch != ((), ()) or tuple(numbers.lhs_ragged_dimensions) != (0,):
        return None
    group = tuple(numbers.rhs_group_dimensions)
    if rhs_rank == 3 and group == (0,) and contracting in (((1,), (1,)), ((1,), (2,))):
        return False, contracting[1] == (2,)
    if rhs_rank == 2 and not group and contracting == ((0,), (0,)):
        return True, False
    return None


def grouped(call: GroupedCall, *operands: jax.Array) -> jax.Array:
    """Computes a product of groups."""
    return computed_by(grouped_p, call, operands, call=call)


@grouped_part_p.def_effectful_abstract_eval
@grouped_p.def_effectful_abstract_eval
def _abstract(*avals: Any, call: GroupedCall, **_: Any) -> Any:
    result = lowering.types_by(avals, xla_groups.by_jax, call)[0]
    return result, lowering.effects(call, signature_of(avals))


def _lowered(
    ctx: mlir.LoweringRuleContext, *operands: Any, call: GroupedCall, devices: Any, gpu: bool
) -> Any:
    """Lowers a whole product, for one device or for several that share it."""
    if mesh_context.is_one_devices(ctx.module_context.axis_context):
        return _lowered_part(ctx, *operands, call=call, gpu=gpu)
    lowering.refuse_simulation(call.options.implementation)
    alone = mesh_context.why_not_partitioned(ctx.module_context)
    few_bits = _has_few_bits(call, ctx.avals_in)
    if devices is None or alone or (call.epilogue.blocks and not few_bits):
        lowering.refuse_unshared(call, ctx.module_context)
        run = functools.partial(xla_groups.by_jax, call)
    elif call.epilogue.blocks:
        run = functools.partial(_of_matrices, shared_groups, call)
    else:
        run = functools.partial(shared_groups, call)
    return mlir.lower_fun(run, multiple_results=False)(ctx, *operands)


def _lowered_part(
    ctx: mlir.LoweringRuleContext, *operands: Any, call: GroupedCall, gpu: bool
) -> Any:
    """Lowers what one device computes.

    XLA makes matrices of 16 bits of weights of few that no kernel takes. Then one may take these.
    """
    if _has_few_bits(call, ctx.avals_in):
        again = dataclasses.replace(call, options=call.options.for_another_product())
        otherwise = functools.partial(_of_matrices, _part, again)
    else:
        otherwise = functools.partial(xla_groups.by_tiles, call)
    kernel = lowering.kernel_of(lowering.planned(call, gpu), signature_of(ctx.avals_in))
    return mesh_context.lower_off_mesh(ctx, kernel or otherwise, operands)


def _has_few_bits(call: GroupedCall, operands: Sequence[Any]) -> bool:
    """Whether the matrices are weights of few bits beside wider rows."""
    return not call.contracted and is_widened(operands[0].dtype, operands[1].dtype)


def _of_matrices(
    compute: Callable[..., jax.Array], call: GroupedCall, *operands: jax.Array
) -> jax.Array:
    """Computes a call of weights of few bits, or of blocks, from what they stand for."""
    whole, given = xla_groups.as_matrices(call, *operands)
    return compute(whole, *given)


def _part(call: GroupedCall, *operands: jax.Array) -> jax.Array:
    return grouped_part_p.bind(*operands, call=call)


def _jvp(primals: Any, tangents: Any, *, call: GroupedCall, **_: Any) -> tuple[Any, Any]:
    changes, given = linear.changes(tangents), call.unpack(primals)
    moved = call.unpack(changes)
    in_groups = call.contracted and call.epilogue.blocks
    if in_groups or _has_few_bits(call, primals):
        check_weights(primals, moved)
        by_matrices = functools.partial(_of_matrices, grouped, call)
        change = linear.change_by(by_matrices, primals, changes)
        return linear.named(grouped(call, *primals)), change
    if call.epilogue.blocks:
        change = linear.change_by_xla(call, xla_groups.by_jax, primals, changes)
        return linear.named(grouped(call, *primals)), change
    if not call.epilogue.is_identity:
        return _jvp_of_epilogue(call, primals, changes)
    result = linear.named(grouped(call, *primals))
    terms = changes_of_sums(call, given, moved, call.sizes(primals))
    return result, linear.rounded_sum(terms, result)


def changes_of_sums(
    call: GroupedCall, given: Operands, moved: Operands, sizes: Any
) -> list[jax.Array]:
    """Returns the products by which the sums of a call change, which are added up."""
    plain = call.plain(jnp.float32)
    terms = [] if moved.a is None else [grouped(plain, moved.a, given.b, sizes)]
    return terms + ([] if moved.b is None else [grouped(plain, given.a, moved.b, sizes)])


def _jvp_of_epilogue(call: GroupedCall, given: Any, moved: list[Any]) -> tuple[Any, Any]:
    """Derives a product with an epilogue as one without, and the pass that applies it.

    The sums that an activation or a gate is applied to have to be there, so that no product is
    computed twice. They have the result's type then. Otherwise the result is the kernel's. Where no
    scale changes, they are not even computed.
    """
    is_affine = call.epilogue.activation is None and not call.epilogue.gated
    changed = call.unpack(moved)
    if is_affine and not any(getattr(changed, name) is not None for name in ("alpha", *SCALES)):
        result = linear.named(grouped(call, *given))
        return result, _affine_change(call, given, moved, result)
    is_scaled = call.epilogue.alpha != 1 or any("scale" in x for x in call.epilogue.operands)
    kept = linear.kept_sums_dtype if is_scaled else linear.kept_dtype
    dtype = None if is_affine else kept(call.out_dtype)
    alone = functools.partial(xla_groups.finished, call, _plainly, dtype=dtype)
    result, change = linear.derived(alone, given, moved)
    # What is promised of the result holds where it is derived, too.
    is_kernels = is_affine or call.options.numerics is not None
    result = grouped(linear.as_derived(call), *given) if is_kernels else result
    return linear.named(result), change


def _affine_change(call: GroupedCall, given: Any, moved: Any, result: jax.Array) -> jax.Array:
    """Derives an epilogue by which the result changes as much whatever the sums are."""
    own, changed = call.unpack(given), call.unpack(moved)
    # In place of the sums, of which nothing but the type counts.
    sums = result.astype(xla.wide_dtype(own.a.dtype, own.b.dtype, call.out_dtype))
    names = call.epilogue.operands
    sizes = call.sizes(given)
    change = linear.rounded_sum(changes_of_sums(call, own, changed, sizes), sums)

    def finish(sums: jax.Array, *extras: jax.Array) -> jax.Array:
        named = Operands(None, None, **dict(zip(names, extras, strict=True)))
        return xla_groups.applied(call, [sums], named, sizes)

    primals, changes = ([getattr(x, name) for name in names] for x in (own, changed))
    return linear.derived(finish, (sums, *primals), (change, *changes))[1]


def _plainly(call: GroupedCall, *operands: jax.Array) -> jax.Array:
    return grouped(call.plain(call.out_dtype), *operands)


def _transpose(
    cotangent: Any, a: Any, b: Any, sizes: Any, *_: Any, call: GroupedCall, **__: Any
) -> list[Any]:
    """Returns the cotangent of the factor that is missing, and None for the others."""
    missing = [ad.is_undefined_primal(x) for x in (a, b)]
    linear.check_linear(call, sum(missing))
    left = missing[0]
    wanted = (a if left else b).aval
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(wanted) if own else None for own in (*missing, False)]

    def compute(dtype: Any, g: jax.Array, other: jax.Array) -> jax.Array:
        plain, pair = call.plain(dtype), (g, other)
        if call.contracted:
            pair = other, g
            plain = dataclasses.replace(plain, contracted=False, transpose_b=left)
        elif left:
            plain = dataclasses.replace(plain, transpose_b=not call.transpose_b)
        else:
            pair = pair if call.transpose_b else pair[::-1]
            plain = dataclasses.replace(plain, contracted=True, transpose_b=False)
        return grouped(numerics.resolved_groups(plain, *pair), *pair, sizes)

    result = linear.gradient_by(compute, [(cotangent, b if left else a)], wanted.dtype)
    return [result if own else None for own in (*missing, False)]


def _batch(
    operands: tuple[Any, ...], dims: tuple[Any, ...], *, call: GroupedCall, **_: Any
) -> tuple[jax.Array, int]:
    """Maps it: as groups of groups where each has matrices of its own; else one after the other."""
    # What is promised of sums over rows is said of the rows of one.
    is_promised = call.contracted and call.options.numerics is not None
    if None not in dims and len(dims) == 3 and call.epilogue.is_identity and not is_promised:
        mapped = [jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)]
        # XLA asks for a known number of groups. Rows in no group count as those of the last group,
        # so there has to be one.
        if not is_symbolic_dim(mapped[0].shape[0]) and mapped[2].shape[1]:
            return _groups_of_groups(call, *mapped), 0
    return one_by_one(functools.partial(grouped, call), operands, dims), 0


def _groups_of_groups(call: GroupedCall, a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
    """Computes a batch of products of groups as one, with the groups of all of them.

    Rows in no group are between those of two products then. They count as those of the last group,
    and are zeros afterwards; where they are summed up, they have a group of their own.
    """
    batch, rows = a.shape[:2]
    last = jnp.int32(rows)
    ends = jax.vmap(lambda own: lax.min(groups.bounds(own, rows, rows).end, last))(sizes)
    to_last = jnp.full((batch, 1), last)
    every = jnp.concatenate([ends if call.contracted else ends[:, :-1], to_last], axis=1)
    own = jnp.diff(every, axis=1, prepend=jnp.zeros_like(to_last))
    result = grouped(call, *(x.reshape(math.prod(x.shape[:2]), *x.shape[2:]) for x in (a, b, own)))
    result = result.reshape(batch, own.shape[1] if call.contracted else rows, *result.shape[1:])
    if call.contracted:
        return result[:, :-1]
    row = lax.broadcasted_iota(jnp.int32, result.shape, 1)
    return jnp.where(row < ends[:, -1:, None], result, jnp.zeros_like(result))


give_rules(grouped_p, jvp=_jvp, transpose=_transpose, batch=_batch)
lower_by(grouped_p, _lowered)
lower_by(grouped_part_p, _lowered_part)
