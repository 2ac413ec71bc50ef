"""How a product changes with its factors, and the gradient of a factor.

For `a @ b` the gradients are `g @ b.T` and `a.T @ g`. Both are computed in the layout in which the
operand is stored, from operands as they are stored, so that nothing is transposed in memory. The
cotangent `g` is rounded to the type of the operand that it is multiplied with, because there is no
kernel for mixed types: a float32 cotangent becomes bfloat16 beside a bfloat16 operand. Operands of
8 bits are widened to bfloat16 instead, which is exact.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad

from pallas_gemm.call import OUT_NAME, Call, Operands
from pallas_gemm.kernels.functions import activations
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.product import product
from pallas_gemm.planning import numerics
from pallas_gemm.problem import OF_VALUE, Epilogue


def changes(tangents: Sequence[Any]) -> list[Any]:
    """Returns tangents with None for each that is zero."""
    return [None if isinstance(t, ad.Zero) else t for t in tangents]


def named(result: jax.Array) -> jax.Array:
    """Names a result, which a policy of `jax.checkpoint` may then keep."""
    return checkpoint_name(result, OUT_NAME)


def derived(
    function: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Any, Any]:
    """Returns the results of a function, and how they change with those of its operands that do.

    Args:
        function: The function.
        primals: Its operands.
        tangents: How they change, None for one that does not.
    """
    places = [i for i, change in enumerate(tangents) if change is not None]

    def of_moving(*moving: Any) -> Any:
        every = dict(enumerate(primals)) | dict(zip(places, moving, strict=True))
        return function(*every.values())

    moving, changes = ([of[i] for i in places] for of in (primals, tangents))
    return jax.jvp(of_moving, moving, changes)


def as_derived[AnyCall: Call](call: AnyCall) -> AnyCall:
    """Returns the call for a product that is derived, whose activation may have a rule for it."""
    if (activation := call.epilogue.activation) is None:
        return call
    own = activations.as_derived(activation)
    return dataclasses.replace(call, epilogue=dataclasses.replace(call.epilogue, activation=own))


def change_by(
    function: Callable[..., jax.Array], primals: Sequence[Any], tangents: Sequence[Any]
) -> jax.Array:
    """Returns how the result of a function changes. Nothing but the operands is kept for it."""
    return derived(jax.checkpoint(function), primals, tangents)[1]


def transposed(
    function: Callable[..., Sequence[jax.Array]], cotangents: Sequence[Any], operands: Sequence[Any]
) -> list[Any]:
    """Returns the cotangents of operands that are missing, and None for each other.

    Args:
        function: The function of all operands, which is linear in those that are missing.
        cotangents: The cotangents of its results.
        operands: Its operands.
    """
    missing = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]

    def of_missing(*own: jax.Array) -> Sequence[jax.Array]:
        every = dict(enumerate(operands)) | dict(zip(missing, own, strict=True))
        return function(*every.values())

    avals = [operands[i].aval for i in missing]
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    whole = list(map(ad.instantiate_zeros, cotangents))
    found = dict(zip(missing, jax.linear_transpose(of_missing, *types)(whole), strict=True))
    return [found.get(i) for i in range(len(operands))]


def change_by_xla(
    call: Call, by_xla: Callable[..., jax.Array], primals: Sequence[Any], tangents: Sequence[Any]
) -> jax.Array:
    """Returns how a product changes that XLA computes where it is derived; see `change_by`.

    Raises:
        ValueError: Something is promised of it.
    """
    why = "XLA derives a product whose factors have scales of blocks, or are of few bits"
    numerics.refuse_promised(call.options, why)
    return change_by(functools.partial(by_xla, call), primals, tangents)


def affine_change(
    call: Call,
    contraction: Contraction,
    given: Operands,
    moved: Operands,
    of_left: Sequence[jax.Array],
) -> list[jax.Array]:
    """Returns the terms, in float32, of the change of `scales * (a @ b) + bias`.

    Args:
        call: The product.
        contraction: Its dimensions.
        given: Its operands.
        moved: How they change; the scales do not.
        of_left: The term that the left operand changes, if it does, before it is scaled by what is
            an operand.
    """
    plain = call.plain(np.float32, call.epilogue.alpha)
    terms = list(of_left)
    if moved.b is not None:
        terms.append(product(plain, contraction, given.a, moved.b))
    ready = contraction.aligned(given)
    *scales, _ = OF_VALUE
    for factor in (getattr(ready, name) for name in scales):
        if factor is not None:
            terms = [term * factor.astype(jnp.float32) for term in terms]
    if moved.bias is not None:
        bias = contraction.aligned(moved).bias.astype(jnp.float32)
        terms.append(jnp.broadcast_to(bias, contraction.shape(given.a.shape, given.b.shape)))
    return terms


def residual_change(epilogue: Epilogue, given: Operands, moved: Operands) -> list[jax.Array]:
    """Returns the terms, in float32, that a residual and its factor change."""
    terms = []
    if moved.residual is not None:
        beta = given.beta if epilogue.beta is None else np.float32(epilogue.beta)
        terms.append(moved.residual.astype(jnp.float32) * beta.astype(jnp.float32))
    if moved.beta is not None:
        terms.append(given.residual.astype(jnp.float32) * moved.beta.astype(jnp.float32))
    return terms


def total(terms: Sequence[Any]) -> Any:
    """Adds up the terms that there are; None if there is none."""
    there = [x for x in terms if x is not None]
    return functools.reduce(operator.add, there) if there else None


def rounded_sum(terms: Sequence[jax.Array], like: jax.Array) -> Any:
    """Adds up terms of a change, rounds the sum to the type of a result; without terms it is 0."""
    if (found := total(terms)) is None:
        return jnp.zeros_like(like)
    if found.shape != like.shape:
        # All of them are of operands that several products share.
        found = jnp.broadcast_to(found, like.shape)
    return found.astype(like.dtype)


def kept_dtype(out_dtype: Any) -> np.dtype:
    """The type in which pre-activations are kept: the result's, but not of 8 bits."""
    dtype = np.dtype(out_dtype)
    return np.dtype(jnp.bfloat16) if dtype.itemsize == 1 else dtype


def kept_sums_dtype(out_dtype: Any) -> np.dtype:
    """The type in which sums are kept that are not scaled yet: they may be beyond float16."""
    dtype = kept_dtype(out_dtype)
    return np.dtype(np.float32) if dtype == np.float16 else dtype


def check_linear(call: Call, missing: int) -> None:
    """Refuses to transpose what is not linear, or not in all operands that are missing."""
    if call.epilogue != Epilogue(alpha=call.epilogue.alpha) or missing > 1:
        raise NotImplementedError(
            "only a product without bias, residual and activation is linear, and only in one of its"
            " operands"
        )


def gradients_of_factors(
    cotangent: Any, operands: Sequence[Any], call: Call, contraction: Contraction
) -> list[Any]:
    """Returns the cotangent of the factor of a product that is missing, and None for the other."""
    missing = [ad.is_undefined_primal(x) for x in operands]
    check_linear(call, sum(missing))
    a, b = operands
    return [
        gradient(call, contraction, cotangent, other, x.aval, left=x is a) if is_missing else None
        for x, other, is_missing in zip((a, b), (b, a), missing, strict=True)
    ]


def gradient(
    call: Call, contraction: Contraction, cotangent: Any, other: Any, wanted: Any, *, left: bool
) -> Any:
    """Returns the gradient of a factor.

    Args:
        call: The product: one with nothing but a scale.
        contraction: Its dimensions.
        cotangent: The cotangent of its result.
        other: The other factor.
        wanted: The type of the gradient.
        left: It is that of the left factor.
    """
    if isinstance(cotangent, ad.Zero):
        return ad.Zero(wanted)

    def compute(dtype: np.dtype, g: jax.Array, other: jax.Array) -> jax.Array:
        plain = call.plain(dtype, call.epilogue.alpha)
        dims, pair = contraction.of_right, (other, g)
        if left:
            dims, pair = contraction.of_left, (g, other)
        sizes = dims.sizes(*(x.shape for x in pair))
        n, k = (math.prod(sizes[x] for x in own) for own in (dims.columns, dims.contracted))
        if left:
            plain = numerics.resolved_call(plain, n, k, g.dtype)
        else:
            plain = numerics.over_rows(plain, k, g.dtype)
        return product(plain, dims, *pair)

    return gradient_by(compute, [(cotangent, other)], wanted.dtype)


def gradient_by(
    compute: Callable[..., jax.Array], pairs: Sequence[tuple[Any, Any]], wanted: Any
) -> jax.Array:
    """Returns a gradient, the sum of products of cotangents with other factors.

    Cotangents of float32 are divided by their unit before, and the sum is multiplied by it.

    Args:
        compute: Computes the sum in a type, of pairs that can be multiplied, one after the other.
        pairs: The cotangent and the other factor of each product.
        wanted: The type of the gradient.
    """
    unit, dtype, factors = _unit_of(pairs, wanted), kept_dtype(wanted), []
    for g, other in pairs:
        own = _multiplied_in(other.dtype, wanted)
        factors += [(g if unit is None else g / unit).astype(own), other.astype(own)]
    if unit is None:
        return compute(dtype, *factors).astype(wanted)
    return (compute(np.dtype(np.float32), *factors) * unit).astype(wanted)


def _multiplied_in(other: Any, wanted: Any) -> np.dtype:
    """Returns the type of both factors of a gradient, given those of the other one and of it.

    The gradient of a float32 factor beside one of 16 bits has operands of float32, which are cast
    as the precision of the product says.
    """
    if wanted == np.float32:
        return np.dtype(np.float32)
    narrow = wanted if wanted.itemsize == 2 else np.dtype(jnp.bfloat16)
    return narrow if other.itemsize == 1 else other


def _unit_of(pairs: Sequence[tuple[jax.Array, jax.Array]], wanted: Any) -> Any:
    """Returns a power of two by which cotangents of float32 are divided; None if they are not.

    They are where both factors become float16. Scales of weights in 8 bits may make them smaller
    than what that holds, and a scaled loss larger.
    """
    if not any(
        g.dtype == np.float32 and _multiplied_in(other.dtype, wanted) == np.float16
        for g, other in pairs
    ):
        return None
    each = [jnp.max(jnp.abs(g), initial=0).astype(np.float32) for g, _ in pairs]
    largest = lax.stop_gradient(functools.reduce(jnp.maximum, each))
    power = lax.reduce_precision(largest, exponent_bits=8, mantissa_bits=0)
    return jnp.where(jnp.isfinite(power) & (power > 0), power, 1)
