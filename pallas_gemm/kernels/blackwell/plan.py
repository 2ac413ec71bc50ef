"""`BlackwellPlan`: everything about a launch that follows from problem, config and device."""

import dataclasses
import functools

from pallas_gemm.kernels import protocol
from pallas_gemm.kernels.blackwell.config import BlackwellConfig
from pallas_gemm.kernels.operand import OperandPlan
from pallas_gemm.kernels.plan import KernelPlan
from pallas_gemm.problem import Problem

PAIR_AXIS = "pair"
"""The axis of the cluster, of one CTA or two."""


@dataclasses.dataclass(frozen=True)
class BlackwellPlan(KernelPlan):
    """See `KernelPlan`.

    The simulator knows no two views of one buffer and no pairs of CTAs, and refuses every request
    for a tile.
    """

    config: BlackwellConfig

    @functools.cached_property
    def a(self) -> OperandPlan:
        """How one CTA's part of the left operand is loaded."""
        return self._operand(
            self.problem.a_dtype, self.config.tile[0], not self.problem.transpose_a, 1
        )

    @functools.cached_property
    def b(self) -> OperandPlan:
        """How one CTA's part of the right operands is loaded."""
        columns = self.config.b_columns(self.problem)
        parts = self.config.parts(self.problem)
        return self._operand(self.problem.b_dtype, columns, self.problem.transpose_b, parts)

    @property
    def takes_over(self) -> bool:
        """Whether clusters take over the tiles of those that have not started."""
        return self.config.persistence == "dynamic"

    @property
    def ctas_per_mma(self) -> int:
        """CTAs that multiply together."""
        return self.config.ctas_per_mma

    @functools.cached_property
    def launched(self) -> int:
        """How many clusters the grid has."""
        if self.config.persistence == "static":
            return self.workers
        return self.config.launched(self.problem, self.device)

    @property
    def roles(self) -> int:
        """Warpgroups of a CTA, each with a role of its own."""
        return 3 if self.config.specialised else 2

    @property
    def chunks(self) -> int:
        """Chunks of columns in which a tile of the result is stored."""
        return self.config.out_tile(self.problem)[1] // self.config.store_columns

    @property
    def halves(self) -> int:
        """Parts of an accumulator that are freed one after the other."""
        return self.config.halves(self.problem)

    @property
    def steps_by_halves(self) -> int:
        """Steps at the start of a tile of which the first half is multiplied before the second.

        One for each slot of the ring, which nobody else needs while the second half is still read.
        A piece of k may have fewer.
        """
        return min(self.config.stages, self.k_steps) if self.halves > 1 else 0

    @property
    def stored(self) -> Problem:
        """The problem whose result is stored: of whole tiles where nothing clips the stores."""
        if not self.config.direct_store:
            return self.problem
        m, n = self.config.reach(self.problem)
        return dataclasses.replace(self.problem, m=m, n=n)

    @property
    def full_arrivals(self) -> int:
        """Arrivals that complete `full[s]`."""
        return protocol.full_arrivals(self.config.atoms * (self.a.copies + self.b.copies))

    def _operand(self, dtype: object, tile: int, k_major: bool, parts: int) -> OperandPlan:
        return OperandPlan(
            dtype=dtype,
            tile=tile,
            tile_k=self.tile_k // self.config.atoms,
            k_major=k_major,
            paneled=False,
            multicast_axis=None,
            parts=parts,
            simulated=self.simulated,
        )
