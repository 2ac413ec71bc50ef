"""The product by XLA: the same semantics as the kernels, on every device.

The sum is kept in float32 (int32 for integers), the epilogue follows in float32, and one rounding
ends it. Without an epilogue it is a single `lax.dot_general` whose result XLA rounds itself.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gemm.planning.call import Call, Operands, SumCall
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


def sum_of_products(call: SumCall, *operands: jax.Array) -> jax.Array:
    """Computes a sum's result from its operands."""
    wide = wide_dtype(operands[0].dtype, operands[1].dtype, call.out_dtype)
    products = [dot(call, a, b, wide) for a, b in call.pairs(operands)]
    total = functools.reduce(operator.add, products)
    return finish(call.epilogue, [total], Operands(None, None)).astype(call.out_dtype)


def finish(epilogue: Epilogue, sums: list[jax.Array], given: Operands) -> jax.Array:
    """Applies an epilogue in float32 (float64 where the sums are) and does not round."""
    wide = np.dtype(np.float64 if sums[0].dtype == np.float64 else np.float32)
    scaled = [total.astype(wide) * wide.type(epilogue.alpha) for total in sums]
    result = scaled[0]
    if given.bias is not None:
        result = result + align_bias(given.bias.astype(wide), result.ndim)
    if epilogue.activation is not None:
        result = epilogue.activation(result)
    if epilogue.gated:
        result = result * scaled[1]
    if given.residual is not None:
        residual = given.residual.astype(wide) * wide.type(epilogue.beta)
        # One that a batch shares has a dimension less.
        result = result + lax.expand_dims(residual, range(result.ndim - residual.ndim))
    return result


def align_bias(bias: jax.Array, ndim: int) -> jax.Array:
    """Gives a bias, `[n]`, `[batch, n]` or what has them, the dimensions of a result."""
    if bias.ndim == ndim:
        return bias
    if bias.ndim == 2:
        return bias[:, None, :]
    return lax.expand_dims(bias, tuple(range(ndim - 1)))


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
    result = lax.dot_general(
        a,
        b,
        (((contract_a,), (contract_b,)), batch),
        precision=precision,
        preferred_element_type=out_dtype,
    )
    return jnp.swapaxes(result, 1, 2) if shared else result
