"""Splits a function of the sums: which of its values a kernel computes, and which XLA does.

`axes.py` finds along which dimensions of the result each operand lies. `parts.py` has the result.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from pallas_gemm.kernels.element_types import FLOATS
from pallas_gemm.kernels.functions import flat, places
from pallas_gemm.kernels.functions.apart import apart
from pallas_gemm.kernels.functions.axes import (
    ELEMENTWISE,
    FOREIGN,
    MOVES,
    ONE,
    REDUCTIONS,
    Axes,
    Names,
)
from pallas_gemm.kernels.functions.builder import Builder, constant
from pallas_gemm.kernels.functions.parts import Split, exponent
from pallas_gemm.program import ALL, ARGMAX, CARRIED, FIRST, LAST, LOGSUMEXP, Constant, Result

FLOAT32 = np.dtype(np.float32)
LARGEST = 4
"""Bytes of a value that a kernel computes, at most."""


@functools.lru_cache(maxsize=1024)
def split(function: core.ClosedJaxpr, names: Names, sums: int = 1) -> Split | str:
    """Splits a function of the sums, and of operands; or says why it cannot be split.

    Args:
        function: It takes the sums first, each of the same shape.
        names: The dimensions of the sums.
        sums: How many there are.
    """
    whole = flat.flat(function)
    axes = Axes(whole, sums, names)
    if axes.mixed():
        whole = apart(whole, sums)
        axes = Axes(whole, sums, names)
    if axes.mixed():
        return "the function uses one dimension as rows and as columns"
    return _Splitter(whole, axes, names, sums).split()


class _Splitter:
    """Where each value of a function is computed.

    A value is *inside* if a kernel can compute it for each element of the result.
    """

    def __init__(self, function: flat.Flat, axes: Axes, names: Names, sums: int) -> None:
        self.flat, self.names, self.sizes = function, names, axes.sizes
        self.sums = function.inputs[:sums]
        self.axes = {number: axes.of(number) for number in function.types}
        self.made = {number: e for e in function.equations for number in e.outputs}
        self.depends = set(self.sums)
        self.source = {number: number for number in function.types}
        self.inside = set(self.sums)
        self.numbers: dict[int, Constant] = {}
        self.left = ""
        for equation in function.equations:
            self._place(equation)

    def _place(self, equation: flat.Equation) -> None:
        name, outputs = equation.primitive.name, equation.outputs
        taken = [x for x in equation.inputs if isinstance(x, int)]
        if self.depends & set(taken):
            self.depends |= set(outputs)
        if (number := self._number(equation, taken)) is not None:
            self.numbers[outputs[0]] = number
        elif name in MOVES and len(taken) == 1:
            (out,) = outputs
            own, moved = (self.axes[x].replace(ONE, "") for x in (taken[0], out))
            # The elements of a reshape stay in their order, and it repeats none.
            is_free = name != "reshape"
            is_same = sorted(own) == sorted(moved) if is_free else own == moved
            spreads = is_free and taken[0] not in self.depends and set(own) <= set(moved)
            if is_same or spreads:
                self.source[out] = self.source[taken[0]]
        elif name in ELEMENTWISE and self._is_of_each_element(outputs[0], taken):
            self.inside |= set(outputs)

    def _number(self, equation: flat.Equation, taken: Sequence[int]) -> Constant | None:
        """Returns the number that an operation makes everywhere; None if it makes others."""
        name = equation.primitive.name
        if name not in MOVES | {"convert_element_type"}:
            return None
        known = self.numbers.get(self.source[taken[0]]) if taken else constant(equation.inputs[0])
        if known is None or name in MOVES:
            return known
        dtype = np.dtype(equation.params["new_dtype"])
        value = np.asarray(known.value, known.dtype)
        if jnp.issubdtype(known.dtype, jnp.floating) and jnp.issubdtype(dtype, jnp.integer):
            limits = jnp.iinfo(dtype)
            value = np.clip(np.nan_to_num(value.astype(np.float64)), limits.min, limits.max)
        return Constant(value.astype(dtype).item(), dtype)

    def _is_of_each_element(self, number: int, taken: Sequence[int]) -> bool:
        """Whether a kernel computes a value for each element, of others that it takes.

        XLA makes what products of a batch share, if the kernel would load more for it.
        """
        dtype = self._type(number)
        is_known = dtype in FLOATS or not jnp.issubdtype(dtype, jnp.floating)
        if self.kind(number) != "mn" or dtype.itemsize > LARGEST or not is_known:
            return False
        if not all(map(self._is_reachable, taken)):
            return False
        if self._is_shaped_like_sums(number):
            return True
        loaded = {x for own in taken for x in self._loads(own) if self.kind(x) == "mn"}
        return not loaded or (len(loaded) == 1 and self._is_whole_matrix(number))

    def _type(self, number: int) -> np.dtype:
        return np.dtype(self.flat.types[number].dtype)

    def _is_whole_matrix(self, number: int) -> bool:
        """Whether a value has all rows and columns; products of a batch may share it."""
        real = {x for x in self.names.rows + self.names.columns if self.sizes[x] != 1}
        return real <= set(self.axes[number])

    def _is_shaped_like_sums(self, number: int) -> bool:
        real = [x for x in self.names.out if self.sizes[x] != 1]
        return sorted(self.axes[number].replace(ONE, "")) == sorted(real)

    def _varies(self, number: int) -> str:
        """Returns the dimensions along which a value is not the same by construction."""
        source = self.source[number]
        if source in self.numbers:
            return ""
        if source in self.depends or source in self.flat.inputs or source not in self.made:
            return self.axes[source].replace(ONE, "")
        equation = self.made[source]
        if equation.primitive.name not in ELEMENTWISE:
            return self.axes[source].replace(ONE, "")
        found = "".join(self._varies(x) for x in equation.inputs if isinstance(x, int))
        return "".join(dict.fromkeys(found))

    def kind(self, number: int) -> str:
        """Returns which dimensions of the result a value has."""
        varies = set(self._varies(number))
        if number in self.depends:
            return "mn"
        return "m" * bool(varies & set(self.names.rows)) + "n" * bool(
            varies & set(self.names.columns)
        )

    def _is_reachable(self, number: int) -> bool:
        """Whether a kernel has a value, or can load it."""
        source = self.source[number]
        return source in self.inside | self.numbers.keys() or (
            source not in self.depends and self._is_loaded(source)
        )

    def _is_loaded(self, number: int) -> bool:
        """Whether a kernel can load a value that does not depend on the sums."""
        dtype = self._type(number)
        if FOREIGN in self.axes[number]:
            return False
        if self.kind(number) == "mn":
            return dtype in FLOATS | CARRIED
        return dtype.itemsize <= LARGEST and not np.issubdtype(dtype, np.complexfloating)

    def batch(self, number: int) -> str:
        """Returns which dimensions of the batch an operand of each element has for a kernel."""
        lies = self.axes[number].replace(ONE, "")
        if self.kind(number) != "mn" or not set(self.names.batch) & set(lies):
            return ALL
        ends = {ALL: self.names.batch, FIRST: self.names.first(lies), LAST: self.names.last(lies)}
        return min(ends, key=lambda end: math.prod(self.sizes[x] for x in ends[end]))

    def counts(self, number: int) -> bool:
        """Whether a value is the number of each column, which a kernel counts without loading."""
        equation = self.made.get(number)
        columns = "".join(x for x in self.names.columns if self.sizes[x] != 1)
        is_int = self.flat.types[number].dtype == np.int32
        return (
            equation is not None
            and equation.primitive.name == "iota"
            and is_int
            and self.axes[number] == columns
        )

    def split(self) -> Split | str:
        """Returns the parts of the function."""
        wanted: dict[int, Result] = {}
        for output in self.flat.outputs:
            self._want(output, wanted)
        if not wanted:
            return "the function does not use the product"
        builder = Builder(self)
        values: list[Any] = [builder.value(result.value) for result in wanted.values()]
        beside = self._beside(frozenset(builder.operands))
        wanted |= {x: Result(x, self._type(x)) for x in beside}
        values += map(builder.value, beside)
        pairs = zip(wanted.values(), values, strict=True)
        results = tuple(result._replace(value=value) for result, value in pairs)
        program = builder.program(results)
        return Split(
            program,
            self.flat,
            tuple(builder.operands),
            tuple(wanted),
            self.names,
            self.sizes,
            self.axes,
            self.left,
        )

    def _want(self, atom: Any, wanted: dict[int, Result]) -> None:
        """Notes which results of the kernel a value needs that XLA computes."""
        if not isinstance(atom, int) or atom not in self.depends or atom in wanted:
            return
        dtype = self._type(atom)
        if atom in self.sums or (atom in self.inside and dtype in FLOATS):
            wanted[atom] = Result(atom, dtype)
            return
        equation = self.made[atom]
        if (reduced := self._reduction(equation)) is not None:
            wanted[atom] = reduced
            return
        if (reduced := self._sum_of_exp(equation)) is not None:
            wanted[atom] = reduced
            self._want(exponent(equation, self.made)[1], wanted)
            return
        is_move = equation.primitive.name in MOVES
        whole = any(self._is_whole_sum(x) for x in equation.inputs)
        if whole and not is_move and not self.left:
            self.left = f"{equation.primitive.name}{flat.where(equation)} is left to XLA"
        for x in equation.inputs:
            self._want(x, wanted)

    def _beside(self, loaded: frozenset[int]) -> list[int]:
        """Returns the results that are computed of what the kernel loads, without the sums.

        XLA would read all of it again.
        """
        every = dict.fromkeys(x for x in self.flat.outputs if isinstance(x, int))
        own = [x for x in every if x in self.inside - self.depends and x in self.made]
        own = [x for x in own if self._is_shaped_like_sums(x)]
        return [x for x in own if self._type(x) in FLOATS and self._loads(x) <= loaded]

    def _loads(self, number: int) -> set[int]:
        """Returns what a kernel loads to compute a value."""
        queue, seen, found = [number], set[int](), set[int]()
        while queue:
            source = self.source[queue.pop()]
            if source in seen | self.numbers.keys():
                continue
            seen.add(source)
            if source in self.inside and source in self.made:
                queue += [x for x in self.made[source].inputs if isinstance(x, int)]
            else:
                found.add(source)
        return found

    def _is_whole_sum(self, atom: Any) -> bool:
        return isinstance(atom, int) and self.source[atom] in self.inside & self.depends

    def _reduction(self, equation: flat.Equation) -> Result | None:
        """Returns a reduction as the kernel begins it; None if it cannot."""
        name = REDUCTIONS.get(equation.primitive.name)
        if name is None or not self._is_whole_sum(equation.inputs[0]):
            return None
        kind = self._kept(equation)
        columns = math.prod(self.sizes[x] for x in self.names.columns)
        if name == ARGMAX and (kind != "m" or columns > places.MOST):
            return None
        return Result(self.source[equation.inputs[0]], FLOAT32, kind, name) if kind else None

    def _sum_of_exp(self, equation: flat.Equation) -> Result | None:
        """Returns sum(exp(z - x)) as the kernel begins it, which does not know x of a row yet."""
        z, x = exponent(equation, self.made)
        if not self._is_whole_sum(z) or not isinstance(x, int):
            return None
        is_of_rows = not set(self.axes[x]) & {FOREIGN, *self.names.columns}
        if is_of_rows and self._kept(equation) == "m":
            return Result(self.source[z], FLOAT32, "m", LOGSUMEXP)
        return None

    def _kept(self, equation: flat.Equation) -> str:
        """Returns the dimensions that a reduction leaves, "m" or "n"; "" if kernels have none."""
        (x,) = equation.inputs
        gone = {self.axes[x][axis] for axis in equation.params["axes"]} - {ONE}
        rows, columns = (
            {letter for letter in group if self.sizes[letter] != 1}
            for group in (self.names.rows, self.names.columns)
        )
        if self.flat.types[x].dtype != FLOAT32 or not self._is_shaped_like_sums(x):
            return ""
        if columns and columns <= gone:
            return "m"
        return "n" if rows and rows <= gone and not columns & gone else ""
