"""A function of the sums in two parts: what a kernel computes, and what XLA computes around it.

    before    what does not depend on the sums, and is no elementwise work on whole arrays    XLA
    program   elementwise work on the sums, and on what is loaded for it                      kernel
              their reductions along rows or columns
    after     what needs a reduction, or what kernels cannot compute                          XLA

`split.py` says which is which.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from pallas_gemm.kernels.functions import exponentials, flat, vectors
from pallas_gemm.kernels.functions.axes import ONE, Names
from pallas_gemm.program import ARGMAX, FIRST, LAST, LOGSUMEXP, Operand, Program, Result


@dataclasses.dataclass(frozen=True)
class Split:
    """A function of the sums in the parts that compute it.

    Attributes:
        program: The kernel's part.
        flat: The whole function.
        operands: The number of the value that each operand of the program is.
        results: The number of the value that each result of the program is.
        names: The dimensions of the result.
        sizes: The size of each.
        axes: The dimension that each axis of each value is; `ONE` for an axis of size 1.
        left: Why XLA computes what follows the kernel; "" if nothing follows.
    """

    program: Program
    flat: flat.Flat
    operands: tuple[int, ...]
    results: tuple[int, ...]
    names: Names
    sizes: Mapping[str, int]
    axes: Mapping[int, str]
    left: str

    def types(self) -> Iterator[jax.ShapeDtypeStruct]:
        """Yields the types of the kernel's operands."""
        every = zip(self.operands, self.letters, self.program.operands, strict=True)
        for number, letters, own in every:
            shape = self.names.merged(own.kind, letters, self._shape(letters))
            stored = self.flat.types[vectors.narrow(self.flat, number)].dtype
            yield jax.ShapeDtypeStruct(shape, own.loaded if own.kind == "mn" else stored)

    def prepared(self, given: Sequence[Any]) -> list[Any]:
        """Computes the kernel's operands, as matrices and vectors, of those of the function."""
        every = zip(self.spread(given), self.letters, self.program.operands, strict=True)
        return [x.reshape(self.names.merged(own.kind, of, x.shape)) for x, of, own in every]

    @property
    def letters(self) -> list[str]:
        """The dimensions of each operand of the kernel, before they are merged."""
        found = []
        for number, operand in zip(self.operands, self.program.operands, strict=True):
            own = self.names.of_kind(operand.kind).removeprefix(self.names.batch)
            found.append(self._batch(operand, self.axes[number]) + own)
        return found

    def _batch(self, operand: Operand, lies: str) -> str:
        """Returns the dimensions of the batch that an operand of the kernel has."""
        if not set(self.names.batch) & set(lies):
            return ""
        ends = {FIRST: self.names.first, LAST: self.names.last}
        return ends[operand.batch](lies) if operand.batch in ends else self.names.batch

    @property
    def stored(self) -> frozenset[int]:
        """Which results of the function the kernel stores as they are, with all their elements."""
        pairs = zip(self.results, self.program.results, strict=True)
        whole = {number for number, own in pairs if own.kind == "mn"}
        return frozenset(i for i, x in enumerate(self.flat.outputs) if x in whole)

    @property
    def spread_bytes(self) -> int:
        """The bytes that are moved to make operands of each element as the kernel loads them."""
        total = 0
        every = zip(self.operands, self.letters, self.program.operands, strict=True)
        for number, letters, operand in every:
            own = self.flat.types[number]
            is_there = self.axes[number].replace(ONE, "") == self._real(letters)
            is_there = is_there and number in self.flat.inputs and own.dtype == operand.loaded
            if operand.kind == "mn" and not is_there:
                total += math.prod(own.shape) * own.dtype.itemsize
                total += math.prod(self._shape(letters)) * operand.loaded.itemsize
        return total

    def spread(self, given: Sequence[Any]) -> list[Any]:
        """Computes the kernel's operands of those of the function, each with its dimensions."""
        values, found = _Values(self, given), []
        every = zip(self.operands, self.letters, self.program.operands, strict=True)
        for number, letters, operand in every:
            is_vector = operand.kind != "mn"
            x = values.get(vectors.narrow(self.flat, number) if is_vector else number)
            x = self._with_dimensions(x, number, letters)
            found.append(x if is_vector else x.astype(operand.loaded))
        return found

    def finished(self, given: Sequence[Any], computed: Sequence[Any]) -> list[Any]:
        """Computes the function's results of the kernel's, and of the function's operands."""
        values = _Values(self, given)
        own = zip(self.results, self.program.results, computed, strict=True)
        # A sum of exp needs values that come of results before it.
        for number, result, x in sorted(own, key=lambda each: each[0]):
            values.known[number] = self._as_function_has(x, number, result, values)
        return [values.get(output) for output in self.flat.outputs]

    def _shape(self, letters: str) -> tuple[int, ...]:
        return tuple(self.sizes[x] for x in letters)

    def _real(self, letters: str) -> str:
        return "".join(x for x in letters if self.sizes[x] != 1)

    def _with_dimensions(self, x: Any, number: int, letters: str) -> Any:
        """Gives a value all of some dimensions."""
        lies = self.axes[number]
        # Along others it is the same by construction.
        for axis in reversed([i for i, letter in enumerate(lies) if letter not in letters]):
            x = lax.index_in_dim(x, 0, axis, keepdims=False)
        places = [letters.index(letter) for letter in lies if letter in letters]
        if places != sorted(places):
            x = lax.transpose(x, np.argsort(places))
        return lax.broadcast_in_dim(x, self._shape(letters), tuple(sorted(places)))

    def _as_function_has(self, x: Any, number: int, result: Result, values: "_Values") -> Any:
        """Gives a result of the kernel the shape that it has in the function."""
        letters = self.names.of_kind(result.kind)
        if not result.reduction:
            return self._shaped(x, letters, number)
        equation = values.made[number]
        if result.reduction == LOGSUMEXP:
            x = x.reshape(result.vectors, *self._shape(letters))
            _, less = exponent(equation, values.made)
            x = exponentials.beside(x, self._with_dimensions(values.get(less), less, letters))
            along = jnp.sum
        elif result.reduction == ARGMAX:
            found = x[1].astype(equation.params["index_dtype"])
            return self._shaped(found.reshape(self._shape(letters)), letters, number)
        else:
            x, along = x.reshape(self._shape(letters)), getattr(jnp, result.reduction)
        gone = self.axes[equation.inputs[0]]
        reduced = {gone[axis] for axis in equation.params["axes"]}
        axes = tuple(i for i, letter in enumerate(letters) if letter in reduced)
        left = "".join(x for x in letters if x not in reduced)
        return self._shaped(along(x, axes) if axes else x, left, number)

    def _shaped(self, x: Any, letters: str, number: int) -> Any:
        """Gives an array of these dimensions the order and the shape of a value."""
        real = self._real(letters)
        order = [real.index(letter) for letter in self.axes[number].replace(ONE, "")]
        if order != sorted(order):
            x = x.reshape(self._shape(real)).transpose(order)
        return x.reshape(self.flat.types[number].shape)


def exponent(equation: flat.Equation, made: Mapping[int, flat.Equation]) -> tuple[Any, Any]:
    """Returns z and x of `sum(exp(z - x))`; None twice of all else."""
    for name in ("reduce_sum", "exp", "sub"):
        if equation.primitive.name != name:
            break
        if name == "sub":
            return equation.inputs
        if not isinstance(equation.inputs[0], int) or equation.inputs[0] not in made:
            break
        equation = made[equation.inputs[0]]
    return None, None


class _Values:
    """The values of a function, each computed when it is asked for."""

    def __init__(self, split: Split, given: Sequence[Any]) -> None:
        function = split.flat
        sums = len(function.inputs) - len(given)
        self.known: dict[int, Any] = dict(function.constants)
        self.known |= dict(zip(function.inputs[sums:], given, strict=True))
        self.made = {number: e for e in function.equations for number in e.outputs}

    def get(self, atom: Any) -> Any:
        """Returns a value."""
        if isinstance(atom, core.Literal):
            return atom.val
        if atom not in self.known:
            equation = self.made[atom]
            inputs = [self.get(x) for x in equation.inputs]
            outputs = equation.primitive.bind(*inputs, **equation.params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
            self.known |= dict(zip(equation.outputs, outputs, strict=True))
        return self.known[atom]
