"""Products of JAX's own as ours: what each would be, and whether a kernel computes it alone.

A kernel may be slower than XLA's for the product alone, and faster with what follows it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np
from jax import lax
from jax.extend import core
from jax.sharding import AxisType

from pallas_gemm.call import Call, GroupedCall, Options, Signature, signature_of
from pallas_gemm.device import Device
from pallas_gemm.kernels import element_types
from pallas_gemm.op import grouped as groups
from pallas_gemm.op import lowering
from pallas_gemm.op.canonical import Form, merged
from pallas_gemm.op.contraction import Contraction, normal_dimension_numbers, of_dot_general
from pallas_gemm.op.mesh import mesh_context
from pallas_gemm.op.mesh.reduction import reduction_dtype
from pallas_gemm.op.product import product_p
from pallas_gemm.planning import dispatch, prediction, scheme
from pallas_gemm.planning.by_xla import xla_time
from pallas_gemm.problem import Problem


class Alone(NamedTuple):
    """How a product is best computed on its own.

    Attributes:
        seconds: How long that is predicted to take; None if nothing is known of it.
        left: Why XLA computes it so; None if a kernel does.
        refused: No kernel is chosen for it, whatever is predicted.
    """

    seconds: float | None
    left: str | None = None
    refused: bool = False


@dataclasses.dataclass(frozen=True)
class How:
    """How a program is rewritten.

    Attributes:
        device: The GPU that is planned for.
        named: It is named, and part of each call; else the program's own GPU is asked for.
        exact: Nothing may change a bit but the products themselves.
        only: Parts of the names of lines; only products on these are replaced, None for all.
        implementation: "interpret" simulates the kernels, for tests.
        known: The answers so far, by their questions: equal blocks have equal products.
    """

    device: Device
    named: bool = True
    exact: bool = False
    only: tuple[str, ...] | None = None
    implementation: str | None = None
    known: dict[Any, Any] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def options(self) -> Options:
        """How a product is to be computed."""
        return Options(
            implementation=self.implementation,
            target=self.device if self.named else None,
            reduced=reduction_dtype(),
        )

    def alone(self, call: Call, dims: Contraction, signature: Signature) -> Alone:
        """Returns how a product is best computed on its own."""
        key = call, dims, signature
        return self.once(key, functools.partial(self._alone, *key))

    def once(self, question: Hashable, answer: Callable[[], Any]) -> Any:
        """Returns the answer to a question, for which a function is called once."""
        found = self.known.get(question, self)
        if found is self:
            found = self.known[question] = answer()
        return found

    def _alone(self, call: Call, dims: Contraction, signature: Signature) -> Alone:
        own, operands, form = merged(call.with_target(self.device), dims, signature)
        decision = dispatch.decide(own, operands)
        by_xla = xla_time.seconds(decision.problem, self.device)
        if decision.plan is None:
            return Alone(by_xla, _why(decision), refused=True)
        copies = copy_seconds(form, signature, call.out_dtype.itemsize, self.device)
        seconds = decision.plan.seconds + copies
        if self.implementation is not None or by_xla is None:
            return Alone(seconds)
        if seconds > (1 if copies else SLOWER) * by_xla:
            why = f"{_us(seconds)} with our kernel, {_us(by_xla)} with XLA's, as predicted"
            return Alone(by_xla, why)
        return Alone(seconds)


@dataclasses.dataclass(frozen=True)
class Dense:
    """A `dot_general` that a kernel could compute, alone or with what is around it.

    Attributes:
        call: The product.
        dims: Its dimensions.
        factors: The operands.
        out: Its result.
        seconds: The predicted time of the product alone.
        left: Why XLA computes it alone; None if a kernel does.
        refused: No kernel is chosen for it alone, whatever is predicted.
        order: The axes of `out` in the order in which a kernel makes them; empty for their own.
    """

    call: Call
    dims: Contraction
    factors: tuple[Any, Any]
    out: Any
    seconds: float
    left: str | None = None
    refused: bool = False
    order: tuple[int, ...] = ()

    @property
    def axes_of_rows(self) -> tuple[int, ...]:
        """The axes of the result that are the left operand's."""
        return tuple(map(self.dims.out.index, self.dims.rows))

    @functools.cached_property
    def swapped(self) -> "Dense":
        """The same product with the operands in the other order."""
        call = self.call.with_swapped_precision()
        return dataclasses.replace(
            self, call=call, dims=self.dims.swapped, factors=self.factors[::-1]
        )

    @property
    def exchanged(self) -> "Dense":
        """The same product whose kernel has its rows as columns, and the other way round."""
        own = self.swapped
        out = own.dims.batch + own.dims.rows + own.dims.columns
        dims = dataclasses.replace(own.dims, out=out)
        return dataclasses.replace(own, dims=dims, order=tuple(map(self.dims.out.index, out)))

    @functools.cached_property
    def in_order(self) -> "Dense":
        """The same with the dimensions of the left operand first in the result, if that can be."""
        dims = self.dims
        is_turned = dims.columns and dims.out.endswith(dims.columns + dims.rows)
        return self.swapped if is_turned else self


def is_one_devices(own: Dense) -> bool:
    """Whether a product is one device's as far as the types of its operands say."""
    return all(
        x.aval.sharding.mesh.size <= 1
        or mesh_context.why_not_shared(x.aval.sharding.mesh) == mesh_context.ONE_DEVICES
        for x in own.factors
    )


def avals_of(atoms: Any) -> tuple[Any, ...]:
    """Returns the types of what an equation reads or makes."""
    return tuple(x.aval for x in atoms)


def precision_of(equation: Any) -> Any:
    """Returns the precision that an equation asks for."""
    own = equation.params["precision"]
    return (lax.Precision.DEFAULT,) * 2 if own is None else own


def dense_of(equation: Any) -> tuple[Call, Contraction]:
    """Returns what a `dot_general` is as a call, and its dimensions."""
    ranks = [len(x.aval.shape) for x in equation.invars]
    numbers = normal_dimension_numbers(equation.params["dimension_numbers"])
    call = Call(equation.outvars[0].aval.dtype, precision=precision_of(equation))
    return call, of_dot_general(*ranks, numbers)


def groups_of(equation: Any) -> GroupedCall | Problem:
    """Returns what a `ragged_dot_general` is as a call; its size if no call is like it."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    given = signature_of(avals_of(equation.invars))
    (left, a_dtype), (right, b_dtype), (sizes, _) = given[:3]
    result = equation.outvars[0].aval
    if form := groups.form_of(numbers, len(left), len(right)):
        contracted, transposed = form
        return GroupedCall(
            result.dtype,
            transpose_b=transposed,
            precision=precision_of(equation),
            contracted=contracted,
        )
    (contracting, _), _ = normal_dimension_numbers(numbers.dot_dimension_numbers)
    k = math.prod(left[i] for i in contracting)
    rows = math.prod(size for i, size in enumerate(left) if i not in contracting)
    is_of_k = set(numbers.lhs_ragged_dimensions) <= set(contracting)
    whole = math.prod(result.shape) // (sizes[-1] if is_of_k else 1)
    count = sizes[-1] if numbers.rhs_group_dimensions else 0
    return Problem(*(rows, whole // max(rows, 1), k), a_dtype, b_dtype, result.dtype, groups=count)


def text_of(equation: Any) -> str:
    """Says what an equation multiplies."""
    types = [f"{x.aval.dtype}{list(x.aval.shape)}" for x in equation.invars[:2]]
    return f"{' x '.join(types)} -> {equation.outvars[0].aval.dtype}"


def _why_left(equation: Any) -> str | None:
    """Returns why an equation stays JAX's whatever kernels say; None if nothing does."""
    given = avals_of(equation.invars)
    result = equation.outvars[0].aval
    types = {np.dtype(x.dtype) for x in given[:2]}
    types = scheme.multiplied(precision_of(equation), types, groups=len(given) > 2)
    if why := element_types.why_no_kernel(types, np.dtype(result.dtype), widened=False):
        return why
    if result.weak_type:
        return "its result is weakly typed"
    types = (*given, result)
    if any(map(_is_split_by_type, types)):
        return "the types of the operands say how a mesh splits them"
    if any(map(mesh_context.is_partial_sum, types)):
        return "the type of an operand says that it is reduced, or unreduced"
    meshes = [own for x in given if (own := x.sharding.mesh).size > 1]
    why = mesh_context.why_not_shared(*meshes) if meshes else None
    return None if why == mesh_context.ONE_DEVICES else why


def _is_split_by_type(aval: Any) -> bool:
    mesh = aval.sharding.mesh
    return mesh.size > 1 and AxisType.Explicit in mesh.axis_types


def dense(equation: Any, how: How) -> Dense | str:
    """Returns a `dot_general` as a kernel could compute it, or why it stays JAX's."""
    factors, (out,), params = tuple(equation.invars), equation.outvars, equation.params
    numbers = normal_dimension_numbers(params["dimension_numbers"])
    question = avals_of(factors), out.aval, numbers, precision_of(equation)
    answer = how.once(question, functools.partial(_dense, equation, how))
    if isinstance(answer, str):
        return answer
    call, dims, alone = answer
    return Dense(call, dims, factors, out, *alone)


def _dense(equation: Any, how: How) -> tuple[Call, Contraction, Alone] | str:
    """Returns the same without the operands: equal products have it in common."""
    if why := _why_left(equation):
        return why
    call, dims = dense_of(equation)
    shape = equation.invars[0].aval.shape
    if math.prod(shape[dims.lhs.index(x)] for x in dims.contracted) == 1:
        return "one element is contracted, which XLA multiplies in the pass of what follows"
    call = dataclasses.replace(call, options=how.options)
    alone = how.alone(call, dims, signature_of(avals_of(equation.invars)))
    return str(alone.left) if alone.seconds is None else (call, dims, alone)


SLOWER = 1.05
"""How much longer a kernel may be predicted to take than XLA, which predictions err by. A kernel
whose operands are copied first may not take longer at all: XLA may make them in another layout."""


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us"


def copy_seconds(form: Form, factors: Signature, out_bytes: int, device: Device) -> float:
    """Returns how long it takes to make matrices of the factors, and the result of theirs.

    Args:
        form: How that is done.
        factors: The left one, and the right one; of a gated product the one of up, too.
        out_bytes: Bytes of an element of the result.
        device: The GPU.
    """
    first, second = (form.b, form.a) if form.swapped else (form.a, form.b)
    total = 0
    for (shape, dtype), side in zip(factors, (first, second, second), strict=False):
        if not side.is_free:
            total += (math.prod(shape) + math.prod(side.shape)) * dtype.itemsize
    if form.permutation is not None:
        total += 2 * math.prod(form.parts) * out_bytes
    return prediction.pass_seconds(total, device) if total else 0.0


def _why(decision: dispatch.Decision) -> str:
    """Returns the reason, with that of the kernel for this GPU if it gives one."""
    telling = [x for _, x in decision.refused if not x[0].startswith(dispatch.OTHER_GPU)]
    return "; ".join((decision.reason, *(why for each in telling for why in each)))


def equation_of(
    call: Call, dims: Contraction, operands: tuple[Any, ...], out: Any, like: Any
) -> Any:
    """Returns the equation of a product of ours, in the place of another."""
    devices = mesh_context.device_request(call, operands)
    return like.replace(
        invars=list(operands),
        outvars=[out],
        primitive=product_p,
        params={"call": call, "contraction": dims, "devices": devices},
        effects=lowering.effects(*merged(call, dims, signature_of(avals_of(operands)))[:2]),
    )


def grouped(equation: Any, how: How) -> Any:
    """Returns the equation of our product of groups, or why a `ragged_dot_general` stays JAX's."""
    if why := _why_left(equation):
        return why
    if equation.params["group_offset"] is not None or len(equation.invars) > 3:
        return "the groups begin at an offset"
    call = groups_of(equation)
    if isinstance(call, Problem):
        return groups.NO_FORM
    call = dataclasses.replace(call, options=how.options)
    signature = signature_of(avals_of(equation.invars))
    decision = dispatch.decide(call.with_target(how.device), signature)
    if decision.plan is None:
        return _why(decision)
    devices = mesh_context.device_request(call, equation.invars)
    return equation.replace(
        primitive=groups.grouped_p,
        params={"call": call, "devices": devices},
        effects=lowering.effects(call, signature),
    )


def turned(own: Dense, how: How, **stored: Any) -> Dense | None:
    """Returns a product of an operand as it is stored, or whose result is stored as it is wanted.

    Args:
        own: The product.
        how: How it is computed.
        **stored: `lhs`, `rhs` or `out`: (letters, variable) of it as it is in memory.

    Returns:
        The product; None if something would still be copied for it.
    """
    dims = own.dims.with_letters(**{name: letters for name, (letters, _) in stored.items()})
    named = {"lhs": own.factors[0], "rhs": own.factors[1], "out": own.out}
    named |= {name: variable for name, (_, variable) in stored.items()}
    factors = (named["lhs"], named["rhs"])
    signature = signature_of(avals_of(factors))
    form = merged(own.call, dims, signature).form
    left, right = (form.b, form.a) if form.swapped else (form.a, form.b)
    free = {"lhs": left.is_free, "rhs": right.is_free, "out": form.permutation is None}
    if not all(free[name] for name in stored):
        return None
    before = merged(own.call, own.dims, signature_of(avals_of(own.factors))).form
    if _copies(form) > _copies(before):
        return None
    seconds, left, refused = how.alone(own.call, dims, signature)
    if seconds is None or isinstance(named["out"], core.DropVar):
        return None
    return Dense(own.call, dims, factors, named["out"], seconds, left, refused)


def _copies(form: Any) -> int:
    return (not form.a.is_free) + (not form.b.is_free) + (form.permutation is not None)
