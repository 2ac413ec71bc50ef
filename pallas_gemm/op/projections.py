"""Several products of one left operand as one primitive, for the sake of their gradient.

    y1, y2, ... = a @ b1, a @ b2, ...        as many products as there are
    da = g1 @ b1.T + g2 @ b2.T + ...         one sum of products

JAX would round each product of the gradient and add them up; a kernel adds in its accumulator.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.interpreters import ad, mlir

from pallas_gemm.call import Call, SumCall, signature_of
from pallas_gemm.op import linear, lowering
from pallas_gemm.op.canonical import merged
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.mesh import mesh_context
from pallas_gemm.op.product import computed_by, give_rules, product, squeezed
from pallas_gemm.op.sum_of_products import sum_of_contractions

projections_p = core.Primitive("pallas_gemm_projections")
projections_p.multiple_results = True


def projections(
    call: Call,
    contractions: Sequence[Contraction],
    a: jax.Array,
    rights: Sequence[Sequence[jax.Array]],
) -> list[jax.Array]:
    """Computes several products of one left operand.

    Args:
        call: The product that each of them is.
        contractions: The dimensions of each.
        a: Their left operand.
        rights: The other operands of each, in the order of `Operands`.
    """
    products = [
        squeezed(call, own, (a, *right)) for own, right in zip(contractions, rights, strict=True)
    ]
    each = [merged(call, own, signature_of(operands)) for own, operands in products]
    kinds = {
        (own.call, own.form.a, own.form.swapped, operands[0].shape)
        for own, (_, operands) in zip(each, products, strict=True)
    }
    is_matrix = len(each[0].form.product_shape) == 2
    if _are_apart(call, a, rights) or len(kinds) > 1 or each[0].form.swapped or not is_matrix:
        return [product(call, own, *operands) for own, operands in products]
    dims = tuple(own for own, _ in products)
    others = (x for _, operands in products for x in operands[1:])
    operands = (products[0][1][0], *others)
    return computed_by(projections_p, call, operands, call=call, contractions=dims)


def _are_apart(call: Call, a: jax.Array, rights: Sequence[Sequence[jax.Array]]) -> bool:
    """Whether the gradient of the left operand is no one sum.

    An accumulator does not add up what devices of a mesh add up, nor sums of several types. A name
    in the call is for each product alone, and a promise is, too.
    """
    operands = (a, *itertools.chain.from_iterable(rights))
    named = call.options.names_something or call.options.numerics is not None
    alone = named or mesh_context.is_on_mesh(*operands)
    return alone or len(rights) == 1 or len({right[0].dtype for right in rights}) > 1


def one_by_one(
    call: Call, contractions: Sequence[Contraction], a: jax.Array, *operands: jax.Array
) -> list[jax.Array]:
    """Computes each product for itself."""
    each = operands_of_each(call, operands)
    return [product(call, own, a, *rest) for own, rest in zip(contractions, each, strict=True)]


def operands_of_each(call: Call, rights: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns what each product has of all operands but the left one."""
    return list(itertools.batched(rights, 1 + len(call.epilogue.operands)))


@projections_p.def_abstract_eval
def _abstract(
    a: Any, *rights: Any, call: Call, contractions: Sequence[Contraction], **_: Any
) -> list[Any]:
    """Each result has the type of its own product; none of these is simulated."""
    each = operands_of_each(call, rights)
    return [
        lowering.types_by((a, *rest), own.by_xla, call)[0]
        for own, rest in zip(contractions, each, strict=True)
    ]


def _lowered(
    ctx: mlir.LoweringRuleContext, *operands: Any, call: Call, contractions: Any, **_: Any
) -> Any:
    run = functools.partial(one_by_one, call, contractions)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


def _jvp(
    primals: Any, tangents: Any, *, call: Call, contractions: Sequence[Contraction], **_: Any
) -> Any:
    a, *rights = primals
    da, *changes = linear.changes(tangents)
    given = [call.unpack((a, *own)) for own in operands_of_each(call, rights)]
    moved = [call.unpack((da, *own)) for own in operands_of_each(call, changes)]
    results = projections(call, contractions, a, [own.present()[1:] for own in given])
    results = [linear.named(result) for result in results]
    of_left: list[jax.Array] = []
    if da is not None:
        plain = call.plain(np.float32, call.epilogue.alpha)
        of_left = projections(plain, contractions, da, [(own.b,) for own in given])
    every = enumerate(zip(contractions, given, moved, strict=True))
    terms = [
        linear.affine_change(call, dims, own, change, of_left[i : i + 1])
        for i, (dims, own, change) in every
    ]
    return results, list(map(linear.rounded_sum, terms, results))


def _transpose(
    cotangents: Any,
    a: Any,
    *rights: Any,
    call: Call,
    contractions: Sequence[Contraction],
    **_: Any,
) -> list[Any]:
    """Returns the cotangent of the left operand, or those of the others that are missing."""
    missing = [ad.is_undefined_primal(x) for x in (a, *rights)]
    linear.check_linear(call, 2 if missing[0] and any(missing[1:]) else 1)
    every = list(zip(contractions, cotangents, rights, strict=True))
    if missing[0]:
        return [_left_gradient(call, every, a.aval), *(None for _ in rights)]
    rest = [
        linear.gradient(call, dims, g, a, x.aval, left=False) if ad.is_undefined_primal(x) else None
        for dims, g, x in every
    ]
    return [None, *rest]


def _left_gradient(
    call: Call, every: Sequence[tuple[Contraction, Any, jax.Array]], wanted: Any
) -> Any:
    """Returns the gradient of the left operand from the other factors, each with a cotangent."""
    every = [term for term in every if not isinstance(term[1], ad.Zero)]
    if not every:
        return ad.Zero(wanted)
    dims = tuple(own.of_left for own, _, _ in every)

    def compute(dtype: np.dtype, *factors: jax.Array) -> jax.Array:
        plain = call.plain(dtype, call.epilogue.alpha)
        return sum_of_contractions(SumCall.of(plain), dims, *factors)

    return linear.gradient_by(compute, [(g, b) for _, g, b in every], wanted.dtype)


def _batch(
    operands: tuple[Any, ...],
    dims: tuple[Any, ...],
    *,
    call: Call,
    contractions: Sequence[Contraction],
    **_: Any,
) -> tuple[list[jax.Array], list[int]]:
    """Maps them: more rows if the left operand alone is mapped."""
    if dims[0] is None or set(dims[1:]) != {None}:
        results = jax.vmap(functools.partial(one_by_one, call, contractions), dims)(*operands)
    else:
        a, *rights = operands
        more = tuple(own.with_rows(dims[0]) for own in contractions)
        results = projections(call, more, a, operands_of_each(call, rights))
    return results, [0] * len(results)


give_rules(projections_p, jvp=_jvp, transpose=_transpose, batch=_batch)
mlir.register_lowering(projections_p, _lowered)
