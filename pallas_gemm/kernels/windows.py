"""Arrays of which a kernel takes a part: from a place that only the running program knows.

Between kernels that take one part of an array after the other, nothing is copied: neither a part of
an operand that is not one block of memory, nor a result that belongs into a larger one.

    an operand    loads begin at the place
    the result    is written into an array that is already there, at the place, or all of it
    in place      the array is the residual, too: the result takes its place

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
    """

    left: int | None = None
    right: int | None = None
    result: int | None = None
    in_place: bool = False
    below: int | None = None

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
    first = pl.multiple_of(gmem.first[0], ALIGNED)
    ((left, (right,)),) = gmem.factors
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


def _part(ref: Ref, axis: int | None, shape: tuple[int, ...], first: Any) -> Any:
    if axis is None:
        return ref
    places: list[Any] = [slice(None)] * len(shape)
    places[axis] = pl.ds(first, shape[axis])
    return ref.at[tuple(places)]
