"""Operands that a program transposes just before a product, read as they are stored.

`matmul(x, y.T)` says the same as a product that reads y the other way round. XLA sees that of its
own products. Here it is seen of ours, so that no transposed array is made.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pallas_gemm.call import Call, Signature
from pallas_gemm.op.canonical import merged
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.planning import dispatch
from pallas_gemm.planning.plans import Plan


class Turned(NamedTuple):
    """How an operand was transposed.

    Attributes:
        permutation: The order of its dimensions.
        shape: The shape before.
    """

    permutation: tuple[int, ...]
    shape: tuple[Any, ...]

    def letters(self, turned: str) -> str:
        """Returns the letters of the dimensions as they are stored, of those that are turned."""
        return "".join(turned[self.permutation.index(i)] for i in range(len(turned)))


class AsStored(NamedTuple):
    """A product of operands of which some are as they are stored.

    Attributes:
        contraction: The dimensions, in the order of the operands as they are read.
        signature: Shapes and types of the operands as they are read.
        places: Which operands are not transposed.
    """

    contraction: Contraction
    signature: Signature
    places: tuple[int, ...]


def as_stored(
    call: Call, contraction: Contraction, signature: Signature, turned: Sequence[Turned | None]
) -> AsStored:
    """Returns the product that a kernel computes with the fewest transposed operands.

    An operand is read as it is stored if the kernel then needs no other copy. A product of which a
    caller names the config or the order, or of which something is promised, stays as it is: both
    are said of this layout.

    Args:
        call: The product, with the GPU to plan for.
        contraction: Its dimensions.
        signature: Shapes and types of its operands.
        turned: How each operand was transposed, None of those that were not.
    """
    best = AsStored(contraction, signature, ())
    options = call.options
    named = (options.config, options.schedule, options.numerics)
    if not any(turned[:2]) or named != (None, None, None):
        return best
    plan = _plan(call, best)
    for place, name in enumerate(("lhs", "rhs")):
        own = turned[place]
        if plan is None or own is None or (place and call.epilogue.gated):
            continue
        letters = own.letters(getattr(best.contraction, name))
        operands = list(best.signature)
        operands[place] = (own.shape, operands[place][1])
        other = AsStored(
            best.contraction.with_letters(**{name: letters}),
            tuple(operands),
            (*best.places, place),
        )
        found = _plan(call, other)
        if found is not None and found.realigned.bytes <= plan.realigned.bytes:
            best, plan = other, found
    return best


def _plan(call: Call, product: AsStored) -> Plan | None:
    """Returns how a kernel computes a product; None if it does not, or dimensions are moved."""
    matrices = merged(call, product.contraction, product.signature)
    form = matrices.form
    if not (form.a.is_free and form.b.is_free and form.permutation is None):
        return None
    try:
        return dispatch.decide(matrices.call, matrices.signature).plan
    except ValueError:
        # The kernel that is named takes another layout alone.
        return None
