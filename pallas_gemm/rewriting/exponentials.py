"""Sums of exponentials of a product's rows, as a softmax and a cross entropy have them.

    sum(exp(z - m))        m: of the largest z of a row

A kernel finds the largest z and the sum in one pass, before it knows either of a whole row.
"""

import heapq
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from jax.extend import core

from pallas_gemm.kernels.functions.axes import ELEMENTWISE, MOVES
from pallas_gemm.rewriting.level import Level, is_stored_by, variables

LARGEST = "reduce_max"
TOTAL = "reduce_sum"
OF_ROWS = ELEMENTWISE | MOVES
"""Operations by which what is subtracted follows from the largest value."""


class SumOfExp(NamedTuple):
    """A sum of exponentials.

    Attributes:
        largest: The largest values of rows.
        z: The values, each of which is an exponent but for what is subtracted.
        exp: The equation of the exponentials.
        total: The equation that adds them up.
        before: The equations before both: those of the value that is subtracted, the subtraction.
    """

    largest: Any
    z: Any
    exp: Any
    total: Any
    before: tuple[Any, ...]

    @property
    def columns(self) -> int:
        """How many exponentials are added up for each row."""
        shape = self.exp.outvars[0].aval.shape
        return math.prod(shape[axis] for axis in self.total.params["axes"])

    def read_at(self, level: Level) -> list[int]:
        """Returns how deep the others are that read exponents or exponentials."""
        own = (*self.before, self.exp, self.total)
        values = (self.before[-1].outvars[0], self.exp.outvars[0])
        readers = [e for x in values for e in level.readers(x) if all(e is not y for y in own)]
        # What something reads from memory, or the function returns, is computed at once.
        found = [0 if is_stored_by(e) else level.depth_before(e) for e in readers]
        return found + [0 for x in values if x in level.results]


def sums_of_exp(
    level: Level, largest: Any, bits: int, known: Any, is_total: Callable[[Any], bool]
) -> list[SumOfExp]:
    """Returns the sums of exponentials that follow from the largest values of rows.

    Args:
        level: The function that they are in.
        largest: The equation of the largest values.
        bits: The bits of the products.
        known: The values that a kernel has, each of the shape of the products.
        is_total: Whether an equation adds up what a kernel may add up.
    """
    of_rows = _of_rows(level, largest, bits)
    found = []
    for below in of_rows:
        for less in level.readers(below):
            if less.primitive.name != "sub" or less.invars[1] is not below:
                continue
            z = less.invars[0]
            if not isinstance(z, core.Var) or z not in known:
                continue
            before = (*_makers(of_rows, below), less)
            for exp in level.readers(less.outvars[0]):
                if exp.primitive.name == "exp":
                    totals = filter(is_total, level.readers(exp.outvars[0]))
                    (top,) = largest.outvars
                    found += [SumOfExp(top, z, exp, total, before) for total in totals]
    return found


def _of_rows(level: Level, largest: Any, bits: int) -> dict[Any, Any]:
    """Returns the values that follow from the largest ones of rows alone, and what makes them."""
    (top,) = largest.outvars
    most = math.prod(largest.invars[0].aval.shape)
    found: dict[Any, Any] = {top: None}
    heap = [(level.place(e), e) for e in level.readers(top)]
    heapq.heapify(heap)
    seen: set[float] = set()
    while heap:
        place, equation = heapq.heappop(heap)
        if place in seen:
            continue
        seen.add(place)
        name, inputs = equation.primitive.name, variables(equation)
        is_move = name == "broadcast_in_dim"
        is_small = all(is_move or math.prod(x.aval.shape) < most for x in equation.outvars)
        if name not in OF_ROWS or equation.effects or not is_small:
            continue
        if any(level.above(x) & bits and x not in found for x in inputs):
            continue
        for x in equation.outvars:
            found[x] = equation
            for own in level.readers(x):
                heapq.heappush(heap, (level.place(own), own))
    return found


def _makers(of_rows: dict[Any, Any], x: Any) -> list[Any]:
    """Returns the equations that make a value of the largest ones, in their order."""
    wanted, found = {x}, []
    for value, equation in reversed(of_rows.items()):
        if value in wanted and equation is not None:
            found.append(equation)
            wanted.update(variables(equation))
    return found[::-1]
