"""Which dimension of the result each axis of each value of a function is.

Nothing says so of an operand; the way it is used does. Each axis of each value is a node: an
elementwise operation joins the axes of its operands, and the axes of the sums have names.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pallas_gemm.kernels.functions import flat
from pallas_gemm.kernels.functions.activations import KERNEL_PRIMITIVES
from pallas_gemm.program import ARGMAX

REDUCTIONS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min", "argmax": ARGMAX}
"""The reductions that a kernel begins, with their names in `Result.reduction`."""
ELEMENTWISE = KERNEL_PRIMITIVES - frozenset(flat.CALLS)
TURN = "transpose"
MOVES = frozenset(("broadcast_in_dim", "reshape", "squeeze", TURN))
"""Operations after which the same values lie in another shape, or in another order."""
OF_XLA = frozenset(
    (
        *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bitcast_convert_type"),
        *("cbrt", "cosh", "digamma", "erf_inv", "lgamma", "nextafter", "pow", "reduce_precision"),
        *("rem", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sinh", "tan"),
    )
)
"""Operations that no kernel has, and that compute each element by itself."""
ONE, FOREIGN = "1", "?"
"""The names of an axis of size 1, and of one that is none of the result's."""


class Names(NamedTuple):
    """The names of the result's dimensions, a letter each.

    Attributes:
        out: All, in the order of the sums.
        rows: The rows of the matrices that a kernel computes.
        columns: Their columns.
    """

    out: str
    rows: str
    columns: str

    @property
    def batch(self) -> str:
        """The dimensions that all products of a batch differ in."""
        return "".join(x for x in self.out if x not in self.rows + self.columns)

    def of_kind(self, kind: str) -> str:
        """Returns the dimensions of a value of this kind: those of the batch come first."""
        return self.batch + self.rows * ("m" in kind) + self.columns * ("n" in kind)

    def first(self, needed: str) -> str:
        """Returns the first dimensions of the batch, up to the last one that is needed."""
        return self.batch[: max((self.batch.find(x) + 1 for x in needed), default=0)]

    def last(self, needed: str) -> str:
        """Returns the last dimensions of the batch, from the first one that is needed."""
        places = [self.batch.index(x) for x in needed if x in self.batch]
        return self.batch[min(places) :] if places else ""

    def merged(self, kind: str, letters: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape that a kernel has an array of these dimensions in."""
        sizes = dict(zip(letters, shape, strict=True))
        batch = "".join(x for x in letters if x in self.batch)
        groups = [(batch, batch != ""), (self.rows, "m" in kind), (self.columns, "n" in kind)]
        found = [math.prod(sizes[x] for x in group) for group, is_there in groups if is_there]
        # Of a batch of one there is no dimension.
        return tuple(found[1:] if groups[0][1] and found[0] == 1 else found)


class Axes:
    """Which dimension of the result each axis of each value is."""

    def __init__(self, function: flat.Flat, sums: int, names: Names) -> None:
        self._types = function.types
        self._above: dict[tuple[int, int], tuple[int, int]] = {}
        for equation in function.equations:
            for own, other in _same_axes(equation, function.types):
                self._above[self._top(own)] = self._top(other)
        self._letters: dict[tuple[int, int], set[str]] = {}
        for number in function.inputs[:sums]:
            for axis, letter in enumerate(names.out):
                self._letters.setdefault(self._top((number, axis)), set()).add(letter)
        shape = function.types[function.inputs[0]].shape
        self.sizes = dict(zip(names.out, shape, strict=True))

    def _top(self, node: tuple[int, int]) -> tuple[int, int]:
        while node in self._above and self._above[node] != node:
            node = self._above[node]
        return node

    def mixed(self) -> bool:
        """Whether one axis would be two dimensions."""
        return any(len(found) > 1 for found in self._letters.values())

    def of(self, number: int) -> str:
        """Returns the name of each axis of a value."""
        found = ""
        for axis, size in enumerate(self._types[number].shape):
            letter = next(iter(self._letters.get(self._top((number, axis)), ())), FOREIGN)
            found += ONE if size == 1 else letter
        return found


def _same_axes(
    equation: flat.Equation, types: Mapping[int, Any]
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Returns the pairs of axes of inputs and outputs that are the same dimension."""
    if not equation.outputs:
        return []
    out = equation.outputs[0]
    rank, name = len(types[out].shape), equation.primitive.name
    taken = [x for x in equation.inputs if isinstance(x, int) and types[x].shape]
    is_of_each = all(len(types[x].shape) == rank for x in taken)
    if name in ELEMENTWISE or (name in OF_XLA and is_of_each):
        return [((x, axis), (out, axis)) for x in taken for axis in range(rank)]
    if not taken:
        return []
    first = taken[0]
    axes = range(len(types[first].shape))
    if name == TURN:
        pairs = [(axis, i) for i, axis in enumerate(equation.params["permutation"])]
    elif name == "broadcast_in_dim":
        pairs = list(enumerate(equation.params["broadcast_dimensions"]))
    elif name in REDUCTIONS:
        pairs = [(axis, i) for i, axis in enumerate(set(axes) - set(equation.params["axes"]))]
    elif name in ("reshape", "squeeze"):
        real = [[i for i, size in enumerate(types[x].shape) if size != 1] for x in (first, out)]
        pairs = list(zip(*real, strict=False))
        if [types[first].shape[i] for i in real[0]] != [types[out].shape[i] for i in real[1]]:
            pairs = []
    else:
        pairs = []
    shapes = types[first].shape, types[out].shape
    return [((first, i), (out, j)) for i, j in pairs if shapes[0][i] == shapes[1][j]]
