"""Integers of few bits become bfloat16 in one instruction, which may scale them, too.

The mantissa of bfloat16 is too short to hold an integer beside a leading bit. But the numbers of
bfloat16 from 0 to the 256th go up in equal parts, of 2**-133. So the bits of an integer, without
its sign, are such a small number as they are, also with 4 bits below them. A product makes a number
of usual size of it, and a sum takes off what the sign is worth. Both are exact, and rounded once
where the factor has a scale in it.

No factor is large enough: what comes out is divided by `Form.part`, by which sums are multiplied.
"""

from typing import NamedTuple

import numpy as np

from pallas_gemm.kernels.element_types import BITS, UINT4
from pallas_gemm.kernels.ptx.form import PART, SCALED_PART
from pallas_gemm.kernels.ptx.widen import Register, Spread, run

PLACES = ((0, 0), (4, 4), (0, 4))
"""How many bits may be below the weights of the halves of a register."""


class Terms(NamedTuple):
    """Factors of small numbers, and summands.

    Attributes:
        by: The factors of two weights, by how many bits are below each.
        less: The summands.
    """

    by: dict[tuple[int, int], Register]
    less: Register


def unscaled(kind: np.dtype, unknown: Register | None) -> Terms:
    """The terms of weights that are widened alone.

    Args:
        kind: Their type.
        unknown: A register of no more than 31 bits. Where ptxas knows the summand, it moves the
            factors to a register each time. None if the summand is to take no register.
    """
    by = {place: run(f"mov.b32 $0, {_factors(place, PART)};") for place in PLACES}
    less = run(f"mov.b32 $0, {_signs(kind, PART)};")
    if unknown is not None:
        text = "{ .reg .b32 x; shr.b32 x, $1, 31; or.b32 $0, x, $2; }"
        less = run(text, unknown, less)
    return Terms(by, less)


def scaled(kind: np.dtype, scales: Register) -> Terms:
    """The terms of weights that have a scale: twice in a register."""

    def times(number: int) -> Register:
        return run(f"{{ .reg .b32 x; mov.b32 x, {number}; mul.rn.bf16x2 $0, $1, x; }}", scales)

    by = {place: times(_factors(place, SCALED_PART)) for place in PLACES}
    return Terms(by, times(_signs(kind, SCALED_PART)))


def zero_point(kind: np.dtype, both: Register) -> Register:
    """The summands of weights that have a zero point, which is spread in a register twice."""
    text = f"{{ .reg .b32 x; mov.b32 x, {1 << 31 | 1 << 15 | _factors((0, 0), PART)};"
    return run(f"{text} mul.rn.bf16x2 $0, $1, x; }}", _small(kind, Spread(both)))


def widened(kind: np.dtype, spread: Spread, terms: Terms) -> Register:
    """Two weights as bfloat16, divided by the part that the terms are for."""
    text = "fma.rn.bf16x2 $0, $1, $2, $3;"
    return run(text, _small(kind, spread), terms.by[spread.below], terms.less)


def _small(kind: np.dtype, spread: Spread) -> Register:
    """Two small numbers: the sign of an integer is turned, which makes it larger by its worth."""
    mask, sign = (
        sum(bits << place for bits, place in zip((bits,) * 2, _places(spread.below), strict=True))
        for bits in ((1 << BITS[kind]) - 1, _sign(kind))
    )
    return run(f"lop3.b32 $0, $1, {mask}, {sign}, 0x6A;", spread.word)


def _places(below: tuple[int, int]) -> tuple[int, int]:
    return below[0], 16 + below[1]


def _sign(kind: np.dtype) -> int:
    return 0 if kind == UINT4 else 1 << BITS[kind] - 1


def _factors(below: tuple[int, int], part: int) -> int:
    """2**133 / part as two numbers of bfloat16; each less by what the bits below are worth."""
    low, high = (_bits(2.0 ** (133 - bits) / part) for bits in below)
    return low | high << 16


def _signs(kind: np.dtype, part: int) -> int:
    """Two summands."""
    return _bits(-_sign(kind) / part) * 0x10001


def _bits(number: float) -> int:
    """A number as bfloat16, which it is exactly."""
    return int(np.float32(number).view(np.uint32)) >> 16
