"""Which axis of each value of a function is that of the rows, and which operations mix rows.

An operation keeps rows apart if each row of what it makes is made of the same row of what it takes.
Rows that are mixed may be those of several groups, and of none.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pallas_gemm.kernels.functions import flat
from pallas_gemm.kernels.functions.axes import ELEMENTWISE, OF_XLA, TURN
from pallas_gemm.kernels.quantize import ALONG


class Taken(NamedTuple):
    """The inputs of an operation.

    Attributes:
        params: Its parameters.
        shapes: The shape of each input.
        axes: The axis of the rows of each input; None of one that is not made of the sums.
        out: The shape of its first output.
        rows: How many rows there are, more than one.
    """

    params: Mapping[str, Any]
    shapes: Sequence[tuple[Any, ...]]
    axes: Sequence[int | None]
    out: tuple[Any, ...]
    rows: Any

    @property
    def first(self) -> int:
        """The axis of the first input that is made of the sums."""
        return next(axis for axis in self.axes if axis is not None)


Rule = Callable[[Taken], int | None]
"""Returns the axis of the rows of what an operation makes; None if it mixes rows."""


def axes_of_rows(function: flat.Flat, sums: int, rows: Any) -> dict[int, int | str]:
    """Returns the axis of the rows of each value that is made of the sums.

    If the rows of a value are mixed, it has the reason in words in place of an axis.

    Args:
        function: It takes the sums first, whose first axis is that of the rows.
        sums: How many there are.
        rows: How many rows there are.
    """
    found: dict[int, int | str] = dict.fromkeys(function.inputs[:sums], 0)
    for equation in function.equations:
        taken = [found.get(x) if isinstance(x, int) else None for x in equation.inputs]
        made = _axis(function, equation, taken, rows)
        if made is not None:
            found |= dict.fromkeys(equation.outputs, made)
    return found


def _axis(
    function: flat.Flat, equation: flat.Equation, taken: Sequence[int | str | None], rows: Any
) -> int | str | None:
    """Returns the axis of the rows of what an operation makes, or why it has none."""
    axes = [x for x in taken if not isinstance(x, str)]
    if len(axes) < len(taken):
        return next(x for x in taken if isinstance(x, str))
    if axes.count(None) == len(axes):
        return None
    name = equation.primitive.name
    rule = _rule(name, equation.params)
    words = f"{name}{flat.where(equation)} of epilogue"
    if rule is None:
        return f"{words} may mix groups: nothing says that it computes each row by itself"
    shapes = [
        tuple(function.types[x].shape if isinstance(x, int) else x.aval.shape)
        for x in equation.inputs
    ]
    out = tuple(function.types[equation.outputs[0]].shape)
    axis = rule(Taken(equation.params, shapes, axes, out, rows))
    return f"{words} is over rows, which would mix groups" if axis is None else axis


def _rule(name: str, params: Mapping[str, Any]) -> Rule | None:
    if name in RULES:
        return RULES[name]
    if name.startswith("scatter"):
        return _scattered
    if name.startswith(("reduce_", "arg")) and "axes" in params:
        return _without("axes")
    return _same if name in ELEMENTWISE | OF_XLA else None


def _same(taken: Taken) -> int | None:
    """The rule of elementwise operations."""
    found = {axis for axis in taken.axes if axis is not None}
    return found.pop() if len(found) == 1 else None


def _along(name: str) -> Rule:
    """The rule of operations that mix elements along the axes that a parameter names."""

    def rule(taken: Taken) -> int | None:
        axis, along = _same(taken), taken.params[name]
        return None if axis in (along if isinstance(along, tuple) else (along,)) else axis

    return rule


def _without(name: str) -> Rule:
    """The rule of operations that take away the axes that a parameter names."""

    def rule(taken: Taken) -> int | None:
        gone = taken.params[name]
        return None if taken.first in gone else taken.first - sum(x < taken.first for x in gone)

    return rule


def _reshaped(taken: Taken) -> int | None:
    before = math.prod(taken.shapes[0][: taken.first])
    for axis, size in enumerate(taken.out):
        if size == taken.rows and math.prod(taken.out[:axis]) == before:
            return axis
    return None


def _of_words(taken: Taken) -> int | None:
    """The rule of a cast of bits, which may add a last axis or take one away."""
    return taken.first if taken.first < min(len(taken.out), len(taken.shapes[0])) else None


def _stacked(taken: Taken) -> int | None:
    axis = _same(taken)
    return None if axis is None else axis + (axis >= taken.params["axis"])


def _unstacked(taken: Taken) -> int | None:
    axis, gone = taken.first, taken.params["axis"]
    return None if axis == gone else axis - (axis > gone)


def _tiled(taken: Taken) -> int | None:
    return taken.first if taken.params["reps"][taken.first] == 1 else None


def _sliced(taken: Taken) -> int | None:
    axis, params = taken.first, taken.params
    count = params["limit_indices"][axis] - params["start_indices"][axis]
    is_whole = count == taken.rows and (params["strides"] or (1,) * (axis + 1))[axis] == 1
    return axis if is_whole else None


def _padded(taken: Taken) -> int | None:
    return taken.first if taken.params["padding_config"][taken.first] == (0, 0, 0) else None


def _dotted(taken: Taken) -> int | None:
    contracted, batch = taken.params["dimension_numbers"]
    places = []
    for side, axis in enumerate(taken.axes):
        if axis is None:
            continue
        if axis in batch[side]:
            places.append(batch[side].index(axis))
            continue
        if axis in contracted[side]:
            return None
        gone = (*contracted[side], *batch[side])
        place = axis - sum(x < axis for x in gone) + len(batch[side])
        if side:
            place += len(taken.shapes[0]) - len(batch[0]) - len(contracted[0])
        places.append(place)
    return places[0] if len(set(places)) == 1 else None


def _gathered(taken: Taken) -> int | None:
    numbers, (axis, of_index) = taken.params["dimension_numbers"], taken.axes
    # The other dimensions of the result are those of the indices without the last one.
    others = [i for i in range(len(taken.out)) if i not in numbers.offset_dims]
    if axis is None:
        return others[taken.first] if taken.first < len(others) else None
    if axis in numbers.operand_batching_dims:
        place = numbers.operand_batching_dims.index(axis)
        own = numbers.start_indices_batching_dims[place]
        return others[own] if of_index in (None, own) else None
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    is_whole = axis not in gone and taken.params["slice_sizes"][axis] == taken.rows
    if of_index is not None or not is_whole:
        return None
    return numbers.offset_dims[axis - sum(x < axis for x in gone)]


def _dynamically_sliced(taken: Taken) -> int | None:
    return taken.first if taken.params["slice_sizes"][taken.first] == taken.rows else None


def _updated(taken: Taken) -> int | None:
    axis = _same(taken)
    if axis is None or taken.axes[1] is None:
        return axis
    is_whole = taken.shapes[0][axis] == taken.shapes[1][axis] == taken.rows
    return axis if is_whole else None


def _scattered(taken: Taken) -> int | None:
    axis, of_index, of_update = taken.axes
    if of_index is not None:
        return None
    if of_update is None:
        return axis
    numbers = taken.params["dimension_numbers"]
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [i for i in range(len(taken.shapes[0])) if i not in gone]
    if of_update not in numbers.update_window_dims:
        return None
    own = kept[numbers.update_window_dims.index(of_update)]
    return own if axis in (None, own) and taken.shapes[0][own] == taken.rows else None


def _quantized(taken: Taken) -> int | None:
    """The rule of blocks: each has to lie in one row. Leading dimensions are kept apart."""
    if len(taken.axes) > 1:
        return None
    in_rows = all(own.axis == ALONG and own.block.across == 1 for own in taken.params["how"].ways)
    is_kept = taken.first < len(taken.out) - (1 if in_rows else 2)
    return taken.first if is_kept else None


RULES: Mapping[str, Rule] = {
    "bitcast_convert_type": _of_words,
    "broadcast_in_dim": lambda taken: int(taken.params["broadcast_dimensions"][taken.first]),
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"), _along("axis")),
    "concatenate": _along("dimension"),
    "dot_general": _dotted,
    "dynamic_slice": _dynamically_sliced,
    "dynamic_update_slice": _updated,
    "gather": _gathered,
    "pad": _padded,
    "pallas_gemm_quantize": _quantized,
    "reshape": _reshaped,
    "rev": _along("dimensions"),
    "slice": _sliced,
    "sort": _along("dimension"),
    "split": _along("axis"),
    "squeeze": _without("dimensions"),
    "stack": _stacked,
    "tile": _tiled,
    "top_k": _along("axis"),
    TURN: lambda taken: taken.params["permutation"].index(taken.first),
    "unstack": _unstacked,
}
"""The rules of operations that are neither elementwise nor reductions, by their names."""
