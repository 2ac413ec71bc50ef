"""Makes the program that a kernel runs of the values of a function that it is to return."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core

from pallas_gemm.kernels.functions import elementwise, flat
from pallas_gemm.kernels.functions.axes import MOVES
from pallas_gemm.program import Constant, Operand, Program, Result, Step

STEPS = 1 << 20
"""Where the numbers of steps begin before it is known how many operands there are."""


class Builder:
    """Makes a program of the values that a kernel is to return.

    Attributes:
        operands: The numbers of the values that the program takes.
    """

    def __init__(self, splitter: Any) -> None:
        self._from = splitter
        self._known: dict[int, int] = {x: i for i, x in enumerate(splitter.sums)}
        self._steps: list[Step] = []
        self.operands: list[int] = []

    def value(self, number: int) -> int | Constant:
        """Returns a value in the program: its number, which is not final yet, or a constant."""
        number = self._from.source[number]
        if number in self._from.numbers:
            return self._from.numbers[number]
        if number in self._known:
            return self._known[number]
        if number not in self._from.inside or number not in self._from.made:
            self.operands.append(number)
            self._known[number] = -len(self.operands)
            return self._known[number]
        equation = self._from.made[number]
        inputs = [self.value(x) if isinstance(x, int) else constant(x) for x in equation.inputs]
        types = [self._type(x) for x in equation.inputs]
        inner = elementwise.rewritten(equation, types)
        if inner is None:
            self._known[number] = self._step(equation, inputs)
        else:
            self._known[number] = self._inlined(inner, inputs)
        return self._known[number]

    def _type(self, atom: Any) -> Any:
        return atom.aval if isinstance(atom, core.Literal) else self._from.flat.types[atom]

    def _inlined(self, inner: flat.Flat, inputs: Sequence[Any]) -> Any:
        """Adds the steps of a function without calls."""
        known = dict(zip(inner.inputs, inputs, strict=True))
        for equation in inner.equations:
            taken = [known[x] if isinstance(x, int) else constant(x) for x in equation.inputs]
            (out,) = equation.outputs
            # What is the same everywhere is a number.
            is_number = equation.primitive.name in MOVES
            known[out] = taken[0] if is_number else self._step(equation, taken)
        return known[inner.outputs[0]]

    def _step(self, equation: flat.Equation, inputs: Sequence[Any]) -> int:
        params = tuple(sorted(equation.params.items()))
        self._steps.append(Step(equation.primitive, params, tuple(inputs)))
        return STEPS + len(self._steps) - 1

    def program(self, results: Sequence[Result]) -> Program:
        """Returns the program that computes some values."""
        sums = len(self._from.sums)
        found = {number: -1 - i for i, number in enumerate(self.operands)}
        # Arguments come first, in their order.
        self.operands.sort()
        places = {found[number]: sums + i for i, number in enumerate(self.operands)}

        def final(value: Any) -> Any:
            if isinstance(value, Constant) or 0 <= value < sums:
                return value
            return places[value] if value < 0 else value - STEPS + sums + len(self.operands)

        steps = [x._replace(inputs=tuple(map(final, x.inputs))) for x in self._steps]
        operands = [
            Operand(
                self._from.kind(x),
                np.dtype(self._from.flat.types[x].dtype),
                self._from.counts(x),
                self._from.batch(x),
            )
            for x in self.operands
        ]
        ends = tuple(result._replace(value=final(result.value)) for result in results)
        dtype = np.dtype(self._from.flat.types[self._from.sums[0]].dtype)
        return Program(sums, dtype, tuple(operands), tuple(steps), ends)


def constant(literal: Any) -> Constant:
    """Returns the number that a literal of JAX is."""
    dtype = np.dtype(literal.aval.dtype)
    return Constant(np.asarray(literal.val).item(), dtype)
