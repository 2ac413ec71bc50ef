"""The product by XLA: the same semantics as the kernels, on every device.

The sum is kept in float32 (int32 for integers), the epilogue follows in float32, and one rounding
ends it. Without an epilogue it is a single `lax.dot_general` whose result XLA rounds itself.

Where blocks of the factors have scales, both factors are scaled in float32 and then multiplied.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gemm.call import DIMENSIONS, Call, Operands
from pallas_gemm.kernels.element_types import FLOATS_16, is_widened
from pallas_gemm.planning.by_xla.precise import dot_general
from pallas_gemm.problem import VALUES, Epilogue

TF32_BITS = 10
"""Bits that a number of TF32 has after its first one."""


def product(call: Call, *operands: jax.Array) -> jax.Array:
    """Computes a call's result from its operands."""
    given = call.unpack(operands)
    if call.epilogue.blocks:
        call, given = without_blocks(call, given)
    else:
        given = widened(given)
        if call.epilogue.is_identity:
            return dot(call, given.a, given.b, call.out_dtype)
    wide = wide_dtype(given.a.dtype, given.b.dtype, call.out_dtype)
    sums = [dot(call, given.a, b, wide) for b in (given.b, given.up) if b is not None]
    result = finish(call.epilogue, sums, given)
    return result.astype(call.out_dtype)


def finish(epilogue: Epilogue, sums: Sequence[jax.Array], given: Operands) -> jax.Array:
    """Applies an epilogue in float32 (float64 where the sums are) and does not round."""
    wide = np.dtype(np.float64 if sums[0].dtype == np.float64 else np.float32)
    ndim = sums[0].ndim
    values = []
    for total, (*scales, bias) in zip(sums, VALUES, strict=False):
        value = total.astype(wide)
        if epilogue.alpha is not None:
            value = value * wide.type(epilogue.alpha)
        for name in scales:
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


def aligned(name: str, x: jax.Array, ndim: int) -> jax.Array:
    """Gives an operand of the epilogue the dimensions of a result, of size 1 where it has none.

    Args:
        name: Which operand.
        x: The operand; what it has in front belongs to what the result has in front. It stays as it
            is if it has all dimensions of the result.
        ndim: Dimensions of the result; with one, it is a row.
    """
    if x.ndim == ndim:
        return x
    missing = [letter for letter in "mn"[max(0, 2 - ndim) :] if letter not in DIMENSIONS[name]]
    whole = x.ndim + len(missing)
    x = lax.expand_dims(x, [whole - len("mn") + "mn".index(letter) for letter in missing])
    return lax.expand_dims(x, range(ndim - whole))


def widened(given: Operands) -> Operands:
    """Returns operands with weights of few bits in the type of the left one, which holds them."""
    if not is_widened(given.a.dtype, given.b.dtype):
        return given
    up = None if given.up is None else given.up.astype(given.a.dtype)
    return given._replace(b=given.b.astype(given.a.dtype), up=up)


def without_blocks[C: Call](call: C, given: Operands) -> tuple[C, Operands]:
    """Returns the call for factors whose blocks are scaled, and its operands: matrices."""

    def spread(name: str, value: jax.Array, x: jax.Array) -> jax.Array:
        if call.transpose_a if name == "row_blocks" else call.transpose_b:
            value = jnp.swapaxes(value, -1, -2)
        for axis in (-2, -1):
            # Sizes that are symbols may be equal, and are compared to nothing else.
            if (size := x.shape[axis]) != value.shape[axis]:
                value = jnp.repeat(value, size // max(1, value.shape[axis]), axis)
        return lax.expand_dims(value, range(x.ndim - value.ndim)).astype(x.dtype)

    return scaled_factors(call, given, spread)


def scaled_factors[C: Call](
    call: C, given: Operands, spread: Callable[[str, jax.Array, jax.Array], jax.Array]
) -> tuple[C, Operands]:
    """Returns the call for factors that are scaled, and its operands.

    For a result of 16 bits they are rounded to TF32, which it hardly shows, and which tensor cores
    take: they would cut off the rest. All others are multiplied as they are. Weights beside a left
    operand of 16 bits without scales of its own are rounded to its type.

    Args:
        call: A product with blocks of scales.
        given: Its operands.
        spread: Gives values of blocks, by their name, the shape and the type of their factor.
    """
    wide = wide_dtype(given.a.dtype, given.b.dtype, call.out_dtype, blocks=True)
    epilogue, precision = call.epilogue.of_whole_sums, call.precision
    coarse = isinstance(precision, tuple) and call.out_dtype.itemsize < wide.itemsize
    coarse = coarse and lax.Precision.HIGHEST not in precision

    weights_alone = given.row_blocks is None and given.a.dtype in FLOATS_16
    weights_alone = weights_alone and is_widened(given.a.dtype, given.b.dtype)

    def ready(x: jax.Array, of: str) -> jax.Array:
        if weights_alone and of == "row":
            return x
        whole, names = x.astype(wide), (f"{of}_zeros", f"{of}_blocks")
        zeros, scale = (getattr(given, name, None) for name in names)
        whole = whole if zeros is None else whole - spread(names[0], zeros, whole)
        whole = whole if scale is None else whole * spread(names[1], scale, whole)
        if weights_alone:
            return whole.astype(given.a.dtype)
        return lax.reduce_precision(whole, 8, TF32_BITS) if coarse else whole

    pairs = zip(given[:3], ("row", "col", "up"), strict=True)
    factors = [x if x is None else ready(x, of) for x, of in pairs]
    extras = {name: getattr(given, name) for name in epilogue.operands}
    if not (coarse or weights_alone):
        precision = (lax.Precision.HIGHEST,) * 2
    whole = dataclasses.replace(call, epilogue=epilogue, precision=precision)
    return whole, Operands(*factors, **extras)


def wide_dtype(a_dtype: Any, b_dtype: Any, out_dtype: Any, *, blocks: bool = False) -> np.dtype:
    """The type that sums are kept in: float32, int32 for integers, float64 for float64.

    Args:
        a_dtype: Type of the left operand.
        b_dtype: Type of the right operand.
        out_dtype: Type of the result.
        blocks: Blocks of the factors have scales: then their sums are added up in floats.
    """
    integers = jnp.issubdtype(a_dtype, jnp.integer) and jnp.issubdtype(b_dtype, jnp.integer)
    if integers and not blocks:
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
