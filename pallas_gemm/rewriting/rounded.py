"""The values that a kernel rounds before it reduces them, as the program does.

    g - sum(p * g)        0 where p is 1 for one element: if what is added up were not what is
                          stored, the rounding of g would be left
    z[label] == max(z)    the largest value is one of those that are stored

So a value that is stored in 16 bits is rounded first if something reads both it and what it is
reduced to. If nothing does, as with the gradient of a bias, the sum is of float32 values.
"""

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from pallas_gemm.kernels.element_types import FLOATS_16
from pallas_gemm.kernels.functions.split import REDUCTIONS
from pallas_gemm.op.product import product_p
from pallas_gemm.rewriting import kinds
from pallas_gemm.rewriting.elementwise import variables
from pallas_gemm.rewriting.inside import OF_ORDER
from pallas_gemm.rewriting.level import Level, is_stored_by
from pallas_gemm.rewriting.regions import Region

MOST = 512
"""Operations that are looked at after one value, at most. More may read anything."""
PRODUCTS = kinds.DOTS | {product_p.name, "conv_general_dilated"}
"""Each element of their results is a sum, and the rounding of one summand counts for little."""
EACH = "optimization_barrier"
"""An operation that returns what it is given."""


def rounded_of(level: Level, region: Region) -> frozenset[Any]:
    """Returns the values that a kernel rounds, though it goes on with them in float32.

    Args:
        level: The function that the kernel's operations are in.
        region: The operations.
    """
    stored = list(filter(_is_short, region.results))
    reductions = [e for e in region.inside if e.primitive.name in REDUCTIONS]
    reduced = {x for e in reductions for x in e.outvars}
    found: set[Any] = set()
    for equation in reductions if stored else ():
        above = _above(region, variables(equation))
        if equation.primitive.name in OF_ORDER:
            found |= above.intersection(stored)
        for x in stored:
            both = _last(region, filter(_is_short, above & _above(region, [x])))
            if not both <= found and _meet(level, equation.outvars[0], x, reduced):
                found |= both
    return frozenset(found)


def _is_short(x: Any) -> bool:
    return np.dtype(x.aval.dtype) in FLOATS_16


def _above(region: Region, values: Iterable[Any]) -> set[Any]:
    """Returns some values, and those of the products that they are made of."""
    made = set(region.products)
    for equation in region.inside:
        if not made.isdisjoint(variables(equation)):
            made.update(equation.outvars)
    wanted = set(values)
    for equation in reversed(region.inside):
        if not wanted.isdisjoint(equation.outvars):
            wanted.update(variables(equation))
    return wanted & made


def _last(region: Region, values: Iterable[Any]) -> set[Any]:
    """Returns those of some values that no other one of them is made of."""
    every = set(values)
    before = (_above(region, [x]) - {x} for x in every)
    return every.difference(*before)


def _meet(level: Level, total: Any, x: Any, reduced: Collection[Any]) -> bool:
    """Whether something reads both what a kernel reduces to and what it stores.

    Args:
        level: The function.
        total: The result of a reduction in the kernel.
        x: A value that the kernel stores.
        reduced: All results of reductions in the kernel: they do not follow from what is stored.
    """
    of_total, of_x = _after(level, total, ()), _after(level, x, reduced)
    if of_total is None or of_x is None:
        return True
    if not of_total.isdisjoint(level.results) and not of_x.isdisjoint(level.results):
        return True
    for own in of_total:
        for reader in level.readers(own):
            if reader.primitive.name in PRODUCTS or reader.primitive.name == EACH:
                continue
            if any(y in of_x for y in variables(reader) if y is not own):
                return True
    return False


def _after(level: Level, x: Any, ends: Collection[Any]) -> set[Any] | None:
    """Returns a value and what follows from it before it is multiplied; None if that is much."""
    found, queue, count = {x}, [x], 0
    while queue:
        own = queue.pop()
        for reader in level.readers(own):
            count += 1
            if count > MOST:
                return None
            if reader.primitive.name == EACH:
                pairs = zip(reader.invars, reader.outvars, strict=True)
                made = {y for given, y in pairs if given is own}
            else:
                made = set() if is_stored_by(reader) else set(reader.outvars)
            made -= found.union(ends)
            found |= made
            queue += made
    return found
