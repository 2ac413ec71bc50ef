"""`HopperConfig`: what the Hopper kernel can be told, and what of it is legal."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Self

from pallas_gemm.config import STEP_BYTES, STORE_COLUMNS
from pallas_gemm.device import Device
from pallas_gemm.kernels.hardware import (
    MAX_BARRIERS,
    WARPGROUP_THREADS,
    WGMMA_ROWS,
)
from pallas_gemm.kernels.hopper.problems import cut_refusals, is_narrow, layout_refusals
from pallas_gemm.kernels.hopper.tiling import HopperTiling, ordered_columns
from pallas_gemm.kernels.operand import PANEL
from pallas_gemm.kernels.work import CLAIM_BITS, CLAIM_SLOTS, TABLE_BITS
from pallas_gemm.problem import Problem
from schedules import OnlineSchedule, Schedule

USUAL_STAGES = 4
"""The usual tile has room for this number, and more are hardly faster."""
USUAL_PROBLEM = Problem(4096, 4096, 4096, transpose_b=True)
"""The defaults of a config fit this, if its tile does: 16-bit operands and result, no residual."""
CLAIM_LIMIT = (1 << CLAIM_BITS) - 1
"""Rows and columns of claimed tiles, less the value that says "none left"."""


@dataclasses.dataclass(frozen=True)
class HopperConfig(HopperTiling):
    """The settings of the Hopper kernel.

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
            stored [k, n] becomes the left one, which may have any number of rows. Few rows become
            few columns: a tile may have as few as 16.
        partial_sums: In how many parts, one after the other, a tile or a piece of it is summed up.
            The tensor cores cut off what a sum of float32 does not hold, so that the error goes
            with the length of a part.
        early_launch: The kernel may be launched before the one before it ends, and waits for that.
            Worth 0.4 to 3 us a product where the CPU is ahead of the GPU, and nothing where XLA
            makes a CUDA graph of the program. Not for rows that devices exchange.
    """

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
    def _most_accumulators(self) -> int:
        most = 96 if self.consumers == 3 else 208
        # Two sums of 96 registers each are not spilled.
        return min(most, 192) if self.partial_sums > 1 else most

    def _nearest_tile(self, problem: Problem) -> str:
        """Says which narrower tile the registers of a consumer suffice for."""
        step = 16 * self.tile[1] // self.consumer_tile[1]
        for columns in range(self.tile[1] - step, 0, -step):
            other = dataclasses.replace(self, tile=(self.tile[0], columns))
            if not other.form_refusals(problem) and other.registers_suffice(problem):
                return f"the nearest tile that fits is {other.tile}"
        return "fewer rows would fit"

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

    def takes(self, problem: Problem, device: Device) -> bool:
        """Whether this config can compute `problem`: registers first, as refusals name a tile."""
        return self.registers_suffice(self.as_computed(problem)) and super().takes(problem, device)

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
        if not problem.transpose_b and columns % PANEL:
            whole = max(1, columns // PANEL) * PANEL * self.tile[1] // columns
            yield (
                f"tile columns per consumer must be a multiple of {PANEL} for layout"
                f" {problem.layout}, got tile={self.tile}; the nearest is {(self.tile[0], whole)}"
            )
        if is_narrow(problem) and self.tile[1] != (wanted := PANEL * problem.sums):
            yield (
                f"a tile must have {wanted} columns where groups have fewer than {PANEL} and b is"
                f" stored [k, n], got tile={self.tile}; the nearest is {(self.tile[0], wanted)}"
            )
        if problem.adds_rows_in_order and columns != (wanted := ordered_columns(problem)):
            yield (
                f"a consumer's tile must have {wanted} columns where sums along rows are promised,"
                f" got {columns} of tile={self.tile}"
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
        rows, columns = self.grid(problem)
        if max(rows * problem.ragged_k, columns) > (most := 1 << TABLE_BITS):
            yield (
                f"tiles of groups must be in at most {most} rows and columns, got"
                f" {(rows, columns)} of tile={self.tile}"
            )
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
        most = max(1, -(-problem.large_k // self.tile_k(problem)) // self.split_k)
        if self.partial_sums > most:
            yield (
                f"partial_sums must be at most {most}, the fewest steps of"
                f" {self.tile_k(problem)} of a tile or piece, got {self.partial_sums}"
            )

    def _mode_refusals(self, problem: Problem) -> Iterator[str]:
        if self.late_store and not self.allows_late_store(problem):
            yield (
                "late_store needs one or two cooperative consumers, split_k=1 or split_last,"
                " partial_sums=1, operands that are no sums of arrays, a schedule that is a table,"
                " a result of at most 16 bits (16 if it is gated), no residual, at most 128"
                " accumulator registers and at most 4 chunks per tile, got"
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
        yield from cut_refusals(problem, self.split_k, self.partial_sums)
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
            and not problem.arrays
            and not self.is_online  # Its arithmetic takes the last registers.
            and self.consumers < 3
            and problem.out_dtype.itemsize <= 2
            and not problem.loaded_dtypes
            and len(problem.result_dtypes) == 1
            and not (problem.epilogue.gated and problem.out_dtype.itemsize == 1)
            and self.accumulator_registers <= 128
            and self.stores_per_tile(problem) <= 4
            and self.holds_blocks(problem, late=True)
        )

    def _resource_refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        if not self.registers_suffice(problem):
            for_what = " and ".join(problem.epilogue.parts) or "this mode"
            yield (
                f"a consumer has at most {self.most_registers} registers per thread, and what the"
                f" {self.accumulator_registers} accumulators of tile={self.tile} leave are too few"
                f" for {for_what}; {self._nearest_tile(problem)}"
            )
        yield from self._memory_refusals(self.shared_memory_bytes(problem), device)
