"""A product whose result is symmetric as one primitive, because a kernel can compute half of it.

    x @ x.T                  the Gram matrix of rows; its operands are x and x
    a @ b                    of two symmetric matrices that commute

Where no kernel computes half of the result, all of it is computed, and the elements above the
diagonal are replaced by those below. In a Gram matrix that a kernel of ours computes, they are the
same. On a mesh of several devices it stays as it is.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.interpreters import mlir

from pallas_gemm.call import DIMENSIONS, Operands, SymmetricCall, signature_of
from pallas_gemm.op import linear, lowering
from pallas_gemm.op.contraction import of_matrices
from pallas_gemm.op.mesh import mesh_context
from pallas_gemm.op.product import (
    computed_by,
    give_rules,
    lower_by,
    product,
    product_of_matrices,
)
from pallas_gemm.planning import dispatch
from pallas_gemm.planning.by_xla import xla

symmetric_p = core.Primitive("pallas_gemm_symmetric")


def symmetric(call: SymmetricCall, *operands: jax.Array) -> jax.Array:
    """Computes what `call` says from matrices, or batches of them, in the order of `Operands`."""
    return computed_by(symmetric_p, call, operands, call=call)


def mirrored(x: jax.Array) -> jax.Array:
    """Returns a matrix, or several, with what is below the diagonal above it, too."""
    row, col = (lax.broadcasted_iota(np.int32, x.shape, x.ndim - 2 + axis) for axis in (0, 1))
    return jnp.where(row >= col, x, jnp.swapaxes(x, -1, -2))


@symmetric_p.def_effectful_abstract_eval
def _abstract(*avals: Any, call: SymmetricCall, **_: Any) -> Any:
    result = lowering.types_by(avals, xla.product, call.whole)[0]
    return result, lowering.effects(call, signature_of(avals))


def _lowered(
    ctx: mlir.LoweringRuleContext, *operands: Any, call: SymmetricCall, gpu: bool, **_: Any
) -> Any:
    if not mesh_context.is_one_devices(ctx.module_context.axis_context):
        whole = functools.partial(product_of_matrices, call.whole)
        return mlir.lower_fun(whole, multiple_results=False)(ctx, *operands)
    own, signature = lowering.planned(call, gpu), signature_of(ctx.avals_in)
    decision = dispatch.decide(own, signature)
    if decision.plan is not None:
        half = lowering.bound(lowering.kernel_p, own, decision)
        return mesh_context.lower_off_mesh(ctx, half, operands)
    every = call.whole.with_target(own.options.target)
    kernel = lowering.kernel_of(every, signature)
    compute = kernel or functools.partial(xla.product, every)

    def run(*operands: Any) -> Any:
        result = compute(*operands)
        # Kernels add up in one order wherever an element is, XLA's need not.
        return result if kernel and call.symmetric == "gram" else mirrored(result)

    return mesh_context.lower_off_mesh(ctx, run, operands)


def _jvp(primals: Any, tangents: Any, *, call: SymmetricCall, **_: Any) -> tuple[Any, Any]:
    given, moved = call.unpack(primals), call.unpack(linear.changes(tangents))
    whole = call.whole
    if call.symmetric == "product":
        # Symmetric as it is, the right operand is stored either way; how it changes may not be.
        whole = dataclasses.replace(whole, transpose_b=False)
    contraction = of_matrices(whole, *(x.ndim for x in primals))
    result = linear.named(symmetric(call, *primals))
    of_left = []
    if moved.a is not None:
        plain = whole.plain(np.float32, call.epilogue.alpha)
        of_left = [product(plain, contraction, moved.a, given.b)]
    if call.symmetric == "gram":
        # Both operands change alike, so that one term is the other transposed: in reverse mode one
        # product with `g + g.T`.
        of_left += [jnp.swapaxes(term, -1, -2) for term in of_left]
        moved = moved._replace(b=None)
    terms = linear.affine_change(whole, contraction, given, moved, of_left)
    ready, change = contraction.aligned(given), contraction.aligned(moved)
    if moved.alpha is not None:
        sums = symmetric(call.sums(np.float32), given.a, given.b)
        terms.append(sums * change.alpha.astype(np.float32))
    terms += linear.residual_change(call.epilogue, ready, change)
    return result, linear.rounded_sum(terms, result)


def _batch(
    operands: tuple[Any, ...], dims: tuple[Any, ...], *, call: SymmetricCall, **_: Any
) -> tuple[jax.Array, int]:
    """Maps it: a longer batch; what is not mapped is repeated only where it has to be."""
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    given, mapped = call.unpack(operands), call.unpack(dims)
    own = {name: getattr(given, name) for name in given._fields if getattr(given, name) is not None}
    inner = {
        name: x.ndim - (getattr(mapped, name) is not None) > len(DIMENSIONS[name])
        for name, x in own.items()
    }
    # What is mapped stands in front of the batch, or behind it.
    sizes = (x.shape[getattr(mapped, name) == 0] for name, x in own.items() if inner[name])
    batch = next(sizes, 1)
    # Of a batch, at least one factor has its own; both of a "gram" are one array.
    none = (mapped.a, mapped.b) == (None, None)
    ready = {}
    for name, x in own.items():
        dim = getattr(mapped, name)
        is_shared = dim is None and not inner[name] and not (none and name in ("a", "b"))
        ready[name] = x if is_shared else _in_batch(x, dim, size, batch, inner=inner[name])
    result = symmetric(call, *Operands(**{"a": None, "b": None} | ready).present())
    return result.reshape(size, *(batch,) * any(inner.values()), *result.shape[-2:]), 0


def _in_batch(x: Any, dim: int | None, size: int, batch: int, *, inner: bool) -> jax.Array:
    """Returns an operand with one dimension in front for what is mapped and the batch."""
    x = x[None] if dim is None else jnp.moveaxis(x, dim, 0)
    x = x if inner else x[:, None]
    return jnp.broadcast_to(x, (size, batch, *x.shape[2:])).reshape(size * batch, *x.shape[2:])


give_rules(symmetric_p, jvp=_jvp, batch=_batch)
lower_by(symmetric_p, _lowered)
