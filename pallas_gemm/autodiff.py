"""Derivatives of the product, in both modes and of any order: made of the product itself.

For `a @ b` the gradients are `g @ b.T` and `a.T @ g`. Both are computed in the layout in which the
operand is stored, from operands as they are stored, so that nothing is transposed in memory. The
cotangent `g` is rounded to the type of the operand that it is multiplied with (float32 cotangents
of bfloat16 operands to bfloat16), because there is no kernel for mixed types; operands of 8 bits
are widened to bfloat16 instead, which is exact.

What the derivative of an activation needs follows one rule:

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
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad

from pallas_gemm import canonical
from pallas_gemm.call import OUT_NAME, Call, Operands
from pallas_gemm.kernels import xla
from pallas_gemm.problem import Epilogue
from pallas_gemm.product import product, product_p


def _jvp(primals: Any, tangents: Any, *, call: Call, **_: Any) -> tuple[Any, Any]:
    given = call.unpack(primals)
    moved = call.unpack([None if isinstance(t, ad.Zero) else t for t in tangents])
    epilogue = call.epilogue
    if epilogue.activation is None and not epilogue.gated:
        result = _named(call, *primals)
        change = _affine_change(call, given, moved, given.b, moved.b)
        if moved.residual is not None:
            change.append(moved.residual.astype(jnp.float32) * jnp.float32(epilogue.beta))
        return result, _rounded_sum(change, result)
    if epilogue.activation is jax.nn.relu and not (epilogue.gated or epilogue.residual):
        result = _named(call, *primals)
        change = _rounded_sum(_affine_change(call, given, moved, given.b, moved.b), result)
        return result, jnp.where(result > 0, change, jnp.zeros_like(change))
    return _through_activation(call, given, moved)


def _named(call: Call, *operands: Any) -> Any:
    """Computes a product whose result a policy of `jax.checkpoint` may keep."""
    return checkpoint_name(product(call, *operands), OUT_NAME)


def _through_activation(call: Call, given: Operands, moved: Operands) -> tuple[Any, Any]:
    """Derives a product through its pre-activations."""
    epilogue = call.epilogue
    kept = kept_dtype(call.out_dtype)
    before = dataclasses.replace(
        call, out_dtype=kept, epilogue=Epilogue(alpha=epilogue.alpha, bias=epilogue.bias)
    )
    after = Epilogue(beta=epilogue.beta, activation=epilogue.activation, gated=epilogue.gated)
    sums, changes = [], []
    for b, db in ((given.b, moved.b), (given.up, moved.up)):
        if b is not None:
            operands = Operands(given.a, b, bias=given.bias)
            total = _named(before, *operands.present())
            terms = _affine_change(before, given, moved, b, db)
            change = _rounded_sum(terms, total) if terms else jnp.zeros_like(total)
            sums.append(total)
            # Otherwise XLA keeps its cotangent in float32 for the gradient of the bias, and writes
            # and reads twice as much.
            changes.append(lax.optimization_barrier(change))

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


def _affine_change(
    call: Call, given: Operands, moved: Operands, b: jax.Array, db: jax.Array | None
) -> list[jax.Array]:
    """Returns the terms, in float32, of the change of `alpha * (a @ b) + bias`."""
    # In reverse mode the type of the terms costs nothing: only their transposes are computed.
    plain = call.plain(np.float32, call.epilogue.alpha)
    pairs = [(moved.a, b), (given.a, db)]
    terms = [product(plain, x, y) for x, y in pairs if x is not None and y is not None]
    if moved.bias is not None:
        batch = max(given.a.shape[:-2], b.shape[:-2], key=len)
        shape = (*batch, *call.matrix_shape(given.a.shape, b.shape))
        bias = xla.align_bias(moved.bias.astype(jnp.float32), len(shape))
        terms.append(jnp.broadcast_to(bias, shape))
    return terms


def _rounded_sum(terms: list[jax.Array], like: jax.Array) -> Any:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total.astype(like.dtype)


def kept_dtype(out_dtype: Any) -> np.dtype:
    """The type in which pre-activations are kept: the result's, but not of 8 bits."""
    dtype = np.dtype(out_dtype)
    return np.dtype(jnp.bfloat16) if dtype.itemsize == 1 else dtype


def _transpose(cotangent: Any, *operands: Any, call: Call, **_: Any) -> list[Any]:
    """Returns the cotangent of the operand that is missing, and None for the others."""
    missing = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
    if call.epilogue != Epilogue(alpha=call.epilogue.alpha) or len(missing) != 1:
        raise NotImplementedError(
            "only a product without bias, residual and activation is linear, and only in one of its"
            " operands"
        )
    wanted = operands[missing[0]].aval
    if isinstance(cotangent, ad.Zero):
        gradient: Any = ad.Zero(wanted)
    else:
        gradient = _gradient(call, cotangent, operands[1 - missing[0]], wanted, missing[0] == 0)
    return [gradient if i in missing else None for i in range(len(operands))]


def _gradient(call: Call, g: jax.Array, other: jax.Array, wanted: Any, left: bool) -> jax.Array:
    """Returns the gradient of one operand, from the cotangent and the other operand.

    Args:
        call: The product, with nothing but a scale.
        g: The cotangent of its result.
        other: The other operand.
        wanted: The type of the gradient.
        left: It is that of the left operand.
    """
    narrow = other.dtype.itemsize == 1
    other = other.astype(jnp.bfloat16) if narrow else other
    g = g.astype(other.dtype)
    plain = call.plain(kept_dtype(wanted.dtype), call.epilogue.alpha)
    if wanted.ndim < g.ndim:
        result = _summed_over_batch(plain, g, other, left)
    else:
        # The stored gradient is g times other, or the other way round where it is transposed.
        if left:
            swap = call.transpose_a
            flags = (call.transpose_b, True) if swap else (False, not call.transpose_b)
        else:
            swap = not call.transpose_b
            flags = (not call.transpose_a, False) if swap else (True, call.transpose_a)
        plain = dataclasses.replace(plain, transpose_a=flags[0], transpose_b=flags[1])
        result = product(plain, *((other, g) if swap else (g, other)))
    return result.astype(wanted.dtype)


def _summed_over_batch(plain: Call, g: jax.Array, other: jax.Array, left: bool) -> jax.Array:
    """Returns the gradient of an operand that the whole batch shares: one longer contraction."""
    if left:
        # g is [batch, m, n], other holds batch, k and n.
        g_dims, other_dims = (0, 2), (0, 1 if plain.transpose_b else 2)
        g_first = not plain.transpose_a
    else:
        g_dims, other_dims = (0, 1), (0, 2 if plain.transpose_a else 1)
        g_first = plain.transpose_b
    sides = ((g, g_dims), (other, other_dims))
    (lhs, lhs_dims), (rhs, rhs_dims) = sides if g_first else sides[::-1]
    numbers = ((lhs_dims, rhs_dims), ((), ()))
    form = canonical.of_dot_general(lhs.shape, rhs.shape, numbers)
    sizes = tuple(lhs.shape[dim] for dim in lhs_dims)
    call = dataclasses.replace(
        plain,
        transpose_a=form.a.transposed,
        transpose_b=form.b.transposed,
        contracted=(sizes[0], sizes[1]),
    )
    return product(call, *form.factors(lhs, rhs)).reshape(form.shape)


ad.primitive_jvps[product_p] = _jvp
ad.primitive_transposes[product_p] = _transpose
