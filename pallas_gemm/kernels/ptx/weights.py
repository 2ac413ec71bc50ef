"""Weights of few bits as a warpgroup loads them from a slot, each where `widen.py` wants it.

Stored [rows, k], what a thread multiplies are bytes that lie side by side. Stored [k, rows], it
takes two rows that lie side by side instead, of each of its four contracted elements.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pallas_gemm.kernels.element_types import BITS
from pallas_gemm.kernels.hardware import WGMMA_ROWS
from pallas_gemm.kernels.ptx import widen
from pallas_gemm.kernels.ptx.widen import Register, load, run

ZEROS_ALIGNED = 128
"""Bytes of which TMA begins a box in shared memory at a multiple."""
BATCH = 32
"""Contracted elements that are loaded at a time."""


class Form(NamedTuple):
    """How the operands of a step lie in a slot.

    Attributes:
        kind: Type of the weights.
        to: Type of the other operand.
        k_last: Weights are stored [rows, k]; else [k, rows].
        rows: Rows of one consumer.
        all_rows: Rows of all consumers in the slot.
        cols: Columns of the other operand.
        depth: Contracted elements of a step.
        line: Bytes of a line of a panel of weights.
        group: Contracted elements that have a scale; 0 without.
        scales: Type of the scales.
        zeros: Type of the zero points; None without.
        sums: How many arrays of weights there are.
    """

    kind: np.dtype
    to: np.dtype
    k_last: bool
    rows: int
    all_rows: int
    cols: int
    depth: int
    line: int
    group: int = 0
    scales: Any = None
    zeros: Any = None
    sums: int = 1

    @property
    def has_exact_zeros(self) -> bool:
        """Whether a weight less its zero point is an element of 16 bits, exactly."""
        return self.zeros == self.kind and self.kind in widen.OF_FEW_VALUES

    @property
    def zeros_of_part(self) -> tuple[int, int, int]:
        """Lines and bytes of a block of zero points in a slot, and how many of its rows it has.

        A block has those of one array and consumer. TMA begins it at a multiple of 128 bytes.
        """
        rows = self.rows // self.sums
        line = rows * widen.bits(self.zeros) // 8
        lines = max(1, self.depth // self.group)
        while lines * line % ZEROS_ALIGNED:
            lines += 1
        return lines, line, rows

    @property
    def bits(self) -> int:
        """The bits of a weight."""
        return BITS[self.kind]

    @property
    def lines(self) -> int:
        """The lines of a panel."""
        return self.all_rows if self.k_last else self.depth

    @property
    def panels(self) -> int:
        """Panels of weights in a slot."""
        along = self.depth if self.k_last else self.all_rows
        return along * self.bits // (8 * self.line)

    @property
    def row_below(self) -> int:
        """How far below the first of a thread's two rows of 16 the other one is."""
        return 8 if self.k_last else 1


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
    first = run(f"{{ shr.b32 $0, $1, 2; mul.lo.u32 $0, $0, {1 if form.k_last else 2}; }}", lane)
    text = f"{{ mad.lo.u32 $0, $1, 16, $2; mad.lo.u32 $0, $3, {form.rows}, $0; }}"
    return Thread(run(text, warp, first, me), run("and.b32 $0, $1, 3;", lane))


class AlongK:
    """Loads weights stored [rows, k]: 16 bytes of a row, of which a thread needs some."""

    def __init__(self, form: Form, start: Register, own: Thread) -> None:
        self._form, line = form, form.line
        self._start = run(f"mad.lo.u32 $0, $1, {line}, $2;", own.row, start)
        # A row of 128 bytes is swizzled by its number, shorter ones by that of their 128 bytes.
        turned = f"{{ mul.lo.u32 $0, $1, {line}; shr.b32 $0, $0, 3; and.b32 $0, $0, {line - 16}; }}"
        self._turned = run(turned, own.row)
        if form.bits == 4:
            # A byte of a word, and the same of the word that is shifted by 4 bits.
            text = "{ .reg .b32 x; add.u32 x, $1, 4; shl.b32 x, x, 8; or.b32 $0, x, $1; }"
        else:
            # Two bytes of a word, which two threads share.
            text = "{ .reg .b32 x; and.b32 x, $1, 1; mad.lo.u32 $0, x, 0x0202, 0x0100; }"
            place = "{ .reg .b32 x; shr.b32 x, $1, 1; mad.lo.u32 $0, x, 4, $2; }"
            self._start = run(place, own.pair, self._start)
        self._chosen = run(text, own.pair)

    def load(self, top: int, at: int) -> Sequence[Sequence[Register]]:
        """Loads a batch of two rows of a thread: 16 bytes of each, or of 8 bits a half of 32."""
        each = self._form.bits // 4
        numbers = range(at // BATCH * each, (at // BATCH + 1) * each)
        return [
            [word for number in numbers for word in self._load(top, below, number)]
            for below in range(2)
        ]

    def spread(self, loaded: Any, part: int) -> list[Register]:
        """Each pair of weights of 16 of the contracted elements, in the order of WGMMA."""
        nibbles = self._form.bits == 4
        words = [loaded[below][2 * part + after] for after in range(2) for below in range(2)]
        return [widen.select(x, widen.shifted(x, 4) if nibbles else x, self._chosen) for x in words]

    def _load(self, top: int, below: int, number: int) -> Sequence[Register]:
        """Loads 16 bytes of a row; of 8 bits, two of their words."""
        form = self._form
        panel, within = divmod(16 * number, form.line)
        offset = (panel * form.lines + top * WGMMA_ROWS + 8 * below) * form.line
        text = f"{{ .reg .b32 x; xor.b32 x, $1, {within}; add.u32 $0, $2, x; }}"
        place = run(text, self._turned, self._start)
        if form.bits == 4:
            return widen.load_four(place, offset)
        return [load(place, offset + 8 * half, 4) for half in range(2)]


class AcrossK:
    """Loads weights stored [k, rows]: two rows of each contracted element."""

    def __init__(self, form: Form, start: Register, own: Thread) -> None:
        self._form = form
        self._places = [
            self._two_places(start, own, top * WGMMA_ROWS) for top in range(form.rows // WGMMA_ROWS)
        ]

    def _two_places(self, start: Register, own: Thread, below: int) -> list[Register]:
        """Where a pair of contracted elements is, of the rows so far below."""
        line, bits = self._form.line, self._form.bits
        byte = run(
            f"{{ add.u32 $0, $1, {below}; mul.lo.u32 $0, $0, {bits}; shr.b32 $0, $0, 3; }}", own.row
        )
        text = f"{{ .reg .b32 x; shr.b32 x, $1, {line.bit_length() - 1};"
        text += f" mad.lo.u32 $0, x, {line * self._form.lines}, $2; }}"
        panel, within = run(text, byte, start), run(f"and.b32 $0, $1, {line - 1};", byte)
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
            for first in range(at, at + BATCH, 8)
        ]

    def spread(self, loaded: Any, part: int) -> list[Register]:
        """Each pair of weights of 16 of the contracted elements, in the order of WGMMA."""
        found = []
        for one, two in loaded[2 * part : 2 * part + 2]:
            if self._form.bits == 4:
                both = widen.select(one, two, 0x5410)
                found += [both, widen.shifted(both, 4)]
            else:
                found += [widen.select(one, two, below | 4 + below << 8) for below in range(2)]
        return found
