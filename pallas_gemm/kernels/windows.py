"""Arrays of which a kernel takes a part: from a place that only the running program knows.

Between kernels that take one part of an array after the other, nothing is copied: neither a part of
an operand that is not one block of memory, nor a result that belongs into a larger one.

    an operand    loads begin at the place
    the result    is written into an array that is already there, at the place, or all of it
    in place      the array is the residual, too: the result takes its place
    beside        gate and up lie side by side in one array, which a kernel is given for each

Where the last tile reaches beyond the part, it reads and writes what follows in the array. So parts
are written in order, and each replaces what the one before it wrote too much. No tile writes beyond
the array.
"""

from typing import Any, NamedTuple

from jax.experimental import pallas as pl

from pallas_gemm.kernels import launch
from pallas_gemm.kernels.traced import Ref
from pallas_gemm.problem import Problem

ALIGNED = 64
"""Elements of which a part begins at a multiple, along either dimension."""


class Window(NamedTuple):
    """Along which dimension, as it is stored, each array is larger than what a kernel takes of it.

    Attributes:
        left: The dimension of the left operand; None if the kernel takes all of it.
        right: The same for the right operand.
        result: The same for the array that the result is a part of.
        in_place: The result takes the place of the residual.
        below: How many rows are above the result in the array that it is a part of; None if that is
            as large. Rows that follow may be overwritten. Only one of several results has a value
            for each element, and it is this one that is written so.
        beside: The dimension of one array along which both right operands of a gated product lie
            side by side. It is the whole array that is given for each of them.
        vectors: (place of the operand, 0 or 1) of each vector of the epilogue that is a half of one
            for the columns of both. The operand has two rows, one for each half.
    """

    left: int | None = None
    right: int | None = None
    result: int | None = None
    in_place: bool = False
    below: int | None = None
    beside: int | None = None
    vectors: tuple[tuple[int, int], ...] = ()

    @property
    def moves(self) -> bool:
        """Whether a part begins where only the running program knows, or is written there."""
        return self != Window(beside=self.beside, vectors=self.vectors)

    @property
    def writes(self) -> bool:
        """Whether the result is written into an array that there is already."""
        return self.in_place or self.result is not None or self.below is not None

    def mirrored(self) -> "Window":
        """Returns the same where operands have changed sides."""
        return self._replace(left=self.right, right=self.left)


WHOLE = Window()


def within(
    window: Window, problem: Problem, gmem: launch.Inputs, out: tuple[Any, ...]
) -> tuple[launch.Inputs, tuple[Any, ...]]:
    """Returns what a kernel is given, and its results, as the parts that it takes of them."""
    if window == WHOLE:
        return gmem, out
    ((left, rights),) = gmem.factors
    if window.beside is not None:
        parts = enumerate(rights)
        axis, shape = window.beside, problem.b_shape
        halves = (_part(x, axis, shape, i * shape[axis]) for i, x in parts)
        gmem = gmem._replace(factors=(launch.Factors(left, tuple(halves)),))
        return with_halves(window, gmem), out
    (right,) = rights
    first = pl.multiple_of(gmem.first[0], ALIGNED)
    factors = launch.Factors(
        _part(left, window.left, problem.a_shape, first),
        (_part(right, window.right, problem.b_shape, first),),
    )
    gmem = gmem._replace(factors=(factors,))
    if not window.writes:
        return gmem, out
    result = _part(gmem.results[0], window.result, problem.out_shape, first)
    if window.below is not None:
        result = _part(result, 0, problem.out_shape, window.below)
    if window.in_place:
        gmem = gmem._replace(operands=(*gmem.operands[:-1], result))
    return gmem, (result,)


def with_halves(window: Window, gmem: launch.Inputs) -> launch.Inputs:
    """Returns what a kernel is given with each half of a vector as an operand."""
    operands = list(gmem.operands)
    for place, half in window.vectors:
        operands[place] = operands[place].at[half]
    return gmem._replace(operands=tuple(operands))


def _part(ref: Ref, axis: int | None, shape: tuple[int, ...], first: Any) -> Any:
    if axis is None:
        return ref
    places: list[Any] = [slice(None)] * len(shape)
    places[axis] = pl.ds(first, shape[axis])
    return ref.at[tuple(places)]
