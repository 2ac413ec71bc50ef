"""Derivatives of the product, in both modes and of any order: made of the product itself.

Both right operands of a gated product have one left operand, so its gradient is that of
`projections`. What the derivative of an activation needs follows one rule:

- without an activation, nothing;
- of `relu` (without a residual), the result: its sign tells where the derivative is one;
- of any other, and of gated products, the pre-activation. The product is then computed without the
  activation, the pre-activation is rounded to the result's type (to bfloat16 for results of 8 bits)
  and kept under the name that `jax.checkpoint` knows results by, and XLA applies the activation
  and the residual in float32. So under differentiation, and only there, such a result is rounded
  twice, and one more pass over it is made. Computing the pre-activation again would cost a third of
  the backward pass; the elementwise part after it is computed again, and nothing of it is kept.
"""

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from pallas_gemm.op import linear
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.product import product, product_p
from pallas_gemm.op.projections import projections
from pallas_gemm.planning import xla
from pallas_gemm.planning.call import Call, Operands
from pallas_gemm.problem import Epilogue


def _jvp(
    primals: Any, tangents: Any, *, call: Call, contraction: Contraction, **_: Any
) -> tuple[Any, Any]:
    given, moved = call.unpack(primals), call.unpack(linear.changes(tangents))
    if needs_pre_activation(call.epilogue):
        of_left = _left_change(pre_activation(call), contraction, given, moved)
        pairs = []
        for i, (before, own, change) in enumerate(pre_activations(call, given, moved)):
            total = linear.named(product(before, contraction, *own.present()))
            terms = linear.affine_change(before, contraction, own, change, of_left[i : i + 1])
            pairs.append((total, linear.rounded_sum(terms, total)))
        given, moved = contraction.aligned(given), contraction.aligned(moved)
        return after_activation(call, pairs, given, moved)
    result = linear.named(product(call, contraction, *primals))
    change = change_without_activation(call, contraction, given, moved)
    if call.epilogue.activation is not None:
        change = jnp.where(result > 0, change, jnp.zeros_like(change))
    return result, change


def needs_pre_activation(epilogue: Epilogue) -> bool:
    """Whether the derivative asks for more than the result."""
    if epilogue.activation is jax.nn.relu:
        return epilogue.gated or epilogue.residual
    return epilogue.activation is not None or epilogue.gated


def change_without_activation(
    call: Call, contraction: Contraction, given: Operands, moved: Operands
) -> jax.Array:
    """Returns how a product changes with its operands, of which one does, before an activation."""
    of_left = _left_change(call, contraction, given, moved)
    terms = linear.affine_change(call, contraction, given, moved, of_left)
    if moved.residual is not None:
        residual = contraction.aligned(moved).residual.astype(jnp.float32)
        residual = residual * jnp.float32(call.epilogue.beta)
        terms.append(jnp.broadcast_to(residual, contraction.shape(given.a.shape, given.b.shape)))
    return functools.reduce(operator.add, terms).astype(call.out_dtype)


def pre_activation(call: Call) -> Call:
    """Returns the call for what an activation is applied to."""
    epilogue = Epilogue(alpha=call.epilogue.alpha, bias=call.epilogue.bias)
    return dataclasses.replace(call, out_dtype=linear.kept_dtype(call.out_dtype), epilogue=epilogue)


def pre_activations(
    call: Call, given: Operands, moved: Operands
) -> list[tuple[Call, Operands, Operands]]:
    """Returns the one or two products that come before an activation: operands and changes."""
    before = pre_activation(call)
    return [
        (before, Operands(given.a, b, bias=given.bias), Operands(moved.a, db, bias=moved.bias))
        for b, db in ((given.b, moved.b), (given.up, moved.up))
        if b is not None
    ]


def after_activation(
    call: Call, pairs: list[tuple[jax.Array, jax.Array]], given: Operands, moved: Operands
) -> tuple[Any, Any]:
    """Returns a result and its change from those of what the activation is applied to."""
    epilogue = call.epilogue
    after = Epilogue(beta=epilogue.beta, activation=epilogue.activation, gated=epilogue.gated)
    sums = [total for total, _ in pairs]
    # Otherwise XLA keeps its cotangent in float32 for the gradient of the bias, and writes and
    # reads twice as much.
    changes = [lax.optimization_barrier(change) for _, change in pairs]

    # So that reverse mode keeps the pre-activations alone: else each layer of a scan, and XLA for
    # a `tanh`, keep arrays of float32 besides.
    @jax.checkpoint
    def finish(sums: list[jax.Array], residual: jax.Array | None) -> jax.Array:
        result = xla.finish(after, sums, Operands(None, None, residual=residual))
        return result.astype(call.out_dtype)

    residual_change = moved.residual
    if given.residual is not None and residual_change is None:
        residual_change = jnp.zeros_like(given.residual)
    return jax.jvp(finish, (sums, given.residual), (changes, residual_change))


def _left_change(
    call: Call, contraction: Contraction, given: Operands, moved: Operands
) -> list[jax.Array]:
    """Returns, in float32, what the left operand changes of `alpha * (a @ b)` for each b."""
    if moved.a is None:
        return []
    # In reverse mode the type of the terms costs nothing: only their transposes are computed.
    plain = call.plain(np.float32, call.epilogue.alpha)
    rights = [(b,) for b in (given.b, given.up) if b is not None]
    return projections(plain, [contraction] * len(rights), moved.a, rights)


def _transpose(
    cotangent: Any, *operands: Any, call: Call, contraction: Contraction, **_: Any
) -> list[Any]:
    """Returns the cotangent of the factor that is missing, and None for the other."""
    return linear.gradients_of_factors(cotangent, operands, call, contraction)


ad.primitive_jvps[product_p] = _jvp
ad.primitive_transposes[product_p] = _transpose
