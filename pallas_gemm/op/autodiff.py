"""Derivatives of the product, in both modes and of any order: made of the product itself.

Both right operands of a gated product have one left operand, so its gradient is that of
`projections`. One rule says what the derivative of an activation needs:

- where a scale of the sum changes, the sum: the product is computed without any epilogue, rounded
  and kept as below, and XLA applies the epilogue;
- without an activation, nothing;
- of `relu` (without a residual), the result: its sign tells where the derivative is one;
- of any other, and of gated products, the pre-activation. The kernel stores it beside the result,
  rounded to the result's type (to bfloat16 for results of 8 bits). It is kept under the name that
  `jax.checkpoint` knows results by. Under a promise (`numerics`), a product of its own makes
  the result. Inside `round_once(False)` the kernel stores the pre-activation alone, and XLA applies
  the activation and the residual in float32: the result is rounded twice, and one more pass over it
  is made. Computing the pre-activation again would cost a third of the backward pass. The part
  after it is computed again, and nothing of that is kept.

Where blocks of the factors have scales, XLA computes all of the derivative.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from pallas_gemm.call import Call, Operands, Signature, signature_of
from pallas_gemm.kernels.element_types import is_widened
from pallas_gemm.op import fused, linear
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.function_of_sums import Function, traced
from pallas_gemm.op.product import product, product_p
from pallas_gemm.op.projections import projections
from pallas_gemm.planning.by_xla import xla
from pallas_gemm.problem import OF_VALUE, SCALES, VALUES, Epilogue


def _jvp(
    primals: Any, tangents: Any, *, call: Call, contraction: Contraction, **_: Any
) -> tuple[Any, Any]:
    changes = linear.changes(tangents)
    given, moved = call.unpack(primals), call.unpack(changes)
    check_weights(primals, moved)
    if call.epilogue.blocks:
        change = linear.change_by_xla(call, contraction.by_xla, primals, changes)
        return linear.named(product(call, contraction, *primals)), change
    if needs_pre_activation(call.epilogue, moved):
        of_left = _left_change(pre_activation(call, moved), contraction, given, moved)
        pairs = []
        before_each = pre_activations(call, contraction, given, moved)
        # A promise is kept by a product of its own.
        at_once = call.options.once and call.options.numerics is None
        once = _at_once(call, contraction, given, moved, before_each) if at_once else None
        for i, (before, dims, own, change) in enumerate(before_each):
            total = product(before, dims, *own.present()) if once is None else once[1 + i]
            total = linear.named(total)
            terms = linear.affine_change(before, dims, own, change, of_left[i : i + 1])
            pairs.append((total, linear.rounded_sum(terms, total)))
        given, moved = contraction.aligned(given), contraction.aligned(moved)
        result, change = after_activation(call, pairs, given, moved)
        if once is not None:
            result = linear.named(once[0])
        elif call.options.numerics is not None:
            # What is promised of the result holds where it is derived, too.
            result = linear.named(product(linear.as_derived(call), contraction, *primals))
        return result, change
    result = linear.named(product(call, contraction, *primals))
    change = change_without_activation(call, contraction, given, moved)
    if call.epilogue.activation is not None:
        change = jnp.where(result > 0, change, jnp.zeros_like(change))
    return result, change


def check_weights(primals: Sequence[Any], moved: Operands) -> None:
    """Refuses to derive weights of few bits, whose changes are no numbers of their type.

    Raises:
        TypeError: They change.
    """
    left, right = (x.dtype for x in primals[:2])
    if is_widened(left, right) and (moved.b is not None or moved.up is not None):
        raise TypeError(
            f"weights of {right} beside {left} have no gradient: differentiate with respect to the"
            " inputs, the scales, or an adapter beside them; jax.lax.stop_gradient holds them fixed"
        )


def _at_once(
    call: Call,
    contraction: Contraction,
    given: Operands,
    moved: Operands,
    before_each: Sequence[Any],
) -> list[jax.Array]:
    """Returns the result, and each pre-activation, of one kernel that rounds each of them once."""
    factors = tuple(x for x in (given.a, given.b, given.up) if x is not None)
    extras = tuple(getattr(given, name) for name in call.epilogue.operands)
    befores = tuple((before, dims) for before, dims, _, _ in before_each)
    shape = contraction.shape(given.a.shape, given.b.shape)
    after = _after(call.epilogue, moved)
    function = _with_pre_activations(call, contraction, befores, after, shape, signature_of(extras))
    sums = Call(
        np.float32,
        epilogue=Epilogue(gated=call.epilogue.gated),
        precision=call.precision,
        options=call.options.for_another_product(),
    )
    dims = Contraction(
        contraction.lhs, contraction.rhs, contraction.out, lettered=contraction.lettered
    )
    return fused.fused(sums, dims, function, *factors, *extras)


@functools.lru_cache(maxsize=1024)
def _with_pre_activations(
    call: Call,
    contraction: Contraction,
    befores: tuple[tuple[Call, Contraction], ...],
    after: Epilogue,
    shape: tuple[int, ...],
    extras: Signature,
) -> Function:
    """Returns the function of sums to a result and what its activation is applied to."""

    def both(*args: Any) -> list[Any]:
        sums, operands = args[: len(befores)], args[len(befores) :]
        named = dict(zip(call.epilogue.operands, operands, strict=True))
        given = Operands(None, None, **named)
        found = [contraction.finish(call.epilogue, list(sums), given).astype(call.out_dtype)]
        for i, (before, dims) in enumerate(befores):
            own = _own(before, given, up=i > 0)
            total = dims.finish(before.epilogue, [sums[i]], own)
            found.append(total.astype(before.out_dtype))
        return found

    def twice(*operands: Any) -> list[Any]:
        end = 1 + len(befores)
        named = dict(zip(call.epilogue.operands, operands[end:], strict=True))
        given = Operands(*operands[:end], **named)
        own = [_own(before, given, up=i > 0).present() for i, (before, _) in enumerate(befores)]
        pairs = zip(befores, own, strict=True)
        totals = [product(before, dims, *x) for (before, dims), x in pairs]
        extras = Operands(None, None, **{name: named[name] for name in after.operands})
        return [contraction.finish(after, totals, extras).astype(call.out_dtype), *totals]

    wide = jax.ShapeDtypeStruct(shape, np.float32)
    types = [jax.ShapeDtypeStruct(*operand) for operand in extras]
    function = traced(both, *([wide] * len(befores)), *types, sums=len(befores))
    return dataclasses.replace(function.as_derived, otherwise=twice)


def scales_change(moved: Operands) -> bool:
    """Whether a scale of the sums changes, so that its derivative asks for the sums."""
    return any(getattr(moved, name) is not None for name in ("alpha", *SCALES))


def needs_pre_activation(epilogue: Epilogue, moved: Operands) -> bool:
    """Whether the derivative asks for more than the result."""
    if scales_change(moved):
        return True
    if epilogue.activation is jax.nn.relu:
        return epilogue.gated or epilogue.residual
    return epilogue.activation is not None or epilogue.gated


def change_without_activation(
    call: Call, contraction: Contraction, given: Operands, moved: Operands
) -> jax.Array:
    """Returns how a product changes with its operands, of which one does, before an activation."""
    of_left = _left_change(call, contraction, given, moved)
    terms = linear.affine_change(call, contraction, given, moved, of_left)
    shape = contraction.shape(given.a.shape, given.b.shape)
    given, moved = contraction.aligned(given), contraction.aligned(moved)
    changes = linear.residual_change(call.epilogue, given, moved)
    terms += [jnp.broadcast_to(change, shape) for change in changes]
    return linear.total(terms).astype(call.out_dtype)


def pre_activation(call: Call, moved: Operands, *, up: bool = False) -> Call:
    """Returns the call for what an activation, or what follows the sums, is applied to."""
    out_dtype, epilogue = linear.kept_dtype(call.out_dtype), call.epilogue
    if scales_change(moved):
        return call.sums(linear.kept_sums_dtype(call.out_dtype))
    names = zip(OF_VALUE, VALUES[up], strict=True)
    before = Epilogue(**{name: getattr(epilogue, own) for name, own in names})
    return dataclasses.replace(call, out_dtype=out_dtype, epilogue=before)


def pre_activations(
    call: Call, contraction: Contraction, given: Operands, moved: Operands
) -> list[tuple[Call, Contraction, Operands, Operands]]:
    """Returns the one or two products that come before an activation: operands and changes."""
    found = []
    for up in (False, True)[: 1 + call.epilogue.gated]:
        before = pre_activation(call, moved, up=up)
        dims = contraction.of_up if up else contraction
        found.append((before, dims, _own(before, given, up), _own(before, moved, up)))
    return found


def _own(before: Call, x: Operands, up: bool) -> Operands:
    """Returns what one of the products takes of all operands."""
    return x.of_sum(before.epilogue.operands, up=up)


def _after(epilogue: Epilogue, moved: Operands) -> Epilogue:
    """Returns what follows the pre-activations, or the sums where a scale changes."""
    if scales_change(moved):
        return epilogue
    return Epilogue(
        beta=epilogue.beta,
        residual=epilogue.residual,
        activation=epilogue.activation,
        gated=epilogue.gated,
    )


def after_activation(
    call: Call, pairs: list[tuple[jax.Array, jax.Array]], given: Operands, moved: Operands
) -> tuple[Any, Any]:
    """Returns a result and its change from those of what the activation is applied to."""
    after = _after(call.epilogue, moved)
    sums = [total for total, _ in pairs]
    # Otherwise XLA keeps its cotangent in float32 for the gradient of the bias, and writes and
    # reads twice as much.
    changes = [lax.optimization_barrier(change) for _, change in pairs]

    # So that reverse mode keeps the pre-activations alone: else each layer of a scan, and XLA for
    # a `tanh`, keep arrays of float32 besides.
    @jax.checkpoint
    def finish(*args: jax.Array) -> jax.Array:
        named = dict(zip(after.operands, args[len(sums) :], strict=True))
        result = xla.finish(after, args[: len(sums)], Operands(None, None, **named))
        return result.astype(call.out_dtype)

    own, moving = ([getattr(x, name) for name in after.operands] for x in (given, moved))
    return linear.derived(finish, [*sums, *own], [*changes, *moving])


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
