"""`Program`: an epilogue as data: what becomes of the sums, step by step.

A *kind* says which dimensions of the result a value has:

    "mn"    one value for each element       "m"    one for each row
    ""      one for all                      "n"    one for each column

Every step computes a value of kind "mn" from earlier ones. Values are numbered: the sums come
first, then the operands, then the steps.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

ALL, FIRST, LAST = "all", "first", "last"


class Operand(NamedTuple):
    """An array that a program reads beside the sums.

    Attributes:
        kind: Which dimensions of the result it has.
        dtype: Its element type in the program.
        counts: Its values count up by one, so that the first of some says what the others are.
        batch: Which dimensions of a batch an operand of kind "mn" has: all, or only the first or
            the last of them. The products of a batch that differ only in others share a matrix.
    """

    kind: str
    dtype: np.dtype
    counts: bool = False
    batch: str = ALL

    @property
    def loaded(self) -> np.dtype:
        """The type in which it comes: small integers as bfloat16, which holds all of them."""
        return np.dtype(jnp.bfloat16) if self.dtype in CARRIED else self.dtype


CARRIED = frozenset(map(np.dtype, (np.bool_, np.int8, np.uint8)))
"""Types that come as bfloat16 where an operand has a value for each element."""


LOGSUMEXP = "logsumexp"
"""The reduction to the largest value, and the sum of exp of what each value is less than it."""
ARGMAX = "argmax"
"""The reduction to the largest value, and its place."""
PAIRS = (LOGSUMEXP, ARGMAX)
"""Reductions that leave two vectors; the largest values are the first."""
ADDING = ("sum", LOGSUMEXP)
"""Reductions whose bits depend on an order."""


COARSE = 2
"""Bytes of a type to which a result is rounded by more than the error of what follows."""
APPROXIMATE = frozenset(("div", "exp", "exp2", "log", "logistic", "rsqrt", "sqrt", "tanh"))
"""Operations that a GPU has in a quick form, which errs by more than rounding to float32."""
ROUGH = frozenset(("tanh",))
"""Operations with a quick form that errs by more than the last bits of float32."""


class Constant(NamedTuple):
    """A number in a program."""

    value: Any
    dtype: np.dtype


class Step(NamedTuple):
    """One elementwise operation.

    Attributes:
        primitive: The operation.
        params: Its parameters, as (name, value).
        inputs: The numbers of the values that it takes, or constants.
    """

    primitive: core.Primitive
    params: tuple[tuple[str, Any], ...]
    inputs: tuple[int | Constant, ...]


class Result(NamedTuple):
    """A value that a program returns.

    Attributes:
        value: Its number.
        dtype: Its element type.
        kind: Its dimensions.
        reduction: How the other dimension is reduced: "sum", "max", "min", "logsumexp" or
            "argmax"; "" for kind "mn".
    """

    value: int
    dtype: np.dtype
    kind: str = "mn"
    reduction: str = ""

    @property
    def vectors(self) -> int:
        """How many vectors it is."""
        return 2 if self.reduction in PAIRS else 1


PICKED = ("m", "sum")
"""The kind and the reduction of a result that is one value of each row."""


class Pick(NamedTuple):
    """A value of each row, in the column that a vector says; 0 if there is no such column.

    Attributes:
        value: The number of the sum.
        compared: The number of the step that compares columns.
        vector: The operand that says them.
        columns: The operand that counts them.
    """

    value: int
    compared: int
    vector: int
    columns: int


@dataclasses.dataclass(frozen=True)
class Program:
    """The steps that follow the sums of a product.

    Attributes:
        sums: How many sums there are for each element.
        sum_dtype: The type that it takes them in.
        operands: The values that it reads beside them.
        steps: In order.
        results: The values that it returns.
    """

    sums: int
    sum_dtype: np.dtype
    operands: tuple[Operand, ...]
    steps: tuple[Step, ...]
    results: tuple[Result, ...]

    @functools.cached_property
    def tiles(self) -> tuple[Operand, ...]:
        """The operands with a value for each element."""
        return tuple(operand for operand in self.operands if operand.kind == "mn")

    @property
    def compared(self) -> tuple[Operand, ...]:
        """The vectors of rows, if the numbers of columns are known beside them."""
        counts = any(operand.counts for operand in self.operands)
        return tuple(own for own in self.operands if own.kind == "m") if counts else ()

    @functools.cached_property
    def arrays(self) -> tuple[Result, ...]:
        """The results with a value for each element."""
        return tuple(result for result in self.results if result.kind == "mn")

    @functools.cached_property
    def reductions(self) -> tuple[Result, ...]:
        """The results that are reduced along rows or columns."""
        return tuple(result for result in self.results if result.kind != "mn")

    def vectors(self, result: Result) -> int:
        """How many vectors a result that is reduced leaves.

        The largest values that are a part of a pair leave none.
        """
        of_pairs = (own.value for own in self.results if own.reduction in PAIRS)
        theirs = (result.kind, result.reduction) == ("m", "max") and result.value in of_pairs
        return 0 if theirs else result.vectors

    @property
    def primitives(self) -> frozenset[str]:
        """The names of all operations."""
        return frozenset(step.primitive.name for step in self.steps)

    @functools.cached_property
    def picked(self) -> dict[int, Pick]:
        """Sums along rows of what is not 0 in one column alone, by the numbers of their steps."""
        users = collections.Counter(x for step in self.steps for x in step.inputs)
        users.update(result.value for result in self.results)
        found = {}
        for result in self.results:
            own = self._pick(result.value) if (result.kind, result.reduction) == PICKED else None
            if own and users[own.compared] == users[result.value] == 1:
                found[result.value] = own
        return found

    def _pick(self, number: int) -> Pick | None:
        """Returns what a step picks: select(column == vector, 0, sum)."""
        first = self._first
        whole = self.steps[number - first] if number >= first else None
        if whole is None or whole.primitive.name != "select_n" or len(whole.inputs) != 3:
            return None
        compared, zero, value = whole.inputs
        is_zero = isinstance(zero, Constant) and zero.value == 0
        if not is_zero or isinstance(compared, Constant) or isinstance(value, Constant):
            return None
        if value >= self.sums or compared < first:
            return None
        step = self.steps[compared - first]
        of = {
            (own.kind, own.counts): i
            for i, own in enumerate(self.operands)
            if self.sums + i in step.inputs
        }
        if step.primitive.name != "eq" or of.keys() != {("m", False), ("n", True)}:
            return None
        return Pick(value, compared, of["m", False], of["n", True])

    @property
    def computes(self) -> bool:
        """Whether there is more to do than to reduce sums as they are."""
        return len(self.steps) > 2 * len(self.picked)

    @property
    def sums_exp(self) -> bool:
        """Whether a result is a sum of exp."""
        return any(result.reduction == LOGSUMEXP for result in self.results)

    @property
    def is_coarse(self) -> bool:
        """Whether exp and its like may err by less than rounding to 16 bits.

        They may unless a result of 32 bits depends on one, other than through a rounding. In a sum
        of elements, an error in the last bits of each is lost.
        """
        summed, others = (
            {self.steps[value - self._first].primitive.name for value in found}
            for found in (self.wide(_is_summed), self.wide(lambda own: not _is_summed(own)))
        )
        return not (self.sums_exp or summed & ROUGH or others & APPROXIMATE)

    def with_steps(
        self, steps: Mapping[int, Step], same: Callable[[Any], Any] = lambda x: x
    ) -> "Program":
        """Returns a program of other steps.

        Args:
            steps: In order, by the numbers that other steps and the results have for them.
            same: Returns what stands in place of a value that no step computes any more.
        """
        numbers = {number: self._first + i for i, number in enumerate(steps)}

        def renamed(x: Any) -> Any:
            x = same(x)
            return numbers.get(x, x) if isinstance(x, int) else x

        return dataclasses.replace(
            self,
            steps=tuple(
                own._replace(inputs=tuple(map(renamed, own.inputs))) for own in steps.values()
            ),
            results=tuple(own._replace(value=renamed(own.value)) for own in self.results),
        )

    @property
    def _first(self) -> int:
        """The number of the first step."""
        return self.sums + len(self.operands)

    def wide(self, counts: Callable[[Result], bool]) -> set[int]:
        """Returns the steps that results of 32 bits depend on, other than through a rounding.

        Args:
            counts: Says which results count.
        """
        wanted = [
            result.value
            for result in self.results
            if result.dtype.itemsize > COARSE and counts(result)
        ]
        found: set[int] = set()
        while wanted:
            value = wanted.pop()
            if value < self._first or value in found:
                continue
            found.add(value)
            step = self.steps[value - self._first]
            if np.dtype(dict(step.params).get("new_dtype", np.float32)).itemsize > COARSE:
                wanted += [x for x in step.inputs if isinstance(x, int)]
        return found

    @functools.cached_property
    def live(self) -> int:
        """How many values for each element are in use at a time, at most.

        What is loaded does not count, nor a second sum and what is made of it alone: they have
        registers of their own.
        """
        first = self._first
        ends: dict[int, int] = {}
        for number, step in enumerate(self.steps):
            ends |= {value: number for value in step.inputs if isinstance(value, int)}
        ends |= {result.value: len(self.steps) for result in self.results}
        live = {0} & ends.keys()
        of_second = set(range(1, self.sums))
        most = 1
        for number, step in enumerate(self.steps):
            taken = {x for x in step.inputs if isinstance(x, int)} - set(range(self.sums, first))
            if taken and taken <= of_second:
                of_second.add(first + number)
            live = {value for value in live if ends[value] > number}
            live |= ({first + number} & ends.keys()) - of_second
            most = max(most, len(live))
        # Sums of exp are of other values than those that they are taken of.
        return most + self.sums_exp


def _is_summed(result: Result) -> bool:
    return result.reduction == "sum"
