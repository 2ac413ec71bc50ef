"""Products that a program adds up as one: a kernel adds them in its accumulator.

So it is with the gradient of an array that several products read, such as queries, keys and values.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jax.extend import core

from pallas_gemm.call import Signature, SumCall, signature_of
from pallas_gemm.device import Device
from pallas_gemm.op import lowering
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.mesh import mesh_context
from pallas_gemm.op.sum_of_products import each_merged, merged_sum, sum_p
from pallas_gemm.planning import dispatch, prediction
from pallas_gemm.rewriting.elementwise import bytes_of
from pallas_gemm.rewriting.level import Level
from pallas_gemm.rewriting.products import Dense, How, avals_of

ADDITIONS = frozenset(("add", "add_any"))
MOST = 8
"""Products that a kernel adds up, at most."""


@dataclasses.dataclass(frozen=True)
class Sum:
    """Products that are added up.

    Attributes:
        members: The products.
        others: The other arrays that are added.
        additions: The equations that add, the last one last.
        call: The sum as one product.
        saved: Seconds that it is predicted to save.
    """

    members: tuple[Dense, ...]
    others: tuple[Any, ...]
    additions: tuple[Any, ...]
    call: SumCall
    saved: float

    @property
    def operands(self) -> tuple[Any, ...]:
        """The factors of each product, one after the other."""
        return tuple(x for own in self.members for x in own.factors)

    @property
    def told(self) -> dict[Any, tuple[str, ...]]:
        """The words for each product, by its result."""
        return {own.out: ("the others that are added to it",) for own in self.members}

    def apply(self, level: Level) -> None:
        """Puts the sum in the place of the products."""
        first, *rest = self.members
        equation, last = level.maker(first.out), self.additions[-1]
        for own in rest:
            level.remove(level.maker(own.out))
        for old in self.additions:
            level.remove(old)
        dims = tuple(own.dims for own in self.members)
        devices = mesh_context.device_request(self.call, self.operands)
        params = {"call": self.call, "contractions": dims, "devices": devices}
        signature = signature_of(avals_of(self.operands))
        whole = merged_sum(each_merged(self.call, dims, signature))
        out = core.Var(first.out.aval) if self.others else last.outvars[0]
        new = equation.replace(
            primitive=sum_p,
            invars=list(self.operands),
            outvars=[out],
            params=params,
            effects=frozenset() if whole is None else lowering.effects(*whole),
        )
        level.replace(equation, new)
        level.depends_more([out], self.operands)
        for i, other in enumerate(self.others, 1):
            is_last = i == len(self.others)
            total = last.outvars[0] if is_last else core.Var(first.out.aval)
            level.insert(last, last.replace(invars=[out, other], outvars=[total]))
            out = total


def sum_of(level: Level, own: Dense, ours: Mapping[Any, Dense], how: How) -> Sum | None:
    """Returns the products that are added to one; None if a kernel had better not add them up.

    Args:
        level: The function that they are in.
        own: The product.
        ours: All products of the function, by their results.
        how: How it is rewritten.
    """
    top = _next(level, own.out)
    if top is None or how.exact:
        return None
    while (above := _next(level, top.outvars[0])) is not None:
        top = above
    additions: list[Any] = []
    leaves = _leaves(level, top, additions)
    members = [ours[x] for x in leaves if _may_be_added(level, x, ours, own)]
    if not 2 <= len(members) <= MOST or own not in members:
        return None
    call = SumCall.of(own.call)
    dims = tuple(one.dims for one in members)
    given = tuple(x for one in members for x in one.factors)
    question = call, dims, signature_of(avals_of(given))
    seconds = how.once(question, functools.partial(_seconds_of, how.device, *question))
    if seconds is None:
        return None
    more = (len(members) - 1) * bytes_of(own.out)
    read = prediction.pass_seconds(more, how.device) - prediction.pass_seconds(0, how.device)
    saved = sum(one.seconds for one in members) + read - seconds
    others = tuple(x for x in leaves if all(x is not one.out for one in members))
    return Sum(tuple(members), others, tuple(additions), call, saved)


def _seconds_of(
    device: Device, call: SumCall, dims: tuple[Contraction, ...], signature: Signature
) -> float | None:
    """Returns how long a kernel is predicted to take; None if none adds up such products."""
    whole = merged_sum(each_merged(call, dims, signature))
    if whole is None:
        return None
    decision = dispatch.decide(whole[0].with_target(device), whole[1])
    return None if decision.plan is None else decision.plan.seconds


def _next(level: Level, x: Any) -> Any:
    """Returns the addition that alone reads a value."""
    reader = level.only_reader(x)
    if reader is None or reader.primitive.name not in ADDITIONS:
        return None
    is_plain = all(y.aval.shape == x.aval.shape for y in reader.invars)
    is_plain = is_plain and sum(y is x for y in reader.invars) == 1
    return reader if is_plain and reader.outvars[0].aval.dtype == x.aval.dtype else None


def _leaves(level: Level, addition: Any, additions: list[Any]) -> list[Any]:
    """Returns what is added up, in the order of the program; notes the equations."""
    found = []
    for x in addition.invars:
        maker = level.maker(x)
        is_inner = maker is not None and _next(level, x) is addition
        if is_inner and maker.primitive.name in ADDITIONS:
            found += _leaves(level, maker, additions)
        else:
            found.append(x)
    additions.append(addition)
    return found


def _may_be_added(level: Level, x: Any, ours: Mapping[Any, Dense], like: Dense) -> bool:
    if not isinstance(x, core.Var) or x not in ours or level.only_reader(x) is None:
        return False
    own = ours[x]
    maker = level.maker(x)
    same = own.call == like.call and avals_of(own.factors)[0].dtype == like.factors[0].aval.dtype
    return same and maker.primitive.name == "pallas_gemm"
