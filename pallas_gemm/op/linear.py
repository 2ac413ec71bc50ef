"""How a product changes with its factors, and the gradient of a factor.

For `a @ b` the gradients are `g @ b.T` and `a.T @ g`. Both are computed in the layout in which the
operand is stored, from operands as they are stored, so that nothing is transposed in memory. The
cotangent `g` is rounded to the type of the operand that it is multiplied with (float32 cotangents
of bfloat16 operands to bfloat16), because there is no kernel for mixed types; operands of 8 bits
are widened to bfloat16 instead, which is exact.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad

from pallas_gemm.op import canonical
from pallas_gemm.op.product import product
from pallas_gemm.planning import xla
from pallas_gemm.planning.call import OUT_NAME, Call, Operands
from pallas_gemm.problem import Epilogue


def changes(tangents: Sequence[Any]) -> list[Any]:
    """Returns tangents with None for each that is zero."""
    return [None if isinstance(t, ad.Zero) else t for t in tangents]


def named(result: jax.Array) -> jax.Array:
    """Names a result, which a policy of `jax.checkpoint` may then keep."""
    return checkpoint_name(result, OUT_NAME)


def affine_change(
    call: Call, given: Operands, moved: Operands, of_left: Sequence[jax.Array]
) -> list[jax.Array]:
    """Returns the terms, in float32, of the change of `alpha * (a @ b) + bias`.

    Args:
        call: The product.
        given: Its operands.
        moved: How they change.
        of_left: The term that the left operand changes, if it does.
    """
    plain = call.plain(np.float32, call.epilogue.alpha)
    terms = list(of_left)
    if moved.b is not None:
        terms.append(product(plain, given.a, moved.b))
    if moved.bias is not None:
        shape = result_shape(call, given)
        bias = xla.align_bias(moved.bias.astype(jnp.float32), len(shape))
        terms.append(jnp.broadcast_to(bias, shape))
    return terms


def result_shape(call: Call, given: Operands) -> tuple[int, ...]:
    """Returns the shape of a product of these operands."""
    batch: tuple[int, ...] = max(given.a.shape[:-2], given.b.shape[:-2], key=len)
    return (*batch, *call.matrix_shape(given.a.shape, given.b.shape))


def rounded_sum(terms: list[jax.Array], like: jax.Array) -> Any:
    """Adds up terms of a change, rounds the sum to the type of a result; without terms it is 0."""
    if not terms:
        return jnp.zeros_like(like)
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total.astype(like.dtype)


def kept_dtype(out_dtype: Any) -> np.dtype:
    """The type in which pre-activations are kept: the result's, but not of 8 bits."""
    dtype = np.dtype(out_dtype)
    return np.dtype(jnp.bfloat16) if dtype.itemsize == 1 else dtype


def check_linear(call: Call, missing: int) -> None:
    """Refuses to transpose what is not linear, or not in all operands that are missing."""
    if call.epilogue != Epilogue(alpha=call.epilogue.alpha) or missing > 1:
        raise NotImplementedError(
            "only a product without bias, residual and activation is linear, and only in one of its"
            " operands"
        )


def gradients_of_factors(cotangent: Any, operands: Sequence[Any], call: Call) -> list[Any]:
    """Returns the cotangent of the factor of a product that is missing, and None for the other."""
    missing = [ad.is_undefined_primal(x) for x in operands]
    check_linear(call, sum(missing))
    a, b = operands
    return [
        gradient(call, cotangent, other, x.aval, left=x is a) if is_missing else None
        for x, other, is_missing in zip((a, b), (b, a), missing, strict=True)
    ]


def gradient(call: Call, cotangent: Any, other: jax.Array, wanted: Any, *, left: bool) -> Any:
    """Returns the gradient of a factor.

    Args:
        call: The product: one with nothing but a scale.
        cotangent: That of its result.
        other: The other factor.
        wanted: The type of the gradient.
        left: It is that of the left factor.
    """
    if isinstance(cotangent, ad.Zero):
        return ad.Zero(wanted)
    g, other = for_gradient(cotangent, other)
    if wanted.ndim < g.ndim:
        plain = call.plain(kept_dtype(wanted.dtype), call.epilogue.alpha)
        return _summed_over_batch(plain, g, other, left).astype(wanted.dtype)
    plain, swap = gradient_call(call, wanted, left=left)
    return product(plain, *((other, g) if swap else (g, other))).astype(wanted.dtype)


def for_gradient(g: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a cotangent and an operand in a type that both can be multiplied in."""
    wide = other.astype(jnp.bfloat16) if other.dtype.itemsize == 1 else other
    return g.astype(wide.dtype), wide


def gradient_call(call: Call, wanted: Any, *, left: bool) -> tuple[Call, bool]:
    """Returns the product that is a factor's gradient, and whether the other factor comes first."""
    # The stored gradient is g times other, or the other way round where it is transposed.
    if left:
        swap = call.transpose_a
        flags = (call.transpose_b, True) if swap else (False, not call.transpose_b)
    else:
        swap = not call.transpose_b
        flags = (not call.transpose_a, False) if swap else (True, call.transpose_a)
    plain = call.plain(kept_dtype(wanted.dtype), call.epilogue.alpha)
    return dataclasses.replace(plain, transpose_a=flags[0], transpose_b=flags[1]), swap


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
