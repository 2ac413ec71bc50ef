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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from pallas_gemm.op import linear
from pallas_gemm.op.product import product, product_p
from pallas_gemm.op.projections import projections
from pallas_gemm.planning import xla
from pallas_gemm.planning.call import Call, Operands
from pallas_gemm.problem import Epilogue


def _jvp(primals: Any, tangents: Any, *, call: Call, **_: Any) -> tuple[Any, Any]:
    given, moved = call.unpack(primals), call.unpack(linear.changes(tangents))
    epilogue = call.epilogue
    if epilogue.activation is None and not epilogue.gated:
        result = linear.named(product(call, *primals))
        change = linear.affine_change(call, given, moved, _left_change(call, given, moved))
        if moved.residual is not None:
            change.append(moved.residual.astype(jnp.float32) * jnp.float32(epilogue.beta))
        return result, linear.rounded_sum(change, result)
    if epilogue.activation is jax.nn.relu and not (epilogue.gated or epilogue.residual):
        result = linear.named(product(call, *primals))
        terms = linear.affine_change(call, given, moved, _left_change(call, given, moved))
        change = linear.rounded_sum(terms, result)
        return result, jnp.where(result > 0, change, jnp.zeros_like(change))
    return _through_activation(call, given, moved)


def _through_activation(call: Call, given: Operands, moved: Operands) -> tuple[Any, Any]:
    """Derives a product through its pre-activations."""
    epilogue = call.epilogue
    kept = linear.kept_dtype(call.out_dtype)
    before = dataclasses.replace(
        call, out_dtype=kept, epilogue=Epilogue(alpha=epilogue.alpha, bias=epilogue.bias)
    )
    after = Epilogue(beta=epilogue.beta, activation=epilogue.activation, gated=epilogue.gated)
    sums, changes = [], []
    of_left = _left_change(before, given, moved)
    for b, db, change in ((given.b, moved.b, of_left[:1]), (given.up, moved.up, of_left[1:])):
        if b is not None:
            own = Operands(given.a, b, bias=given.bias)
            total = linear.named(product(before, *own.present()))
            terms = linear.affine_change(before, own, moved._replace(b=db), change)
            sums.append(total)
            # Otherwise XLA keeps its cotangent in float32 for the gradient of the bias, and writes
            # and reads twice as much.
            changes.append(lax.optimization_barrier(linear.rounded_sum(terms, total)))

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


def _left_change(call: Call, given: Operands, moved: Operands) -> list[jax.Array]:
    """Returns, in float32, what the left operand changes of `alpha * (a @ b)` for each b."""
    if moved.a is None:
        return []
    # In reverse mode the type of the terms costs nothing: only their transposes are computed.
    plain = call.plain(np.float32, call.epilogue.alpha)
    return projections(plain, moved.a, [(b,) for b in (given.b, given.up) if b is not None])


def _transpose(cotangent: Any, *operands: Any, call: Call, **_: Any) -> list[Any]:
    """Returns the cotangent of the factor that is missing, and None for the other."""
    return linear.gradients_of_factors(cotangent, operands, call)


ad.primitive_jvps[product_p] = _jvp
ad.primitive_transposes[product_p] = _transpose
