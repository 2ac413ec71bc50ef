"""`HopperConfig`: what the Hopper kernel can be told, and what of it is legal."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Literal, Self

from pallas_gemm.config import FITTING, STEP_BYTES, STORE_COLUMNS, GemmConfig, Joined
from pallas_gemm.device import Device
from pallas_gemm.kernels import words
from pallas_gemm.kernels.elementwise import divides
from pallas_gemm.kernels.hardware import (
    MAX_BARRIERS,
    MAX_REGISTERS,
    WARPGROUP_THREADS,
    WGMMA_COLUMNS,
    WGMMA_ROWS,
)
from pallas_gemm.kernels.hopper.problems import cut_refusals, layout_refusals, stored_by_tma
from pallas_gemm.kernels.hopper.registers import Registers, epilogue_registers, reordered_registers
from pallas_gemm.kernels.operand import PANEL
from pallas_gemm.kernels.work import CLAIM_BITS, CLAIM_SLOTS, GroupCoding, SumCoding
from pallas_gemm.problem import Problem
from schedules import OnlineSchedule, Schedule

USUAL_STAGES = 4
"""What the tile that is usual has room for, and more is hardly faster."""
USUAL_PROBLEM = Problem(4096, 4096, 4096, transpose_b=True)
"""What the defaults of a config fit, if its tile does: 16-bit operands and result, no residual."""
SPARE_REGISTERS = 64
"""What an epilogue leaves, if it can, for the assembler to mix the arithmetic of columns."""
UNROLLED_STEPS = 8
"""Steps of a k loop that the compiler unrolls."""
LATE_STRIP = 32
"""Columns of a tile that are finished at once, at most, where it is stored late."""
CLAIM_LIMIT = (1 << CLAIM_BITS) - 1
"""Rows and columns of claimed tiles, less the value that says "none left"."""
LINE_PADDING = 8
"""Elements between the lines of a store slot that threads read, so that they share no bank."""
TOLD_SLOTS = 8
"""Pieces of groups that may be told of ahead; a power of two."""
TOLD_HEADER = 2
"""Words before those that are told of pieces: what rows in groups are, or scratch of two warps."""


@dataclasses.dataclass(frozen=True)
class HopperConfig(GemmConfig):
    """What the Hopper kernel can be told.

    >>> HopperConfig(tile=(128, 256)).late_store, HopperConfig(tile=(256, 192)).late_store
    (True, False)

    Attributes:
        consumers: Warpgroups that multiply. With `pingpong` each computes whole tiles of the size
            `tile`; else they share each tile, by rows where it is tall enough, or by columns.
        pingpong: Two consumers take the tiles in turn: one stores while the other multiplies.
        late_store: A tile is stored during the first k steps of the next one. Rounded, it stays in
            registers beside the next accumulator, so that only small accumulators allow it; by
            default where tile, order and mode do.
        mirrored: Compute the transposed product and transpose it on the way out. A right operand
            stored [k, n] becomes the left one, whose rows may be of any number; and few rows become
            few columns, of which a tile may have as few as 16.
        partial_sums: In how many parts, one after the other, a tile or a piece of it is summed up.
            The tensor cores cut off what a sum of float32 does not hold, so that the error goes
            with the length of a part.
        early_launch: The kernel may be launched before the one before it ends, and waits for that.
            Worth 0.4 to 3 us a product where the CPU is ahead of the GPU, and nothing where XLA
            makes a CUDA graph of the program. Not for rows that devices exchange.
    """

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

    def reordered(self, schedule: str | Schedule | OnlineSchedule) -> Self:
        """See `GemmConfig`; computing the order takes the registers of a late store."""
        config = super().reordered(schedule)
        return dataclasses.replace(config, late_store=False) if config.is_online else config

    def _fit(self) -> None:
        """Finds the most stages, and the widest stores that go with them, for a 16-bit result."""
        fits = itertools.product(
            range(USUAL_STAGES, 1, -1) if self.stages is None else (self.stages,),
            STORE_COLUMNS if self.store_columns is None else (self.store_columns,),
        )
        for stages, columns in fits if None in (self.stages, self.store_columns) else ():
            self._set("stages", stages)
            self._set("store_columns", columns)
            if self.shared_memory_bytes(USUAL_PROBLEM) <= Device.shared_memory:
                break
        if self.late_store is None:
            self._set("late_store", self.allows_late_store(self.as_computed(USUAL_PROBLEM)))

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

        An SM has 65,536. What the producer gives up, in steps of 8, the consumers get.
        """
        if self.consumers == 1:
            return None
        if self.consumers == 3:
            return Registers(32, 160)
        return Registers(24, 240) if self.sum_registers > 128 else Registers(40, 232)

    @property
    def most_registers(self) -> int:
        """Registers that a thread of a consumer may use."""
        return self.registers.consumer if self.registers else MAX_REGISTERS

    def finished_columns(self, problem: Problem) -> int:
        """Columns that the epilogue is applied to at once: it takes registers for each of them.

        As many as are stored at once, or are finished at once to be stored late, if their values
        leave enough beside the accumulator; else half of them, and so on.
        """
        width = LATE_STRIP if self.late_store else self.store_columns
        if problem.epilogue.is_identity:
            return width
        enough = max(SPARE_REGISTERS, self._needed_registers(problem))
        while width > WGMMA_COLUMNS and self._free_registers(problem, width) < enough:
            width //= 2
        return width

    def _free_registers(self, problem: Problem, columns: int) -> int:
        """Registers that are left where the epilogue is applied to so many columns at once."""
        rows = self.consumer_tile[0]
        waiting = (*problem.loaded_dtypes, *problem.result_dtypes[1:])
        size = rows * self.store_columns * sum(dtype.itemsize for dtype in waiting)
        taken = size // (4 * WARPGROUP_THREADS) + epilogue_registers(problem, rows, columns)
        return self.most_registers - self.sum_registers - taken

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
        """Whether nothing is spilled."""
        # The parts of a division are too many, with panels of a transposed left operand above all.
        short = self.consumer_tile[0] == WGMMA_ROWS and not problem.transpose_a
        early = not self.late_store and self.sum_registers > (128 if short else 104)
        if early and divides(words.program(problem).primitives):
            return False
        free = self._free_registers(problem, self.finished_columns(problem))
        return free >= self._needed_registers(problem)

    @property
    def _most_accumulators(self) -> int:
        most = 96 if self.consumers == 3 else 208
        # Registers of WGMMA stay where they are, and a sum that waits beside them gets in its way:
        # 144 in all are not spilled, 160 are.
        return min(most, 144) if self.partial_sums > 1 else most

    def _nearest_tile(self, problem: Problem) -> str:
        """Says which narrower tile the registers of a consumer suffice for."""
        step = 16 * self.tile[1] // self.consumer_tile[1]
        for columns in range(self.tile[1] - step, 0, -step):
            other = dataclasses.replace(self, tile=(self.tile[0], columns))
            if not other.form_refusals(problem) and other.registers_suffice(problem):
                return f"the nearest tile that fits is {other.tile}"
        return "fewer rows would fit"

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
            problem: What is computed.
            stages: Of the ring; None for as many as the config has.
        """
        problem, stages = self.as_computed(problem), stages or self.stages
        depth = self.tile_k(problem) * stages
        # What is cut along k is stored by another kernel.
        slots = self.consumers * self.store_slots * (not self.cuts_all_tiles)
        stored = slots * math.prod(self.store_slot_shape(problem))
        loaded = slots * self.consumer_tile[0] * self.store_columns
        # An operand takes the slots of a result of its type that TMA stores; else it has its own.
        alone = problem.own_dtypes if stored_by_tma(problem) else problem.loaded_dtypes
        buffers = (
            self.tile[0] * depth * problem.a_dtype.itemsize,
            self.loaded_columns(problem) * depth * problem.b_dtype.itemsize,
            *(stored * dtype.itemsize for dtype in problem.result_dtypes),
            *(loaded * dtype.itemsize for dtype in alone),
            8 * (2 * stages * self.ring_readers + 2),
            self.told_words(problem) * 4,
        )
        return sum(-(-size // 1024) * 1024 for size in buffers)

    def loaded_columns(self, problem: Problem) -> int:
        """See `GemmConfig`; stored [k, n], they are whole panels."""
        columns = super().loaded_columns(problem)
        whole = 1 if self.as_computed(problem).transpose_b else PANEL
        return -(-columns // whole) * whole

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

    def refusals(self, problem: Problem, device: Device) -> tuple[str, ...]:
        """Returns every reason why this config cannot compute `problem` on `device`."""
        if device.compute_capability != (9, 0):
            return (f"the Hopper kernel {device.lacks('9.0')}",)
        problem = self.as_computed(problem)
        return (
            *layout_refusals(problem),
            *self.form_refusals(problem),
            *super().refusals(problem, device),
            *self._resource_refusals(problem, device),
        )

    def joined(self, problem: Problem) -> Joined:
        """See `GemmConfig`; each consumer's part of a tile is cut up for itself."""
        height, width = self.consumer_tile
        columns = min(width, self.store_columns * problem.sums)
        chunks = self.stores_per_tile(self.as_computed(problem))
        return Joined(self.consumers * chunks, self.consumers, height * columns)

    def _malformed(self) -> Iterator[str]:
        yield from super()._malformed()
        if self.partial_sums < 1:
            yield f"partial_sums must be at least 1, got {self.partial_sums}"
        if self.consumers not in (1, 2, 3):
            yield f"consumers must be 1, 2 or 3, got {self.consumers}"

    def _impossible(self) -> Iterator[str]:
        yield from super()._impossible()
        if self.pingpong and self.consumers != 2:
            yield f"pingpong needs 2 consumers, got {self.consumers}"
        if self.split_k > 1 and self.pingpong:
            yield f"split_k needs cooperative consumers, got split_k={self.split_k}, pingpong=True"
        if self.partial_sums > 1 and (self.pingpong or self.late_store):
            yield (
                "partial_sums needs cooperative consumers and late_store=False, got partial_sums="
                f"{self.partial_sums}, pingpong={self.pingpong}, late_store={self.late_store}"
            )
        rows, cols = self.consumer_tile
        if rows < WGMMA_ROWS or rows % WGMMA_ROWS:
            yield f"tile rows per consumer must be a multiple of 64, got tile={self.tile}"
        elif cols < 16 or cols % 16 or self.tile[1] % cols:
            yield f"tile columns per consumer must be a multiple of 16, got tile={self.tile}"
        elif self.sum_registers > self._most_accumulators:
            most = self._most_accumulators * self.accumulator_registers // self.sum_registers
            fitting = most * WARPGROUP_THREADS // rows // 16 * 16 * self.tile[1] // cols
            yield (
                f"a consumer holds at most {self._most_accumulators} accumulator registers per"
                f" thread, tile={self.tile} needs {self.sum_registers}; the nearest tile"
                f" that fits is {(self.tile[0], fitting)}"
            )
        if self.stages < 2 or self.ring_barriers > MAX_BARRIERS:
            most = MAX_BARRIERS // (2 if self.pingpong else 1)
            yield f"stages must be from 2 to {most}, got {self.stages}"

    def form_refusals(self, problem: Problem) -> tuple[str, ...]:
        """Returns what is illegal about tile and mode, whatever an SM has."""
        own = self._group_refusals(problem) if problem.in_groups else ()
        common = (self._tile_refusals, self._steps_refusals, self._mode_refusals)
        return (*itertools.chain.from_iterable(of(problem) for of in common), *own)

    def _tile_refusals(self, problem: Problem) -> Iterator[str]:
        columns = self.consumer_tile[1]
        shared = not self.pingpong and not self.split_rows
        if not problem.transpose_b and columns % PANEL and (shared or problem.ragged_k):
            whole = max(1, columns // PANEL) * PANEL * self.tile[1] // columns
            why = "consumers share them" if shared else "groups are summed over"
            yield (
                f"tile columns per consumer must be a multiple of {PANEL} for layout"
                f" {problem.layout} where {why}, got tile={self.tile}; the nearest is"
                f" {(self.tile[0], whole)}"
            )
        narrowest = min((width for _, width in self.store_chunks(problem)), default=16)
        for dtype in problem.stored_dtypes:
            what = "result" if dtype in problem.result_dtypes else "residual"
            if narrowest * dtype.itemsize < 32:
                yield (
                    f"chunks of a {dtype} {what} must be at least {32 // dtype.itemsize} columns"
                    f" wide, store_columns={self.store_columns} cuts tile={self.tile} into some of"
                    f" {narrowest}"
                )
            if self.store_columns * dtype.itemsize > STEP_BYTES:
                yield (
                    f"store_columns must be at most {STEP_BYTES // dtype.itemsize} for {dtype}, got"
                    f" {self.store_columns}"
                )
        if problem.symmetric == "product" and (narrowest, self.store_columns) != (64, 64):
            yield (
                "a symmetric product is stored in squares of 64: store_columns must be 64, and tile"
                f" columns per consumer a multiple of it, got {self.store_columns} and"
                f" tile={self.tile}"
            )
        for name, size, sharers in (
            ("rows", self.tile[0], self.cluster[1]),
            ("columns", self.tile[1], self.cluster[0]),
        ):
            if sharers > 1 and size % (8 * sharers):
                yield f"tile {name} must be a multiple of {8 * sharers} to be multicast, got {size}"

    def _group_refusals(self, problem: Problem) -> Iterator[str]:
        if self.split_k > 1:
            yield f"groups need split_k=1, got {self.split_k}"
        if problem.groups and self.persistence == "dynamic":
            yield "rows in groups are not claimed: persistence='static' fits, got 'dynamic'"
        if problem.ragged_k:
            if self.pingpong or self.cluster_size > 1 or not self.split_rows:
                yield (
                    "sums over groups need cooperative consumers that share the rows of a tile, and"
                    f" no cluster, got pingpong={self.pingpong}, tile={self.tile} and"
                    f" cluster={self.cluster}"
                )
            if self.partial_sums > 1:
                yield f"partial_sums must be 1 for sums over groups, got {self.partial_sums}"
        elif self.consumer_tile[1] % self.store_columns:
            yield (
                "tile columns per consumer must be a multiple of store_columns for rows in groups,"
                f" got tile={self.tile} and store_columns={self.store_columns}"
            )

    def _steps_refusals(self, problem: Problem) -> Iterator[str]:
        fewest = max(1, -(-problem.k // self.tile_k(problem)) // self.split_k)
        if self.partial_sums > fewest:
            yield (
                f"partial_sums must be at most {fewest}, the fewest steps of"
                f" {self.tile_k(problem)} of a tile or piece, got {self.partial_sums}"
            )

    def _mode_refusals(self, problem: Problem) -> Iterator[str]:
        if self.late_store and not self.allows_late_store(problem):
            yield (
                "late_store needs one or two cooperative consumers, split_k=1 or split_last,"
                " partial_sums=1, a schedule that is a table, a result of at most 16 bits (16 if it"
                " is gated), no residual, at most 128 accumulator registers and at most 4 chunks"
                " per tile, got"
                f" consumers={self.consumers}, pingpong={self.pingpong}, split_k={self.split_k},"
                f" split_last={self.split_last}, partial_sums={self.partial_sums},"
                f" schedule={self.schedule!r},"
                f" out_dtype={problem.out_dtype}, residual={bool(problem.loaded_dtypes)},"
                f" {self.accumulator_registers} registers, {self.stores_per_tile(problem)} stores;"
                " late_store=False would fit"
            )
        if self.persistence == "dynamic":
            if self.pingpong:
                yield "persistence='dynamic' needs cooperative consumers, got pingpong=True"
            if not problem.in_groups:
                yield from self._claim_refusals(problem)
        yield from cut_refusals(problem, self.split_k)
        if problem.epilogue.gated:
            if self.tile[1] % 128:
                yield (
                    "tile columns must be a multiple of 128 for a gated epilogue, half of them for"
                    f" each of its two sums, got tile={self.tile}"
                )
            if not self.pingpong and not self.split_rows:
                yield (
                    "consumers must share the rows of a tile for a gated epilogue, so that tile"
                    f" rows must be a multiple of {WGMMA_ROWS * self.consumers} for"
                    f" {self.consumers} of them, got tile={self.tile}"
                )

    def _claim_refusals(self, problem: Problem) -> Iterator[str]:
        if self.is_online:
            yield "persistence='dynamic' needs a schedule that is a table, got an online one"
        if max(self.stacked_grid(problem)) >= CLAIM_LIMIT:
            yield (
                f"persistence='dynamic' numbers fewer than {CLAIM_LIMIT} rows and columns of"
                f" cluster tiles, got {self.stacked_grid(problem)}"
            )
        if self.stages > (most := CLAIM_SLOTS // 2 - 1):
            yield f"persistence='dynamic' takes at most {most} stages, got stages={self.stages}"

    def allows_late_store(self, problem: Problem) -> bool:
        """Whether the registers of a consumer hold a rounded tile beside the accumulator."""
        return (
            not self.pingpong
            and not self.cuts_all_tiles
            and self.partial_sums == 1
            and not self.is_online  # Its arithmetic takes the last registers.
            and self.consumers < 3
            and problem.out_dtype.itemsize <= 2
            and not problem.loaded_dtypes
            and len(problem.result_dtypes) == 1
            and not (problem.epilogue.gated and problem.out_dtype.itemsize == 1)
            and self.accumulator_registers <= 128
            and self.stores_per_tile(problem) <= 4
        )

    def _resource_refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        if not self.registers_suffice(problem):
            for_what = " and ".join(problem.epilogue.parts) or "this mode"
            yield (
                f"a consumer has at most {self.most_registers} registers per thread, and what the"
                f" {self.accumulator_registers} accumulators of tile={self.tile} leave are too few"
                f" for {for_what}; {self._nearest_tile(problem)}"
            )
        needed = self.shared_memory_bytes(problem)
        if needed > device.shared_memory:
            yield (
                f"shared memory: needs {needed} bytes of {device.shared_memory};"
                f" fewer stages than {self.stages} or a smaller tile than {self.tile} would fit"
            )
