"""Rows in groups whose epilogue is a function of the caller's.

    s = a @ b[group]                     float32; of a gated product the sums of gate and of up
    results = function(s, *operands)     each row with what its group has; zeros of rows in no group

A kernel computes what `kernels/functions/split.py` says, as of one product. XLA computes the rest,
and on several devices all of the function. An operand that groups have comes to the kernel as it
is: to it a group is one product of a batch.
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

from pallas_gemm.call import GroupedCall, Operands, Signature, signature_of
from pallas_gemm.kernels.functions.axes import Names
from pallas_gemm.kernels.functions.parts import Split
from pallas_gemm.kernels.functions.split import split
from pallas_gemm.op import linear, lowering
from pallas_gemm.op.batching import one_by_one
from pallas_gemm.op.function_of_sums import Function
from pallas_gemm.op.grouped import changes_of_sums, grouped
from pallas_gemm.op.mesh import mesh_context
from pallas_gemm.op.mesh.fused_partition import program_kernel_p, refuse_unpromised
from pallas_gemm.op.product import computed_by, give_rules, lower_by
from pallas_gemm.planning import dispatch
from pallas_gemm.planning.by_xla import xla_groups
from pallas_gemm.planning.dispatch import Decision
from pallas_gemm.program import Operand

fused_groups_p = core.Primitive("pallas_gemm_fused_groups")
fused_groups_p.multiple_results = True

NAMES = Names("mn", "m", "n")
"""The dimensions of the sums."""


@dataclasses.dataclass(frozen=True, eq=False)
class OfRows:
    """A function of rows in groups.

    Attributes:
        function: It takes operands whose rows are those of the sums.
        of_groups: Which of its operands have a row for each group instead.
    """

    function: Function
    of_groups: tuple[bool, ...]

    @property
    def sums(self) -> int:
        """How many sums it takes first."""
        return self.function.sums

    @functools.cache  # noqa: B019 - a function lives as long as the program that holds it
    def keeping_sums(self, dtype: Any) -> "OfRows":
        """Returns the function with the sums, rounded, as more results."""
        return OfRows(self.function.keeping_sums(dtype), self.of_groups)

    @functools.cached_property
    def as_derived(self) -> "OfRows":
        """The function where it is derived, as `Function` says."""
        own = self.function.as_derived
        return self if own is self.function else OfRows(own, self.of_groups)

    def spread(self, group: jax.Array, groups: int, given: Sequence[Any]) -> list[Any]:
        """Returns operands whose rows are those of the sums."""
        of_row = jnp.minimum(group, max(groups - 1, 0))
        every = zip(given, self.of_groups, strict=True)
        return [xla_groups.taken(x, of_row) if many else x for x, many in every]

    def finished(self, sums: Sequence[Any], sizes: jax.Array, given: Sequence[Any]) -> list[Any]:
        """Computes the results from the sums by XLA."""
        group = xla_groups.group_of_rows(sizes, sums[0].shape[0])
        groups = sizes.shape[0]
        every = (*sums, *self.spread(group, groups, given))
        results = self.function(*(_held(x, group, groups) for x in every))
        return [xla_groups.of_rows_in_groups(x, group < groups) for x in results]


def _held(x: Any, group: jax.Array, groups: int) -> Any:
    """See `xla_groups.held`; what all rows have in common stays as it is."""
    is_of_rows = x.ndim == 2 and x.shape[:1] == group.shape
    return xla_groups.held(x, group < groups) if is_of_rows else x


class Given(NamedTuple):
    """The operands: factors and their scales, sizes, and what the function takes."""

    factors: Operands
    sizes: Any
    others: tuple[Any, ...]

    @classmethod
    def of(cls, call: GroupedCall, operands: Sequence[Any]) -> "Given":
        """Returns operands by their names."""
        end = len(call.names) + 1
        return cls(call.unpack(operands[:end]), call.sizes(operands), tuple(operands[end:]))

    def each_sum(self, call: GroupedCall, dtype: Any) -> list[tuple[GroupedCall, tuple[Any, ...]]]:
        """Returns the product that each sum is, in a type, and its operands."""
        plain, each = call.sums(dtype), call.each_sum(self.factors)
        return [(plain, plain.packed(own, self.sizes)) for own in each]


def fused_groups(call: GroupedCall, function: OfRows, *operands: jax.Array) -> list[jax.Array]:
    """Computes a function of rows in groups.

    Args:
        call: The product, with float32 sums and no epilogue but a gate and scales of blocks.
        function: The function of the sums.
        *operands: The factors, the sizes, scales of blocks, then what the function takes.
    """
    return computed_by(fused_groups_p, call, operands, call=call, function=function)


def apart(
    call: GroupedCall,
    function: OfRows,
    *operands: jax.Array,
    multiply: Callable[..., jax.Array] = grouped,
) -> list[jax.Array]:
    """Computes the products, then the function by XLA."""
    given = Given.of(call, operands)
    sums = [multiply(plain, *own) for plain, own in given.each_sum(call, call.out_dtype)]
    return function.finished(sums, given.sizes, given.others)


class FusedGroups(NamedTuple):
    """How a kernel computes a function of rows in groups.

    Attributes:
        function: The function.
        split: Its parts, of operands whose rows are those of the sums.
        places: The number of the operand of groups that each operand of the kernel is; None of
            other operands.
        call: The product and its program.
        signature: The operands of that.
        decision: The kernel that computes it, and the reason.
    """

    function: OfRows
    split: Split
    places: tuple[int | None, ...]
    call: GroupedCall
    signature: Signature
    decision: Decision

    def run(self, compute: Callable[..., Any], *operands: jax.Array) -> list[jax.Array]:
        """Computes the results; `compute` is the kernel."""
        given = Given.of(self.call, operands)
        groups, group = given.sizes.shape[0], _group(given)
        every = self.function.spread(group, groups, given.others)
        ready = _prepared(self.split, self.places, given.others, every)
        results = compute(*self.call.packed(given.factors, given.sizes), *ready)
        finished = self.split.finished(every, results)
        # Rows of no group are zeros in what the kernel stores.
        return [
            x if i in self.split.stored else xla_groups.of_rows_in_groups(x, group < groups)
            for i, x in enumerate(finished)
        ]


def _group(given: Given) -> jax.Array:
    return xla_groups.group_of_rows(given.sizes, given.factors.a.shape[0])


def _prepared(
    parts: Split, places: Sequence[int | None], given: Sequence[Any], of_rows: Sequence[Any]
) -> list[Any]:
    """Computes the kernel's operands; those of groups come as they are, without a dimension of 1.

    XLA computes no operand of rows that is not used.
    """
    found = []
    for place, own, x in zip(places, parts.program.operands, parts.prepared(of_rows), strict=True):
        if place is None:
            found.append(x)
        else:
            found.append(given[place] if "n" in own.kind else given[place].reshape(-1))
    return found


def plan(call: GroupedCall, function: OfRows, signature: Signature) -> FusedGroups | str:
    """Returns how a kernel computes a function of rows in groups, or why none does.

    Raises:
        ValueError: Something is promised of the results that is not kept.
    """
    found = _plan(call, function, signature)
    refuse_unpromised(call, found if isinstance(found, str) else found.split)
    return found


@functools.lru_cache(maxsize=4096)
def _plan(call: GroupedCall, function: OfRows, signature: Signature) -> FusedGroups | str:
    parts = split(function.function.closed, NAMES, function.sums)
    if isinstance(parts, str):
        return parts
    if not (parts.program.steps or parts.program.reductions):
        return parts.left or "the function computes nothing"
    inputs = parts.flat.inputs[function.sums :]
    of_groups = {inputs[i]: i for i, many in enumerate(function.of_groups) if many}
    places = tuple(of_groups.get(number) for number in parts.operands)
    operands = tuple(
        own if place is None else Operand(own.kind.removeprefix("m"), own.dtype)
        for own, place in zip(parts.program.operands, places, strict=True)
    )
    program = dataclasses.replace(parts.program, operands=operands)
    given = Given.of(call, signature)
    shapes = [jax.ShapeDtypeStruct(*x) for x in given.others]
    of_rows = function.function.types[function.sums :]
    ready = jax.eval_shape(functools.partial(_prepared, parts, places), shapes, of_rows)
    own = (*call.packed(given.factors, given.sizes), *signature_of(ready))
    fused_call = call.with_program(program)
    decision = dispatch.decide(fused_call, own)
    return FusedGroups(function, parts, places, fused_call, own, decision)


@fused_groups_p.def_effectful_abstract_eval
def _abstract(*avals: Any, call: GroupedCall, function: OfRows, **_: Any) -> Any:
    given = signature_of(avals)
    run = functools.partial(_run, call, function, given, gpu=False)
    types = lowering.types_by(avals, _by_jax, call, function)
    return types, lowering.effects_of(call, run, given)


_by_jax = functools.partial(apart, multiply=xla_groups.by_jax)


def _run(
    call: GroupedCall, function: OfRows, signature: Signature, *, gpu: bool
) -> Callable[..., list[jax.Array]]:
    """Returns what computes a function of rows in groups on one device."""
    found = plan(lowering.planned(call, gpu), function, signature)
    if isinstance(found, str) or found.decision.plan is None:
        return functools.partial(apart, call, function)
    kernel = lowering.bound(program_kernel_p, found.call, found.decision)
    return functools.partial(found.run, kernel)


def _lowered(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    call: GroupedCall,
    function: OfRows,
    devices: Any,
    gpu: bool,
) -> Any:
    del devices  # The products learn them.
    if mesh_context.is_one_devices(ctx.module_context.axis_context):
        run = _run(call, function, signature_of(ctx.avals_in), gpu=gpu)
        return mesh_context.lower_off_mesh(ctx, run, operands)
    lowering.refuse_simulation(call.options.implementation)
    refuse_unpromised(call, "devices share the rows in groups")
    run = functools.partial(apart, call, function)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


def _jvp(
    primals: Any, tangents: Any, *, call: GroupedCall, function: OfRows, **_: Any
) -> tuple[Any, Any]:
    given = Given.of(call, primals)
    moves = Given.of(call, linear.changes(tangents))
    changes = [*_changes_of_sums(call, given, moves), *moves.others]

    def compute(kept: Any = None) -> list[Any]:
        own = function.as_derived
        own = own if kept is None else own.keeping_sums(kept)
        return fused_groups(call, own, *primals)

    def finished(*args: Any) -> list[Any]:
        return function.finished(args[: function.sums], given.sizes, args[function.sums :])

    dtype = given.factors.a.dtype
    return function.function.derivative(compute, dtype, changes, given.others, finished)


def _changes_of_sums(call: GroupedCall, given: Given, moves: Given) -> list[Any]:
    """Returns how each sum changes with its factors and scales; None where it does not."""
    found: list[Any] = []
    each = map(call.each_sum, (given.factors, moves.factors))
    for x, dx in zip(*each, strict=True):
        if call.epilogue.blocks:
            pairs = zip(x, dx, strict=True)
            a, b, *scales = (t for own_x, t in pairs if own_x is not None)
            tangents, change = (a, b, None, *scales), None
            if any(t is not None for t in tangents):
                plain = call.sums(np.float32)
                operands = plain.packed(x, given.sizes)
                change = linear.change_by_xla(plain, xla_groups.by_jax, operands, tangents)
            found.append(change)
            continue
        found.append(linear.total(changes_of_sums(call, x, dx, given.sizes)))
    return found


def _batch(
    operands: tuple[Any, ...],
    dims: tuple[Any, ...],
    *,
    call: GroupedCall,
    function: OfRows,
    **_: Any,
) -> tuple[list[jax.Array], list[int]]:
    results = one_by_one(functools.partial(fused_groups, call, function), operands, dims)
    return results, [0] * len(results)


give_rules(fused_groups_p, jvp=_jvp, batch=_batch)
lower_by(fused_groups_p, _lowered)
