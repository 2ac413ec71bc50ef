"""`KernelPlan`: what follows from problem, config and device, whatever the architecture."""

import dataclasses
import functools
from typing import Any, Literal, Self

import numpy as np

from pallas_gemm.config import GemmConfig
from pallas_gemm.device import Device
from pallas_gemm.kernels import work
from pallas_gemm.kernels.element_types import SINGLE
from pallas_gemm.kernels.functions import words
from pallas_gemm.problem import Problem
from schedules import OnlineSchedule, Pieces, Schedule, split_k

BLOCK = 8
"""Rows and columns of sums that a warp stores at once: in memory, they follow each other."""


@dataclasses.dataclass(frozen=True)
class KernelPlan:
    """A problem, a legal config and a device, and what follows from them.

    Attributes:
        problem: The problem of the kernel.
        config: How.
        device: On what.
        computes: Which tiles this kernel computes, where only the last ones are cut along k
            (`split_last`): those that stay whole, or those that are cut.
        interpret: False for the GPU, or the parameters of its simulator.
    """

    problem: Problem
    config: GemmConfig
    device: Device
    computes: Literal["all", "whole", "cut"] = dataclasses.field(default="all", kw_only=True)
    interpret: Any = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self.config.check(self.problem, self.device)

    @property
    def simulated(self) -> bool:
        """Whether the kernel runs in the simulator."""
        return bool(self.interpret)

    @property
    def rounds_loads(self) -> bool:
        """Whether TMA rounds operands."""
        return self.problem.a_dtype == SINGLE and not self.simulated

    @property
    def shares_words(self) -> bool:
        """Whether CTAs may share words of global memory: JAX's simulator knows no atomics."""
        return not self.simulated

    @property
    def claims_tiles(self) -> bool:
        """Whether clusters claim their tiles."""
        return False

    @property
    def tile_k(self) -> int:
        """Contracted elements per step."""
        return self.config.tile_k(self.problem)

    @property
    def k_steps(self) -> int:
        """Steps of the k loop; what lies beyond the edge in the last one is zeros."""
        return -(-self.problem.k // self.tile_k)

    @property
    def approx_math(self) -> bool:
        """Whether exp and tanh may be instructions, which err by less than rounding to 16 bits."""
        return words.program(self.problem).is_coarse

    @functools.cached_property
    def schedule(self) -> Schedule | OnlineSchedule:
        """The order of the cluster tiles of the whole batch."""
        return self.config.resolve_schedule(self.problem)

    @property
    def joins(self) -> bool:
        """Whether the sum of a tile is made of several pieces'."""
        return self.config.split_k > 1 and self.computes != "whole"

    def only(self, tiles: Literal["whole", "cut"]) -> Self:
        """The plan of one of the two kernels where only the last tiles are cut along k."""
        return dataclasses.replace(self, computes=tiles)

    def portion(self, of_all: int) -> int:
        """The portion of this kernel's tiles of a quantity that is alike for all tiles."""
        tiles, last = self.config.tiles(self.problem), self.config.split_last or 0
        own = {"all": tiles, "whole": tiles - last, "cut": last}[self.computes]
        return of_all * own // tiles

    @functools.cached_property
    def pieces(self) -> Schedule | Pieces | work.Listed | OnlineSchedule:
        """The pieces of work, in order: tiles, unless they are cut along k."""
        parts, last = self.config.split_k, self.config.split_last
        if parts == 1 or isinstance(self.schedule, OnlineSchedule):
            return self.schedule
        pieces = split_k(self.schedule, self.k_steps, parts, last)
        if last is None:
            return pieces
        whole = len(self.schedule) - last
        if self.computes == "whole":
            return work.Listed(pieces.order[:whole])
        cut_tile = np.tile(np.arange(last), parts)
        return work.Listed(pieces.order[whole:], np.column_stack([pieces.spans[whole:], cut_tile]))

    @property
    def cut(self) -> work.Cut | None:
        """How tiles are cut along k, where the order is computed."""
        if not self.joins:
            return None
        return work.Cut(self.config.split_k, self.k_steps, self.parts_of_piece)

    @functools.cached_property
    def spans(self) -> np.ndarray | None:
        """The (first step, steps) of k of each piece of work, in order, and which summand it makes.

        And of which cut tile, if others are whole. None if every piece takes all steps, or the
        order is computed.
        """
        return self.pieces.spans if isinstance(self.pieces, Pieces | work.Listed) else None

    @property
    def parts_of_piece(self) -> int:
        """How many promised parts of k a piece of a tile takes, one after the other."""
        return 1

    @property
    def summands(self) -> int:
        """How many summands of a tile that is cut along k are joined."""
        return self.config.summands(self.problem)

    @property
    def cut_tiles(self) -> int:
        """How many tiles are cut along k, if any are."""
        return self.config.split_last or self.config.tiles(self.problem)

    @functools.cached_property
    def coding(self) -> work.Coding:
        """How pieces of work are written."""
        bits = work.CLAIM_BITS if self.claims_tiles else work.TABLE_BITS
        coding = work.coding(self.config, self.problem, bits)
        if self.spans is None:
            return coding
        return dataclasses.replace(coding, words=self.spans.shape[1])

    @functools.cached_property
    def workers(self) -> int:
        """How many clusters share the pieces of work."""
        workers = self.config.workers(self.problem, self.device)
        return workers if self.computes == "all" else min(workers, len(self.pieces))

    @property
    def summands_shape(self) -> tuple[int, ...]:
        """The shape of what pieces hand over: [tile, summand, CTA of the cluster, row, column]."""
        sums = self.in_blocks(*self.config.tile)
        return self.cut_tiles, self.summands, self.config.cluster_size, *sums

    def in_blocks(self, rows: int, cols: int) -> tuple[int, ...]:
        """The shape of sums that are handed over: on a GPU those of a block follow each other."""
        return (rows, cols) if self.simulated else (rows // BLOCK, cols // BLOCK, BLOCK, BLOCK)
