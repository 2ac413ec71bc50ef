"""`WidenedPlan`: what follows from a product, a config and a device."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from pallas_gemm.kernels.element_types import bits
from pallas_gemm.kernels.hardware import WARPGROUP_THREADS, WGMMA_ROWS
from pallas_gemm.kernels.hopper.widened.config import WidenedConfig
from pallas_gemm.kernels.plan import KernelPlan
from pallas_gemm.kernels.ptx.form import Form

WIDEST_COPY = 256
"""Elements, or lines, that TMA copies at a time."""


class Part(NamedTuple):
    """Rows of a slot that are those of one array.

    Attributes:
        array: Which: gated, there are gate and up.
        source: Its first row there, counted from the first of the tile.
        first: Its first row in the slot.
        rows: How many there are.
    """

    array: int
    source: int
    first: int
    rows: int


@dataclasses.dataclass(frozen=True)
class WidenedPlan(KernelPlan):
    """See `KernelPlan`; the problem is the transposed one, whose left operand the weights are.

    Attributes:
        scales: Type of the scales of groups.
        zeros: Type of their zero points.
    """

    config: WidenedConfig
    scales: Any = None
    zeros: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "problem", self.config.as_computed(self.problem))

    def typed(self, scales: Sequence[Any]) -> Self:
        """The plan for the types of scales, and of zero points, which come last."""
        if not scales:
            return self
        zeros = scales[-1].dtype if self.has_zeros else None
        return dataclasses.replace(self, scales=scales[0].dtype, zeros=zeros)

    @property
    def has_zeros(self) -> bool:
        """Whether groups of weights have zero points."""
        return self.problem.blocks is not None and self.problem.blocks.zeros

    @functools.cached_property
    def form(self) -> Form:
        """How operands lie in a slot."""
        return self.config.form(self.problem, self.scales, self.zeros)

    @property
    def has_several_tiles(self) -> bool:
        """Whether a CTA may compute several tiles, one after the other."""
        return self.config.shares_all or self.config.tiles(self.problem) > self.workers

    @property
    def weights_are_smaller(self) -> bool:
        """Whether the weights have fewer bytes than the other operand."""
        own = self.problem
        return own.m * own.sums * bits(own.a_dtype) < own.n * bits(own.b_dtype)

    @property
    def x_panels(self) -> int:
        """Panels of the other operand in a slot."""
        return self.config.step // self.form.panel

    @property
    def scales_of_step(self) -> int:
        """Scales of a row in a slot."""
        return self.config.scales_of_step(self.problem)

    @property
    def copies(self) -> int:
        """TMA copies of a step."""
        weights = len(self.panel_parts) if self.form.k_last else self.form.panels
        return weights + self.x_panels + len(self.scale_parts) + self.blocks_of_zeros

    @property
    def blocks_of_zeros(self) -> int:
        """Blocks of zero points in a slot: those of an array and a consumer."""
        return self.problem.sums * self.config.consumers if self.has_zeros else 0

    def parts(self, most: int) -> list[Part]:
        """The rows of a slot in parts of one array each, and of a number of rows at most."""
        sums, found = self.problem.sums, []
        for consumer in range(self.config.consumers if sums > 1 else 1):
            own = self.form.rows // sums if sums > 1 else self.form.all_rows
            for number in range(sums):
                begin = (consumer * sums + number) * own
                found += [
                    Part(number, consumer * own + first, begin + first, min(most, own - first))
                    for first in range(0, own, most)
                ]
        return found

    @property
    def panel_parts(self) -> list[tuple[int, Part]]:
        """The copies of weights stored [rows, k]: each panel, and a part of its lines."""
        parts = self.parts(WIDEST_COPY)
        return [(panel, part) for panel in range(self.form.panels) for part in parts]

    @property
    def scale_parts(self) -> list[tuple[Part, slice | int]]:
        """The copies of scales: a part of the rows, and all groups of a step, or one of them.

        A copy fills shared memory without gaps: those of several groups are whole lines of a slot.
        """
        parts = self.parts(WIDEST_COPY)
        whole = len(parts) == 1 or self.scales_of_step == 1
        groups = [slice(None)] if whole else range(self.scales_of_step)
        return [(part, own) for own in groups for part in parts] if self.scales_of_step else []

    @property
    def left_sums(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The array in which CTAs leave sums for others, of each consumer its own, if they do."""
        config = self.config
        shape = self.workers, config.consumers, config.sum_registers * WARPGROUP_THREADS
        return (jax.ShapeDtypeStruct(shape, jnp.float32),) if config.shares_all else ()

    @property
    def most_awaited(self) -> int:
        """How many sums other CTAs of its cluster send to one at most."""
        return self.config.most_awaited(self.problem, self.device)

    @property
    def tops(self) -> int:
        """How many times 64 columns of the result a consumer has."""
        return self.form.rows // self.problem.sums // WGMMA_ROWS
