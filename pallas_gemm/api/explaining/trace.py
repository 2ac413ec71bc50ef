"""A traced function as one list of operations: those of the functions that it calls among them.

The body of a loop is there once, with how often it runs. Values that are equal by construction,
because the same operation makes them of the same operands, are one value. An array in another shape
is the same value, too.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core
from jax.extend.core import primitives

from pallas_gemm.kernels.functions.flat import key_of
from pallas_gemm.rewriting import kinds

_SAME = frozenset(("reshape", "squeeze", "expand_dims", "name", "copy", "sharding_constraint"))
"""The result is the array itself, in another shape at most."""


class Value:
    """An array within a program.

    Attributes:
        aval: Its type.
        made_by: The operation that makes it; None if it is given.
        is_number: It is a number that stands in the program.
    """

    def __init__(
        self, aval: Any, made_by: "Operation | None" = None, *, is_number: bool = False
    ) -> None:
        self.aval = aval
        self.made_by = made_by
        self.is_number = is_number

    @property
    def bytes(self) -> int:
        """Its size in memory; 0 of what is no array of numbers, and of a number."""
        dtype = getattr(self.aval, "dtype", None)
        shape = getattr(self.aval, "shape", ())
        if self.is_number or not isinstance(dtype, np.dtype):
            return 0
        sizes = [size if isinstance(size, int) else 0 for size in shape]
        return math.prod(sizes) * dtype.itemsize


@dataclasses.dataclass(eq=False)
class Operation:
    """An equation of a program.

    Attributes:
        equation: The equation of JAX.
        inputs: The values that it reads.
        outputs: The values that it makes.
        times: How often it runs.
        gradient: It is a part of a derivative in reverse mode.
        function: Stands for the call of a function that it is in.
    """

    equation: Any
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    times: int
    gradient: bool
    function: object = None

    @property
    def name(self) -> str:
        """The primitive's."""
        return self.equation.primitive.name

    @property
    def is_apart(self) -> bool:
        """Whether its operands and results are in memory, whatever is before and after it."""
        return kinds.is_apart(self.equation)


@dataclasses.dataclass(frozen=True)
class Trace:
    """A traced function.

    Attributes:
        operations: In an order in which they can run.
        given: Its arguments and constants.
        results: The values that it returns, and those that a round of a loop leaves behind.
    """

    operations: tuple[Operation, ...]
    given: tuple[Value, ...]
    results: tuple[Value, ...]

    def users(self) -> Mapping[Value, list[Operation]]:
        """Returns the operations that read each value."""
        found: dict[Value, list[Operation]] = {}
        for operation in self.operations:
            for value in operation.inputs:
                found.setdefault(value, []).append(operation)
        return found

    def live(self) -> frozenset[Operation]:
        """Returns the operations that a result, or one that is apart, depends on."""
        wanted, found = set(self.results), set()
        for operation in reversed(self.operations):
            if operation.is_apart or wanted.intersection(operation.outputs):
                found.add(operation)
                wanted.update(operation.inputs)
        return frozenset(found)


def trace_of(jaxpr: core.Jaxpr) -> Trace:
    """Returns a traced function as one list of operations."""
    writer = _Writer()
    given = tuple(Value(var.aval) for var in (*jaxpr.constvars, *jaxpr.invars))
    results = writer.write(jaxpr, given, times=1, gradient=False)
    return Trace(tuple(writer.operations), given, (*results, *writer.left))


class _Writer:
    """Writes the operations of functions one after the other."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.left: list[Value] = []
        self._known: dict[Any, tuple[Value, ...]] = {}
        self._function: object = None

    def write(
        self, jaxpr: core.Jaxpr, given: Sequence[Value], times: int, gradient: bool
    ) -> list[Value]:
        """Writes those of a function with these constants and arguments; returns its results."""
        names = (*jaxpr.constvars, *jaxpr.invars)
        # A function's constants may be left out where it is called.
        missing = [Value(var.aval) for var in names[: len(names) - len(given)]]
        values = dict(zip(names, (*missing, *given), strict=True))
        caller, function = self._function, object()
        for equation in jaxpr.eqns:
            self._function = function
            inputs = tuple(self._read(values, v) for v in equation.invars)
            backward = gradient or "transpose(" in str(equation.source_info.name_stack)
            outputs = self._outputs(equation, inputs, times, backward)
            values.update(zip(equation.outvars, outputs, strict=True))
        self._function = caller
        return [self._read(values, v) for v in jaxpr.outvars]

    def _read(self, values: Mapping[Any, Value], v: Any) -> Value:
        if not isinstance(v, core.Literal):
            return values[v]
        key = ("literal", str(v.aval), repr(v.val))
        (found,) = self._known.setdefault(key, (Value(v.aval, is_number=True),))
        return found

    def _outputs(
        self, equation: Any, inputs: tuple[Value, ...], times: int, gradient: bool
    ) -> Sequence[Value]:
        name, inner = equation.primitive.name, list(core.jaxprs_in_params(equation.params))
        if name in kinds.CALLS | kinds.CALLS_AGAIN | {kinds.SHARDED} and len(inner) == 1:
            again = name in kinds.CALLS_AGAIN and equation.params.get("differentiated", False)
            if again and equation.params.get("prevent_cse", True):
                # What was computed before is computed again, and not found.
                inputs = self._made(equation, inputs, [v.aval for v in inputs], times, gradient)
            if len(inner[0].invars) == len(inputs):
                return self.write(inner[0], inputs, times, gradient)
        if (same := _same(equation, inputs)) is not None:
            return (same,)
        if name in kinds.DOTS:
            # XLA reads and writes what is turned around its own products as it is stored.
            inputs = tuple(map(_upright, inputs))
        repeated = times * (equation.params["length"] if name == primitives.scan_p.name else 1)
        for jaxpr in () if name in kinds.KERNELS else inner:
            own = [Value(var.aval) for var in jaxpr.invars]
            self.left += self.write(jaxpr, own, repeated, gradient)
        avals = [v.aval for v in equation.outvars]
        key = None if inner or kinds.is_apart(equation) else key_of(equation, *map(id, inputs))
        if key is not None and key in self._known:
            return self._known[key]
        made = self._made(equation, inputs, avals, times, gradient)
        if key is not None:
            self._known[key] = made
        return made

    def _made(
        self, equation: Any, inputs: Any, avals: Any, times: int, gradient: bool
    ) -> tuple[Value, ...]:
        own = Operation(equation, tuple(inputs), (), times, gradient, self._function)
        own.outputs = tuple(Value(aval, own) for aval in avals)
        self.operations.append(own)
        return own.outputs


def _same(equation: Any, inputs: tuple[Value, ...]) -> Value | None:
    """Returns the value that an operation returns as it is; None if it makes another."""
    if equation.primitive.name in _SAME:
        return inputs[0]
    makers = [own.name for value in inputs if (own := value.made_by) is not None]
    if equation.primitive.name == "transpose" and makers and makers[0] in kinds.DOTS:
        return inputs[0]
    if equation.primitive.name != "convert_element_type":
        return None
    (given,), wanted = inputs, equation.outvars[0].aval.dtype
    if given.aval.dtype == wanted:
        return given
    if makers == ["convert_element_type"] and given.made_by is not None:
        (first,) = given.made_by.inputs
        # There and back again.
        if first.aval.dtype == wanted and given.aval.dtype.itemsize > wanted.itemsize:
            return first
    return None


def _upright(value: Value) -> Value:
    """Returns what is turned, as it is before."""
    own = value.made_by
    return own.inputs[0] if own is not None and own.name == "transpose" else value
