"""`WidenedPlan`: what follows from a product with weights of few bits, a config and a device."""

import dataclasses
import functools
from typing import Any, Self

import numpy as np

from pallas_gemm.kernels import words
from pallas_gemm.kernels.element_types import BITS
from pallas_gemm.kernels.hardware import WGMMA_ROWS
from pallas_gemm.kernels.hopper.widened.config import WidenedConfig
from pallas_gemm.kernels.operand import PANEL
from pallas_gemm.kernels.plan import BLOCK, KernelPlan
from pallas_gemm.kernels.ptx.weights import Form


@dataclasses.dataclass(frozen=True)
class WidenedPlan(KernelPlan):
    """See `KernelPlan`; the problem is the transposed one, whose left operand the weights are.

    Attributes:
        scales: Type of the scales of groups.
    """

    config: WidenedConfig
    scales: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "problem", self.config.as_computed(self.problem))

    def typed(self, scales: Any) -> Self:
        """The plan for scales of the type that is given, if any are."""
        return self if scales is None else dataclasses.replace(self, scales=scales.dtype)

    @functools.cached_property
    def form(self) -> Form:
        """How operands lie in a slot."""
        problem, config = self.problem, self.config
        return Form(
            kind=problem.a_dtype,
            to=problem.b_dtype,
            k_last=not problem.transpose_a,
            rows=config.consumer_tile[0],
            all_rows=config.tile[0],
            cols=config.tile[1],
            depth=config.step,
            line=config.line(problem),
            group=problem.blocks.k if problem.blocks else 0,
            scales=self.scales or np.dtype(np.float32),
        )

    @property
    def has_several_tiles(self) -> bool:
        """Whether a CTA may compute several tiles, one after the other."""
        return self.config.tiles(self.problem) > self.workers

    @property
    def bits(self) -> int:
        """The bits of a weight."""
        return BITS[self.problem.a_dtype]

    @property
    def x_panels(self) -> int:
        """Panels of the other operand in a slot."""
        return self.config.step // PANEL

    @property
    def scales_of_step(self) -> int:
        """Scales of a row in a slot."""
        return self.config.scales_of_step(self.problem)

    @property
    def copies(self) -> int:
        """TMA copies of a step."""
        wide = -(-self.config.tile[0] // 256) if self.scales_of_step else 0
        return self.form.panels + self.x_panels + wide

    @property
    def steps_of_cta(self) -> int:
        """Steps that a CTA of a cluster takes at most."""
        return -(-self.k_steps // self.config.ctas_along_k)

    @property
    def tops(self) -> int:
        """How many times 64 rows a consumer has."""
        return self.form.rows // WGMMA_ROWS

    @property
    def joined_shape(self) -> tuple[int, ...]:
        """The shape of the sums that warpgroups hand over: on a GPU in blocks."""
        rows, cols = self.form.rows, self.form.cols
        own = (rows, cols) if self.simulated else (rows // BLOCK, cols // BLOCK, BLOCK, BLOCK)
        return max(1, self.config.along_k - 1), self.config.consumers, *own

    @property
    def approx_math(self) -> bool:
        """Whether exp and tanh may be instructions, which err by less than rounding to 16 bits."""
        return words.program(self.problem).is_coarse
