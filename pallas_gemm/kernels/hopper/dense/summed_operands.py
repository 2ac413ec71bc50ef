"""Products of operands that are sums of arrays: see `product.py`.

The small terms come first, and the largest one is added to them in the same registers.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_gemm.kernels import launch, work
from pallas_gemm.kernels.hopper import ring
from pallas_gemm.kernels.hopper.dense import late_store, multiply
from pallas_gemm.kernels.hopper.dense.product import Product
from pallas_gemm.kernels.traced import Scalar


class SummedOperands(Product):
    """Each operand is the sum of several arrays."""

    @property
    def factors(self) -> Sequence[launch.Factors]:
        """See `Product`; several terms may share an array."""
        given = self.cta.gmem.factors
        return [
            launch.Factors(given[left].a, given[right].b)
            for left, right in self.plan.problem.arrays
        ]

    def add_up(
        self, me: Scalar, piece: work.Piece, steps: multiply.Steps, stores: late_store.Stores
    ) -> tuple[Any, Any]:
        """See `Product`."""
        del piece
        count = self.plan.small_steps
        small = steps._replace(count=count, ends=False)
        total, slot = multiply.add_up_whole(self.cta, me, small, stores)
        # Where the largest term is infinite, the others are anything.
        total = jnp.where(jnp.abs(total) < jnp.inf, total, jnp.zeros_like(total))
        large = steps._replace(
            slot=ring.following(self.plan, slot), count=self.plan.k_steps - count, begins=False
        )
        return multiply.add_up(self.cta, me, large, [], total)
