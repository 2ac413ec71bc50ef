"""The hyperbolic tangent where only `1 + tanh(u)` or `1 - tanh(u)**2` is asked for, as in gelu.

    1 + tanh(u)         2 s                 with s = logistic(2 u)
    1 - tanh(u)**2      4 (s - s * s)

A GPU computes the logistic function to float32's precision in four instructions, and such a tangent
in some fifteen. Where a result is rounded to 16 bits, it has a tangent of one instruction: programs
for which that is precise enough (`Program.is_coarse`) are left alone.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
from jax import lax

from pallas_gemm.program import Constant, Program, Result, Step

_F32 = np.dtype(np.float32)


def rewritten(program: Program) -> Program:
    """Returns a program that computes the same without the tangents that this file is about."""
    if program.is_coarse or "tanh" not in program.primitives:
        return program
    return _Rewriter(program).program()


class _Rewriter:
    """Copies the steps of a program, and makes others of tangents and of what uses them."""

    def __init__(self, program: Program) -> None:
        self._before = program
        self._first = program.sums + len(program.operands)
        self._steps: list[Step] = []
        self._known: dict[int, Any] = {i: i for i in range(self._first)}
        self._readers: dict[int, list[Step | Result]] = {}
        for reader in (*program.steps, *program.results):
            for number in {x for x in _taken(reader) if isinstance(x, int)}:
                self._readers.setdefault(number, []).append(reader)
        self._squares: dict[int, int] = {}

    def program(self) -> Program:
        """Returns the other program."""
        logistic: dict[int, int] = {}
        for number, step in enumerate(self._before.steps, self._first):
            if step.primitive is lax.tanh_p and self._is_beside_one(number):
                doubled = self._add(lax.mul_p, 2.0, self._value(step.inputs[0]))
                logistic[number] = self._add(lax.logistic_p, doubled, accuracy=None)
            elif step.inputs[0] in logistic and step.inputs[0] == step.inputs[-1]:
                self._squares[number] = logistic[_number(step.inputs[0])]
            elif found := logistic.keys() & set(step.inputs):
                self._known[number] = self._add(lax.mul_p, 2.0, logistic[found.pop()])
            elif found := self._squares.keys() & set(step.inputs):
                s = self._squares[found.pop()]
                rest = self._add(lax.sub_p, s, self._add(lax.mul_p, s, s))
                self._known[number] = self._add(lax.mul_p, 4.0, rest)
            else:
                self._known[number] = self._copied(step)
        results = tuple(
            result._replace(value=self._known[result.value]) for result in self._before.results
        )
        return dataclasses.replace(self._before, steps=tuple(self._steps), results=results)

    def _is_beside_one(self, number: int) -> bool:
        """Whether each reader of a tangent adds one, or subtracts its square from one."""
        return all(
            _adds_one(reader)
            or (_is_square(reader) and all(map(_subtracts_from_one, self._readers_of(reader))))
            for reader in self._readers[number]
        )

    def _readers_of(self, step: Any) -> Iterable[Step | Result]:
        return self._readers[self._first + self._before.steps.index(step)]

    def _value(self, x: int | Constant) -> int | Constant:
        return x if isinstance(x, Constant) else self._known[x]

    def _copied(self, step: Step) -> int:
        return self._append(step._replace(inputs=tuple(map(self._value, step.inputs))))

    def _add(self, primitive: Any, *inputs: Any, **params: Any) -> int:
        values = [Constant(x, _F32) if isinstance(x, float) else x for x in inputs]
        return self._append(Step(primitive, tuple(sorted(params.items())), tuple(values)))

    def _append(self, step: Step) -> int:
        self._steps.append(step)
        return self._first + len(self._steps) - 1


def _taken(reader: Step | Result) -> tuple[Any, ...]:
    return reader.inputs if isinstance(reader, Step) else (reader.value,)


def _number(x: int | Constant) -> int:
    assert isinstance(x, int)
    return x


def _has_one(step: Step) -> bool:
    return any(isinstance(x, Constant) and x.value == 1 for x in step.inputs)


def _adds_one(reader: Step | Result) -> bool:
    return isinstance(reader, Step) and reader.primitive is lax.add_p and _has_one(reader)


def _is_square(reader: Step | Result) -> bool:
    return (
        isinstance(reader, Step)
        and reader.primitive is lax.mul_p
        and reader.inputs[0] == reader.inputs[1]
    )


def _subtracts_from_one(reader: Step | Result) -> bool:
    return (
        isinstance(reader, Step)
        and reader.primitive is lax.sub_p
        and isinstance(reader.inputs[0], Constant)
        and reader.inputs[0].value == 1
    )
