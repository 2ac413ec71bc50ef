"""What is done to operands before a kernel can take them, as data: `Problem` to a list of steps.

A kernel states what it cannot take; here the cheapest way around that is looked for among all
combinations of a few remedies: store an operand the other way round, or make a dimension a little
longer. Each remedy is one pass over an operand, and a result that was made too wide is sliced. The
cost is counted in bytes moved, because that is what such a pass is limited by.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_gemm.call import Operands
from pallas_gemm.problem import Problem

Action = Literal["broadcast", "fold", "transpose", "pad", "slice", "reshape"]
Refusals = Callable[[Problem], Iterable[str]]

ROW_BYTES = 16
"""What the rows of an operand have to be a multiple of for TMA."""
WIDE = 64
"""What the columns of a right operand stored [k, n] have to be a multiple of."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One thing that is done to an operand or to the result.

    Attributes:
        operand: A field of `Operands`, or "result".
        action: What is done.
        shape: The shape afterwards.
        bytes: Bytes read and written by it; 0 if it is free.
    """

    operand: str
    action: Action
    shape: tuple[int, ...]
    bytes: int = 0

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        cost = f"moves {self.bytes / 1e6:.1f} MB" if self.bytes else "free"
        return f"{self.action} {self.operand} to {shape}: {cost}"

    def apply(self, x: jax.Array) -> jax.Array:
        """Does it."""
        match self.action:
            case "broadcast":
                return jnp.broadcast_to(x, self.shape)
            case "fold" | "reshape":
                return x.reshape(self.shape)
            case "transpose":
                return jnp.swapaxes(x, -1, -2)
            case "pad":
                extra = (want - have for want, have in zip(self.shape, x.shape, strict=True))
                return jnp.pad(x, [(0, size) for size in extra])
            case "slice":
                return x[tuple(slice(size) for size in self.shape)]


@dataclasses.dataclass(frozen=True)
class Realigned:
    """A problem that a kernel takes, and the steps that lead to it and back.

    Attributes:
        problem: What the kernel computes.
        steps: In order; those of the result follow the kernel.
    """

    problem: Problem
    steps: tuple[Step, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes that all steps move."""
        return sum(step.bytes for step in self.steps)

    def prepare(self, operands: Operands) -> Operands:
        """Applies the steps that come before the kernel."""
        for step in self.steps:
            if step.operand != "result":
                x = step.apply(getattr(operands, step.operand))
                operands = operands._replace(**{step.operand: x})
        return operands

    def restore(self, result: jax.Array) -> jax.Array:
        """Applies the steps that come after it."""
        return functools.reduce(
            lambda x, step: step.apply(x) if step.operand == "result" else x, self.steps, result
        )


def realign(problem: Problem, refusals: Refusals) -> Realigned | None:
    """Returns the cheapest way to a problem without refusals, None if no remedy helps."""
    if not tuple(refusals(problem)):
        return Realigned(problem)
    options = [
        Realigned(changed, tuple(_steps(problem, changed)))
        for changed in _remedies(problem)
        if not tuple(refusals(changed))
    ]
    return min(options, key=lambda option: option.bytes, default=None)


def _remedies(problem: Problem) -> Iterator[Problem]:
    sizes = itertools.product(
        _rounded(problem.m, ROW_BYTES // problem.a_dtype.itemsize),
        _rounded(
            problem.n, ROW_BYTES // min(problem.out_dtype.itemsize, problem.b_dtype.itemsize), WIDE
        ),
        _rounded(problem.k, ROW_BYTES // min(problem.a_dtype.itemsize, problem.b_dtype.itemsize)),
        (False, True),
        (False, True),
    )
    for m, n, k, flip_a, flip_b in sizes:
        yield dataclasses.replace(
            problem,
            m=m,
            n=n,
            k=k,
            transpose_a=problem.transpose_a ^ flip_a,
            transpose_b=problem.transpose_b ^ flip_b,
        )


def _rounded(size: int, *multiples: int) -> list[int]:
    return sorted({size, *(-(-size // multiple) * multiple for multiple in multiples)})


def _steps(before: Problem, after: Problem) -> Iterator[Step]:
    shapes = {
        "a": (
            before.a_shape,
            after.a_shape,
            after.transpose_a != before.transpose_a,
            before.a_dtype,
        ),
        "b": (
            before.b_shape,
            after.b_shape,
            after.transpose_b != before.transpose_b,
            before.b_dtype,
        ),
    }
    if before.epilogue.gated:
        shapes["up"] = shapes["b"]
    if before.epilogue.residual:
        shapes["residual"] = (before.out_shape, after.out_shape, False, before.out_dtype)
    for operand, (have, want, flipped, dtype) in shapes.items():
        turned = (*have[:-2], have[-1], have[-2]) if flipped else have
        # XLA makes one pass of a transposition and the padding that follows it.
        moved = (math.prod(have) + math.prod(want)) * dtype.itemsize
        if flipped:
            yield Step(operand, "transpose", turned, moved)
        if turned != want:
            yield Step(operand, "pad", want, 0 if flipped else moved)
    if before.epilogue.bias and after.n != before.n:
        yield Step("bias", "pad", (after.n,), 4 * (before.n + after.n))
    if after.out_shape != before.out_shape:
        moved = 2 * math.prod(before.out_shape) * before.out_dtype.itemsize
        yield Step("result", "slice", before.out_shape, moved)
