"""The product by XLA: the same semantics as the kernels, on every device.

The sum is kept in float32 (int32 for integers), the epilogue follows in float32, and one rounding
ends it. Without an epilogue it is a single `lax.dot_general` whose result XLA rounds itself.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import dot_general

from pallas_gemm.call import DIMENSIONS, Call, Operands
from pallas_gemm.problem import Epilogue


def product(call: Call, *operands: jax.Array) -> jax.Array:
    """Computes a call's result from its operands."""
    given = call.unpack(operands)
    wide = wide_dtype(given.a.dtype, given.b.dtype, call.out_dtype)
    if call.epilogue.is_identity:
        return dot(call, given.a, given.b, call.out_dtype)
    sums = [dot(call, given.a, b, wide) for b in (given.b, given.up) if b is not None]
    result = finish(call.epilogue, sums, given)
    return result.astype(call.out_dtype)


def finish(epilogue: Epilogue, sums: Sequence[jax.Array], given: Operands) -> jax.Array:
    """Applies an epilogue in float32 (float64 where the sums are) and does not round."""
    wide = np.dtype(np.float64 if sums[0].dtype == np.float64 else np.float32)
    ndim = sums[0].ndim
    values = []
    for total, scale, bias in zip(sums, SCALES_OF_COLUMNS, BIASES, strict=False):
        value = total.astype(wide)
        if epilogue.alpha is not None:
            value = value * wide.type(epilogue.alpha)
        for name in ("alpha", "row_scale", scale):
            if (factor := getattr(given, name)) is not None:
                value = value * aligned(name, factor.astype(wide), ndim)
        if (summand := getattr(given, bias)) is not None:
            value = value + aligned(bias, summand.astype(wide), ndim)
        values.append(value)
    result = values[0]
    if epilogue.activation is not None:
        result = epilogue.activation(result)
    if epilogue.gated:
        result = result * values[1]
    if given.residual is not None:
        residual = aligned("residual", given.residual.astype(wide), ndim)
        if epilogue.beta is None:
            residual = residual * aligned("beta", given.beta.astype(wide), ndim)
        else:
            residual = residual * wide.type(epilogue.beta)
        result = result + residual
    return result


SCALES_OF_COLUMNS = ("col_scale", "up_scale")
BIASES = ("bias", "up_bias")
"""Both sums, the gate's first."""


def aligned(name: str, x: jax.Array, ndim: int) -> jax.Array:
    """Gives an operand of the epilogue the dimensions of a result, of size 1 where it has none.

    Args:
        name: Which operand.
        x: The operand; what it has in front belongs to what the result has in front. It stays as
            it is if it has as many dimensions as the result.
        ndim: Dimensions of the result; with one, it is a row.
    """
    if x.ndim == ndim:
        return x
    missing = [letter for letter in "mn"[max(0, 2 - ndim) :] if letter not in DIMENSIONS[name]]
    whole = x.ndim + len(missing)
    x = lax.expand_dims(x, [whole - len("mn") + "mn".index(letter) for letter in missing])
    return lax.expand_dims(x, range(ndim - whole))


def wide_dtype(a_dtype: Any, b_dtype: Any, out_dtype: Any) -> np.dtype:
    """The type that sums are kept in: float32, int32 for integers, float64 for float64."""
    if jnp.issubdtype(a_dtype, jnp.integer) and jnp.issubdtype(b_dtype, jnp.integer):
        return np.dtype(np.int32)
    any_wide = jnp.float64 in (a_dtype, b_dtype, out_dtype)
    return np.dtype(np.float64 if any_wide else np.float32)


def dot(call: Call, a: jax.Array, b: jax.Array, out_dtype: Any) -> jax.Array:
    """Multiplies as `call` says the operands are stored; an operand of two dimensions is shared."""
    contract_a = a.ndim - 2 if call.transpose_a else a.ndim - 1
    contract_b = b.ndim - 1 if call.transpose_b else b.ndim - 2
    precision = call.precision
    shared = a.ndim < b.ndim
    if shared:
        # The batch comes out in front if its operand stands in front; the CPU backend of XLA, which
        # multiplies bfloat16 to float32, also takes no transposed left operand of this kind.
        a, b, contract_a, contract_b = b, a, contract_b, contract_a
        precision = precision[::-1] if isinstance(precision, tuple) else precision
    both = a.ndim == b.ndim == 3
    batch = ((0,), (0,)) if both else ((), ())
    result = dot_general(
        a,
        b,
        (((contract_a,), (contract_b,)), batch),
        precision=precision,
        preferred_element_type=out_dtype,
    )
    return jnp.swapaxes(result, 1, 2) if shared else result
