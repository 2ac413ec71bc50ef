"""The operations around a product that its kernel could compute, and how much that saves.

So it is with two products of one left operand, whose kernel is that of a gated product. From the
product on, elementwise operations are *inside* as long as nothing else that they read
depends on the product. Some of what they make is read by others: that is stored. XLA computes again
what follows from something stored that is no larger; so do we, and store that. The kernel also
computes the operands of an operation, back to arrays that are in memory anyway.
"""

import dataclasses
import functools
import heapq
import math
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
from jax.extend import core

from pallas_gemm.kernels.element_types import FLOATS
from pallas_gemm.kernels.split import ELEMENTWISE, REDUCTIONS
from pallas_gemm.rewriting import exponentials
from pallas_gemm.rewriting.level import Level, called, is_stored_by

EXACT = frozenset(
    (
        *("abs", "add", "add_any", "and", "clamp", "convert_element_type", "copy", "eq", "ge"),
        *("gt", "le", "lt", "max", "min", "mul", "ne", "neg", "or", "select_n", "sign"),
        *("square", "sub", "xor"),
    )
)
"""Operations whose result is the exact value, rounded once, wherever they are computed."""
EXACT_REDUCTIONS = frozenset(("reduce_max", "reduce_min"))
MOVES = frozenset(("broadcast_in_dim", "reshape", "squeeze"))
PICKS = frozenset(("dynamic_slice", "gather"))
"""Operations that read a few elements of an array: no pass over it."""
AFTER = 0.5
"""How much deeper a pass is that needs what another one makes of whole rows."""
EXP_PASS = 1.4
"""How much longer XLA's pass over rows takes that sums exponentials than one that finds the largest
value. On an H200, 8192 rows of 151936 words take 0.88 to 1.03 ms and 0.62 to 0.64 ms. 4096 rows of
128256 words take 0.32 to 0.34 ms and 0.25 ms."""
LARGEST = 256
"""Operations that are looked at for one product, at most."""
AGAIN = 2
"""Arrays that are read to compute a value again, at most."""
MOST_ARRAYS = 6
"""Operands and results of the result's shape, at most."""


def bytes_of(x: Any) -> int:
    """Returns the size of a value in memory."""
    return math.prod(x.aval.shape) * np.dtype(x.aval.dtype).itemsize


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
        left: Bytes that the passes move that are left.
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


class _Operands:
    """The operands of operations beside the product, back to arrays that are in memory."""

    def __init__(self, level: Level, shape: tuple[int, ...], allowed: frozenset[str]) -> None:
        self._level, self._shape, self._allowed = level, shape, allowed
        self._known: dict[Any, tuple[frozenset[Any], frozenset[Any]]] = {}
        self._equations: dict[int, Any] = {}

    def of(self, x: Any) -> tuple[frozenset[Any], frozenset[int]]:
        """Returns (what is read for a value, the `id` of the operations that make it of that)."""
        if x not in self._known:
            maker = self._level.maker(x)
            if self._is_read(x, maker):
                self._known[x] = frozenset((x,)), frozenset()
            else:
                self._equations[id(maker)] = maker
                leaves, made = frozenset(), frozenset((id(maker),))
                for other in variables(maker):
                    own = self.of(other)
                    leaves, made = leaves | own[0], made | own[1]
                most = 1 if self._is_read_later(x) else AGAIN
                is_much = sum(y.aval.shape == self._shape for y in leaves) > most
                self._known[x] = (frozenset((x,)), frozenset()) if is_much else (leaves, made)
        return self._known[x]

    def _is_read(self, x: Any, maker: Any) -> bool:
        if maker is None or x.aval.shape != self._shape or len(self._equations) > LARGEST:
            return True
        if self._level.is_stored(x):
            return True
        if is_elementwise(self._level, maker, self._shape, self._allowed):
            return False
        is_small = all(math.prod(y.aval.shape) < math.prod(self._shape) for y in variables(maker))
        return not (maker.primitive.name in MOVES and is_small)

    def _is_read_later(self, x: Any) -> bool:
        depth = self._level.depth(x)
        return any(self._level.depth_before(own) > depth for own in self._level.readers(x))

    def equation(self, number: int) -> Any:
        """Returns an operation."""
        return self._equations[number]

    def is_made(self, x: Any) -> bool:
        """Whether what is read would be stored only for that."""
        if x.aval.shape != self._shape or self._level.is_stored(x):
            return False
        if self._is_read_later(x):
            # So XLA stores it.
            return False
        maker = self._level.maker(x)
        if maker.primitive.name in MOVES:
            (before,) = variables(maker)
            return math.prod(before.aval.shape) != math.prod(self._shape) or self.is_made(before)
        return True


class _Inside:
    """The operations that follow a product, and what is known of what they make."""

    def __init__(
        self, level: Level, products: tuple[Any, ...], *, exact: bool, reduces: bool
    ) -> None:
        self.level, self.products = level, products
        self.shape = products[0].aval.shape
        self.depth = max(map(level.depth, products))
        self.allowed = EXACT if exact else ELEMENTWISE - {"custom_jvp_call", "jit"}
        known = EXACT_REDUCTIONS if exact else frozenset(REDUCTIONS)
        self.reductions = known if reduces else frozenset()
        self.operands = _Operands(level, self.shape, self.allowed)
        self.equations: list[Any] = []
        self.reduced: list[Any] = []
        # What each value is computed of again, and what is read for it.
        self.base: dict[Any, Any] = {x: x for x in products}
        self.reads: dict[Any, frozenset[Any]] = {x: frozenset((x,)) for x in products}
        self.of_exp: list[exponentials.SumOfExp] = []
        self._grow()
        self._add_sums_of_exp()

    def _grow(self) -> None:
        seen: set[int] = set()
        bits = functools.reduce(operator.or_, map(self.level.bit, self.products))
        readers = (e for x in self.products for e in self.level.readers(x))
        heap = [(self.level.place(e), id(e), e) for e in readers]
        heapq.heapify(heap)
        while heap and len(seen) < LARGEST:
            _, number, equation = heapq.heappop(heap)
            if number in seen:
                continue
            seen.add(number)
            others = [x for x in variables(equation) if x not in self.base]
            if any(self.level.above(x) & bits for x in others):
                continue
            if self._is_reduction(equation):
                self.equations.append(equation)
                self.reduced += equation.outvars
            elif is_elementwise(self.level, equation, self.shape, self.allowed):
                self._take(equation, others)
                for x in equation.outvars:
                    for own in self.level.readers(x):
                        heapq.heappush(heap, (self.level.place(own), id(own), own))

    def _take(self, equation: Any, others: list[Any]) -> None:
        self.equations.append(equation)
        read = frozenset().union(*(self.operands.of(x)[0] for x in others))
        within = [x for x in variables(equation) if x in self.base]
        for x in within:
            read |= self.reads[x]
        bases = {self.base[x] for x in within}
        beside = (y for x in others for y in self.operands.of(x)[0])
        is_alone = len(bases) == 1 and not any(y.aval.shape == self.shape for y in beside)
        for x in equation.outvars:
            self.reads[x] = read
            (base,) = bases if is_alone else (x,)
            is_better = bytes_of(x) < bytes_of(base) or self.is_stored(x)
            self.base[x] = x if is_better and np.dtype(x.aval.dtype) in FLOATS else base

    def _add_sums_of_exp(self) -> None:
        """Adds what follows from the largest values of rows, back to the values themselves."""
        if exponentials.TOTAL not in self.reductions:
            return
        bits = functools.reduce(operator.or_, map(self.level.bit, self.products))
        for largest in [e for e in self.equations if e.primitive.name == exponentials.LARGEST]:
            self.of_exp += exponentials.sums_of_exp(
                self.level, largest, bits, self.base, self._is_reduction
            )
        known = {id(e) for e in self.equations}
        for own in self.of_exp:
            every = (*own.before, own.exp, own.total)
            self.equations += [e for e in every if id(e) not in known]
            known.update(map(id, every))
            self.reads[own.exp.outvars[0]] = self.reads[own.z]
            self.reduced += own.total.outvars
        self.equations.sort(key=self.level.place)

    def settle(self, read: set[Any]) -> None:
        """Has what others read computed again of the last value that all of it follows from.

        A sum and its bias are rounded once then, as where XLA adds the bias within its product. If
        the sum alone were rounded, the derivative of relu would see other signs.
        """
        for base in {self.base[x] for x in read}:
            wanted = {x for x in read if self.base[x] is base}
            last, needed = base, self._between(base, wanted)
            while last not in wanted:
                readers = [e for e in needed if last in variables(e)]
                if len(readers) > 1 or not _may_stand_for(readers[0], last):
                    break
                (last,) = readers[0].outvars
            self.base |= dict.fromkeys((last, *wanted), last)

    def _between(self, base: Any, wanted: set[Any]) -> list[Any]:
        """Returns the operations by which some values follow from one."""
        values, found = set(wanted), []
        for equation in reversed(self.equations):
            if values & set(equation.outvars) and base not in equation.outvars:
                found.append(equation)
                values.update(variables(equation))
        return found

    def is_stored(self, x: Any) -> bool:
        """Whether a value is in memory, whatever is computed with the product."""
        return x in self.level.results or any(map(is_stored_by, self.level.readers(x)))

    def _is_reduction(self, equation: Any) -> bool:
        if equation.primitive.name not in self.reductions or equation.effects:
            return False
        (x,) = equation.invars
        axes, rank = set(equation.params["axes"]), len(self.shape)
        is_float = np.issubdtype(np.dtype(x.aval.dtype), np.floating) or x.aval.dtype.itemsize == 2
        return is_float and 0 < len(axes) < rank

    def reads_of(self, x: Any) -> frozenset[Any]:
        """Returns what a pass reads for a value, or for the reduction that makes it."""
        return self.reads[x] if x in self.reads else self.reads[self.level.maker(x).invars[0]]

    def of(self, x: Any) -> frozenset[Any]:
        """Returns the products that a value depends on."""
        return self.reads_of(x).intersection(self.products)

    def others(self, x: Any) -> list[Any]:
        """Returns the operations outside that read a value."""
        own = set(map(id, self.equations))
        return [e for e in self.level.readers(x) if id(e) not in own]


def region_of(
    level: Level, products: tuple[Any, ...], *, exact: bool, reduces: bool
) -> Region | None:
    """Returns what a kernel could compute with products; None if there is nothing to save.

    Args:
        level: The function that they are in.
        products: Their results, of which none depends on the other.
        exact: No operation may be rounded otherwise.
        reduces: It may reduce what it makes.
    """
    inside = _Inside(level, products, exact=exact, reduces=reduces)
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
    again = {inside.base[x] for x in read}
    reduced = [x for x in inside.reduced if x in level.results or level.readers(x)]
    results = [x for x in inside.base if x in again or x in apart]
    if not reduced and set(results) <= set(products):
        return None
    if all(len(inside.of(x)) < len(products) for x in (*results, *reduced)):
        return None
    return _priced(inside, results, reduced, apart, later)


def _priced(
    inside: _Inside,
    results: list[Any],
    reduced: list[Any],
    apart: list[Any],
    later: dict[float, set[Any]],
) -> Region | None:
    """Returns the region that computes some values, with what XLA moves for them."""
    level = inside.level
    needed = _needed(inside, [*results, *reduced])
    read = frozenset().union(*(inside.operands.of(x)[0] for x in _beside(inside, needed)))
    full = [x for x in read if x.aval.shape == inside.shape]
    if len(full) + len(results) > MOST_ARRAYS:
        return None
    pulled = frozenset().union(*(inside.operands.of(x)[1] for x in _beside(inside, needed)))
    every = [*needed, *map(inside.operands.equation, pulled)]
    kept = _kept(inside, set(results) | set(reduced))
    written = [x for x in apart if x not in inside.products]
    # The largest values come of a pass, and the sums of the next one.
    again = sum(round(EXP_PASS * _bytes(inside.reads[own.z])) for own in inside.of_exp)
    is_pass = bool(written or reduced) and inside.depth not in later
    left = {depth: _bytes({inside.base[x] for x in read}) for depth, read in later.items()}
    return Region(
        inside.products,
        tuple(sorted(every, key=level.place)),
        tuple(sorted(read, key=lambda x: (x.aval.shape != inside.shape, _place(level, x)))),
        (*results, *reduced),
        tuple(e for e in inside.equations if id(e) not in kept),
        _stock(inside, [*written, *reduced], later) + _bytes(written) + again,
        sum(left.values()),
        is_pass,
        tuple(x for x in full if inside.operands.is_made(x)),
        bool(inside.of_exp),
    )


def _stock(inside: _Inside, first: list[Any], later: dict[float, set[Any]]) -> int:
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


def _place(level: Level, x: Any) -> int:
    maker = level.maker(x)
    if maker is not None:
        return level.place(maker) + len(level.jaxpr.invars)
    given = (*level.jaxpr.constvars, *level.jaxpr.invars)
    return next(i for i, y in enumerate(given) if y is x)


def _bytes(values: Iterable[Any]) -> int:
    return sum(map(bytes_of, values))


def _needed(inside: _Inside, results: list[Any]) -> list[Any]:
    """Returns the operations that some values need."""
    wanted, found = set(results), []
    for equation in reversed(inside.equations):
        if wanted & set(equation.outvars):
            found.append(equation)
            wanted.update(variables(equation))
    return found[::-1]


def _may_stand_for(equation: Any, x: Any) -> bool:
    """Whether a kernel may store what an operation makes of a value, and not the value."""
    (y, *more) = equation.outvars
    return not more and bytes_of(y) <= bytes_of(x) and np.dtype(y.aval.dtype) in FLOATS


def _beside(inside: _Inside, equations: list[Any]) -> set[Any]:
    """Returns what operations read that does not depend on the product."""
    made = {x for e in inside.equations for x in e.outvars}
    return {x for e in equations for x in variables(e) if x not in inside.base and x not in made}


def _kept(inside: _Inside, stored: set[Any]) -> set[int]:
    """Returns the operations that something outside needs even if some values are stored."""
    kept: set[int] = set()
    wanted: set[Any] = set()
    for equation in reversed(inside.equations):
        for x in equation.outvars:
            if x not in stored and (x in wanted or x in inside.level.results or inside.others(x)):
                kept.add(id(equation))
                wanted.update(y for y in variables(equation) if y not in stored)
    return kept


def variables(equation: Any) -> list[Any]:
    """Returns the values that an equation reads, without numbers."""
    return [x for x in equation.invars if isinstance(x, core.Var)]


def computes_each(equation: Any, shape: tuple[int, ...], allowed: frozenset[str]) -> bool:
    """Whether an equation computes each element of arrays of this shape, as far as it tells."""
    return not equation.effects and _is_elementwise(equation, shape, allowed)


def is_elementwise(
    level: Level, equation: Any, shape: tuple[int, ...], allowed: frozenset[str]
) -> bool:
    """Whether an equation computes each element of arrays of this shape by itself."""
    if equation.effects or any(x.aval.shape != shape for x in equation.outvars):
        return False
    own = functools.partial(_is_elementwise, equation, shape, allowed)
    return bool(level.known((is_elementwise, shape, allowed), equation, own))


def _is_elementwise(equation: Any, shape: tuple[int, ...], allowed: frozenset[str]) -> bool:
    every = [x.aval for x in (*equation.invars, *equation.outvars)]
    if not all(_fits(x.shape, shape) and _is_plain(x.dtype) for x in every):
        return False
    inner = called(equation)
    if inner is not None:
        return not inner.constvars and all(_is_elementwise(e, shape, allowed) for e in inner.eqns)
    if equation.primitive.name == "broadcast_in_dim":
        return all(x.aval.shape == () for x in equation.invars)
    return equation.primitive.name in allowed


def _fits(own: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether an array of one shape stands for one of another in elementwise operations."""
    if not own:
        return True
    same = len(own) == len(shape)
    return same and all(a in (1, b) for a, b in zip(own, shape, strict=True))


def _is_plain(dtype: Any) -> bool:
    """Whether values of a type can be in a register of a kernel."""
    if not isinstance(dtype, np.dtype):
        return False
    return dtype.itemsize <= 4 and dtype.kind in "biufV"
