"""`Form`: how weights and the other operand lie in a slot, and who has which rows."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_gemm.kernels import element_types
from pallas_gemm.kernels.element_types import BITS, E2M1, INT4, INT8, UINT4
from pallas_gemm.kernels.hardware import WARPS, WGMMA_BYTES, WGMMA_ROWS
from pallas_gemm.kernels.smem import ATOM_BYTES

OF_FEW_VALUES = frozenset((INT4, UINT4, INT8, E2M1))
"""Types of which the difference of two values is an element of 16 bits."""
INTEGERS = frozenset((INT4, UINT4, INT8))
PART, SCALED_PART = 2**6, 2**66
"""Integers are divided by these in bfloat16, see `small.py`. With the second, the product of a
scale of bfloat16 from 2**-60 to 2**60 is exact, or rounded once."""
FEW_COLUMNS = 16
"""With more, and sums of a group, threads have no register to spare."""
ZEROS_ALIGNED = 128
"""Bytes of which TMA begins a box in shared memory at a multiple."""
MATRIX_BYTES = 16
"""A row of a matrix has these. A warp loads four matrices of 8 rows at a time."""
MOST_COLUMNS = 16
"""Columns of sums whose rows a warpgroup exchanges at a time in shared memory."""
PADDING = 2
"""Elements between lines there, so that threads that store at once use different banks."""


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
    def is_small(self) -> bool:
        """Whether weights become bfloat16 as small numbers do."""
        return self.kind in INTEGERS and self.to == jnp.bfloat16

    @property
    def stays(self) -> bool:
        """Whether a weight may have 4 bits below it when it is widened.

        With zero points, too, threads would have too few registers.
        """
        return self.is_small and self.bits == 4 and self.zeros is None

    @property
    def scales_at_once(self) -> bool:
        """Whether one instruction widens and scales weights."""
        is_alone = self.group > 0 and self.zeros is None and not self.scales_sums
        return self.is_small and is_alone and self.scales == self.to

    @property
    def part(self) -> int:
        """Divides weights; sums are multiplied by it."""
        if not self.is_small:
            return 1
        return SCALED_PART if self.scales_at_once else PART

    @property
    def has_exact_zeros(self) -> bool:
        """Whether a weight less its zero point is an element of 16 bits, exactly."""
        return self.zeros == self.kind and self.kind in OF_FEW_VALUES

    @property
    def zeros_of_part(self) -> tuple[int, int, int]:
        """Lines and bytes of a block of zero points in a slot, and how many of its rows it has.

        A block has those of one array and consumer. TMA begins it at a multiple of 128 bytes.
        """
        rows = self.rows // self.sums
        line = rows * element_types.bits(self.zeros) // 8
        lines = max(1, self.depth // self.group)
        while lines * line % ZEROS_ALIGNED:
            lines += 1
        return lines, line, rows

    @property
    def bits(self) -> int:
        """The bits of a weight."""
        return element_types.bits(self.kind)

    @property
    def unit(self) -> int:
        """Bytes of an element of a line: weights of few bits are copied as bytes."""
        return 1 if self.kind in BITS else self.kind.itemsize

    @property
    def panel(self) -> int:
        """Contracted elements of a panel of the other operand."""
        return ATOM_BYTES // self.to.itemsize

    @property
    def batch(self) -> int:
        """Contracted elements that are loaded at a time: those of two WGMMAs.

        The WGMMAs of a batch may still run while the next batch is loaded. A step has two batches
        at least, so that these have registers of their own.
        """
        return 2 * self.wgmma_depth

    @property
    def wgmma_depth(self) -> int:
        """Contracted elements of one WGMMA."""
        return WGMMA_BYTES // self.to.itemsize

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
    def turned(self) -> bool:
        """Whether the hardware turns weights as they are loaded: a warp has 16 bytes of a line."""
        is_loaded_so = not self.k_last and self.kind in BITS
        return is_loaded_so and self.rows // WARPS * self.bits >= 8 * MATRIX_BYTES

    @property
    def tops_of_line(self) -> int:
        """How many of 64 rows each have rows that lie side by side in a thread."""
        return MATRIX_BYTES * 8 // (WGMMA_ROWS // WARPS * self.bits) if self.turned else 1

    @property
    def crosses_warps(self) -> bool:
        """Whether a warp sums up rows that another one has in the layout of WGMMA."""
        return self.tops_of_line > 1

    def row_offset(self, top: int, below: int) -> int:
        """How far below a thread's first row another of its rows is.

        Args:
            top: Which 64 rows of its consumer the other row belongs to.
            below: Which of two rows of these, from 0.
        """
        whole, part = divmod(top, self.tops_of_line)
        beside = 8 if self.k_last else 1
        return whole * self.tops_of_line * WGMMA_ROWS + 2 * part + below * beside

    @property
    def share(self) -> int:
        """Contracted elements of a step that have a scale of their own; 0 without."""
        return min(self.group, self.depth)

    @property
    def scales_sums(self) -> bool:
        """Whether scales are multiplied into sums of a group, which are fewer than its weights.

        With zero points, too, threads would have too few registers.
        """
        return self.zeros is None and 4 * self.cols <= self.share

    @property
    def scratch_line(self) -> int:
        """Elements of a line of what a warpgroup exchanges rows in."""
        return min(self.cols, MOST_COLUMNS) + PADDING

    @property
    def scratch(self) -> int:
        """Elements of shared memory in which a warpgroup exchanges rows; 0 if it need not."""
        return self.tops_of_line * WGMMA_ROWS * self.scratch_line if self.crosses_warps else 0
