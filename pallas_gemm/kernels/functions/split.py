"""A function of the sums, split into what a kernel computes and what XLA computes around it.

    before    what does not depend on the sums, and is no elementwise work on whole arrays    XLA
    program   elementwise work on the sums, and on what is loaded for it                      kernel
              their reductions along rows or columns
    after     what needs a reduction, or what kernels cannot compute                          XLA

`axes.py` finds along which dimensions of the result each operand lies.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from pallas_gemm.kernels.element_types import FLOATS
from pallas_gemm.kernels.functions import exponentials, flat, places, vectors
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
from pallas_gemm.program import (
    ALL,
    ARGMAX,
    CARRIED,
    FIRST,
    LAST,
    LOGSUMEXP,
    Constant,
    Operand,
    Program,
    Result,
)

FLOAT32 = np.dtype(np.float32)
LARGEST = 4
"""Bytes of a value that a kernel computes, at most."""


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
            _, less = _exponent(equation, values.made)
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


def _exponent(equation: flat.Equation, made: Mapping[int, flat.Equation]) -> tuple[Any, Any]:
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
            self._want(_exponent(equation, self.made)[1], wanted)
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
        z, x = _exponent(equation, self.made)
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
