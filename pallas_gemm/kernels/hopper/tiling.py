"""How a Hopper config divides a tile among consumers, and the registers and memory that takes."""

import dataclasses
import math
from typing import Literal

from pallas_gemm.config import FITTING, GemmConfig, Joined
from pallas_gemm.kernels.functions import words
from pallas_gemm.kernels.functions.elementwise import divides
from pallas_gemm.kernels.hardware import (
    MAX_REGISTERS,
    WARPGROUP_THREADS,
    WARPS,
    WGMMA_COLUMNS,
    WGMMA_ROWS,
)
from pallas_gemm.kernels.hopper.block_scales import BlockScales, staged_slots
from pallas_gemm.kernels.hopper.problems import stored_by_tma
from pallas_gemm.kernels.hopper.registers import Registers, epilogue_registers, reordered_registers
from pallas_gemm.kernels.work import GroupCoding, SumCoding
from pallas_gemm.problem import Problem

SPARE_REGISTERS = 64
"""An epilogue leaves these, if it can, for the assembler to mix the arithmetic of columns."""
SPARE_OF_REDUCTIONS = 12
"""The same where every result is reduced. Wide strips are shuffled less: log-sum-exp of 128 x 256
takes 2,267 instructions of a kernel in strips of 32 columns, and 4,619 in strips of 8."""
MOST_COMPARED = 3
"""Vectors of rows of a mirrored product stored late, beside the numbers of its columns. Four spill
14 registers of a tile of 128 x 256, and none without the numbers."""
ORDERED_STRIP = 16
"""Columns of a strip, where the order of sums along rows is promised."""
UNROLLED_STEPS = 8
"""Steps of a k loop that the compiler unrolls."""
MOST_OF_CONSUMERS = Registers(24, 240)
"""The most that two consumers get: the producer keeps few."""
LATE_STRIP = 32
"""Columns of a tile that are finished at once, at most, where it is stored late."""
SCALING_CYCLES = 0.85
"""For each element of a thread's part of a block's sum: the tensor cores wait while it is added."""
ADDING_CYCLES = 0.3
"""The same of blocks without scales: 8192 cubed takes 742 us so on an H200, 701 us in one sum."""
ALONE_CYCLES = 150
"""From the last WGMMA of a block to the first of the next one, for a consumer alone."""
AWAITED_CYCLES = 860
"""Rows in groups wait for the scales of the next step, if they are loaded step by step. Consumers
share the wait. 16384 x 8192 x 5120 in 16 groups takes 1356 to 1471 us on an H200 in tiles of 128 x
256, which load so. In tiles of 128 x 128, which load scales of several steps, it is 1112 to 1215.
Without scales, 8192 x 14336 x 4096 in 8 groups takes 928 us on an H100 in the former tiles, 701 to
845 in the latter.
"""
LOADED_CYCLES = 1000
"""A step of sums over groups takes this at least, until the scales arrive. 8 groups of
4096 x 14336 take 1641 us on an H200 in tiles of 128 x 256 and 2095 us in tiles of 128 x 128."""
LINE_PADDING = 8
"""Elements between the lines of a store slot that threads read, so that they share no bank."""
TOLD_SLOTS = 8
"""Pieces of groups that may be told of ahead; a power of two."""
TOLD_HEADER = 2
"""Words before those that are told of pieces: what rows in groups are, or scratch of two warps."""


def ordered_columns(problem: Problem) -> int:
    """Columns of a consumer's tile where sums along rows are promised: a power of two, at most 128.

    They follow from the number of columns alone, as the order of the sums has to.
    """
    return min(128, max(ORDERED_STRIP, 1 << (problem.n - 1).bit_length()))


@dataclasses.dataclass(frozen=True)
class HopperTiling(GemmConfig):
    """The fields of a `HopperConfig`, which explains them, and what follows from them."""

    stages: int = FITTING
    store_columns: int = FITTING
    consumers: int = 2
    pingpong: bool = False
    late_store: bool = FITTING
    mirrored: bool = False
    partial_sums: int = 1
    early_launch: bool = False

    @property
    def overlap(self) -> Literal["late", "turns", "other"]:
        """See `GemmConfig`."""
        return "late" if self.late_store else "turns" if self.pingpong else "other"

    def as_computed(self, problem: Problem) -> Problem:
        """The problem as the kernel computes it; tile, cluster and schedule refer to it."""
        return problem.mirrored() if self.mirrored and not problem.transpose_out else problem

    @property
    def split_rows(self) -> bool:
        """Whether cooperative consumers share a tile by rows, rather than by columns."""
        return self.tile[0] % (WGMMA_ROWS * self.consumers) == 0

    @property
    def consumer_tile(self) -> tuple[int, int]:
        """The part of a tile that one consumer accumulates."""
        rows, cols = self.tile
        if self.pingpong:
            return rows, cols
        return (rows // self.consumers, cols) if self.split_rows else (rows, cols // self.consumers)

    @property
    def accumulator_registers(self) -> int:
        """Registers per thread that hold the accumulator."""
        rows, cols = self.consumer_tile
        return rows * cols // 128

    @property
    def sum_registers(self) -> int:
        """Registers per thread that hold the accumulator, and what was summed up before."""
        return self.accumulator_registers * (2 if self.partial_sums > 1 else 1)

    @property
    def registers(self) -> Registers | None:
        """Registers per thread of producer and consumers; None leaves them as launched.

        An SM has 65,536. The consumers get those that the producer gives up, in steps of 8.
        """
        if self.consumers == 1:
            return None
        if self.consumers == 3:
            return Registers(32, 160)
        return MOST_OF_CONSUMERS if self.sum_registers > 128 else Registers(40, 232)

    @property
    def most_registers(self) -> int:
        """Registers that a thread of a consumer may use."""
        return self.registers.consumer if self.registers else MAX_REGISTERS

    def finished_columns(self, problem: Problem) -> int:
        """Columns that the epilogue is applied to at once: it takes registers for each of them.

        The columns that are stored, or finished, at a time. If their values do not leave enough
        registers beside the accumulator, half of these columns, and so on.
        """
        width = LATE_STRIP if self.late_store else self.store_columns
        if problem.epilogue.is_identity:
            return width
        if problem.adds_rows_in_order:
            return ORDERED_STRIP
        spare = SPARE_REGISTERS if problem.result_dtypes else SPARE_OF_REDUCTIONS
        enough = max(spare, self._needed_registers(problem))
        while width > WGMMA_COLUMNS and self._free_registers(problem, width) < enough:
            width //= 2
        return width

    def _free_registers(self, problem: Problem, columns: int) -> int:
        """Registers that an epilogue leaves which is applied to a number of columns at once."""
        rows = self.consumer_tile[0]
        waiting = (*problem.loaded_dtypes, *problem.result_dtypes[1:])
        size = rows * self.store_columns * sum(dtype.itemsize for dtype in waiting)
        taken = size // (4 * WARPGROUP_THREADS) + epilogue_registers(problem, rows, columns)
        return self.most_registers - self.accumulator_registers - taken

    def _needed_registers(self, problem: Problem) -> int:
        """Registers that must be left: for addresses, counters and what the assembler reorders.

        These numbers are where configs that were drawn at random and compiled hardly spilled any
        more: of 241 accepted near the border 6 did, 5 of which the numbers have since ruled out.
        """
        # The loop over so few steps is unrolled, and keeps the addresses of all of them.
        few = -(-problem.k // self.tile_k(problem)) <= UNROLLED_STEPS
        if problem.epilogue.is_identity:
            tall = self.consumer_tile[0] > 192
            kept = few and self.is_online and problem.transpose_out and self.cluster_size > 1
            return 16 + (40 if self.pingpong else 16) * tall + 72 * kept
        # So do the arithmetic by which a tile is found, and even more so what claims one.
        kept = 2 if self.persistence == "dynamic" else int(few or self.is_online)
        return reordered_registers(words.program(problem), kept)

    def registers_suffice(self, problem: Problem) -> bool:
        """Whether a consumer has enough registers, so that nothing is spilled."""
        if not self.holds_blocks(problem, late=self.late_store):
            return False
        # The parts of a division are too many, with panels of a transposed left operand above all.
        alone = self.consumers == 1 or not problem.transpose_a
        short = self.consumer_tile[0] == WGMMA_ROWS and alone
        program = words.program(problem)
        early = not self.late_store and self.accumulator_registers > (128 if short else 104)
        if early and divides(program.primitives):
            return False
        if self.late_store and problem.transpose_out and len(program.compared) > MOST_COMPARED:
            return False
        free = self._free_registers(problem, self.finished_columns(problem))
        return free >= self._needed_registers(problem)

    def store_chunks(self, problem: Problem) -> tuple[tuple[int, int], ...]:
        """(first column, width) of each chunk of a consumer's part of the sums.

        Chunks are `store_columns` wide, and what is left over is cut into halves of that, quarters
        and so on.
        """
        chunks: list[tuple[int, int]] = []
        start, width = 0, self.store_columns
        columns = self.consumer_tile[1] // problem.sums
        while start < columns and width >= 16:
            if width <= columns - start:
                chunks.append((start, width))
                start += width
            else:
                width //= 2
        return tuple(chunks)

    def stores_per_tile(self, problem: Problem) -> int:
        """How many TMA stores a consumer's tile takes: transposed, one per chunk and 64 rows."""
        in_panels = problem.transpose_out or problem.symmetric
        panels = self.consumer_tile[0] // WGMMA_ROWS if in_panels else 1
        return panels * len(self.store_chunks(problem))

    def store_slot_shape(self, problem: Problem) -> tuple[int, int]:
        """The shape of a store slot: lines of the result in memory, and elements of each."""
        lines, length = self.consumer_tile[0], self.store_columns
        if problem.symmetric:
            # A chunk, and its mirror image.
            return 2 * WGMMA_ROWS, length
        if problem.transpose_out:
            lines, length = length, WGMMA_ROWS
        return lines, length + (0 if stored_by_tma(problem) else LINE_PADDING)

    def shared_memory_bytes(self, problem: Problem, stages: int | None = None) -> int:
        """Predicts the shared memory of a CTA; Mosaic aligns every buffer to 1,024 bytes.

        Args:
            problem: The problem.
            stages: The stages of the ring; None for those of the config.
        """
        problem, stages = self.as_computed(problem), stages or self.stages
        depth = self.tile_k(problem) * stages
        # What is cut along k is stored by another kernel.
        slots = self.consumers * self.store_slots * (not self.cuts_all_tiles)
        stored = slots * math.prod(self.store_slot_shape(problem))
        loaded = slots * self.consumer_tile[0] * self.store_columns
        # An operand takes the slots of a result of its type that TMA stores; else it has its own.
        alone = problem.own_dtypes if stored_by_tma(problem) else problem.loaded_dtypes
        along_columns = sum(own.kind == "n" for own in problem.reductions)
        buffers = (
            4 * WARPS * self.consumers * self.consumer_tile[1] * along_columns,
            self.tile[0] * depth * problem.a_dtype.itemsize,
            self.tile[1] * depth * problem.b_dtype.itemsize,
            *(stored * dtype.itemsize for dtype in problem.result_dtypes),
            *(loaded * dtype.itemsize for dtype in alone),
            4 * math.prod(self.staged_shape(problem, stages)),
            8 * (2 * stages * self.ring_readers + 2),
            self.told_words(problem) * 4,
        )
        return sum(-(-size // 1024) * 1024 for size in buffers)

    def holds_blocks(self, problem: Problem, *, late: bool) -> bool:
        """Whether a consumer has registers for the sum of a block, and its scales.

        Args:
            problem: The problem.
            late: The tile before is stored meanwhile.
        """
        if problem.blocks is None:
            return True
        own, scales = self.registers_of(problem), BlockScales.of(self, problem)
        if late and scales.per_step > 1:
            return False
        stored = self.accumulator_registers * problem.out_dtype.itemsize // 4 if late else 0
        return stored + scales.registers <= (own.consumer if own else MAX_REGISTERS)

    def scaling_cycles(self, problem: Problem) -> float:
        """See `GemmConfig`: that of a consumer alone is not hidden behind the WGMMAs of another."""
        if problem.blocks is None:
            return 0.0
        scales = BlockScales.of(self, problem)
        sums = self.consumers * scales.per_step
        each = SCALING_CYCLES * (2 if scales.apart else 1) if problem.scales else ADDING_CYCLES
        each *= self.accumulator_registers
        waits = ALONE_CYCLES * scales.sums_of_step if self.consumers == 1 else 0.0
        if scales.awaited and problem.groups:
            waits += AWAITED_CYCLES / self.consumers
        return sums * each + waits

    def awaited_cycles(self, problem: Problem) -> float:
        """See `GemmConfig`; rows in groups wait for more than these."""
        is_awaited = problem.ragged_k and problem.blocks is not None
        return LOADED_CYCLES if is_awaited and BlockScales.of(self, problem).awaited else 0.0

    def staged_shape(self, problem: Problem, stages: int) -> tuple[int, ...]:
        """The shape of what scales of columns pass through: consumers, slots, operands, columns."""
        if problem.blocks is None or not (own := BlockScales.of(self, problem)).staged:
            return (0,)
        return self.consumers, staged_slots(stages), own.sums, own.consumer[1]

    def registers_of(self, problem: Problem) -> Registers | None:
        """Registers of the roles for a problem: the sums of blocks take some of the producer's."""
        own = self.registers
        more = problem.blocks is not None and self.consumers == 2
        return MOST_OF_CONSUMERS if more else own

    def told_words(self, problem: Problem) -> int:
        """How many words the roles are told of pieces in groups, at a time."""
        if not problem.in_groups:
            return 0
        coding = GroupCoding if problem.groups else SumCoding
        return TOLD_HEADER + TOLD_SLOTS * coding.words

    @property
    def ring_barriers(self) -> int:
        """How many `full` (and how many `empty`) barriers there are."""
        return self.stages * self.ring_readers

    @property
    def ring_readers(self) -> int:
        """How many pairs of barriers a slot has: consumers in turns have one each."""
        return self.consumers if self.pingpong else 1

    def summands(self, problem: Problem) -> int:
        """See `GemmConfig`; all pieces but the first leave each promised part for itself."""
        each = self.partial_sums if problem.parts else 1
        return 1 + (self.split_k - 1) * each

    def joined(self, problem: Problem) -> Joined:
        """See `GemmConfig`; each consumer's part of a tile is cut up for itself."""
        height, width = self.consumer_tile
        columns = min(width, self.store_columns * problem.sums)
        chunks = self.stores_per_tile(self.as_computed(problem))
        return Joined(self.consumers * chunks, self.consumers, height * columns)
