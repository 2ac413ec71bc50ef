"""The operations that follow a product, as far as its kernel could compute them, too.

From the product on, elementwise operations are *inside* as long as nothing else that they read
depends on the product. The kernel also computes the operands of an operation, back to arrays that
are in memory anyway.
"""

import copy
import functools
import heapq
import math
import operator
from collections.abc import Iterable
from typing import Any, Self

import numpy as np

from pallas_gemm.kernels.element_types import FLOATS
from pallas_gemm.kernels.functions.axes import ELEMENTWISE, MOVES, REDUCTIONS, TURN
from pallas_gemm.rewriting import exponentials
from pallas_gemm.rewriting.elementwise import EXACT, bytes_of, is_elementwise, variables
from pallas_gemm.rewriting.level import Level

ALLOWED = ELEMENTWISE - {"custom_jvp_call", "jit"}
"""Operations that are looked into here are no calls: those are inlined before."""
POSITIONS = "iota"
"""The operation that makes an array of positions: a kernel needs to read none."""
PLACES = frozenset(("argmax", "argmin"))
"""Reductions to a place. The smallest value is the largest one with the other sign."""
SUMS = frozenset(("add", "add_any"))
"""Operations by which the blocks of a model add to what those before them have added up."""
EQUAL = frozenset(("eq", "ne"))
"""Operations that ask for all bits of a value."""
ORDER = frozenset(("ge", "gt", "le", "lt"))
"""Operations that ask for them if one side is the largest value."""
OF_ORDER = frozenset(("reduce_max", "reduce_min"))
"""Reductions whose result is one of the values."""
EXACT_REDUCTIONS = PLACES | OF_ORDER
LARGEST = 256
"""Operations that are looked at for one product, at most."""
AGAIN = 2
"""Arrays that are read to compute a value again, at most."""


class Operands:
    """The operands of operations beside the product, back to arrays that are in memory."""

    def __init__(self, level: Level, shape: tuple[int, ...], allowed: frozenset[str]) -> None:
        self._level, self._shape, self._allowed = level, shape, allowed | {POSITIONS}
        self._known: dict[Any, tuple[frozenset[Any], frozenset[Any]]] = {}
        self._equations: dict[int, Any] = {}

    def of(self, x: Any) -> tuple[frozenset[Any], frozenset[int]]:
        """Returns (what is read for a value, the `id` of the operations that make it of that)."""
        found = self._known.get(x)
        if found is None:
            found = self._known[x] = self._found(x)
        return found

    def _found(self, x: Any) -> tuple[frozenset[Any], frozenset[int]]:
        maker = self._level.maker(x)
        if self._is_read(x, maker) or self._is_surely_much(x, maker):
            return frozenset((x,)), frozenset()
        self._equations[id(maker)] = maker
        each = list(map(self.of, variables(maker)))
        leaves = frozenset().union(*(own for own, _ in each))
        if self._is_much(x, leaves):
            return frozenset((x,)), frozenset()
        return leaves, frozenset((id(maker),)).union(*(own for _, own in each))

    def is_full(self, x: Any) -> bool:
        """Whether a value has the elements of the whole product."""
        return math.prod(x.aval.shape) == math.prod(self._shape)

    def _is_much(self, x: Any, leaves: frozenset[Any]) -> bool:
        """Whether a value is better read than made of what would be read for it."""
        if not self.is_full(x):
            # A kernel reads a bias in float32, too, where the program rounds it first.
            is_of_one = len(leaves) == 1 and len(_real(x.aval.shape)) == 1
            return not is_of_one and bytes_of(x) <= sum(map(bytes_of, leaves))
        made = sum(bytes_of(own) for own in leaves if self.is_made(own))
        return sum(map(self.is_full, leaves)) > self._most(x) or made > bytes_of(x)

    def _most(self, x: Any) -> int:
        """Returns how many whole arrays may be read to compute a whole value again."""
        return 1 if self._is_read_later(x) else AGAIN

    def _is_surely_much(self, x: Any, maker: Any) -> bool:
        """Whether a sum is better read, as far as its summands and their operands say.

        To go back through all blocks of a model, for each of its products, takes long.
        """
        if maker.primitive.name not in SUMS or not self.is_full(x):
            return False
        full = set(filter(self.is_full, variables(maker)))
        read = {y for y in full if self._is_read(y, self._level.maker(y))}
        further = (z for y in full - read for z in variables(self._level.maker(y)))
        # Another one at least: what is added up itself, or this operand of it.
        more = any(
            z not in read and self.is_full(z) and self._is_read(z, self._level.maker(z))
            for z in further
        )
        return len(read) + more > self._most(x)

    def _is_read(self, x: Any, maker: Any) -> bool:
        if maker is None or len(self._equations) > LARGEST or self._level.is_stored(x):
            return True
        if is_elementwise(maker, x.aval.shape, self._allowed):
            return self._asks_for_bits(maker) and not all(map(self._is_kept, variables(maker)))
        if maker.primitive.name not in MOVES:
            return True
        return any(math.prod(y.aval.shape) > math.prod(x.aval.shape) for y in variables(maker))

    def _asks_for_bits(self, equation: Any) -> bool:
        """Whether an operation asks which values are equal to one, or as large as the largest.

        So does the derivative of a maximum. A kernel that makes values again in float32 finds none.
        """
        name = equation.primitive.name
        return name in EQUAL or (
            name in ORDER and any(map(self._is_of_largest, variables(equation)))
        )

    def _is_of_largest(self, x: Any) -> bool:
        maker = self._level.maker(x)
        if maker is not None and (maker.primitive.name in MOVES or _widens(maker)):
            return any(map(self._is_of_largest, variables(maker)))
        return maker is not None and maker.primitive.name in OF_ORDER

    def _is_kept(self, x: Any) -> bool:
        """Whether a kernel has the bits of a value that the program has: it reads them."""
        maker = self._level.maker(x)
        is_same = maker is not None and (maker.primitive.name in MOVES or _widens(maker))
        if is_same and not self._is_read(x, maker):
            return all(map(self._is_kept, variables(maker)))
        return np.dtype(x.aval.dtype).kind in "biu" or self._is_read(x, maker)

    def _is_read_later(self, x: Any) -> bool:
        return self._level.is_read_deeper(x, self._level.depth(x))

    def equation(self, number: int) -> Any:
        """Returns an operation."""
        return self._equations[number]

    def is_made(self, x: Any) -> bool:
        """Whether what is read would be stored only for that."""
        if not self.is_full(x) or self._level.is_stored(x):
            return False
        if self._is_read_later(x):
            # So XLA stores it.
            return False
        maker = self._level.maker(x)
        if maker.primitive.name in MOVES:
            (before,) = variables(maker)
            return math.prod(before.aval.shape) != math.prod(self._shape) or self.is_made(before)
        return True


class Inside:
    """The operations that follow a product, and what is known of what they make."""

    def __init__(self, level: Level, products: tuple[Any, ...], *, exact: bool) -> None:
        self.level, self.products = level, products
        self.shape = products[0].aval.shape
        self.depth = max(map(level.depth, products))
        self.allowed = EXACT if exact else ALLOWED
        self.reductions = EXACT_REDUCTIONS if exact else PLACES.union(REDUCTIONS)
        self.operands = Operands(level, self.shape, self.allowed)
        self.equations: list[Any] = []
        self.reduced: list[Any] = []
        # What each value is computed of again, and what is read for it.
        self.base: dict[Any, Any] = {x: x for x in products}
        self.reads: dict[Any, frozenset[Any]] = {x: frozenset((x,)) for x in products}
        # The product's dimensions, without those of one element, in the order that each has them.
        self.order: dict[Any, tuple[int, ...]] = dict.fromkeys(products, self._real_axes)
        # The order in which a kernel makes them.
        self.made_in = self._real_axes
        self.of_exp: list[exponentials.SumOfExp] = []
        self._grow()
        self._grown = self.base
        self._add_sums_of_exp()

    def without_reductions(self) -> Self:
        """The operations that compute each element by itself."""
        own = copy.copy(self)
        own.reduced, own.of_exp, own.base = [], [], self._grown
        own.equations = [e for e in self.equations if e.outvars[0] in own.base]
        own.__dict__.pop("_own", None)
        return own

    def _is_inside(self, equation: Any) -> bool:
        """Whether an equation that reads something inside computes, or moves, each element."""
        if not equation.outvars or equation.effects:
            return False
        shape, (first, *_) = equation.outvars[0].aval.shape, equation.invars
        if equation.primitive.name == TURN:
            return True
        if equation.primitive.name in MOVES:
            return _real(first.aval.shape) == _real(shape)
        # An operation may broadcast what it reads.
        within = [x for x in variables(equation) if x in self.base]
        is_whole = all(_real(x.aval.shape) == _real(shape) for x in within)
        return is_whole and is_elementwise(equation, shape, self.allowed)

    def _order_after(self, equation: Any) -> tuple[int, ...]:
        """Returns the product's dimensions in the order that what an equation makes has them."""
        before = next(x for x in variables(equation) if x in self.base)
        order = self.order[before]
        if equation.primitive.name != TURN:
            return order
        real = [i for i, size in enumerate(before.aval.shape) if size != 1]
        turned = [i for i in equation.params["permutation"] if i in real]
        return tuple(order[real.index(i)] for i in turned)

    def copied_bytes(self, results: Iterable[Any]) -> int:
        """Returns what is moved to store results in another order than a kernel makes them."""
        turned = [x for x in results if x in self.order and self.order[x] != self.made_in]
        return sum(2 * bytes_of(x) for x in turned if self.is_stored(x))

    def is_turned(self, x: Any) -> bool:
        """Whether a value has its dimensions in another order than the program's product."""
        return self.order[x] != self._real_axes

    def made_in_order(self, axes: tuple[int, ...]) -> Self:
        """The same where a kernel makes the product's dimensions in another order."""
        own = copy.copy(self)
        own.made_in = tuple(axis for axis in axes if axis in self._real_axes)
        return own

    def sums_along(self, axes: Iterable[int]) -> bool:
        """Whether exponentials are added up along all of these axes of the product alone."""
        found = set()
        for own in self.of_exp:
            shape, order = own.z.aval.shape, self.order[own.z]
            real = [i for i, size in enumerate(shape) if size != 1]
            found |= {order[real.index(i)] for i in own.total.params["axes"] if i in real}
        return bool(found) and found == {axis for axis in axes if self.shape[axis] != 1}

    @property
    def _real_axes(self) -> tuple[int, ...]:
        return tuple(i for i, size in enumerate(self.shape) if size != 1)

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
            elif self._is_inside(equation):
                self._take(equation, others)
                for x in equation.outvars:
                    for own in self.level.readers(x):
                        heapq.heappush(heap, (self.level.place(own), id(own), own))

    def _take(self, equation: Any, others: list[Any]) -> None:
        self.equations.append(equation)
        beside = frozenset().union(*(self.operands.of(x)[0] for x in others))
        within = [x for x in variables(equation) if x in self.base]
        bases = {self.base[x] for x in within}
        is_alone = len(bases) == 1 and not any(y.aval.shape == self.shape for y in beside)
        read = beside.union(*(self.reads[x] for x in within))
        order = self._order_after(equation)
        for x in equation.outvars:
            self.reads[x], self.order[x] = read, order
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
            self.base = self.base | dict.fromkeys((last, *wanted), last)

    def keep_compared(self, read: set[Any]) -> None:
        """Has others read values as they are, not computed again, whose largest one is taken.

        They may look for it, and it is one of what is stored. A wider type of a value holds nothing
        more.
        """
        for value in [x for e in self.equations if e.primitive.name in OF_ORDER for x in e.invars]:
            same = [value]
            while (made := self.level.maker(same[-1])) in self.equations and _widens(made):
                same += made.invars
            if not read.isdisjoint(same):
                self.base = self.base | dict.fromkeys(same, same[-1])

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
        return self.level.is_read_stored(x)

    def _is_reduction(self, equation: Any) -> bool:
        if equation.primitive.name not in self.reductions or equation.effects:
            return False
        (x,) = equation.invars
        is_float = np.issubdtype(np.dtype(x.aval.dtype), np.floating) or x.aval.dtype.itemsize == 2
        return is_float and bool(equation.params["axes"])

    def reads_of(self, x: Any) -> frozenset[Any]:
        """Returns what a pass reads for a value, or for the reduction that makes it."""
        return self.reads[x] if x in self.reads else self.reads[self.level.maker(x).invars[0]]

    def of(self, x: Any) -> frozenset[Any]:
        """Returns the products that a value depends on."""
        return self.reads_of(x).intersection(self.products)

    def others(self, x: Any) -> list[Any]:
        """Returns the operations outside that read a value."""
        return [e for e in self.level.readers(x) if id(e) not in self._own]

    @functools.cached_property
    def _own(self) -> set[int]:
        """The `id` of each operation, of which no more are found."""
        return set(map(id, self.equations))


def _real(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the sizes of the dimensions that are more than one element."""
    return tuple(size for size in shape if size != 1)


def _widens(equation: Any) -> bool:
    """Whether an equation is a cast to a wider type."""
    if equation.primitive.name != "convert_element_type":
        return False
    (before,), (after,) = equation.invars, equation.outvars
    return bytes_of(before) < bytes_of(after)


def _may_stand_for(equation: Any, x: Any) -> bool:
    """Whether a kernel may store what an operation makes of a value, and not the value."""
    (y, *more) = equation.outvars
    return not more and bytes_of(y) <= bytes_of(x) and np.dtype(y.aval.dtype) in FLOATS
