"""How a consumer takes the scales of blocks, and the registers that they and a block's sum take."""

from typing import Any, NamedTuple, Self

from pallas_gemm.config import GemmConfig
from pallas_gemm.kernels.hardware import WARPGROUP_THREADS, WGMMA_ROWS
from pallas_gemm.problem import Blocks, Problem

MOST_OF_BLOCK = 128
"""Columns whose block is summed up at a time, at most: its sum takes registers of its own."""
SPARE_REGISTERS = 26
"""Registers beside the sums and the scales, for addresses and counters."""
MORE_OF_SEVERAL = 8
"""The same beyond that, where the scales of several steps are loaded at a time."""
OF_GROUPS = 16
"""The same beyond that, in groups: tiles of 128 x 256 without scales would spill 112 bytes."""
LATE = 8
"""The same beyond that, where scales are taken from shared memory as they are needed."""
AHEAD = (4, 2, 1)
"""Steps whose scales are loaded at a time, if registers hold those and the next ones."""


class BlockScales(NamedTuple):
    """The scales of a product's blocks.

    Attributes:
        blocks: The blocks.
        per_step: Blocks of k in a step, each with its scale; 1 of a longer one.
        consumer: Rows and columns of a consumer's part of a tile of the result.
        sums: Right operands.
        most: Registers of a thread.
        in_groups: The sizes of groups are an operand.
        ragged: So are the steps of a tile.
    """

    blocks: Blocks
    per_step: int
    consumer: tuple[int, int]
    sums: int
    most: int
    in_groups: bool
    ragged: bool

    @classmethod
    def of(cls, config: Any, problem: Problem) -> Self:
        """Returns the scales of a product with blocks, as a config takes them."""
        assert problem.blocks is not None
        rows, columns = config.consumer_tile
        per_step = max(1, GemmConfig.tile_k(config, problem) // problem.blocks.k)
        own = (rows, columns // problem.sums)
        registers = config.registers_of(problem)
        most = registers.consumer if registers else config.most_registers
        groups = problem.in_groups, problem.ragged_k
        return cls(problem.blocks, per_step, own, problem.sums, most, *groups)

    @property
    def part(self) -> int:
        """Columns of a consumer's tile whose block is summed up at a time."""
        columns = self.consumer[1]
        return min(columns & -columns, MOST_OF_BLOCK)

    @property
    def apart(self) -> bool:
        """Whether columns that are summed up at a time have scales of their own."""
        return self.blocks.columns % self.part != 0

    @property
    def sums_of_step(self) -> int:
        """How many sums a consumer scales one after the other in a step."""
        rows, columns = self.consumer
        return self.per_step * self.sums * (rows // WGMMA_ROWS) * (columns // self.part)

    @property
    def staged(self) -> bool:
        """Whether scales of columns pass through shared memory.

        Each thread loads that of one column, or of some, and takes those that it needs from there.
        """
        whole = self.consumer[1] % WARPGROUP_THREADS == 0
        return self.blocks.columns == 1 and self.per_step == 1 and whole

    @property
    def early(self) -> bool:
        """Whether they are taken from there before the products that they scale are made."""
        return self._taken(1, early=True) <= self.most

    @property
    def ahead(self) -> int:
        """Steps whose scales are loaded at a time."""
        if (self.apart and not self.staged) or self.per_step > 1 or self.ragged:
            return 1
        return next((x for x in AHEAD if self._taken(x) <= self.most), 1)

    @property
    def in_pairs(self) -> bool:
        """Whether steps are computed in pairs, where scales of one are loaded at a time.

        Then scales are not moved to other registers, which would wait for them. Groups, and scales
        of each column, leave too few registers for that.
        """
        return not (self.apart or self.in_groups)

    @property
    def awaited(self) -> bool:
        """Whether each step waits for the next one's scales; groups wait without scales, too."""
        return self.ahead == 1 and not self.in_pairs

    @property
    def registers(self) -> int:
        """Registers of a thread that the k loop takes."""
        return self._taken(self.ahead)

    def _taken(self, ahead: int, *, early: bool = False) -> int:
        rows, columns = self.consumer
        whole = self.sums * columns
        of_rows = rows // 32 if self.blocks.rows else 0
        of_columns = self.part // 4 if self.apart and not self.staged else 1
        scales = of_rows + (of_columns * whole // self.part if self.blocks.columns else 0)
        sums = (rows * whole + WGMMA_ROWS * self.part) // WARPGROUP_THREADS
        spare = SPARE_REGISTERS + (MORE_OF_SEVERAL if ahead > 1 else 0)
        spare += (self.part // 4 if early else LATE) if self.staged else 0
        spare += OF_GROUPS if self.in_groups and ahead > 1 else 0
        return sums + 2 * ahead * self.per_step * scales + spare


def staged_slots(stages: int) -> int:
    """Returns how many slots staged scales take: of steps that follow each other, different ones.

    A step has the slot that its slot of the ring leaves when it is divided by this number.
    """
    return next(count for count in range(2, stages + 1) if (stages - 1) % count)
