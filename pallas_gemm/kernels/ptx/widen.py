"""Weights of few bits in registers: two of them become two elements of 16 bits, exactly.

A register has two halves, and a weight for each half goes three steps. First it is *spread*: it
lies in the lowest bits of its half, and the bits above it may have any value. Then it is *widened*:
the half is the weight as bfloat16 or float16. Then it may be *scaled*, and is rounded once.

In float16, the bits of an integer become the last ones of the mantissa of a large number. The large
number is then subtracted. The mantissa of bfloat16 has too few bits for that. But its numbers up to
the 256th go up in equal parts, of 2**-133: the bits of an integer are one of these as they are. So
one instruction, a product by 2**127 and a sum, makes an integer / 64 of them. The sums of a tile
are multiplied by 64. Integers of 4 bits may have 4 bits below them, which a smaller factor undoes.

The bits of a float of 4 bits are moved to their places in the wider type, and a product corrects
the bias of the exponent. The hardware converts floats of 8 bits to float16.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils

from pallas_gemm.kernels.element_types import BITS, E2M1, UINT4
from pallas_gemm.kernels.ptx.form import INTEGERS, PART, part

Register = Any
"""32 bits of each thread."""

BF16, F16, F32 = (np.dtype(x) for x in (jnp.bfloat16, jnp.float16, jnp.float32))
E4M3, E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)
_NAMES = {BF16: "bf16", F16: "f16", F32: "f32", E4M3: "e4m3", E5M2: "e5m2"}
# 1024 in float16, twice: the last bit of its mantissa is worth 1.
_LARGE = 0x64006400
# 2 ** 126 and 2 ** 14, twice: what the bias of the exponent of e2m1 is off by.
_BIAS_OF_E2M1 = {BF16: 0x7E807E80, F16: 0x74007400}


class Spread(NamedTuple):
    """Two weights in a register.

    Attributes:
        word: The register.
        low: How many bits are below the weight in the lower half.
        high: The same of the upper half.
    """

    word: Register
    low: int = 0
    high: int = 0


def run(text: str, *given: Register, loads: bool = False) -> Register:
    """Emits PTX with one result of 32 bits."""
    word = utils.ir.IntegerType.get_signless(32)
    return utils.inline_ptx(text, *given, result_types=word, has_side_effects=loads)


def load(place: Register, offset: int, size: int) -> Register:
    """Loads up to four bytes of shared memory, behind what was awaited."""
    if size == 4:
        return run(f"ld.shared.b32 $0, [$1+{offset}];", place, loads=True)
    if size == 1:
        return run(f"ld.shared.u8 $0, [$1+{offset}];", place, loads=True)
    text = f"{{ .reg .b16 x; ld.shared.b16 x, [$1+{offset}]; cvt.u32.u16 $0, x; }}"
    return run(text, place, loads=True)


def load_four(place: Register, offset: int) -> Sequence[Register]:
    """Loads four words of shared memory."""
    word = utils.ir.IntegerType.get_signless(32)
    text = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{offset}];"
    return utils.inline_ptx(text, place, result_types=[word] * 4, has_side_effects=True)


def load_matrices(place: Register, offset: int) -> Sequence[Register]:
    """Loads four matrices of 8 x 8 halves, turned: a lane says where a row of one begins.

    A thread gets two rows of a column of each.
    """
    word = utils.ir.IntegerType.get_signless(32)
    text = f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$0, $1, $2, $3}}, [$4+{offset}];"
    types = [word] * 4
    return utils.inline_ptx(text, place, result_types=types, has_side_effects=True, convergent=True)


def select(low: Register, high: Register, bytes_: int | Register) -> Register:
    """Four bytes of two registers."""
    if isinstance(bytes_, int):
        return run(f"prmt.b32 $0, $1, $2, {bytes_};", low, high)
    return run("prmt.b32 $0, $1, $2, $3;", low, high, bytes_)


def shifted(word: Register, bits: int) -> Register:
    """A register shifted to the right, or to the left by a negative number of bits."""
    if not bits:
        return word
    name = "shr" if bits > 0 else "shl"
    return run(f"{name}.b32 $0, $1, {abs(bits)};", word)


def bits(kind: np.dtype) -> int:
    """The bits of a number in memory."""
    return BITS.get(kind, 8 * kind.itemsize)


def widened(spread: Spread, kind: np.dtype, to: np.dtype, zero: Register = None) -> Register:
    """Two weights as two elements of 16 bits, less a zero point as `zero_point` returns it."""
    if part(kind, to) > 1:
        small = _small(spread, kind)
        zero = run(f"mov.b32 $0, {_less_of(kind)};") if zero is None else zero
        # 2 ** 127, or less by what the bits below a weight are worth.
        by = 254 - spread.low << 7 | 254 - spread.high << 23
        text = f"{{ .reg .b32 by; mov.b32 by, {by}; fma.rn.bf16x2 $0, $1, by, $2; }}"
        return run(text, small, zero)
    if kind in INTEGERS:
        number = _large(kind)
        large = _masked(spread.word, _mask(kind), number, xor=True)
        return _less(large, number) if zero is None else _minus(large, zero, to)
    found = _widened(spread.word, kind, to)
    return found if zero is None else _minus(found, zero, to)


def factors(scale: Register, kind: np.dtype) -> dict[Any, Register]:
    """What small numbers are multiplied by so that they are scaled; and what is added."""

    def times(low: int, high: int) -> Register:
        return run(f"{{ .reg .b32 by; mov.b32 by, {low << 7 | high << 23}; mul.rn.bf16x2 $0, $1, by; }}", scale)

    found = {(low, high): times(194 - low, 194 - high) for low, high in ((0, 0), (4, 4), (0, 4))}
    sign = int(np.float32(-_sign(kind) / 2.0**66).view(np.uint32)) >> 16
    found["less"] = run(f"{{ .reg .b32 by; mov.b32 by, {sign * 0x10001}; mul.rn.bf16x2 $0, $1, by; }}", scale)
    return found


def fused(spread: Spread, kind: np.dtype, by: dict[Any, Register]) -> Register:
    """Two weights, scaled."""
    small = _small(spread, kind)
    return run("fma.rn.bf16x2 $0, $1, $2, $3;", small, by[spread.low, spread.high], by["less"])


def zero_point(byte: Register, row: Register, below: int, kind: np.dtype, to: np.dtype) -> Register:
    """A zero point in a byte of shared memory, as `widened` takes it.

    Args:
        byte: The byte; with 4 bits, it has those of two rows.
        row: A row, whose number says which half it has.
        below: How far below this row the other one is.
        kind: Type of the weights.
        to: Type of the elements.
    """
    if BITS[kind] == 8:
        both = select(byte, byte, 0)
    else:
        text = f"{{ add.u32 $0, $2, {below}; and.b32 $0, $0, 1; shl.b32 $0, $0, 2;"
        nibble = run(f"{text} shr.b32 $0, $1, $0; and.b32 $0, $0, 15; }}", byte, row)
        both = run("mul.lo.u32 $0, $1, 0x10001;", nibble)
    if part(kind, to) > 1:
        return _times(_small(Spread(both), kind), run(f"mov.b32 $0, {0xFF00FF00};"), to)
    # What is taken off is the number that an integer is the end of, with the zero point in place.
    if kind in INTEGERS:
        return _masked(both, _mask(kind), _large(kind), xor=True)
    return _widened(both, kind, to)


def _mask(kind: np.dtype) -> int:
    """The bits of two weights that have nothing below them."""
    return ((1 << BITS[kind]) - 1) * 0x10001


def _sign(kind: np.dtype) -> int:
    """The bit of an integer's sign: without it, the integer is larger by as much."""
    return 0 if kind == UINT4 else 1 << BITS[kind] - 1


def _small(spread: Spread, kind: np.dtype) -> Register:
    """Integers without their signs, in the bits of small numbers."""
    (_, low, high), ones, sign = spread, (1 << BITS[kind]) - 1, _sign(kind)
    mask = ones << low | ones << high + 16
    return _masked(spread.word, mask, sign << low | sign << high + 16, xor=True)


def _less_of(kind: np.dtype) -> int:
    """What the integers are larger by without their signs, less than 0, twice in bfloat16."""
    sign = np.float32(-_sign(kind) / PART).view(np.uint32) >> 16
    return int(sign) * 0x10001


def _large(kind: np.dtype) -> int:
    """Twice the number in float16 in whose mantissa a weight is, which is larger by its sign."""
    return _LARGE + 0x10001 * _sign(kind)


def _widened(spread: Register, kind: np.dtype, to: np.dtype) -> Register:
    if kind == E2M1:
        rest, sign = (9, 12) if to == F16 else (6, 12)
        moved = _masked(shifted(spread, -rest), 0x00070007 << rest, 0)
        moved = run(f"lop3.b32 $0, $1, {0x80008000}, $2, 0xEA;", shifted(spread, -sign), moved)
        return _times(moved, run(f"mov.b32 $0, {_BIAS_OF_E2M1[to]};"), to)
    both = select(spread, spread, 0x0020)
    halves = run(
        f"{{ .reg .b16 two; cvt.u16.u32 two, $1; cvt.rn.f16x2.{_NAMES[kind]}x2 $0, two; }}", both
    )
    return halves if to == F16 else _packed(_apart(halves, F16), to)


def scale(loaded: Register, kind: np.dtype, to: np.dtype) -> Register:
    """A scale that was loaded, as `scaled` takes it: twice in 16 bits, or once in float32."""
    if kind == to:
        return select(loaded, loaded, 0x1010)
    return single(loaded, kind)


def divided(word: Register, by: int) -> Register:
    """A float32 divided by a power of two."""
    if by == 1:
        return word
    factor = int(np.float32(1 / by).view(np.uint32))
    return run(f"{{ .reg .b32 by; mov.b32 by, {factor}; mul.rn.f32 $0, $1, by; }}", word)


def single(loaded: Register, kind: np.dtype) -> Register:
    """A float that was loaded, or a number of few bits, in float32."""
    return loaded if kind == F32 else _apart(loaded, kind)[0]


def scaled(
    pair: Register, by: Register, kind: np.dtype, to: np.dtype, zero: Register = None
) -> Register:
    """Two elements times a scale of that type, rounded once.

    With a zero point in float32, the scale is of float32, too.
    """
    if zero is not None:
        less = [run("sub.rn.f32 $0, $1, $2;", x, zero) for x in _apart(pair, to)]
        return _packed([run("mul.rn.f32 $0, $1, $2;", x, by) for x in less], to)
    if kind == to:
        return _times(pair, by, to)
    return _packed([run("mul.rn.f32 $0, $1, $2;", x, by) for x in _apart(pair, to)], to)


def _masked(word: Register, mask: int, more: int, *, xor: bool = False) -> Register:
    return run(f"lop3.b32 $0, $1, {mask}, {more}, {0x6A if xor else 0xEA};", word)


def _less(pair: Register, number: int) -> Register:
    return run(f"{{ .reg .b32 less; mov.b32 less, {number}; sub.rn.f16x2 $0, $1, less; }}", pair)


def _minus(pair: Register, other: Register, to: np.dtype) -> Register:
    return run(f"sub.rn.{_NAMES[to]}x2 $0, $1, $2;", pair, other)


def _times(pair: Register, by: Register, to: np.dtype) -> Register:
    return run(f"mul.rn.{_NAMES[to]}x2 $0, $1, $2;", pair, by)


def _apart(pair: Register, kind: np.dtype) -> list[Register]:
    """Two elements of 16 bits as two of float32, which they are exactly."""
    if kind == BF16:
        return [shifted(pair, -16), run(f"and.b32 $0, $1, {0xFFFF0000};", pair)]
    text = "{{ .reg .b16 low, high; .reg .f32 x; mov.b32 {{low, high}}, $1; "
    text += "cvt.f32.f16 x, {}; mov.b32 $0, x; }}"
    return [run(text.format(half), pair) for half in ("low", "high")]


def _packed(pair: Sequence[Register], to: np.dtype) -> Register:
    """Two elements of float32, rounded."""
    return run(f"cvt.rn.{_NAMES[to]}x2.f32 $0, $2, $1;", *pair)
