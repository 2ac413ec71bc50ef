"""What is done to operands before a kernel can take them, as data: `Problem` to a list of steps.

A kernel takes a matrix or a batch of them on each side, and says what it cannot take. Here the
cheapest way around that is looked for among all combinations of a few remedies: make the rows of a
batch those of one product, store an operand the other way round, make a dimension a little longer.
Each is one pass over an operand at most; what is then too much of the result is left out by the
kernel, or sliced off where it cannot. The cost is counted in bytes moved, because that is what a
pass is limited by.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm.call import DIMENSIONS, Call, Operands, Signature
from pallas_gemm.device import LINE_BYTES
from pallas_gemm.planning.scheme import Scheme
from pallas_gemm.problem import KINDS, OF_FACTORS, Problem

Action = Literal["reshape", "transpose", "pad", "slice", "cast", "split", "measure", "add"]
Refusals = Callable[[Problem], Iterable[str]]
Shape = tuple[int, ...]

TRANSPOSED = 1.1
"""What a byte counts for that is read in one order and written in another: of two ways that move
about the same bytes, the one that copies rows is the safe choice."""
WIDE = 64
"""The columns of a right operand stored [k, n] have to be a multiple of this."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One thing that is done to an operand or to the result.

    Attributes:
        operand: A field of `Operands`, or "result".
        action: The pass; "transpose" swaps the last two dimensions.
        shape: The shape afterwards.
        bytes: Bytes read and written by it; 0 if it is free.
        types: The type that an operand is cast to, or the arrays that it is split into.
    """

    operand: str
    action: Action
    shape: Shape
    bytes: int = 0
    types: str = ""

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.shape)) + (f" of {self.types}" if self.types else "")
        cost = f"moves {self.bytes / 1e6:.1f} MB" if self.bytes else "free"
        return f"{self.action} {self.operand} to {shape}: {cost}"

    def apply(self, x: jax.Array) -> jax.Array:
        """Does it."""
        match self.action:
            case "reshape":
                return x.reshape(self.shape)
            case "transpose":
                return jnp.swapaxes(x, -1, -2)
            case "pad":
                # What a whole batch shares has a dimension less.
                extra = zip(self.shape[-x.ndim :], x.shape, strict=True)
                return jnp.pad(x, [(0, want - have) for want, have in extra])
            case "cast" | "split" | "measure" | "add":
                # It is done right beside the kernel: by `Scheme`, or by the kernel's own function.
                return x
            case "slice":
                return x[tuple(slice(size) for size in self.shape)]


@dataclasses.dataclass(frozen=True)
class Realigned:
    """A problem that a kernel takes, and the steps that lead to it and back.

    Attributes:
        problem: The problem of the kernel.
        steps: In order; those of the result follow the kernel.
        unfused: Why XLA applies the epilogue; None if the kernel does.
        scheme: How operands become arrays of the kernel's type after these steps; None if they are.
        casts: The passes of that.
    """

    problem: Problem
    steps: tuple[Step, ...] = ()
    unfused: str | None = None
    scheme: Scheme | None = None
    casts: tuple[Step, ...] = ()

    @property
    def passes(self) -> tuple[Step, ...]:
        """All that is done beside the kernel."""
        before = tuple(step for step in self.steps if step.operand != "result")
        return (*before, *self.casts, *(step for step in self.steps if step not in before))

    @property
    def kernels(self) -> int:
        """How many kernels compute a sum: one for each term where they are not one sum."""
        return len(self.scheme.terms) if self.scheme is not None and self.scheme.apart else 1

    @property
    def bytes(self) -> int:
        """Bytes that all passes move."""
        return sum(step.bytes for step in self.passes)

    @property
    def cost(self) -> float:
        """What ways are compared by: bytes, of which those that change places count for more."""
        turned = sum(step.bytes for step in self.passes if step.action == "transpose")
        return self.bytes + (TRANSPOSED - 1) * turned

    @property
    def out_shape(self) -> Shape:
        """Shape of the result after all steps."""
        after = [step.shape for step in self.steps if step.operand == "result"]
        return after[-1] if after else self.problem.out_shape

    def prepare(self, operands: Operands) -> Operands:
        """Applies the steps that come before the kernel."""
        for step in self.steps:
            x = None if step.operand == "result" else getattr(operands, step.operand)
            if x is not None:
                operands = operands._replace(**{step.operand: step.apply(x)})
        return operands

    def restore(self, result: jax.Array) -> jax.Array:
        """Applies the steps that come after it."""
        return functools.reduce(
            lambda x, step: step.apply(x) if step.operand == "result" else x, self.steps, result
        )


def realign(call: Call, signature: Signature, refusals: Refusals) -> Realigned | None:
    """Returns the cheapest way to a problem without refusals, None if no remedy helps."""
    ways = []
    for arranged in _arrangements(call, signature):
        problem = arranged.problem
        legal = not tuple(refusals(problem))
        # A sum of products is taken as it is, or product by product.
        for remedied in (problem,) if legal or problem.terms else _remedies(problem):
            if legal or not tuple(refusals(remedied)):
                before, after = _remedy_steps(problem, remedied)
                # What is undone last was done first.
                undo = tuple(step for step in arranged.steps if step.operand == "result")
                do = tuple(step for step in arranged.steps if step.operand != "result")
                ways.append(Realigned(remedied, (*do, *before, *after, *undo)))
    return min(ways, key=lambda way: (way.cost, way.problem.batch, len(way.steps)), default=None)


def realign_function(problem: Problem, refusals: Refusals) -> Realigned | None:
    """Returns the cheapest way to a problem without refusals whose result a function is applied to.

    Factors may be turned, and padded with zeros along k: the function reads and returns arrays as
    they are.
    """
    ways: list[Realigned] = []
    for left, right, k in itertools.product((False, True), (False, True), _longer_sums(problem)):
        larger = dataclasses.replace(
            problem,
            k=k,
            transpose_a=problem.transpose_a != left,
            transpose_b=problem.transpose_b != right,
        )
        if not tuple(refusals(larger)):
            ways.append(Realigned(larger, tuple(_remedy_steps(problem, larger)[0])))
    return min(ways, key=lambda way: way.cost, default=None)


def realign_groups(
    problem: Problem, bare: Problem | None, unfused: str | None, refusals: Refusals
) -> Realigned | tuple[str, ...]:
    """Returns what a kernel computes of a product of groups, or why it cannot.

    Rows in groups are taken as they are.

    Args:
        problem: The product.
        bare: Its sums alone, to which XLA would apply the epilogue; None if it is not to.
        unfused: Why XLA has to; None if it need not.
        refusals: Says why the kernel refuses a problem.
    """
    refused = (unfused,) if unfused else tuple(refusals(problem))
    variants: list[tuple[Problem, str | None]] = [] if unfused else [(problem, None)]
    if bare is not None and not problem.epilogue.is_identity:
        variants.append((bare, "; ".join(refused)))
    for own, why in variants:
        if not tuple(refusals(own)):
            return Realigned(own, unfused=why)
        ways: list[Realigned] = []
        for remedied in _remedies_of_groups(own):
            others = tuple(refusals(remedied))
            refused = min(refused, others or refused, key=len)
            if not others:
                steps = itertools.chain(*_remedy_steps(own, remedied))
                ways.append(Realigned(remedied, tuple(steps), unfused=why))
        if ways:
            return min(ways, key=lambda way: (way.cost, len(way.steps)))
    return refused


def converted(realigned: Realigned, scheme: Scheme, types: Mapping[str, np.dtype]) -> Realigned:
    """Returns the way to a problem of all terms of a scheme, of that to one of them.

    XLA makes one pass of what is done to an operand before it is cast or split.

    Args:
        realigned: The way to a problem of the type of the scheme's arrays.
        scheme: How operands become such arrays.
        types: The types of the operands, by their names.
    """
    problem = realigned.problem
    shapes = {"a": problem.a_shape, "b": problem.b_shape, "up": problem.b_shape}
    casts, steps = [], list(realigned.steps)
    for name, dtype in types.items():
        if scheme.dtype is None or (dtype == scheme.dtype and not scheme.terms):
            continue
        moved = _bytes(shapes[name], dtype) + scheme.count * _bytes(shapes[name], scheme.dtype)
        steps = [dataclasses.replace(x, bytes=0) if x.operand == name else x for x in steps]
        what: tuple[Action, str] = ("cast", str(scheme.dtype))
        if scheme.terms:
            what = ("split", f"{scheme.dtype}, {scheme.count} arrays")
        if scheme.otherwise is not None:
            read = _bytes(shapes[name], dtype)
            casts.append(Step(name, "measure", shapes[name], read))
        casts.append(Step(name, what[0], shapes[name], moved, what[1]))
    if scheme.apart:
        added = (len(scheme.terms) + 1) * _bytes(problem.out_shape, np.dtype(np.float32))
        casts.append(Step("result", "add", problem.out_shape, added))
    return dataclasses.replace(
        realigned,
        problem=scheme.whole(problem),
        steps=tuple(steps),
        scheme=scheme,
        casts=tuple(casts),
    )


def _arrangements(call: Call, signature: Signature) -> Iterator[Realigned]:
    """Yields the ways to one matrix, or one batch of them, on each side."""
    shapes = Operands(*(x and x[0] for x in call.unpack(signature)))
    problem = call.problem(signature)
    if problem.batch == 1:
        yield _without_batch(problem, shapes)
        return
    yield Realigned(problem)
    # What lies along the rows becomes longer with them; nothing else may differ between them.
    fits = all(
        shape is None or (len(shape) > len(DIMENSIONS[name])) == ("m" in DIMENSIONS[name])
        for name, shape in shapes._asdict().items()
    )
    if fits:
        yield _more_rows(problem)


def _without_batch(problem: Problem, shapes: Operands) -> Realigned:
    """Drops a batch of one."""
    steps = [
        Step(name, "reshape", shape[1:])
        for name, shape in shapes._asdict().items()
        if shape is not None and len(shape) > len(DIMENSIONS[name])
    ]
    if len(shapes.a) == 3 or len(shapes.b) == 3:
        steps.append(Step("result", "reshape", (1, *problem.out_shape)))
    return Realigned(problem, tuple(steps))


def _more_rows(problem: Problem) -> Realigned:
    """Makes the rows of a whole batch, which shares its right operand, those of one product."""
    batch, m, n, k = problem.batch, problem.m, problem.n, problem.k
    rows = dataclasses.replace(problem, m=batch * m, batch=1, transpose_a=False, shared_b=False)
    steps = [Step("a", "reshape", rows.a_shape)]
    if problem.transpose_a:
        cost = 2 * _bytes(problem.a_shape, problem.a_dtype)
        steps.insert(0, Step("a", "transpose", (batch, m, k), cost))
    sizes = {"m": rows.m, "n": n}
    for name in problem.epilogue.operands:
        if "m" in (kind := KINDS[name]) and name not in OF_FACTORS:
            steps.append(Step(name, "reshape", tuple(sizes[x] for x in kind)))
    if problem.blocks and problem.blocks.rows:
        scales = batch * m // problem.blocks.rows, k // problem.blocks.k
        steps.append(Step("row_blocks", "reshape", scales))
    steps.append(Step("result", "reshape", (batch, m, n)))
    return Realigned(rows, tuple(steps))


def _remedies(problem: Problem) -> Iterator[Problem]:
    """Yields the problem with its sizes rounded up and its operands stored the other way round."""
    a, b, out = (dtype.itemsize for dtype in (problem.a_dtype, problem.b_dtype, problem.out_dtype))
    sizes = itertools.product(
        # TMA asks for 16 bytes, and reads whole lines of the cache fastest.
        _rounded(problem.m, LINE_BYTES // a),
        _rounded(problem.n, LINE_BYTES // min(b, out), WIDE),
        _longer_sums(problem),
        (problem.transpose_a, not problem.transpose_a),
        (problem.transpose_b, not problem.transpose_b),
    )
    whole = problem.m, problem.n
    for m, n, k, transpose_a, transpose_b in sizes:
        larger = dataclasses.replace(
            problem, m=m, n=n, k=k, transpose_a=transpose_a, transpose_b=transpose_b
        )
        if (m, n) != whole:
            yield dataclasses.replace(larger, kept=whole)
        yield larger


def _remedies_of_groups(problem: Problem) -> Iterator[Problem]:
    """Yields the same of a product of groups, but for what has to stay as it is.

    Left operands of rows in groups are left as they are: another layout or more rows never help.
    """
    fixed = ["m", "transpose_a"] if problem.groups else []
    if problem.blocks:
        fixed += ["m", "n", "k"]
    if problem.epilogue.program is not None:
        # A function has several results, and reduces whole rows.
        fixed.append("n")
    for remedied in _remedies(problem):
        if all(getattr(remedied, name) == getattr(problem, name) for name in fixed):
            yield remedied


def _longer_sums(problem: Problem) -> list[int]:
    """Returns the contracted elements that come into question: those there are, or whole lines."""
    return _rounded(
        problem.k, LINE_BYTES // min(problem.a_dtype.itemsize, problem.b_dtype.itemsize)
    )


def _rounded(size: int, *multiples: int) -> list[int]:
    return sorted({size, *(-(-size // multiple) * multiple for multiple in multiples)})


def _remedy_steps(before: Problem, after: Problem) -> tuple[list[Step], list[Step]]:
    """Returns the steps from one problem to the other, and back for the result."""
    left = ("a", before.a_shape, after.a_shape, before.transpose_a != after.transpose_a)
    right = (before.b_shape, after.b_shape, before.transpose_b != after.transpose_b)
    changes = [(*left, before.a_dtype)]
    changes += [(name, *right, before.b_dtype) for name in ("b", "up")[: before.sums]]
    if before.epilogue.residual:
        residual = before.out_shape, after.residual_shape
        changes.append(("residual", *residual, False, before.added_dtype))
    steps = []
    for name, have, want, flipped, dtype in changes:
        stored = (*want[:-2], want[-1], want[-2]) if flipped else want
        moved = _bytes(have, dtype) + _bytes(want, dtype)
        if have != stored:
            # XLA makes one pass of padding and the transposition that follows it.
            steps.append(Step(name, "pad", stored, 0 if flipped else moved))
        if flipped:
            steps.append(Step(name, "transpose", want, moved))
    if after.out_shape == before.out_shape:
        return steps, []
    moved = 2 * _bytes(before.out_shape, before.out_dtype)
    return steps, [Step("result", "slice", before.out_shape, moved)]


def _bytes(shape: Shape, dtype: np.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
