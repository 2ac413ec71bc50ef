"""A product of an array and itself: a kernel computes half of it, and stores that twice."""

import dataclasses
from typing import Any

from pallas_gemm.call import SymmetricCall, signature_of
from pallas_gemm.op import lowering
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.mesh import mesh_context
from pallas_gemm.op.symmetric import symmetric_p
from pallas_gemm.planning import dispatch
from pallas_gemm.rewriting.folds import LEAST_SAVED
from pallas_gemm.rewriting.level import Level
from pallas_gemm.rewriting.products import Dense, How, avals_of, is_one_devices


@dataclasses.dataclass(frozen=True)
class Gram:
    """A product of an array and itself.

    Attributes:
        product: The product.
        call: The same as a symmetric one.
        saved: Seconds that it is predicted to save.
    """

    product: Dense
    call: SymmetricCall
    saved: float

    @property
    def told(self) -> dict[Any, tuple[str, ...]]:
        """The words for the product, by its result."""
        return {self.product.out: ("the symmetry of its result",)}

    def apply(self, level: Level) -> None:
        """Puts it in the place of the product."""
        own, equation = self.product, level.maker(self.product.out)
        devices = mesh_context.device_request(self.call, own.factors)
        new = equation.replace(
            primitive=symmetric_p,
            params={"call": self.call, "devices": devices},
            effects=lowering.effects(self.call, signature_of(avals_of(own.factors))),
        )
        level.replace(equation, new)


def gram_of(own: Dense, how: How) -> Gram | None:
    """Returns a product as a symmetric one; None if it is none, or a kernel had better not be."""
    x, other = own.factors
    transposed = _transposed(own.dims)
    if x is not other or transposed is None or not is_one_devices(own):
        return None
    left, right = transposed
    call = dataclasses.replace(own.call, transpose_a=left, transpose_b=right)
    symmetric = SymmetricCall.of(call, "gram")
    decision = dispatch.decide(symmetric.with_target(how.device), signature_of(avals_of((x, x))))
    if decision.plan is None:
        return None
    saved = own.seconds - decision.plan.seconds
    return Gram(own, symmetric, saved) if saved > LEAST_SAVED * own.seconds else None


def _transposed(dims: Contraction) -> tuple[bool, bool] | None:
    """Returns which operand is read transposed; None if it is no matrix times its transposition."""
    lead, k = dims.batch, dims.contracted
    if len(lead) > 1 or (len(k), len(dims.rows), len(dims.columns)) != (1, 1, 1):
        return None
    if dims.out not in (lead + dims.rows + dims.columns, lead + dims.columns + dims.rows):
        return None
    for left in (False, True):
        stored = (lead + k + x if left else lead + x + k for x in (dims.rows, dims.columns))
        if (dims.lhs, dims.rhs) == tuple(stored):
            return left, not left
    return None
