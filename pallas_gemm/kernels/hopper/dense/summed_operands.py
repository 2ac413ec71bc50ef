"""Products of operands that are sums of arrays: see `product.py`.

The small terms come first, and the largest one is added to them in the same registers. Where the
small ones are of arrays that were made larger, their sum is made smaller again in between.
"""

import itertools
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
        plan = self.plan
        total: Any = None
        own = steps._replace(slot=ring.first_slot(plan, steps.turn, steps.slot), ends=False)
        for count in self._small:
            own = own._replace(count=count)
            total, _ = multiply.add_up_whole(self.cta, me, own, stores, total)
            if plan.problem.shift:
                total = total * 2.0**-plan.problem.shift
            own = own._replace(slot=ring.later(plan, own.slot, count), begins=False)
            stores = []
        # Where the largest term is infinite, the others are anything.
        total = jnp.where(jnp.abs(total) < jnp.inf, total, jnp.zeros_like(total))
        large = own._replace(count=plan.k_steps - plan.small_steps, ends=steps.ends)
        return multiply.add_up(self.cta, me, large, [], total)

    @property
    def _small(self) -> list[int]:
        """The steps of the small terms, of those together that are of one size."""
        problem, steps = self.plan.problem, self.plan.term_steps
        if not problem.shift:
            return [self.plan.small_steps]
        sizes = [left + right for left, right in problem.arrays]
        alike = itertools.groupby(zip(sizes[:-1], steps, strict=False), key=lambda own: own[0])
        return [sum(count for _, count in own) for _, own in alike]
