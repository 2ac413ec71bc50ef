"""A sum of products as one primitive, because a kernel can add them up in its accumulator.

    a1 @ b1 + a2 @ b2 + ...        rounded once

It is what the gradient of an operand that several products share comes to. No public function
computes it. Where no kernel takes all operands, it is computed product by product.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from pallas_gemm.op import linear, lowering, mesh_context
from pallas_gemm.op.contraction import of_matrices
from pallas_gemm.op.product import equally_varying, product_of_matrices, run_as_jax_does
from pallas_gemm.planning import xla
from pallas_gemm.planning.call import Operands, SumCall, signature_of

sum_p = core.Primitive("pallas_gemm_sum")


def sum_of_products(call: SumCall, *operands: jax.Array) -> jax.Array:
    """Computes a sum of products; operands come in the order `a, b, a, b, ...`."""
    if len(operands) == 2:
        return product_of_matrices(call.each, *operands)
    devices = mesh_context.device_request(call, operands)
    return sum_p.bind(*equally_varying(operands), call=call, devices=devices)


def one_by_one(call: SumCall, *operands: jax.Array) -> jax.Array:
    """Computes the products and adds them up as JAX adds up gradients: the last one first."""
    products = [product_of_matrices(call.each, a, b) for a, b in reversed(call.pairs(operands))]
    return functools.reduce(operator.add, products)


@sum_p.def_effectful_abstract_eval
def _abstract(*avals: Any, call: SumCall, **_: Any) -> Any:
    result = lowering.type_by(xla.sum_of_products, call, avals)
    return result, lowering.effects(call, signature_of(avals))


def _lowered(
    ctx: mlir.LoweringRuleContext, *operands: Any, call: SumCall, devices: Any, gpu: bool
) -> Any:
    del devices
    apart = functools.partial(one_by_one, call)
    if mesh_context.is_one_devices(ctx.module_context.axis_context):
        return lowering.lower_matrices(ctx, operands, call, apart, gpu=gpu)
    return mlir.lower_fun(apart, multiple_results=False)(ctx, *operands)


def _jvp(primals: Any, tangents: Any, *, call: SumCall, **_: Any) -> tuple[Any, Any]:
    each = call.each
    plain = each.plain(jnp.float32, each.epilogue.alpha)
    terms = []
    for (a, b), (da, db) in zip(
        call.pairs(primals), call.pairs(linear.changes(tangents)), strict=True
    ):
        of_left = [] if da is None else [product_of_matrices(plain, da, b)]
        given, moved = Operands(a, b), Operands(da, db)
        terms += linear.affine_change(each, of_matrices(each, 2, 2), given, moved, of_left)
    result = linear.named(sum_of_products(call, *primals))
    return result, linear.rounded_sum(terms, result)


def _transpose(cotangent: Any, *operands: Any, call: SumCall, **_: Any) -> list[Any]:
    """Returns the cotangents of the operands that are missing, and None for the others."""
    return [
        gradient
        for pair in call.pairs(operands)
        for gradient in linear.gradients_of_factors(
            cotangent, pair, call.each, of_matrices(call.each, 2, 2)
        )
    ]


def _batch(
    operands: tuple[Any, ...], dims: tuple[Any, ...], *, call: SumCall, **_: Any
) -> tuple[jax.Array, int]:
    """Maps it: more rows of each product where only left operands are mapped."""
    if call.transpose_a or None in dims[::2] or set(dims[1::2]) != {None}:
        return jax.vmap(functools.partial(one_by_one, call), dims)(*operands), 0
    lefts = [jnp.moveaxis(x, d, 0) for x, d in zip(operands[::2], dims[::2], strict=True)]
    folded = [lax.collapse(x, 0, 2) for x in lefts]
    pairs = zip(folded, operands[1::2], strict=True)
    result = sum_of_products(call, *(x for pair in pairs for x in pair))
    return result.reshape(*lefts[0].shape[:2], result.shape[-1]), 0


run_as_jax_does(sum_p)
ad.primitive_jvps[sum_p] = _jvp
ad.primitive_transposes[sum_p] = _transpose
batching.primitive_batchers[sum_p] = _batch
mlir.register_lowering(sum_p, functools.partial(_lowered, gpu=False))
mlir.register_lowering(sum_p, functools.partial(_lowered, gpu=True), platform="cuda")
