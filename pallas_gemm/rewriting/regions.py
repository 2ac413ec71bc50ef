"""The operations around a product that its kernel could compute, and how much that saves.

So it is with two products of one left operand, whose kernel is that of a gated product. Some of
what the operations make is read by others: that is stored. XLA computes again what follows from
something stored that is no larger; so do we, and store that.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from pallas_gemm.kernels.functions.axes import MOVES
from pallas_gemm.program import APPROXIMATE
from pallas_gemm.rewriting.elementwise import bytes_of, variables
from pallas_gemm.rewriting.exponentials import SumOfExp
from pallas_gemm.rewriting.inside import Inside
from pallas_gemm.rewriting.level import Level, is_stored_by

PICKS = frozenset(("dynamic_slice", "gather"))
"""Operations that read a few elements of an array: no pass over it."""
AFTER = 0.5
"""How much deeper a pass is that needs what another one makes of whole rows."""
EXP_PASS = 1.4
"""How much longer XLA's pass over rows takes that sums exponentials than one that finds the largest
value. On an H200, 8192 rows of 151936 words take 0.88 to 1.03 ms and 0.62 to 0.64 ms. 4096 rows of
128256 words take 0.32 to 0.34 ms and 0.25 ms."""
AT_ONCE = 8192
"""Columns of a softmax for which XLA reads each row once, at most. On an H200, 2**27 elements of
float32 take 197 to 233 us up to 8192 columns, 447 us with 16384 and 450 us with 32768."""
MASKED_BYTES = 8
"""How many more bytes XLA's pass could move for each element if a softmax is masked. The same take
468 to 618 us with a mask that is given, and squares of up to 2048 take 469 to 603 us with a causal
one. Attention of 16 heads, 4096 tokens and float32 logits takes 860 us, 1395 us if it is causal.
"""
TURNED_BYTES = 5
"""The same if the scores are transposed before, as those of heads in groups are. 2**28 of 2048
tokens take 1068 us, and 427 us if they are not. 2**29 of 4096 tokens take 1393 us. A mask slows it
down no further: attention with such scores takes 1406 us, and 1417 us if it is causal."""
MOST_ARRAYS = 5
"""Operands and results of the result's shape, at most. An update of AdamW has six, and then
registers hold tiles of 64 x 128 alone. On an H200, a step of four blocks of an 8B model's sizes
takes 51.9 ms with updates in the kernels of gradients, and 45.2 ms without."""


@dataclasses.dataclass(frozen=True)
class Region:
    """A part of a program that a kernel could compute with a product, or with two.

    Attributes:
        products: The results of the products.
        inside: The operations, in their order; those on operands among them.
        operands: The values that they read beside the product.
        results: The values that are stored.
        gone: The operations that nothing else needs.
        stock: Bytes that XLA's passes move for it, without what the products themselves write.
        left: Bytes that the passes move that are left, and copies.
        is_pass: A whole pass is no longer made.
        made: Operands that would have to be stored for it.
        rounds: A kernel rounds where the program does: sums of exponentials are of what is stored.
    """

    products: tuple[Any, ...]
    inside: tuple[Any, ...]
    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    gone: tuple[Any, ...]
    stock: int
    left: int
    is_pass: bool
    made: tuple[Any, ...]
    rounds: bool


def region_of(inside: Inside) -> Region | None:
    """Returns what a kernel could compute with products; None if there is nothing to save.

    Args:
        inside: The operations that follow them.
    """
    level, products = inside.level, inside.products
    if not inside.equations:
        return None
    stored = [x for x in inside.base if inside.is_stored(x)]
    apart = [x for x in stored if inside.base[x] is x]
    later: dict[float, set[Any]] = {}
    if others := set(stored) - set(apart):
        # A kernel stores no truth values and integers.
        later[inside.depth] = others
    picked: set[Any] = set()
    for x in inside.base:
        for reader in inside.others(x):
            if reader.primitive.name in PICKS:
                picked.add(x)
            elif not is_stored_by(reader):
                later.setdefault(level.depth_before(reader), set()).add(x)
    for own in inside.of_exp:
        for depth in own.read_at(level):
            later.setdefault(max(depth, inside.depth + AFTER), set()).add(own.z)
    read = picked.union(*later.values())
    inside.settle(read)
    inside.keep_compared(read)
    again = {inside.base[x] for x in read}
    reduced = [x for x in inside.reduced if x in level.results or level.readers(x)]
    results = [x for x in inside.base if x in again or x in apart]
    if not reduced and set(results) <= set(products):
        return None
    if all(len(inside.of(x)) < len(products) for x in (*results, *reduced)):
        return None
    return _priced(inside, results, reduced, apart, later)


def _priced(
    inside: Inside,
    results: list[Any],
    reduced: list[Any],
    apart: list[Any],
    later: dict[float, set[Any]],
) -> Region | None:
    """Returns the region that computes some values, with what XLA moves for them."""
    level = inside.level
    needed = _needed(inside, [*results, *reduced])
    if all(e.primitive.name in MOVES for e in needed):
        # Nothing is computed.
        return None
    beside = _beside(inside, needed)
    read = frozenset().union(*(inside.operands.of(x)[0] for x in beside))
    full = [x for x in read if inside.operands.is_full(x)]
    if len(full) + len(results) > MOST_ARRAYS:
        return None
    pulled = frozenset().union(*(inside.operands.of(x)[1] for x in beside))
    every = [*needed, *map(inside.operands.equation, pulled)]
    kept = _kept(inside, set(results) | set(reduced))
    written = [x for x in apart if x not in inside.products]
    at_once = [own for own in inside.of_exp if _is_at_once(level, own)]
    # The largest values come of a pass, and the sums of the next one.
    passes = [own for own in inside.of_exp if own not in at_once]
    again = sum(round(EXP_PASS * _bytes(inside.reads[own.z])) for own in passes)
    slow = [own for own in at_once if not _is_kept(own, inside)]
    again += sum(max(_of_mask(own, beside), _of_order(own, inside)) for own in slow)
    with_others = {x for own in at_once for x in (own.largest, *own.total.outvars)}
    first = [*written, *(x for x in reduced if x not in with_others)]
    is_pass = bool(first) and inside.depth not in later
    left = {depth: _bytes({inside.base[x] for x in read}) for depth, read in later.items()}
    return Region(
        inside.products,
        tuple(sorted(every, key=level.place)),
        tuple(sorted(read, key=lambda x: (x.aval.shape != inside.shape, _place(level, x)))),
        (*results, *reduced),
        tuple(e for e in inside.equations if id(e) not in kept),
        _stock(inside, first, later) + _bytes(written) + again,
        sum(left.values()) + _copied(inside, full, results) + inside.copied_bytes(results),
        is_pass,
        tuple(x for x in full if inside.operands.is_made(x)),
        bool(inside.of_exp),
    )


def _is_at_once(level: Level, own: SumOfExp) -> bool:
    """Whether XLA finds the sums in the pass that divides by them, as it does for a softmax."""
    return own.columns <= AT_ONCE and len(set(own.read_at(level))) == 1


def _is_kept(own: SumOfExp, inside: Inside) -> bool:
    """Whether XLA seems to store the scores of a softmax: it computes no tanh or the like twice.

    Then its passes see neither a mask nor another order. On an H200, 16 heads of 4096 tokens, with
    tanh and a given mask, take 1094 us in stock JAX. A kernel stored the scores: 1474 us.
    """
    return any(e.primitive.name in APPROXIMATE for e in _needed(inside, [own.z]))


def _of_mask(own: SumOfExp, beside: Iterable[Any]) -> int:
    """Returns the bytes that XLA could move in the time by which a mask slows its softmax down."""
    is_masked = any(x.aval.dtype == np.bool_ and x.aval.shape for x in beside)
    return MASKED_BYTES * math.prod(own.z.aval.shape) if is_masked else 0


def _of_order(own: SumOfExp, inside: Inside) -> int:
    """Returns the same of a softmax of scores that are transposed before."""
    return TURNED_BYTES * math.prod(own.z.aval.shape) if inside.is_turned(own.z) else 0


def _stock(inside: Inside, first: list[Any], later: dict[float, set[Any]]) -> int:
    """Returns the bytes that XLA reads, and writes for itself, to compute values again or not.

    Args:
        inside: The operations.
        first: The values that the first pass after the product makes.
        later: The values that others read, by how deep these are.
    """
    start = inside.depth
    again: dict[float, set[Any]] = {depth: set(read) for depth, read in later.items()}
    if first:
        again.setdefault(start, set()).update(first)
    every = ({y for x in own for y in inside.reads_of(x)} for own in again.values())
    kept = {inside.base[x] for depth, own in later.items() for x in own if depth > start}
    written = [x for x in kept if x not in inside.products and not inside.is_stored(x)]
    # Or the first pass stores what the others read.
    once = {y for x in (*first, *kept, *later.get(start, ())) for y in inside.reads_of(x)}
    bases = ({inside.base[x] for x in own} for depth, own in later.items() if depth > start)
    stored = _bytes(once) + _bytes(written) + sum(map(_bytes, bases))
    return min(sum(map(_bytes, every)), stored)


def _copied(inside: Inside, full: list[Any], results: list[Any]) -> int:
    """Returns the bytes that are moved to copy an update over what it updates.

    A training step gives its weights away. A pass of XLA's writes the new ones over the old ones; a
    kernel does not, and XLA copies what it wrote. On an H200, 4096 x 14336 x 4096 and a step of
    gradient descent take 659 us in two kernels. In one, they take 622 us, and the copy takes 54.
    """
    level = inside.level
    given = collections.Counter(x.aval.dtype for x in full if level.is_argument(x))
    made = collections.Counter(x.aval.dtype for x in results if x in level.results)
    maker, both = level.maker(inside.products[0]), given & made
    if not both or maker is None or "transpose(" not in str(maker.source_info.name_stack):
        return 0
    each = (count * dtype.itemsize for dtype, count in both.items())
    return 2 * math.prod(inside.shape) * sum(each)


def _place(level: Level, x: Any) -> tuple[float, int]:
    """Returns where a value is made: its equation's place, and its own among the results."""
    maker = level.maker(x)
    if maker is None:
        return level.given[x], 0
    return level.place(maker) + len(level.given), maker.outvars.index(x)


def _bytes(values: Iterable[Any]) -> int:
    return sum(map(bytes_of, values))


def _needed(inside: Inside, results: list[Any]) -> list[Any]:
    """Returns the operations that some values need."""
    wanted, found = set(results), []
    for equation in reversed(inside.equations):
        if wanted & set(equation.outvars):
            found.append(equation)
            wanted.update(variables(equation))
    return found[::-1]


def _beside(inside: Inside, equations: list[Any]) -> set[Any]:
    """Returns what operations read that does not depend on the product."""
    made = {x for e in inside.equations for x in e.outvars}
    return {x for e in equations for x in variables(e) if x not in inside.base and x not in made}


def _kept(inside: Inside, stored: set[Any]) -> set[int]:
    """Returns the operations that something outside needs even if some values are stored."""
    kept: set[int] = set()
    wanted: set[Any] = set()
    for equation in reversed(inside.equations):
        for x in equation.outvars:
            if x not in stored and (x in wanted or x in inside.level.results or inside.others(x)):
                kept.add(id(equation))
                wanted.update(y for y in variables(equation) if y not in stored)
    return kept
