"""Weights as a warpgroup loads them from a slot, each where `widen.py` or WGMMA wants it.

Stored [rows, k], what a thread multiplies are bytes that lie side by side. Stored [k, rows], it
takes rows that lie side by side instead, of each of its contracted elements. Where a warp has 16
bytes of them, one instruction loads and turns 32 contracted elements for all of the warp. Float32
has no such instruction.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from pallas_gemm.kernels.hardware import WARPS, WGMMA_ROWS
from pallas_gemm.kernels.ptx import widen
from pallas_gemm.kernels.ptx.form import MATRIX_BYTES, Form
from pallas_gemm.kernels.ptx.widen import Register, Spread, load, run


class Thread(NamedTuple):
    """Which part of a fragment a thread has.

    Attributes:
        row: Its first row, in the first 64 of its consumer.
        pair: Which of the pairs of contracted elements: from 0 to 3.
    """

    row: Register
    pair: Register


def thread(form: Form, me: Register) -> Thread:
    """Returns the part of a thread of a consumer."""
    lane = run("mov.u32 $0, %laneid;")
    warp = run("{ mov.u32 $0, %tid.x; shr.b32 $0, $0, 5; and.b32 $0, $0, 3; }")
    beside = 1 if form.k_last else 2 * form.tops_of_line
    first = run(f"{{ shr.b32 $0, $1, 2; mul.lo.u32 $0, $0, {beside}; }}", lane)
    own = WGMMA_ROWS // WARPS * form.tops_of_line
    text = f"{{ mad.lo.u32 $0, $1, {own}, $2; mad.lo.u32 $0, $3, {form.rows}, $0; }}"
    return Thread(run(text, warp, first, me), run("and.b32 $0, $1, 3;", lane))


class AlongK:
    """Loads weights stored [rows, k]: 16 bytes of a row, of which a thread needs some."""

    def __init__(self, form: Form, start: Register, places: Sequence[Register]) -> None:
        self._form, (first, self._turned, self._chosen) = form, places
        self._start = _sum(first, start)

    @staticmethod
    def places(form: Form, own: Thread) -> list[Register]:
        """Where a thread's row begins, how it is swizzled, and which of its bytes it needs."""
        line = form.line
        first = run(f"mul.lo.u32 $0, $1, {line};", own.row)
        # A row of 128 bytes is swizzled by its number, shorter ones by that of their 128 bytes.
        turned = f"{{ mul.lo.u32 $0, $1, {line}; shr.b32 $0, $0, 3; and.b32 $0, $0, {line - 16}; }}"
        swizzled = run(turned, own.row)
        if form.stays:
            # A byte of a word in each half.
            text = "mul.lo.u32 $0, $1, 0x0101;"
        elif form.bits == 4:
            # A byte of a word, and zeros.
            text = "or.b32 $0, $1, 0x4440;"
        else:
            # Two bytes of a word, which two threads share.
            text = "{ .reg .b32 x; and.b32 x, $1, 1; mad.lo.u32 $0, x, 0x0202, 0x0100; }"
            place = "{ .reg .b32 x; shr.b32 x, $1, 1; mad.lo.u32 $0, x, 4, $2; }"
            first = run(place, own.pair, first)
        return [first, swizzled, run(text, own.pair)]

    def load(self, top: int, at: int) -> Sequence[Sequence[Register]]:
        """Loads a batch of two rows of a thread: 16 bytes of each, or of 8 bits a half of 32."""
        each = self._form.bits // 4
        batch = at // self._form.batch
        numbers = range(batch * each, (batch + 1) * each)
        return [
            [word for number in numbers for word in self._load(top, below, number)]
            for below in range(2)
        ]

    def spread(self, top: int, loaded: Any, part: int) -> list[Spread]:
        """Each pair of weights of 16 of the contracted elements, in the order of WGMMA."""
        del top
        words = [loaded[below][2 * part + after] for after in range(2) for below in range(2)]
        if self._form.stays:
            return [Spread(widen.select(x, x, self._chosen), (0, 4)) for x in words]
        if self._form.bits == 8:
            return [Spread(widen.select(x, x, self._chosen)) for x in words]
        zero = run("mov.b32 $0, 0;")
        # The second nibble of a byte goes to the other half, by a product: more units multiply.
        return [
            Spread(run(f"mul.lo.u32 $0, $1, {1 << 12 | 1};", widen.select(x, zero, self._chosen)))
            for x in words
        ]

    def _load(self, top: int, below: int, number: int) -> Sequence[Register]:
        """Loads 16 bytes of a row; of 8 bits, two of their words."""
        form = self._form
        panel, within = divmod(16 * number, form.line)
        offset = (panel * form.lines + top * WGMMA_ROWS + 8 * below) * form.line
        text = f"{{ .reg .b32 x; xor.b32 x, $1, {within}; add.u32 $0, $2, x; }}"
        place = run(text, self._turned, self._start)
        if form.bits == 4:
            return widen.load_words(place, offset, 4)
        return [load(place, offset + 8 * half, 4) for half in range(2)]


class AcrossK:
    """Loads weights stored [k, rows]: two rows of each contracted element."""

    def __init__(self, form: Form, start: Register, places: Sequence[Register]) -> None:
        self._form = form
        self._places = list(itertools.batched((_sum(x, start) for x in places), 2))

    @classmethod
    def places(cls, form: Form, own: Thread) -> list[Register]:
        """Where a pair of contracted elements is, of each 64 rows."""
        tops = range(form.rows // WGMMA_ROWS)
        return [x for top in tops for x in cls._two_places(form, own, top * WGMMA_ROWS)]

    @staticmethod
    def _two_places(form: Form, own: Thread, below: int) -> list[Register]:
        """Where a pair of contracted elements is, of the rows so far below."""
        line, bits = form.line, form.bits
        byte = run(
            f"{{ add.u32 $0, $1, {below}; mul.lo.u32 $0, $0, {bits}; shr.b32 $0, $0, 3; }}", own.row
        )
        text = f"{{ .reg .b32 x; shr.b32 x, $1, {line.bit_length() - 1};"
        text += f" mul.lo.u32 $0, x, {line * form.lines}; }}"
        panel, within = run(text, byte), run(f"and.b32 $0, $1, {line - 1};", byte)
        found = []
        for number in range(2):
            text = f"{{ .reg .b32 x; mad.lo.u32 x, $1, {2 * line}, $2;"
            text += f" add.u32 x, x, {number * line};"
            # TMA swizzles a panel so.
            text += f" shr.b32 $0, x, 3; and.b32 $0, $0, {line - 16}; xor.b32 $0, $0, x;"
            found.append(run(text + " add.u32 $0, $0, $3; }", own.pair, within, panel))
        return found

    def load(self, top: int, at: int) -> Sequence[Sequence[Register]]:
        """Loads a batch: of every 8 contracted elements a pair, which has two words."""
        form = self._form
        return [
            [load(place, first * form.line, form.bits // 4) for place in self._places[top]]
            for first in range(at, at + form.batch, 8)
        ]

    def spread(self, top: int, loaded: Any, part: int) -> list[Spread]:
        """Each pair of weights of 16 of the contracted elements, in the order of WGMMA."""
        del top
        found = []
        for one, two in loaded[2 * part : 2 * part + 2]:
            if self._form.bits == 4:
                both = widen.select(one, two, 0x5410)
                found += [_moved(self._form, both, below * 4) for below in range(2)]
            else:
                each = [widen.select(one, two, below | 4 + below << 8) for below in range(2)]
                found += map(Spread, each)
        return found


class Turned:
    """Loads weights stored [k, rows] as matrices, which the hardware turns.

    A register of a thread then has, in each half, some rows of one of two contracted elements.
    """

    def __init__(self, form: Form, start: Register, places: Sequence[Register]) -> None:
        self._form, self._places = form, [_sum(x, start) for x in places]

    @classmethod
    def places(cls, form: Form, own: Thread) -> list[Register]:
        """Where a lane's line begins, in each unit of rows that are loaded together."""
        # A lane says where a line of the 32 begins; all lanes of a warp begin at the same row.
        shared = 2 * form.tops_of_line
        text = f"{{ .reg .b32 x; mov.u32 x, %laneid; shr.b32 x, x, 2; mul.lo.u32 x, x, {shared};"
        text += f" sub.u32 x, $1, x; mul.lo.u32 x, x, {form.bits}; shr.b32 $0, x, 3; }}"
        byte = run(text, own.row)
        units = range(form.rows // WGMMA_ROWS // form.tops_of_line)
        return [cls._place(form, byte, unit * MATRIX_BYTES * WARPS) for unit in units]

    @staticmethod
    def _place(form: Form, byte: Register, further: int) -> Register:
        """Where the line of a lane begins, and that number of bytes further along it."""
        line = form.line
        text = f"{{ .reg .b32 x, y, z; add.u32 x, $1, {further};"
        text += f" shr.b32 y, x, {line.bit_length() - 1}; and.b32 x, x, {line - 1};"
        text += f" mov.u32 z, %laneid; mad.lo.u32 x, z, {line}, x;"
        # TMA swizzles a panel so.
        text += f" shr.b32 z, x, 3; and.b32 z, z, {line - 16}; xor.b32 x, x, z;"
        text += f" mad.lo.u32 $0, y, {line * form.lines}, x; }}"
        return run(text, byte)

    def load(self, top: int, at: int) -> Sequence[Register]:
        """Loads a batch: of every 8 contracted elements a register. Tops may share what is loaded.

        Args:
            top: Which 64 rows of the consumer.
            at: The first contracted element.
        """
        whole, part = divmod(top, self._form.tops_of_line)
        if part == 0:
            self._loaded = widen.load_matrices(self._places[whole], at * self._form.line)
        return self._loaded

    def spread(self, top: int, loaded: Any, part: int) -> list[Spread]:
        """Each pair of weights of 16 of the contracted elements, in the order of WGMMA."""
        first = 2 * (top % self._form.tops_of_line)
        return [
            _moved(self._form, word, (first + below) * self._form.bits)
            for word in loaded[2 * part : 2 * part + 2]
            for below in range(2)
        ]


class Singles:
    """Loads float32 stored [k, rows]: two rows of two contracted elements.

    Lines of 8 contracted elements are swizzled. Half of the threads load the first of theirs before
    the second, and the others the second before the first: so no two use a bank at once.
    """

    def __init__(self, form: Form, start: Register, places: Sequence[Register]) -> None:
        self._form, (self._chosen, *own) = form, places
        self._places = list(itertools.batched((_sum(x, start) for x in own), 2))

    @classmethod
    def places(cls, form: Form, own: Thread) -> list[Register]:
        """Which of two loads has the first of a thread's elements; where both are, of each top."""
        second = run("{ mov.u32 $0, %laneid; shr.b32 $0, $0, 3; and.b32 $0, $0, 1; }")
        chosen = run(f"mad.lo.u32 $0, $1, {0x4444}, {0x3210};", second)
        tops = range(form.rows // WGMMA_ROWS)
        loads = [(top * WGMMA_ROWS, number) for top in tops for number in range(2)]
        return [chosen, *(cls._place(form, own, second, *load) for load in loads)]

    @staticmethod
    def _place(form: Form, own: Thread, second: Register, below: int, number: int) -> Register:
        """Where a load begins, of the rows so far below."""
        line = form.line
        text = f"{{ .reg .b32 x, k, within; add.u32 x, $1, {below}; mul.lo.u32 x, x, 4;"
        text += f" and.b32 within, x, {line - 1}; shr.b32 x, x, {line.bit_length() - 1};"
        text += f" xor.b32 k, $3, {number}; mad.lo.u32 k, k, 4, $2;"
        # TMA swizzles a panel so.
        text += " shl.b32 $0, k, 4; xor.b32 within, within, $0;"
        text += f" mad.lo.u32 $0, k, {line}, within; mad.lo.u32 $0, x, {line * form.lines}, $0; }}"
        return run(text, own.row, own.pair, second)

    def load(self, top: int, at: int) -> Sequence[Sequence[Register]]:
        """Loads a batch: of every 8 contracted elements two, of two rows each."""
        form, own = self._form, self._places[top]
        return [
            [x for place in own for x in widen.load_words(place, first * form.line, 2)]
            for first in range(at, at + form.batch, 8)
        ]

    def spread(self, top: int, loaded: Any, part: int) -> list[Spread]:
        """Two rows of each of two contracted elements, in the order of WGMMA."""
        del top
        one, two = loaded[part][:2], loaded[part][2:]
        pairs = [*zip(one, two, strict=True), *zip(two, one, strict=True)]
        return [Spread(widen.select(*pair, self._chosen)) for pair in pairs]


def _moved(form: Form, word: Register, below: int) -> Spread:
    """Two weights with a number of bits below them, which stay if there are 4."""
    stay = below % 8 if form.stays else 0
    return Spread(widen.shifted(word, below - stay), (stay, stay))


def _sum(x: Register, y: Register) -> Register:
    return run("add.u32 $0, $1, $2;", x, y)


def _loader(form: Form) -> "type[AlongK | AcrossK | Turned | Singles]":
    if form.k_last:
        return AlongK
    if form.kind == widen.F32:
        return Singles
    return Turned if form.turned else AcrossK


def count(form: Form) -> int:
    """How many places there are."""
    tops = form.rows // WGMMA_ROWS
    if form.k_last:
        return 4
    if form.kind == widen.F32:
        return 2 + 2 * tops
    return 1 + (tops // form.tops_of_line if form.turned else 2 * tops)


def places(form: Form, me: Register) -> list[Register]:
    """Returns what each thread of a consumer has the same of in all steps.

    Returns:
        Its first row, and what `loader` adds to where a slot begins.
    """
    own = thread(form, me)
    return [own.row, *_loader(form).places(form, own)]


def loader(
    form: Form, start: Register, places: Sequence[Register]
) -> "AlongK | AcrossK | Turned | Singles":
    """Returns what loads the weights of a slot that begins there."""
    return _loader(form)(form, start, places[1:])
