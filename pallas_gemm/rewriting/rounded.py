"""The values that a kernel rounds before it reduces them, as the program does.

    g - sum(p * g)        0 where p is 1 for one element: if what is added up were not what is
                          stored, the rounding of g would be left
    z[label] == max(z)    the largest value is one of those that are stored

So a value that is stored in 16 bits is rounded first if something reads both it and what it is
reduced to. If nothing does, as with the gradient of a bias, the sum is of float32 values.

    g @ x - sum(g) * x    the gradient of distances: about 0 where g is large for one element

The kernel makes one part of such a sum of the value, and the other part is computed of it again.
One of them is multiplied by a matrix. Then the value is rounded first, too.
"""

import functools
import operator
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from pallas_gemm.kernels.element_types import FLOATS_16
from pallas_gemm.kernels.functions.axes import REDUCTIONS
from pallas_gemm.op.product import product_p
from pallas_gemm.rewriting import kinds
from pallas_gemm.rewriting.elementwise import variables
from pallas_gemm.rewriting.inside import OF_ORDER
from pallas_gemm.rewriting.level import Level, is_stored_by
from pallas_gemm.rewriting.regions import Region

NEAR, MOST = 32, 512
"""Operations that are looked at after one value: at first, and at most. More may read anything."""
PRODUCTS = kinds.DOTS | {product_p.name, "conv_general_dilated"}
"""Each element of their results is a sum, and the rounding of one summand counts for little."""
ADDING = frozenset(("add", "add_any", "sub"))
"""Operations that may leave the difference of roundings."""
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
    if not stored or len(region.results) < 2:
        return frozenset()
    parts = _parts(region)
    reduced = {x for e in reductions for x in e.outvars}
    found: set[Any] = set()
    pairs = [(x, y) for y in region.results for x in stored if x is not y and x in parts.get(y, ())]
    again = _again(level, region) if pairs else []
    for x, y in pairs:
        of_x = [value for value in again if x in parts.get(value, ())]
        if of_x and x not in found and _meets_product(level, y, region, of_x):
            found.add(x)
    for equation in reductions:
        above = _of_all(parts, variables(equation))
        if equation.primitive.name in OF_ORDER:
            found |= above.intersection(stored)
        for x in stored:
            both = _last(parts, filter(_is_short, above & parts.get(x, set())))
            if not both <= found and _meet(level, equation.outvars[0], x, reduced):
                found |= both
    return frozenset(found)


def _again(level: Level, region: Region) -> list[Any]:
    """Returns the values of a kernel that are not stored, and that others compute again."""
    own, results = set(map(id, region.inside)), set(region.results)
    made = (x for e in region.inside for x in e.outvars if x not in results)
    return [x for x in made if any(id(e) not in own for e in level.readers(x))]


def _is_short(x: Any) -> bool:
    return np.dtype(x.aval.dtype) in FLOATS_16


def _parts(region: Region) -> dict[Any, set[Any]]:
    """Returns the products, and what is made of them: each with those of these it is made of."""
    parts = {x: {x} for x in region.products}
    for equation in region.inside:
        own = _of_all(parts, variables(equation))
        if own:
            parts |= {x: own | {x} for x in equation.outvars}
    return parts


def _of_all(parts: Mapping[Any, set[Any]], values: Iterable[Any]) -> set[Any]:
    return set().union(*(parts[x] for x in values if x in parts))


def _last(parts: Mapping[Any, set[Any]], values: Iterable[Any]) -> set[Any]:
    """Returns those of some values that no other one of them is made of."""
    every = set(values)
    return every.difference(*(parts[x] - {x} for x in every))


def _meet(level: Level, total: Any, x: Any, reduced: Collection[Any]) -> bool:
    """Whether something reads both what a kernel reduces to and what it stores.

    Args:
        level: The function.
        total: The result of a reduction in the kernel.
        x: A value that the kernel stores.
        reduced: All results of reductions in the kernel: they do not follow from what is stored.
    """
    for most in (NEAR, MOST):
        of_total, total_ends = _after(level, [total], (), most)
        of_x, x_ends = _after(level, [x], reduced, most)
        if _are_read_together(level, of_total, of_x):
            return True
        if total_ends and x_ends:
            return False
    return True


def _meets_product(level: Level, y: Any, region: Region, again: Collection[Any]) -> bool:
    """Whether what follows from a result is added to what others compute again of another one.

    One of them is multiplied by a matrix before.

    Args:
        level: The function.
        y: A result.
        region: The operations.
        again: The values that are computed again.
    """
    of_x, ends = _after(level, again, region.results, MOST)
    if not ends:
        return True
    of_y, _ = _after(level, [y], (), MOST)
    return _adds_product(level, of_x, of_y) or _adds_product(level, of_y, of_x)


def _adds_product(level: Level, some: AbstractSet[Any], others: AbstractSet[Any]) -> bool:
    """Whether one of some arrays is added to what follows near a product of others."""
    added = {
        x
        for own in some
        for reader in level.readers(own)
        if reader.primitive.name in ADDING and reader.outvars[0].aval.shape
        for x in variables(reader)
        if x is not own
    }
    bits = functools.reduce(operator.or_, map(level.above, added), 0)
    products = {
        id(reader): reader.outvars
        for factor in (others if added else ())
        for reader in level.readers(factor)
        if reader.primitive.name in PRODUCTS
    }
    for made in products.values():
        bit = level.bit(made[0])
        # Of a convolution, values do not say if they depend on it.
        may_follow = bits & bit or not bit
        if may_follow and not added.isdisjoint(_after(level, made, (), NEAR)[0]):
            return True
    return False


def _are_read_together(level: Level, some: AbstractSet[Any], others: AbstractSet[Any]) -> bool:
    if not some.isdisjoint(level.results) and not others.isdisjoint(level.results):
        return True
    for own in some:
        for reader in level.readers(own):
            if reader.primitive.name in PRODUCTS or reader.primitive.name == EACH:
                continue
            if any(y in others for y in variables(reader) if y is not own):
                return True
    return False


def _after(
    level: Level, values: Iterable[Any], ends: Collection[Any], most: int
) -> tuple[set[Any], bool]:
    """Returns values and what follows from them before it is multiplied, and if that is all."""
    queue, count = list(values), 0
    found = set(queue)
    for own in queue:
        for reader in level.readers(own):
            count += 1
            if count > most:
                return found, False
            made = reader.outvars
            if reader.primitive.name == EACH:
                pairs = zip(reader.invars, made, strict=True)
                made = [y for given, y in pairs if given is own]
            elif is_stored_by(reader):
                continue
            more = [y for y in made if y not in found and y not in ends]
            found.update(more)
            queue += more
    return found, True
