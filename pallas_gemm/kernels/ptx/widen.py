"""Weights of few bits in registers: two of them become two elements of 16 bits, exactly.

A register has two halves, and a weight for each half goes three steps. First it is *spread*: it
lies in the lowest bits of its half, and the bits above it may have any value. Then it is *widened*:
the half is the weight as bfloat16 or float16. Then it may be *scaled*, and is rounded once.

The bits of an integer become the last ones of the mantissa of a large float16. The large number is
then subtracted. For bfloat16 see `small.py`. The bits of a float of 4 bits are moved to their
places in the wider type, and a product corrects the bias of the exponent. The hardware converts
floats of 8 bits to float16.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils

from pallas_gemm.kernels.element_types import BITS, E2M1, UINT4
from pallas_gemm.kernels.ptx.form import INTEGERS

Register = Any
"""32 bits of each thread."""

BF16, F16, F32 = (np.dtype(x) for x in (jnp.bfloat16, jnp.float16, jnp.float32))
E4M3, E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)
_NAMES = {BF16: "bf16", F16: "f16", F32: "f32", E4M3: "e4m3", E5M2: "e5m2"}
# 1024 as float16, twice: the last bit of its mantissa is worth 1.
_LARGE = 0x64006400
# 2 ** 126 and 2 ** 14, twice: what the bias of the exponent of e2m1 is off by.
_BIAS_OF_E2M1 = {BF16: 0x7E807E80, F16: 0x74007400}


class Spread(NamedTuple):
    """Two weights in a register.

    Attributes:
        word: The register.
        below: How many bits are below the weight of each half.
    """

    word: Register
    below: tuple[int, int] = (0, 0)


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


def load_words(place: Register, offset: int, count: int) -> Sequence[Register]:
    """Loads two or four words of shared memory."""
    word = utils.ir.IntegerType.get_signless(32)
    names = ", ".join(f"${i}" for i in range(count))
    text = f"ld.shared.v{count}.b32 {{{names}}}, [${count}+{offset}];"
    return utils.inline_ptx(text, place, result_types=[word] * count, has_side_effects=True)


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


def widened(spread: Register, kind: np.dtype, to: np.dtype, zero: Register = None) -> Register:
    """Two weights as two elements of 16 bits, less a zero point as `zero_point` returns it.

    A float32 is what it is.
    """
    if kind == to:
        return spread
    if kind in INTEGERS:
        number = _large(kind)
        large = _masked(spread, _ones(kind), number, xor=True)
        return _less(large, number) if zero is None else _minus(large, zero, to)
    found = _widened(spread, kind, to)
    return found if zero is None else _minus(found, zero, to)


def spread_zero(byte: Register, row: Register, below: int, kind: np.dtype) -> Register:
    """A zero point in a byte of shared memory, spread twice in a register.

    Args:
        byte: The byte; with 4 bits, it has those of two rows.
        row: A row, whose number says which half it has.
        below: How far below this row the other one is.
        kind: Type of the weights.
    """
    if BITS[kind] == 8:
        return select(byte, byte, 0)
    text = f"{{ add.u32 $0, $2, {below}; and.b32 $0, $0, 1; shl.b32 $0, $0, 2; shr.b32 $0, $1, $0;"
    nibble = run(text + " and.b32 $0, $0, 15; }", byte, row)
    return run("mul.lo.u32 $0, $1, 0x10001;", nibble)


def zero_point(both: Register, kind: np.dtype, to: np.dtype) -> Register:
    """A zero point that is spread twice, as `widened` takes it."""
    if kind in INTEGERS:
        # What is taken off is the number that an integer is the end of, with the zero point there.
        return _masked(both, _ones(kind), _large(kind), xor=True)
    return _widened(both, kind, to)


def _ones(kind: np.dtype) -> int:
    """The bits of two weights."""
    return ((1 << BITS[kind]) - 1) * 0x10001


def _large(kind: np.dtype) -> int:
    """Twice the number in whose mantissa a weight is. Without its sign, it is larger by as much."""
    return _LARGE + (kind != UINT4) * 0x10001 * (1 << BITS[kind] - 1)


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
    factor = int(np.float32(1 / by).view(np.uint32))
    return run(f"{{ .reg .b32 x; mov.b32 x, {factor}; mul.rn.f32 $0, $1, x; }}", word)


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
    return run(f"{{ .reg .b32 zero; mov.b32 zero, {number}; sub.rn.f16x2 $0, $1, zero; }}", pair)


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
