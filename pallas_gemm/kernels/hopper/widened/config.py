"""`WidenedConfig`: what the kernel can be told that takes weights through registers."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from pallas_gemm.config import PAIR, GemmConfig, Joined, Persistence
from pallas_gemm.device import Device
from pallas_gemm.kernels.element_types import bits
from pallas_gemm.kernels.hardware import MAX_BARRIERS, WARPGROUP_THREADS, WGMMA_COLUMNS, WGMMA_ROWS
from pallas_gemm.kernels.hopper.registers import Registers
from pallas_gemm.kernels.hopper.widened import problems, shares
from pallas_gemm.kernels.ptx.form import Form
from pallas_gemm.problem import Problem
from schedules import OnlineSchedule, Schedule

DEPTHS = (32, 64, 128, 256)
"""Contracted elements of a step."""
MOST_WARPGROUPS = 6
"""That multiply: with the one that loads, more have too few registers."""
MOST_CTAS = 8
"""A cluster may have 8 CTAs."""
SCALE_BYTES = 4
"""A scale has 4 bytes at most."""
ALIGNED = 1024
"""Bytes of which Mosaic begins each buffer at a multiple."""
SPARE_REGISTERS = 52
"""For addresses, scales, and the weights of a step on their way."""
MOST_SUMS = 160
"""Registers of sums of a warpgroup. With 168, 16 to 96 bytes are spilled; with 176, WGMMAs wait for
each other."""


@dataclasses.dataclass(frozen=True)
class WidenedConfig(GemmConfig):
    """The options of the kernel that takes weights through registers.

    It computes the transposed product: rows of a tile are columns of the result.

    Attributes:
        tile: Columns of the result, and rows.
        step: Contracted elements of a step, and of a slot of the ring.
        consumers: Warpgroups that share the columns of the result.
        along_k: Warpgroups that take steps in turns, and whose sums are added up.
        ctas_along_k: CTAs of a cluster that share the steps of a tile, and whose sums are added up.
            With `persistence="static"` they share several tiles.
        shares_all: All CTAs share all tiles, and hand over sums in global memory.
    """

    LARGEST: ClassVar[tuple[int, int]] = (512, 256)
    OWN_ORDER: ClassVar[bool] = True

    tile: PAIR = (128, 16)
    stages: int = 8
    persistence: Persistence = "none"
    schedule: str | Schedule | OnlineSchedule = "raster"
    step: int = 128
    consumers: int = 1
    along_k: int = 4
    ctas_along_k: int = 1
    shares_all: bool = False

    def workers(self, problem: Problem, device: Device) -> int:
        """How many clusters are launched: CTAs that share all tiles may be more than tiles."""
        if not self.shares_all:
            return super().workers(problem, device)
        fit = device.coresident_clusters(1)
        return min(fit, self.ctas or fit, self.tiles(problem) * self.steps(problem))

    @property
    def cluster_size(self) -> int:
        """CTAs per cluster."""
        return self.ctas_along_k

    @property
    def warpgroups(self) -> int:
        """How many warpgroups multiply."""
        return self.consumers * self.along_k

    @property
    def consumer_tile(self) -> tuple[int, int]:
        """The part of a tile that one warpgroup accumulates."""
        return self.tile[0] // self.consumers, self.tile[1]

    @property
    def sum_registers(self) -> int:
        """Registers per thread that hold a sum."""
        return math.prod(self.consumer_tile) // WARPGROUP_THREADS

    @property
    def registers(self) -> Registers | None:
        """Registers per thread of producer and consumers; None leaves them as launched."""
        if self.warpgroups == 1:
            return None
        own = 40 if self.warpgroups < 4 else 24
        launched = 512 // (self.warpgroups + 1) // 8 * 8
        left = (launched * (self.warpgroups + 1) - own) // self.warpgroups // 8 * 8
        return Registers(own, min(left, 232))

    def tile_k(self, problem: Problem) -> int:
        """Contracted elements per step."""
        del problem
        return self.step

    def as_computed(self, problem: Problem) -> Problem:
        """The transposed product, of which the weights are the left operand."""
        return problem if problem.transpose_out else problem.mirrored()

    def out_tile(self, problem: Problem) -> tuple[int, int]:
        """Columns of the result, and rows: gated, there are two rows of sums for each column."""
        return self.tile[0] // problem.sums, self.tile[1]

    def grid(self, problem: Problem) -> tuple[int, int]:
        """Tiles of columns of the result, and of rows: of groups, at most.

        Tiles have rows of one group alone. Rows that are in none have tiles like one more group.
        """
        if not problem.groups:
            return super().grid(problem)
        own = self.as_computed(problem)
        rows, cols = self.out_tile(own)
        most = (own.n + (cols - 1) * (own.groups + 1)) // cols
        return -(-own.m // rows), min(own.n, most)

    def line(self, problem: Problem) -> int:
        """Bytes of a line of a panel of weights in a slot."""
        own = self.as_computed(problem)
        rows = self.tile[0] if own.sums == 1 else self.consumer_tile[0] // own.sums
        along = rows if own.transpose_a else self.step
        return min(128, along * bits(own.a_dtype) // 8)

    def form(self, problem: Problem, scales: Any = None, zeros: Any = None) -> Form:
        """How operands lie in a slot.

        Args:
            problem: The product.
            scales: Type of the scales of groups.
            zeros: Type of their zero points.
        """
        own = self.as_computed(problem)
        return Form(
            kind=own.a_dtype,
            to=own.b_dtype,
            k_last=not own.transpose_a,
            rows=self.consumer_tile[0],
            all_rows=self.tile[0],
            cols=self.tile[1],
            depth=self.step,
            line=self.line(problem),
            group=own.blocks.k if own.blocks else 0,
            scales=scales or np.dtype(np.float32),
            zeros=zeros,
            sums=own.sums,
        )

    def scales_of_step(self, problem: Problem) -> int:
        """Scales of a column in a step."""
        return max(1, self.step // problem.blocks.k) if problem.blocks else 0

    def store_chunks(self) -> tuple[tuple[int, int], ...]:
        """(first row, rows) of each part of the result that is stored at a time."""
        start, width, chunks = 0, self.store_columns, []
        while start < self.tile[1]:
            while width > self.tile[1] - start:
                width //= 2
            chunks.append((start, width))
            start += width
        return tuple(chunks)

    def most_awaited(self, problem: Problem, device: Device) -> int:
        """How many sums other CTAs of its cluster send to one at most."""
        tiles, ctas = self.tiles(problem), self.ctas_along_k
        if problem.groups:
            # How many tiles there are is known when the kernel runs.
            return max(1, ctas - 1)
        return shares.most_awaited(tiles, self.workers(problem, device), ctas)

    def shared_memory_bytes(
        self, problem: Problem, stages: int | None = None, device: Device | None = None
    ) -> int:
        """Predicts the shared memory of a CTA; without a device, the most of all."""
        own, stages = self.as_computed(problem), stages or self.stages
        awaited = self.most_awaited(problem, device) if device else self.ctas_along_k - 1
        rows, cols = self.tile
        zeros = own.blocks.zeros if own.blocks else 0
        joined = (self.along_k - 1 + awaited * (self.ctas_along_k > 1)) * rows * cols * 4
        stored = self.consumers * self.store_slots * self.store_columns * WGMMA_ROWS
        buffers = (
            stages * rows * self.step * bits(own.a_dtype) // 8,
            stages * cols * self.step * own.b_dtype.itemsize,
            stages * self.scales_of_step(own) * rows * SCALE_BYTES,
            # Lines of zero points in bytes may be padded, to no more than they would be in float32.
            stages * zeros * self.scales_of_step(own) * rows * SCALE_BYTES,
            joined,
            8 * self.consumers * (self.ctas_along_k > 1),
            self.consumers * self.form(own).scratch * 4,
            *(stored * dtype.itemsize for dtype in (*own.result_dtypes, *own.loaded_dtypes)),
            8 * (2 * stages + (2 + self.store_slots) * self.consumers),
        )
        return sum(-(-size // ALIGNED) * ALIGNED for size in buffers)

    def refusals(self, problem: Problem, device: Device) -> tuple[str, ...]:
        """Returns every reason why this config cannot compute `problem` on `device`."""
        if device.compute_capability != (9, 0):
            return (f"the Hopper kernel {device.lacks('9.0')}",)
        asked = problem.mirrored() if problem.transpose_out else problem
        reasons = problems.refusals(asked)
        if not problems.goes_through_registers(asked):
            return reasons
        return (*reasons, *self._step_refusals(asked, device), *super().refusals(problem, device))

    def _step_refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        group = problem.blocks.k if problem.blocks else problem.k
        if group != problem.k and self.step % group and group % self.step:
            yield f"step must be a multiple or a part of {problem.blocks}, got {self.step}"
        if self.step % (panel := self.form(problem).panel):
            yield f"step must be a multiple of {panel} for {problem.a_dtype}, got {self.step}"
        if (steps := self.steps(problem)) < self.ctas_along_k * self.along_k:
            yield f"along_k and ctas_along_k share {steps} steps, got {self}"
        if self.shares_all and (
            problem.groups or self.ctas_along_k > 1 or self.persistence != "static"
        ):
            yield (
                "all CTAs share tiles of products without groups, with persistence='static' and"
                f" ctas_along_k=1, got {self}"
            )
        if self.consumer_tile[0] % (WGMMA_ROWS * problem.sums):
            yield (
                f"tile[0] must be a multiple of {WGMMA_ROWS * problem.sums} for each consumer of a"
                f" gated result, got tile={self.tile}"
            )
        line = self.line(problem)
        if line < 32:
            yield f"a line of weights in a slot must have at least 32 bytes, got {line}"
        needed = self.shared_memory_bytes(problem, device=device)
        if needed > Device.shared_memory:
            yield f"shared memory: needs {needed} bytes of {Device.shared_memory}"

    def _order_refusals(self, problem: Problem) -> tuple[str, ...]:
        """See `GemmConfig`: the order is the kernel's own, and no table limits its tiles."""
        del problem
        if self.schedule == "raster":
            return ()
        asked = f"got {self.schedule!r}"
        return (f"schedule must be 'raster' where weights go through registers, {asked}",)

    def joined(self, problem: Problem) -> Joined:
        """See `GemmConfig`: nothing is joined by another kernel."""
        del problem
        return Joined(0, 1, 0)

    def _malformed(self) -> Iterator[str]:
        yield from super()._malformed()
        if min(self.consumers, self.along_k) < 1 or self.warpgroups > MOST_WARPGROUPS:
            yield (
                f"consumers and along_k must make from 1 to {MOST_WARPGROUPS} warpgroups, got"
                f" {self.consumers} and {self.along_k}"
            )
        if not 1 <= self.ctas_along_k <= MOST_CTAS:
            yield f"ctas_along_k must be from 1 to {MOST_CTAS}, got {self.ctas_along_k}"
        if self.step not in DEPTHS:
            yield f"step must be one of {DEPTHS}, got {self.step}"

    def _impossible(self) -> Iterator[str]:
        yield from super()._impossible()
        rows, cols = self.tile
        if rows % (WGMMA_ROWS * self.consumers):
            yield f"tile[0] must be a multiple of 64 for each consumer, got tile={self.tile}"
        if cols % WGMMA_COLUMNS:
            yield f"tile[1] must be a multiple of {WGMMA_COLUMNS}, got tile={self.tile}"
        spare = (self.registers.consumer if self.registers else 255) - SPARE_REGISTERS
        most = min(spare, MOST_SUMS)
        if self.sum_registers > most:
            yield f"a warpgroup holds at most {most} registers of sums, got {self.sum_registers}"
        # A consumer frees a slot when it has its next one.
        if self.stages % self.along_k or not 2 * self.along_k <= self.stages <= MAX_BARRIERS:
            yield (
                f"stages must be a multiple of along_k, from twice as many to {MAX_BARRIERS}, got"
                f" {self.stages} and along_k={self.along_k}"
            )
        if self.cluster != (1, 1) or self.split_k > 1:
            yield f"cluster must be (1, 1) and split_k 1, got {self.cluster} and {self.split_k}"
        if self.persistence == "dynamic":
            yield "persistence must be 'none' or 'static', got 'dynamic'"
