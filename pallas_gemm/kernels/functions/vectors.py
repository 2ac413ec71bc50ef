"""Vectors of a function as a kernel reads them: as they are stored."""

from typing import Any

import numpy as np

from pallas_gemm.kernels.element_types import FLOATS
from pallas_gemm.kernels.functions import flat
from pallas_gemm.kernels.functions.axes import MOVES, ONE

WIDE = np.dtype(np.float32)


def narrow(function: flat.Flat, number: int) -> int:
    """Returns a vector before it is widened to float32: a kernel widens what it loads."""
    return _before(function, number, frozenset())


def given(split: Any) -> list[int | None]:
    """Returns which operand of a function each vector of its kernel is; None of all else.

    Args:
        split: The function in its parts.
    """
    function = split.flat
    operands = function.inputs[split.program.sums :]
    every = zip(split.operands, split.letters, split.program.operands, strict=True)
    found = []
    for number, letters, own in every:
        stored = _before(function, number, MOVES)
        real = "".join(x for x in letters if split.sizes[x] != 1)
        is_given = stored in operands and split.axes[stored].replace(ONE, "") == real
        found.append(operands.index(stored) if own.kind != "mn" and is_given else None)
    return found


def _before(function: flat.Flat, number: int, moves: frozenset[str]) -> int:
    """Returns a value before it is widened, and before some moves."""
    made = {x: e for e in function.equations for x in e.outputs}
    while (equation := made.get(number)) and len(equation.inputs) == 1:
        (before,) = equation.inputs
        if not isinstance(before, int):
            break
        old, new = function.types[before], function.types[number]
        is_wider = equation.primitive.name == "convert_element_type"
        is_wider = is_wider and new.dtype == WIDE and old.dtype in FLOATS
        if not is_wider and equation.primitive.name not in moves:
            break
        number = before
    return number
