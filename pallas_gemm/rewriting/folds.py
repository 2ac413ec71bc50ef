"""A product and what is around it as one kernel, where that is predicted to save time.

Two products of one left operand, which something around them joins, are one kernel as well: that of
a gated product.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jax import lax
from jax.extend import core

from pallas_gemm.call import Call, Signature, signature_of
from pallas_gemm.device import Device
from pallas_gemm.kernels.element_types import FLOATS
from pallas_gemm.kernels.functions.axes import ELEMENTWISE
from pallas_gemm.op import fused
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.function_of_sums import Function
from pallas_gemm.op.fused import Fused, fused_p
from pallas_gemm.op.mesh import mesh_context
from pallas_gemm.op.product import product_p
from pallas_gemm.planning import prediction
from pallas_gemm.planning.by_xla.fused import pass_share
from pallas_gemm.problem import Epilogue
from pallas_gemm.rewriting.elementwise import EXACT, bytes_of
from pallas_gemm.rewriting.functions import function_of
from pallas_gemm.rewriting.inside import Inside
from pallas_gemm.rewriting.level import Level
from pallas_gemm.rewriting.products import Dense, How, avals_of, copy_seconds, is_one_devices
from pallas_gemm.rewriting.regions import Region, region_of

LEAST_SAVED = 0.05
"""A fold has to save this part of its product's time: predictions err by as much. A residual, and
sums of squares for a norm, are predicted to save 1 to 4%, and nothing was measured for residuals.
"""


class Fold(NamedTuple):
    """A product, or two, and what is around it as one kernel.

    Attributes:
        saved: Seconds that it is predicted to save.
        products: The products, which have the left operand in common.
        region: The operations around them.
        function: The same as a function of the sums and of operands.
        call: The product, with float32 sums.
    """

    saved: float
    products: tuple[Dense, ...]
    region: Region
    function: Function
    call: Call

    @property
    def told(self) -> dict[Any, tuple[str, ...]]:
        """The names of the operations that each product is computed with, by its result."""
        names = dict.fromkeys(e.primitive.name for e in self.region.inside)
        more = ("the other of its gate",) * (len(self.products) > 1)
        return {own.out: (*more, *names) for own in self.products}

    def apply(self, level: Level) -> None:
        """Puts it in the place of the products and of the operations."""
        region = self.region
        first, *others = self.products
        equation = level.maker(first.out)
        factors = _factors(self.products)
        given = (*factors, *region.operands)
        stored = set(region.results)
        for old in region.inside:
            shared = [x for x in old.outvars if x in stored]
            is_gone = any(old is gone for gone in region.gone)
            if shared and not is_gone:
                # What else it makes is computed again.
                outs = [core.DropVar(x.aval) if x in stored else x for x in old.outvars]
                level.rename(old, old.replace(outvars=outs))
        for old in region.gone:
            level.remove(old)
        for other in others:
            level.depends_more([other.out], given)
            level.remove(level.maker(other.out))
        params = {
            "call": self.call,
            "contraction": first.dims,
            "function": self.function,
            "devices": mesh_context.device_request(self.call, given),
        }
        new = equation.replace(
            primitive=fused_p,
            invars=list(given),
            outvars=list(region.results),
            params=params,
            effects=fused.effects(self.call, first.dims, self.function, avals_of(given)),
        )
        level.replace(equation, new)
        level.depends_more(region.results, given)
        level.remove_unread(region.inside)


class Folder:
    """Folds operations into products."""

    def __init__(self, how: How) -> None:
        self._how = how

    def fold(self, level: Level, own: Dense, ours: Mapping[Any, Dense]) -> Fold | None:
        """Returns a product with what is around it, if that saves time.

        Args:
            level: The function that it is in.
            own: The product.
            ours: All products of the function, by their results.
        """
        if not _may_be_folded(own):
            return None
        own = own.in_order
        best, read = self._best(level, (own,))
        for other in (ours[x].in_order for x in read if x in ours):
            if _are_a_pair(level, own, other):
                both = self.pair(level, (own, other))
                if both is not None and (best is None or both.saved > best.saved):
                    best = both
        return best

    def pair(self, level: Level, products: tuple[Dense, Dense]) -> Fold | None:
        """Returns two products of one left operand as one kernel, if that saves time."""
        return self._best(level, products)[0] if all(map(_may_be_folded, products)) else None

    def _best(
        self, level: Level, products: tuple[Dense, ...]
    ) -> tuple[Fold | None, Mapping[Any, None]]:
        """Returns the fold that saves most, if one does, and what folds would read."""
        best: Fold | None = None
        read: dict[Any, None] = {}
        inside = Inside(level, tuple(each.out for each in products), exact=self._how.exact)
        if len(products) == 1 and inside.sums_along(products[0].axes_of_rows):
            # A kernel adds up the exponentials of its rows, here those of the program's columns.
            products = (products[0].exchanged,)
            inside = inside.made_in_order(products[0].order)
        for reduces in (True, False):
            region = region_of(inside if reduces else inside.without_reductions())
            if region is None:
                break
            read |= dict.fromkeys(region.operands)
            least = best.saved if best else LEAST_SAVED * _seconds(products)
            best = self._planned(level, products, region, least) or best
            if all(map(inside.operands.is_full, region.results)):
                # It reduces nothing.
                break
        return best, read

    def _planned(
        self, level: Level, products: tuple[Dense, ...], region: Region, least: float
    ) -> Fold | None:
        """Returns the fold that a region is, if it saves more than the least that counts."""
        if self._at_most(products, region) <= least:
            return None
        gate = Epilogue(gated=len(products) > 1)
        single = np.dtype(np.float32)
        call = dataclasses.replace(products[0].call, out_dtype=single, epilogue=gate)
        function = function_of(level, region, products[0].order, exact=self._how.exact)
        saved = self._saved(products, region, function, call)
        if saved is None or saved <= least:
            return None
        return Fold(saved, products, region, function, call)

    @property
    def elementwise(self) -> frozenset[str]:
        """The operations that it computes for each element."""
        return EXACT if self._how.exact else ELEMENTWISE

    def again(self, level: Level, fold: Fold, region: Region) -> Fold | None:
        """Returns a kernel that is there with more in it, for the sake of memory.

        None if it is then predicted to lose time, by more than predictions err.
        """
        function = function_of(level, region, fold.products[0].order, exact=self._how.exact)
        saved = self._saved(fold.products, region, function, fold.call)
        if saved is None or saved < -LEAST_SAVED * _seconds(fold.products):
            return None
        return fold._replace(saved=saved, region=region, function=function)

    def _saved(
        self, products: tuple[Dense, ...], region: Region, function: Function, call: Call
    ) -> float | None:
        """Returns how many seconds it is predicted to save; None if no kernel takes it."""
        signature = signature_of(avals_of((*_factors(products), *region.operands)))
        question = call, products[0].dims, function, signature
        answer = functools.partial(_seconds_of, self._how.device, *question)
        found = self._how.once(question, answer)
        if found is None:
            return None
        seconds, is_pass = found
        if not is_pass and all(own.refused for own in products):
            # XLA is faster at the product, and computes what follows with it.
            return None
        return _seconds(products) + self._passes(region) - seconds

    def _passes(self, region: Region) -> float:
        """Returns how many seconds the passes take that XLA then does not make."""
        device = self._how.device
        moved = region.stock - region.left - sum(2 * bytes_of(x) for x in region.made)
        launch = prediction.pass_seconds(0, device)
        return prediction.pass_seconds(moved, device) - launch * (not region.is_pass)

    def _at_most(self, products: tuple[Dense, ...], region: Region) -> float:
        """Returns how many seconds it could save if its kernel had no more to do than the products.

        It is quicker to ask than to plan the kernel.
        """
        device, launch = self._how.device, prediction.pass_seconds(0, self._how.device)
        shared = sum(bytes_of(own.factors[0]) for own in products[1:])
        stored = sum(bytes_of(own.out) for own in products) - sum(map(bytes_of, region.results))
        less = prediction.pass_seconds(shared + max(0, stored), device) - launch
        return self._passes(region) + less + launch * len(products[1:])


def _seconds_of(
    device: Device, call: Call, dims: Contraction, function: Function, signature: Signature
) -> tuple[float, bool] | None:
    """Returns how long a kernel is predicted to take, and whether XLA makes a pass instead.

    None if no kernel computes all of a function.
    """
    found = fused.plan(call.with_target(device), dims, function, signature)
    if not isinstance(found, Fused) or found.decision.plan is None or found.split.left:
        return None
    factors, _ = fused.factors_of(call, signature)
    copies = copy_seconds(found.form, tuple(factors), call.out_dtype.itemsize, device)
    spread = prediction.pass_seconds(moved, device) if (moved := found.split.spread_bytes) else 0.0
    is_pass = pass_share(found.decision.problem) == 1
    return found.decision.plan.seconds + copies + spread, is_pass


def _may_be_folded(own: Dense) -> bool:
    """Whether a product has float32 sums, and is one device's as far as its types say."""
    left, right = own.factors
    if {np.dtype(x.aval.dtype) for x in (left, right, own.out)} - FLOATS:
        return False
    return is_one_devices(own)


def _are_a_pair(level: Level, own: Dense, other: Dense) -> bool:
    """Whether a gated product could compute two products."""
    of_one = avals_of((own.factors[1], own.out)) == avals_of((other.factors[1], other.out))
    same = (own.call, own.dims) == (other.call, other.dims) and of_one
    if not same or own.factors[0] is not other.factors[0]:
        return False
    apart = not level.above(own.out) & level.bit(other.out)
    apart = apart and not level.above(other.out) & level.bit(own.out)
    return apart and level.maker(other.out).primitive in (product_p, lax.dot_general_p)


def _factors(products: tuple[Dense, ...]) -> tuple[Any, ...]:
    """Returns the left operand, and each right one."""
    return (products[0].factors[0], *(own.factors[1] for own in products))


def _seconds(products: tuple[Dense, ...]) -> float:
    return sum(own.seconds for own in products)
