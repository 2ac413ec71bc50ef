"""A product whose epilogue is a function of the caller's: any function, any number of results.

    s = a @ b                            float32; of a gated product the sums of gate and of up
    results = function(s, *operands)

`kernels/functions/split.py` says which part of the function a kernel computes. XLA computes the
rest, or all of it where no kernel takes the product. JAX derives the function. If its derivative
needs the sums, the kernel keeps them as one more result, in the type of the factors: no result is
rounded twice.

Blocks of the factors may have scales. The sums are then those of the scaled blocks, and of their
derivatives XLA computes all.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import mlir

from pallas_gemm.call import NO_EPILOGUE, Call, Operands, Signature, signature_of
from pallas_gemm.kernels.functions.parts import Split
from pallas_gemm.kernels.functions.split import split
from pallas_gemm.op import linear, lowering
from pallas_gemm.op.batching import fronted, one_by_one, with_dimension
from pallas_gemm.op.canonical import Form, merged
from pallas_gemm.op.contraction import Contraction, joined
from pallas_gemm.op.function_of_sums import Function
from pallas_gemm.op.mesh import mesh_context
from pallas_gemm.op.mesh.fused_partition import (
    NOT_IN_ORDER,
    is_turned,
    names_of,
    program_kernel_p,
    refuse_unpromised,
    shared_program,
)
from pallas_gemm.op.mesh.parts import told_apart
from pallas_gemm.op.product import computed_by, give_rules, lower_by, product
from pallas_gemm.op.projections import projections
from pallas_gemm.planning import dispatch
from pallas_gemm.planning.dispatch import Decision

fused_p = core.Primitive("pallas_gemm_fused")
fused_p.multiple_results = True


def fused(
    call: Call, contraction: Contraction, function: Function, *operands: jax.Array
) -> list[jax.Array]:
    """Computes a function of a product.

    Args:
        call: The product, with float32 sums and no epilogue but a gate and scales of blocks.
        contraction: Its dimensions.
        function: The function of the sums.
        *operands: The factors, their scales, then what the function takes.
    """
    how = {"call": call, "contraction": contraction, "function": function}
    return computed_by(fused_p, call, operands, **how)


def apart(
    call: Call,
    contraction: Contraction,
    function: Function,
    *operands: jax.Array,
    multiply: Callable[..., jax.Array] = product,
) -> list[jax.Array]:
    """Computes the product, then the function by XLA."""
    factors, given = factors_of(call, operands)
    each = each_sum(call, contraction, factors, function.rounds_to or call.out_dtype)
    sums = [multiply(own, dims, *x.present()).astype(call.out_dtype) for own, dims, x in each]
    # None of the dimensions that a function takes are cut.
    whole = (joined(x, own.shape) for x, own in zip(sums, function.types, strict=False))
    return function(*whole, *given)


def factors_of(call: Call, operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Returns the factors of a product and their scales, and what a function of it takes."""
    end = len(call.names)
    return operands[:end], operands[end:]


def each_sum(
    call: Call, contraction: Contraction, factors: Sequence[Any], dtype: Any
) -> list[tuple[Call, Contraction, Operands]]:
    """Returns the product that each sum is, in a type: what it takes of factors and scales."""
    plain, dims = call.sums(dtype), (contraction, contraction.of_up)
    each = call.each_sum(call.unpack(factors))
    return [(plain, own, x) for own, x in zip(dims, each, strict=False)]


class Fused(NamedTuple):
    """How a kernel computes a function of a product.

    Attributes:
        split: The parts of the function.
        call: The product of the kernel.
        signature: The shapes and types of its operands.
        form: How the factors become matrices.
        decision: The implementation that computes it, and why.
    """

    split: Split
    call: Call
    signature: Signature
    form: Form
    decision: Decision

    def run(self, compute: Callable[..., Any], *operands: jax.Array) -> list[jax.Array]:
        """Computes the results; `compute` is the kernel."""
        factors, given = factors_of(self.call, operands)
        ready = self.form.ready(self.call.unpack(factors))
        results = compute(*ready.present(), *self.split.prepared(given))
        return self.split.finished(given, results)


def parts_of(contraction: Contraction, function: Function, lead: str = "") -> Split | str:
    """Returns a function of a product in its parts, or why it is XLA's as a whole.

    Args:
        contraction: The product.
        function: The function.
        lead: Rows and columns that are a batch of products, besides those that have to be.
    """
    names = names_of(contraction, lead)
    if names.of_kind("mn") != names.out:
        return NOT_IN_ORDER
    parts = split(function.closed, names, function.sums)
    if isinstance(parts, Split) and not (parts.program.steps or parts.program.reductions):
        return parts.left or "the function computes nothing"
    return parts


def plan(
    call: Call, contraction: Contraction, function: Function, signature: Signature
) -> Fused | str:
    """Returns how a kernel computes a function of a product, or why none does.

    Raises:
        ValueError: Something is promised of the results that is not kept.
    """
    found = _plan(call, contraction, function, signature)
    refuse_unpromised(call, found if isinstance(found, str) else found.split)
    return found


@functools.lru_cache(maxsize=4096)
def _plan(
    call: Call, contraction: Contraction, function: Function, signature: Signature
) -> Fused | str:
    matrices = merged(call, contraction, tuple(factors_of(call, signature)[0]))
    parts = parts_of(contraction, function, matrices.form.lead)
    if isinstance(parts, str):
        return parts
    if is_turned(matrices.form):
        return NOT_IN_ORDER
    fused_call = matrices.call.with_program(parts.program)
    own = (*matrices.signature, *signature_of(parts.types()))
    if function.otherwise is not None and (why := dispatch.why_impossible(fused_call, own)):
        return why
    decision = dispatch.decide(fused_call, own)
    return Fused(parts, fused_call, own, matrices.form, decision)


@fused_p.def_effectful_abstract_eval
def _abstract(
    *avals: Any, call: Call, contraction: Contraction, function: Function, **_: Any
) -> Any:
    types = lowering.types_by(avals, _by_xla, contraction, function, call)
    return types, effects(call, contraction, function, avals)


def _by_xla(contraction: Contraction, function: Function, call: Call, *operands: Any) -> list[Any]:
    """Computes it as JAX would."""

    def multiply(own: Call, dims: Contraction, *factors: Any) -> jax.Array:
        return dims.by_xla(own, *factors)

    return apart(call, contraction, function, *operands, multiply=multiply)


def effects(call: Call, contraction: Contraction, function: Function, avals: Any) -> Any:
    """Returns the effects of a product: the simulator calls back into Python."""
    given = signature_of(avals)
    run = functools.partial(_run, call, contraction, function, given, gpu=False)
    return lowering.effects_of(call, run, given)


def _run(
    call: Call, contraction: Contraction, function: Function, signature: Signature, *, gpu: bool
) -> Callable[..., list[jax.Array]]:
    """Returns what computes a function of a product on one device."""
    found = plan(lowering.planned(call, gpu), contraction, function, signature)
    if isinstance(found, str) or found.decision.plan is None:
        by_xla = functools.partial(apart, call, contraction, function)
        return function.otherwise or by_xla if gpu else by_xla
    kernel = lowering.bound(program_kernel_p, found.call, found.decision)
    return functools.partial(found.run, kernel)


def _lowered(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    call: Call,
    contraction: Contraction,
    function: Function,
    devices: Any,
    gpu: bool,
) -> Any:
    if not mesh_context.is_one_devices(ctx.module_context.axis_context):
        lowering.refuse_simulation(call.options.implementation)
        parts = parts_of(contraction, function)
        refuse_unpromised(call, parts)
        alone = devices is None or mesh_context.why_not_partitioned(ctx.module_context)
        alone = alone or call.epilogue.blocks
        if alone:
            lowering.refuse_unshared(call, ctx.module_context)
        if isinstance(parts, str) or alone:
            run = functools.partial(apart, call, contraction, function)
        else:
            run = functools.partial(_shared, call, contraction, function, parts)
        return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)
    run = _run(call, contraction, function, signature_of(ctx.avals_in), gpu=gpu)
    return mesh_context.lower_off_mesh(ctx, run, operands)


def _shared(
    call: Call, contraction: Contraction, function: Function, parts: Split, *operands: jax.Array
) -> list[jax.Array]:
    """Computes it on the devices of a mesh."""
    by_xla = functools.partial(_by_xla, contraction, function)
    with told_apart(by_xla, call, signature_of(operands)):
        return shared_program(call, contraction, parts, *operands)


def _jvp(
    primals: Any,
    tangents: Any,
    *,
    call: Call,
    contraction: Contraction,
    function: Function,
    **_: Any,
) -> Any:
    factors, given = factors_of(call, primals)
    of_factors, changes = factors_of(call, linear.changes(tangents))
    of_sums = _changes_in_blocks if call.epilogue.blocks else _changes_of_sums
    moves = [*of_sums(call, contraction, function, factors, of_factors), *changes]

    def compute(kept: Any = None) -> list[Any]:
        own = function.as_derived
        own = own if kept is None else own.keeping_sums(kept)
        return fused(call, contraction, own, *primals)

    return function.derivative(compute, factors[0].dtype, moves, tuple(given))


def _changes_of_sums(
    call: Call, contraction: Contraction, function: Function, given: Any, moved: Any
) -> list[Any]:
    """Returns how each sum changes with its factors; None where it does not."""
    (a, *rights), (da, *of_rights) = given, moved
    plain = call.plain(np.float32)
    of_left: list[Any] = [None] * function.sums
    if da is not None:
        dims = [contraction] * function.sums
        of_left = projections(plain, dims, da, [(b,) for b in rights])
    return [
        linear.total([term, None if db is None else product(plain, contraction, a, db)])
        for term, db in zip(of_left, of_rights, strict=True)
    ]


def _changes_in_blocks(
    call: Call, contraction: Contraction, function: Function, given: Any, moved: Any
) -> list[Any]:
    """Returns the same where blocks of the factors have scales, as XLA computes it."""
    found = []
    each = (each_sum(call, contraction, x, np.float32) for x in (given, moved))
    for (own, dims, x), (_, _, dx) in zip(*each, strict=True):
        tangents = [t for t, there in zip(dx, x, strict=True) if there is not None]
        change = None
        if any(t is not None for t in tangents):
            change = linear.change_by_xla(own, dims.by_xla, x.present(), tangents)
        found.append(change if change is None else joined(change, function.types[0].shape))
    return found


def _transpose(
    cotangents: Sequence[Any],
    *operands: Any,
    call: Call,
    contraction: Contraction,
    function: Function,
    **_: Any,
) -> list[Any]:
    return linear.transposed(
        functools.partial(apart, call, contraction, function), cotangents, operands
    )


def _batch(
    operands: Sequence[Any],
    dims: Sequence[Any],
    *,
    call: Call,
    contraction: Contraction,
    function: Function,
    **_: Any,
) -> tuple[list[Any], list[int]]:
    """Maps it: the product has one dimension more, unless only the function's operands do."""
    if call.epilogue.blocks:
        run = functools.partial(fused, call, contraction, function)
        if call.options.numerics is None:
            run = functools.partial(apart, call, contraction, function)
            results = jax.vmap(run, tuple(dims))(*operands)
        else:
            results = one_by_one(run, operands, dims)
        return results, [0] * len(results)
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    (a, *rights), given = factors_of(call, operands)
    (of_a, *of_rights), others = factors_of(call, dims)
    if call.options.numerics is not None and {of_a, *of_rights} == {None}:
        # A promise is that of a kernel that applies the function.
        a, of_a = jnp.broadcast_to(a, (size, *a.shape)), 0
    if of_a is None and set(of_rights) == {None}:
        plain = dataclasses.replace(call, epilogue=NO_EPILOGUE)
        sums = [product(plain, contraction, a, b) for b in rights]
        results = jax.vmap(function, (*of_rights, *others))(*sums, *given)
        return results, [0] * len(results)
    if len(set(of_rights)) > 1:
        # Both right operands have the same dimensions.
        pairs = zip(rights, of_rights, strict=True)
        rights = [fronted(x, dim, size) for x, dim in pairs]
        of_rights = [0] * len(rights)
    letter = contraction.unused()
    whole = Contraction(
        with_dimension(contraction.lhs, of_a, letter),
        with_dimension(contraction.rhs, of_rights[0], letter),
        letter + contraction.out,
        lettered=contraction.lettered,
    )
    mapped = function.mapped(size, tuple(others))
    results = fused(call, whole, mapped, a, *rights, *given)
    return results, [0] * len(results)


give_rules(fused_p, jvp=_jvp, transpose=_transpose, batch=_batch)
lower_by(fused_p, _lowered)
