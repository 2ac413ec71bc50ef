"""The products of matrices in a program: what each is, who asks for it, and what is copied for it.

A product that is asked of this package is one of its primitives. A product of JAX's own is
described as the one that it would be if it were asked of this package.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh

from pallas_gemm.api.explaining.findings import Copy, Origin
from pallas_gemm.api.explaining.trace import Operation, Trace, Value
from pallas_gemm.call import Call, Signature, signature_of
from pallas_gemm.kernels import element_types
from pallas_gemm.kernels.functions import lines
from pallas_gemm.op import fused, fused_groups, stored
from pallas_gemm.op.canonical import Merged, merged
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.function_of_sums import Function
from pallas_gemm.op.fused import fused_p
from pallas_gemm.op.fused_groups import fused_groups_p
from pallas_gemm.op.grouped import NO_FORM, grouped_p
from pallas_gemm.op.loss.loss import function_of, statistics_p, waiting_p
from pallas_gemm.op.loss.loss import kernels as waiting_kernels
from pallas_gemm.op.product import product_p
from pallas_gemm.op.projections import operands_of_each, projections_p
from pallas_gemm.op.quantize import quantize_p
from pallas_gemm.op.side_by_side import side_by_side_p
from pallas_gemm.op.sum_of_products import each_merged, merged_sum, sum_p
from pallas_gemm.op.symmetric import symmetric_p
from pallas_gemm.planning import quantize, scheme
from pallas_gemm.planning.dispatch import Decision
from pallas_gemm.planning.targeting import known_target
from pallas_gemm.problem import Problem
from pallas_gemm.rewriting import products as rewriting

_OURS = (
    *(product_p, fused_p, side_by_side_p, sum_p, projections_p, symmetric_p),
    *(statistics_p, waiting_p, grouped_p, fused_groups_p),
)
_OF_JAX = ("dot_general", "ragged_dot_general")


@dataclasses.dataclass(frozen=True)
class Turned:
    """An array that a program turns.

    Attributes:
        operation: The operation that turns it.
        how: The permutation of its dimensions, and its shape before.
        dtype: Its type.
        is_copy: It is in memory as it was before, too.
    """

    operation: Operation
    how: stored.Turned
    dtype: np.dtype
    is_copy: bool

    @property
    def copy(self) -> Copy:
        """The copy that this is."""
        shape = self.how.shape
        what = f"transpose{self.how.permutation} of {self.dtype}{list(shape)} by the program"
        return Copy(what, int(2 * np.prod(shape) * self.dtype.itemsize), self.operation.times)


@dataclasses.dataclass(frozen=True)
class Asked:
    """A product of matrices in a program.

    Attributes:
        call: Everything about it but the operands; None of what no kernel is considered for.
        signature: The operands.
        meshes: The meshes of several devices that the operands are on.
        origin: The line that asks for it.
        times: How often it runs.
        is_ours: It is asked of this package.
        outside: (problem, reason) of what no kernel is considered for; the reason is "" if only
            the call knew it.
        copies: The copies that are made for it.
        turned: The arrays that the program turns for it, and that it could read as they are stored.
    """

    call: Call | None
    signature: Signature
    meshes: tuple[AbstractMesh, ...]
    origin: Origin
    times: int
    is_ours: bool = True
    outside: tuple[Problem, str] | None = None
    copies: tuple[Copy, ...] = ()
    turned: tuple[Turned, ...] = ()


def products(program: Trace) -> Iterator[Asked]:
    """Yields each product of a program.

    An operand that is read as it is stored is one of its operation afterwards.
    """
    users = program.users()
    for operation in program.operations:
        if operation.equation.primitive is product_p:
            yield _of_product(operation, [_turned(x, users) for x in _inputs(operation)])
        elif operation.equation.primitive in _OURS:
            yield from _of_ours(operation, [_turned(x, users) for x in _inputs(operation)])
        elif operation.name in _OF_JAX:
            yield _of_jax(operation)


def last_layers(program: Trace) -> tuple[str, ...]:
    """Returns how the gradients of each last layer are computed, and in what memory."""
    found = []
    for operation in program.operations:
        primitive, params = operation.equation.primitive, operation.equation.params
        if primitive in (statistics_p, waiting_p):
            hidden, weight, *_ = (v.aval for v in operation.equation.invars)
            layer, waits = params["layer"], primitive is waiting_p
            parts = layer.waiting(hidden, weight) if waits else layer.chunks(hidden, weight)
            found.append(str(parts))
    return tuple(dict.fromkeys(found))


def quantized(program: Trace, device: Any) -> tuple[str, ...]:
    """Returns what quantizes each array that is quantized in blocks, for a GPU or None."""
    found: Counter[str] = Counter()
    for operation in program.operations:
        if operation.equation.primitive is quantize_p:
            named = operation.equation.params
            signature = signature_of(x.aval for x in operation.equation.invars)
            own = quantize.decide(
                named["how"], signature, named["target"] or device, named["implementation"]
            )
            found[str(own)] += operation.times
    return tuple(f"{times} x {text}" if times > 1 else text for text, times in found.items())


def _inputs(operation: Operation) -> Iterator[tuple[Value, Any]]:
    """Yields what an operation reads, and as which type."""
    return zip(operation.inputs, [v.aval for v in operation.equation.invars], strict=True)


def _turned(operand: tuple[Value, Any], users: Mapping[Value, list[Operation]]) -> Turned | None:
    """Returns what is turned to make an operand."""
    value, aval = operand
    own = value.made_by
    if own is None or own.name != "transpose" or own.equation.outvars[0].aval.shape != aval.shape:
        return None
    (before,) = own.inputs
    is_made = before.made_by is not None and not before.made_by.is_apart
    # If nothing else reads it, what makes it writes it so.
    is_copy = not (is_made and all(user is own for user in users[before]))
    ((shape, dtype),) = signature_of((own.equation.invars[0].aval,))
    how = stored.Turned(tuple(own.equation.params["permutation"]), shape)
    return Turned(own, how, dtype, is_copy)


def _common(operation: Operation) -> dict[str, Any]:
    avals = [v.aval for v in operation.equation.invars]
    meshes = tuple(own for x in avals if (own := x.sharding.mesh).size > 1)
    source = operation.equation.source_info
    origin = Origin(lines.place(source), operation.gradient)
    return {"meshes": meshes, "origin": origin, "times": operation.times}


def _of_product(operation: Operation, turned: list[Turned | None]) -> Asked:
    """Returns one product, of operands as they are stored where it is lowered so."""
    equation = operation.equation
    call, dims = (equation.params[x] for x in ("call", "contraction"))
    given = signature_of(v.aval for v in equation.invars)
    common = _common(operation)
    if not common["meshes"]:
        # What another function turns, a product does not see.
        seen = [
            own.how if own is not None and own.operation.function is operation.function else None
            for own in turned
        ]
        dims, given, places = stored.as_stored(call, dims, given, seen)
        operation.inputs = tuple(
            own.operation.inputs[0] if i in places and own is not None else value
            for i, (value, own) in enumerate(zip(operation.inputs, turned, strict=True))
        )
        turned = [None if i in places else own for i, own in enumerate(turned)]
    matrices = merged(call, dims, given)
    copies = tuple(_copies(call, matrices, given, operation.times))
    needless = tuple(_needless(call, dims, given, turned))
    own = (matrices.call, matrices.signature)
    return Asked(*own, **common, copies=copies, turned=needless)


def _of_ours(operation: Operation, turned: list[Turned | None]) -> Iterator[Asked]:
    """Yields the products of one primitive of ours."""
    equation, common = operation.equation, _common(operation)
    given = signature_of(v.aval for v in equation.invars)
    if equation.primitive in (statistics_p, waiting_p):
        yield from _of_last_layer(equation, common)
        return
    if equation.primitive is side_by_side_p:
        own = equation.params["own"]
        parts = (own.call, own.contraction, own.function, own.signature(given))
        yield _of_dense_function(equation, *parts, common)
        return
    call = equation.params["call"]
    if equation.primitive is fused_p:
        dims, function = (equation.params[x] for x in ("contraction", "function"))
        yield _of_dense_function(equation, call, dims, function, given, common)
    elif equation.primitive is fused_groups_p:
        of_rows = equation.params["function"]
        found = fused_groups.plan(call, of_rows, given)
        alone = call, given[: len(call.names) + 1]
        yield _of_function(equation, found, alone, of_rows.function, common)
    elif equation.primitive is projections_p:
        each = operands_of_each(call, given[1:])
        for dims, own in zip(equation.params["contractions"], each, strict=True):
            yield Asked(*merged(call, dims, (given[0], *own))[:2], **common)
    elif equation.primitive is sum_p:
        each = each_merged(call, equation.params["contractions"], given)
        wholes = [whole] if (whole := merged_sum(each)) else [own[:2] for own in each]
        for own_call, signature in wholes:
            yield Asked(own_call, signature, **common)
    else:
        needless = ()
        if equation.primitive is grouped_p:
            copied = [x for x in turned if x is not None and x.is_copy]
            needless = tuple(x for x in copied if x.how.permutation == (0, 2, 1))
        yield Asked(call, given, **common, turned=needless)


def _of_last_layer(equation: Any, common: Mapping[str, Any]) -> Iterator[Asked]:
    """Yields the products of a last layer."""
    layer, avals = equation.params["layer"], [v.aval for v in equation.invars]
    waits = equation.primitive is waiting_p and layer.waiting(*avals[:2]).waits
    keep = equation.params.get("keep", False)
    every = waiting_kernels(avals) if waits else [(avals, keep)]
    for types, keep in every:
        function, own = function_of(layer, keep, types), signature_of(types)
        yield _of_dense_function(equation, layer.call, layer.contraction, function, own, common)


def _of_dense_function(
    equation: Any,
    call: Call,
    dims: Contraction,
    function: Function,
    given: Signature,
    common: Mapping[str, Any],
) -> Asked:
    """Returns a product of dense factors, likewise."""
    found = fused.plan(call, dims, function, given)
    alone = merged(call, dims, tuple(fused.factors_of(call, given)[0]))[:2]
    return _of_function(equation, found, alone, function, common)


def _of_function(
    equation: Any,
    found: Any,
    alone: tuple[Call, Signature],
    function: Function,
    common: Mapping[str, Any],
) -> Asked:
    """Returns a product whose epilogue is a function, and what XLA does of it.

    Args:
        equation: The operation.
        found: How a kernel computes the function, or why none does.
        alone: The product without the function.
        function: The function.
        common: As of `_common`.
    """
    if isinstance(found, str) or found.decision.plan is None:
        call, signature = alone
        left = found if isinstance(found, str) else _why_apart(found.decision)
    else:
        call, signature, left = found.call, found.signature, found.split.left
    if not left:
        return Asked(call, signature, **common)
    results = [v.aval for v in equation.outvars]
    moved = sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in results)
    moved += function.sums * math.prod(function.types[0].shape) * np.dtype(np.float32).itemsize
    text = f"the rest of the epilogue by XLA: {left}"
    copy = Copy(text, moved, common["times"], is_epilogue=True)
    return Asked(call, signature, **common, copies=(copy,))


def _why_apart(decision: Decision) -> str:
    """Returns why no kernel computes a function with its product."""
    reasons = [reason for _, every in decision.refused for reason in every]
    return "; ".join((decision.reason, *reasons[:1]))


def _of_jax(operation: Operation) -> Asked:
    """Returns a product of JAX's own as it would be if it were asked of this package."""
    equation = operation.equation
    common = _common(operation) | {"is_ours": lines.is_ours(equation.source_info)}
    given = signature_of(v.aval for v in equation.invars)
    own = _grouped(equation, given) if len(given) > 2 else _dense(equation, given)
    dtype = np.dtype(equation.outvars[0].aval.dtype)
    types = {kind for _, kind in given[:2]}
    precision = rewriting.precision_of(equation)
    groups = len(given) > 2
    types = scheme.multiplied(precision, types, groups=groups)
    why = element_types.why_no_kernel(types, dtype, widened=not groups)
    if isinstance(own, Problem):
        return Asked(None, given, **common, outside=(own, why or NO_FORM))
    call, signature = own
    if why or common["is_ours"]:
        # If it is not for its types, the call had a reason to leave it to XLA.
        return Asked(None, given, **common, outside=(call.problem(signature), why or ""))
    return Asked(call, signature, **common)


def _dense(equation: Any, given: Signature) -> tuple[Call, Signature]:
    """Returns what a `lax.dot_general` is as a product of matrices."""
    call, dims = rewriting.dense_of(equation)
    return merged(call.with_target(known_target()), dims, given)[:2]


def _grouped(equation: Any, given: Signature) -> tuple[Call, Signature] | Problem:
    """Returns what a `lax.ragged_dot_general` is; its size if it is no product of matrices."""
    call = rewriting.groups_of(equation)
    if isinstance(call, Problem):
        return call
    return call.with_target(known_target()), given[:3]


def _needless(
    call: Call, contraction: Contraction, given: Signature, turned: list[Turned | None]
) -> Iterator[Turned]:
    """Yields what need not be turned: as it is stored, the product reads it without a copy."""
    for name, place in (("lhs", 0), ("rhs", 1)):
        operand = turned[place]
        if operand is None or not operand.is_copy or (place and call.epilogue.gated):
            continue
        dims = contraction.with_letters(**{name: operand.how.letters(getattr(contraction, name))})
        operands = (*given[:place], (operand.how.shape, operand.dtype), *given[place + 1 :])
        if not list(_copies(call, merged(call, dims, operands), operands, 1)):
            yield operand


def _copies(call: Call, matrices: Merged, given: Signature, times: int) -> Iterator[Copy]:
    form = matrices.form
    left, right = given[1::-1] if form.swapped else given[:2]
    for (shape, dtype), side in ((left, form.a), (right, form.b)):
        if side.is_free:
            continue
        what = "broadcast" if side.broadcast else f"transpose{side.permutation}"
        moved = (np.prod(shape) + np.prod(side.shape)) * dtype.itemsize
        yield Copy(f"{what} of {dtype}{list(shape)}", int(moved), times)
    if form.permutation is not None:
        moved = 2 * np.prod(form.parts) * call.out_dtype.itemsize
        what = f"transpose{form.permutation} of {call.out_dtype}{list(form.parts)}, the result"
        yield Copy(what, int(moved), times)
