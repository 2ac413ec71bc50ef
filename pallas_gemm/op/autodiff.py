"""Derivatives of the product, in both modes and of any order: made of the product itself.

For `a @ b` the gradients are `g @ b.T` and `a.T @ g`. Both are computed in the layout in which the
operand is stored, from operands as they are stored, so that nothing is transposed in memory. The
cotangent `g` is rounded to the type of the operand that it is multiplied with (float32 cotangents
of bfloat16 operands to bfloat16), because there is no kernel for mixed types; operands of 8 bits
are widened to bfloat16 instead, which is exact.

Where several products have one left operand, those of a gated product among them, its gradient is
one product of operands in pieces: their sum is kept in the accumulator, and rounded once.

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
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad

from pallas_gemm.op import canonical
from pallas_gemm.op.product import blades, fan, fan_p, product, product_p
from pallas_gemm.planning import xla
from pallas_gemm.planning.call import OUT_NAME, Call, Operands
from pallas_gemm.problem import Epilogue


def _jvp(primals: Any, tangents: Any, *, call: Call, **_: Any) -> tuple[Any, Any]:
    tangents = [None if isinstance(t, ad.Zero) else t for t in tangents]
    if call.pieces > 1:
        return _jvp_pieces(call, primals, tangents)
    given, moved = call.unpack(primals), call.unpack(tangents)
    epilogue = call.epilogue
    if epilogue.activation is None and not epilogue.gated:
        result = _named(call, *primals)
        change = _affine_change(call, given, moved, _left_change(call, given, moved))
        if moved.residual is not None:
            change.append(moved.residual.astype(jnp.float32) * jnp.float32(epilogue.beta))
        return result, _rounded_sum(change, result)
    if epilogue.activation is jax.nn.relu and not (epilogue.gated or epilogue.residual):
        result = _named(call, *primals)
        terms = _affine_change(call, given, moved, _left_change(call, given, moved))
        change = _rounded_sum(terms, result)
        return result, jnp.where(result > 0, change, jnp.zeros_like(change))
    return _through_activation(call, given, moved)


def _jvp_pieces(call: Call, primals: Any, tangents: Any) -> tuple[Any, Any]:
    one, terms = dataclasses.replace(call, pieces=1), []
    for pair, changes in zip(call.pairs(primals), call.pairs(tangents), strict=True):
        given, moved = Operands(*pair), Operands(*changes)
        terms += _affine_change(one, given, moved, _left_change(one, given, moved))
    result = _named(call, *primals)
    return result, _rounded_sum(terms, result)


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
    of_left = _left_change(before, given, moved)
    for b, db, change in ((given.b, moved.b, of_left[:1]), (given.up, moved.up, of_left[1:])):
        if b is not None:
            own = Operands(given.a, b, bias=given.bias)
            total = _named(before, *own.present())
            terms = _affine_change(before, own, moved._replace(b=db), change)
            sums.append(total)
            # Otherwise XLA keeps its cotangent in float32 for the gradient of the bias, and writes
            # and reads twice as much.
            changes.append(lax.optimization_barrier(_rounded_sum(terms, total)))

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
    return fan(plain, moved.a, [(b,) for b in (given.b, given.up) if b is not None])


def _affine_change(
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
        batch: tuple[int, ...] = max(given.a.shape[:-2], given.b.shape[:-2], key=len)
        rows, cols = call.matrix_shape(given.a.shape, given.b.shape)
        shape = (*batch, rows, cols)
        bias = xla.align_bias(moved.bias.astype(jnp.float32), len(shape))
        terms.append(jnp.broadcast_to(bias, shape))
    return terms


def _rounded_sum(terms: list[jax.Array], like: jax.Array) -> Any:
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


def _transpose(cotangent: Any, *operands: Any, call: Call, **_: Any) -> list[Any]:
    """Returns the cotangent of the operand that is missing, and None for the others."""
    gradients: list[Any] = []
    for pair in call.pairs(operands):
        missing = [ad.is_undefined_primal(x) for x in pair]
        _check_linear(call, sum(missing))
        for x, other, is_missing in zip(pair, pair[::-1], missing, strict=True):
            left = x is pair[0]
            gradients.append(
                _gradient(call, [(cotangent, other)], x.aval, left) if is_missing else None
            )
    return gradients


def _transpose_fan(cotangents: Any, a: Any, *rest: Any, call: Call, **_: Any) -> list[Any]:
    """Returns the cotangent of the left operand, or those of the others that are missing."""
    missing = [ad.is_undefined_primal(x) for x in (a, *rest)]
    _check_linear(call, 2 if missing[0] and any(missing[1:]) else 1)
    pairs = list(zip(cotangents, rest, strict=True))
    if missing[0]:
        return [_gradient(call, pairs, a.aval, left=True), *(None for _ in rest)]
    return [
        None,
        *(
            _gradient(call, [(g, a)], x.aval, left=False) if ad.is_undefined_primal(x) else None
            for g, x in pairs
        ),
    ]


def _check_linear(call: Call, missing: int) -> None:
    if call.epilogue != Epilogue(alpha=call.epilogue.alpha) or missing > 1:
        raise NotImplementedError(
            "only a product without bias, residual and activation is linear, and only in one of its"
            " operands"
        )


def _gradient(call: Call, terms: Sequence[tuple[Any, jax.Array]], wanted: Any, left: bool) -> Any:
    """Returns the gradient of an operand that one or more products have in common.

    Args:
        call: What each product is: one with nothing but a scale.
        terms: The cotangent of each result, and the other operand.
        wanted: The type of the gradient.
        left: It is that of the left operand.
    """
    ready = []
    for g, other in terms:
        if not isinstance(g, ad.Zero):
            wide = other.astype(jnp.bfloat16) if other.dtype.itemsize == 1 else other
            ready.append((g.astype(wide.dtype), wide))
    if not ready:
        return ad.Zero(wanted)
    plain = call.plain(kept_dtype(wanted.dtype), call.epilogue.alpha)
    if wanted.ndim < ready[0][0].ndim:
        return _summed_over_batch(plain, *ready[0], left).astype(wanted.dtype)
    # The stored gradient is g times other, or the other way round where it is transposed.
    if left:
        swap = call.transpose_a
        flags = (call.transpose_b, True) if swap else (False, not call.transpose_b)
    else:
        swap = not call.transpose_b
        flags = (not call.transpose_a, False) if swap else (True, call.transpose_a)
    plain = dataclasses.replace(
        plain, transpose_a=flags[0], transpose_b=flags[1], pieces=len(ready)
    )
    operands = [x for pair in ready for x in (pair[::-1] if swap else pair)]
    return product(plain, *operands).astype(wanted.dtype)


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


def _jvp_fan(primals: Any, tangents: Any, *, call: Call, **_: Any) -> tuple[Any, Any]:
    a, *rest = primals
    da, *changes = [None if isinstance(t, ad.Zero) else t for t in tangents]
    given = [call.unpack((a, *own)) for own in blades(call, rest)]
    moved = [call.unpack((da, *own)) for own in blades(call, changes)]
    results = fan(call, a, [own.present()[1:] for own in given])
    results = [checkpoint_name(result, OUT_NAME) for result in results]
    of_left: list[jax.Array] = []
    if da is not None:
        plain = call.plain(np.float32, call.epilogue.alpha)
        of_left = fan(plain, da, [(own.b,) for own in given])
    terms = [
        _affine_change(call, own, change, of_left[i : i + 1])
        for i, (own, change) in enumerate(zip(given, moved, strict=True))
    ]
    return results, list(map(_rounded_sum, terms, results))


ad.primitive_jvps[product_p] = _jvp
ad.primitive_transposes[product_p] = _transpose
ad.primitive_jvps[fan_p] = _jvp_fan
ad.primitive_transposes[fan_p] = _transpose_fan
