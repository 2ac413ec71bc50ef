"""A sum of products as one primitive, because a kernel can add them up in its accumulator.

    a1 @ b1 + a2 @ b2 + ...        rounded once

It is what the gradient of an operand that several products share comes to. No public function
computes it. Where no kernel takes all operands, it is computed product by product.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import mlir

from pallas_gemm.call import Operands, Signature, SumCall, signature_of
from pallas_gemm.op import linear, lowering
from pallas_gemm.op.canonical import Merged, merged
from pallas_gemm.op.contraction import Contraction, of_matrices
from pallas_gemm.op.mesh import mesh_context
from pallas_gemm.op.product import computed_by, give_rules, lower_by, product

sum_p = core.Primitive("pallas_gemm_sum")


def sum_of_products(call: SumCall, *operands: jax.Array) -> jax.Array:
    """Computes a sum of products of matrices; operands come in the order `a, b, a, b, ...`."""
    pairs = call.pairs(operands)
    dims = tuple(of_matrices(call.each, a.ndim, b.ndim) for a, b in pairs)
    return sum_of_contractions(call, dims, *operands)


def sum_of_contractions(
    call: SumCall, contractions: tuple[Contraction, ...], *operands: jax.Array
) -> jax.Array:
    """Computes a sum of products of these dimensions."""
    if len(operands) == 2:
        return product(call.each, contractions[0], *operands)
    return computed_by(sum_p, call, operands, call=call, contractions=contractions)


def one_by_one(
    call: SumCall, contractions: Sequence[Contraction], *operands: jax.Array
) -> jax.Array:
    """Computes the products and adds them up as JAX adds up gradients: the last one first."""
    every = list(zip(contractions, call.pairs(operands), strict=True))
    products = [product(call.each, own, *pair) for own, pair in reversed(every)]
    return linear.total(products)


def each_merged(
    call: SumCall, contractions: Sequence[Contraction], signature: Signature
) -> list[Merged]:
    """Returns the products of matrices that each comes down to."""
    pairs = call.pairs(signature)
    return [merged(call.each, own, pair) for own, pair in zip(contractions, pairs, strict=True)]


def merged_sum(each: Sequence[Merged]) -> tuple[SumCall, Signature] | None:
    """Returns the sum of products of matrices that a kernel computes; None if they differ."""
    forms = [own.form for own in each]
    kinds = {(own.call, own.form.swapped, own.form.parts, own.form.permutation) for own in each}
    if len(kinds) > 1 or any(len(form.product_shape) != 2 for form in forms):
        return None
    return SumCall.of(each[0].call), tuple(x for own in each for x in own.signature)


@sum_p.def_effectful_abstract_eval
def _abstract(*avals: Any, call: SumCall, contractions: Sequence[Contraction], **_: Any) -> Any:
    result = lowering.types_by(avals[:2], contractions[0].by_xla, call.each)[0]
    whole = merged_sum(each_merged(call, contractions, signature_of(avals)))
    return result, set() if whole is None else lowering.effects(*whole)


def _lowered(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    call: SumCall,
    contractions: Sequence[Contraction],
    devices: Any,
    gpu: bool,
) -> Any:
    del devices
    apart = functools.partial(one_by_one, call, contractions)
    avals: Any = ctx.avals_in
    each = each_merged(call, contractions, signature_of(avals))
    whole = merged_sum(each)
    if whole is None or not mesh_context.is_one_devices(ctx.module_context.axis_context):
        return mlir.lower_fun(apart, multiple_results=False)(ctx, *operands)
    multiply = lowering.kernel_of(lowering.planned(whole[0], gpu), whole[1])
    if multiply is None:
        return mesh_context.lower_off_mesh(ctx, apart, operands)

    def run(*operands: jax.Array) -> jax.Array:
        pairs = zip(each, call.pairs(operands), strict=True)
        ready = (own.form.ready(Operands(*pair)).present() for own, pair in pairs)
        return each[0].form.result(multiply(*itertools.chain.from_iterable(ready)))

    return mesh_context.lower_off_mesh(ctx, run, operands)


def _jvp(
    primals: Any, tangents: Any, *, call: SumCall, contractions: Any, **_: Any
) -> tuple[Any, Any]:
    each = call.each
    plain = each.plain(jnp.float32, each.epilogue.alpha)
    terms = []
    for dims, (a, b), (da, db) in zip(
        contractions, call.pairs(primals), call.pairs(linear.changes(tangents)), strict=True
    ):
        of_left = [] if da is None else [product(plain, dims, da, b)]
        terms += linear.affine_change(each, dims, Operands(a, b), Operands(da, db), of_left)
    result = linear.named(sum_of_contractions(call, contractions, *primals))
    return result, linear.rounded_sum(terms, result)


def _transpose(
    cotangent: Any, *operands: Any, call: SumCall, contractions: Any, **_: Any
) -> list[Any]:
    """Returns the cotangents of the operands that are missing, and None for the others."""
    return [
        gradient
        for dims, pair in zip(contractions, call.pairs(operands), strict=True)
        for gradient in linear.gradients_of_factors(cotangent, pair, call.each, dims)
    ]


def _batch(
    operands: tuple[Any, ...],
    dims: tuple[Any, ...],
    *,
    call: SumCall,
    contractions: Sequence[Contraction],
    **_: Any,
) -> tuple[jax.Array, int]:
    """Maps it: more rows of each product where only left operands are mapped."""
    if None in dims[::2] or set(dims[1::2]) != {None}:
        apart = functools.partial(one_by_one, call, contractions)
        return jax.vmap(apart, dims)(*operands), 0
    more = tuple(own.with_rows(d) for own, d in zip(contractions, dims[::2], strict=True))
    return sum_of_contractions(call, more, *operands), 0


give_rules(sum_p, jvp=_jvp, transpose=_transpose, batch=_batch)
lower_by(sum_p, _lowered)
