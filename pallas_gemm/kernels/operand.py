"""How an operand travels from global memory through the ring of slots in shared memory."""

import dataclasses
from typing import Any

from pallas_gemm.kernels import smem
from pallas_gemm.kernels.traced import Ref

PANEL = 64
"""Rows or columns that one TMA copy brings where they lie one after the other in memory."""


@dataclasses.dataclass(frozen=True)
class OperandPlan:
    """How one operand travels through the ring.

    Attributes:
        dtype: Its element type.
        tile: Rows (of the left operand) or columns (of the right one) that a CTA loads.
        tile_k: Contracted elements per step.
        k_major: The contracted dimension is contiguous in memory.
        paneled: A left operand that is not K-major: it is loaded in panels of `PANEL`.
        multicast_axis: The cluster axis along which CTAs share it, or None.
        one_box: A right operand that is not K-major, and narrower than the one panel of its tile.
        parts: How many arrays it consists of: two if the result is gated.
        simulated: Whether the kernel runs in the simulator.
    """

    dtype: Any
    tile: int
    tile_k: int
    k_major: bool
    paneled: bool
    multicast_axis: str | None
    one_box: bool = False
    parts: int = 1
    simulated: bool = False

    @property
    def copies(self) -> int:
        """TMA copies per step."""
        return self.parts * (self.tile // PANEL if self.paneled else 1)

    @property
    def boxed(self) -> bool:
        """Whether TMA moves it in plain boxes, so that its shape may be ragged."""
        return self.k_major or self.paneled or self.one_box

    def ring(self, stages: int) -> Any:
        """The buffer of a ring of slots."""
        own = (self.tile, self.tile_k) if self.k_major else (self.tile_k, self.tile)
        if self.paneled:
            own = (self.tile // PANEL, self.tile_k, PANEL)
        shape = (self.parts, stages, *own)
        if self.boxed:
            return smem.boxed([shape], self.dtype, simulated=self.simulated)
        return smem.tiled(shape, self.dtype)

    def views(self, ref: Ref) -> smem.Boxed:
        """Both views of such a buffer."""
        if not self.boxed:
            return smem.Boxed(ref, ref)
        return smem.views(ref, simulated=self.simulated)[0]
