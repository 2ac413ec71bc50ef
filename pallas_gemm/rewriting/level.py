"""One function of a traced program: its equations, who makes each value, and who reads it."""

import functools
import heapq
import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend import core

from pallas_gemm.kernels.functions import flat
from pallas_gemm.op.product import product_p
from pallas_gemm.rewriting import kinds

GAP = 16
"""Between the places of two equations, for those that are added."""


class Level:
    """The equations of a function, without those of the functions that it calls.

    Equations are replaced here, and read out in an order in which they can run. Each product
    has a bit, and each value has the bits of the products that it depends on.

    Attributes:
        jaxpr: The function.
        results: The variables that the function returns.
        given: The variables that it is given, constants first, each with its place among them.
    """

    def __init__(self, jaxpr: core.Jaxpr, equations: Sequence[Any]) -> None:
        self.jaxpr = jaxpr
        self.results = {x for x in jaxpr.outvars if isinstance(x, core.Var)}
        self.given = {x: i for i, x in enumerate((*jaxpr.constvars, *jaxpr.invars))}
        self._equations: dict[float, Any] = {GAP * i: own for i, own in enumerate(equations)}
        self._place = {id(equation): place for place, equation in self._equations.items()}
        self._maker: dict[Any, Any] = {}
        self._readers: dict[Any, list[Any]] = {}
        self._above: dict[Any, int] = {}
        self._depth: dict[Any, int] = {}
        self._bit: dict[Any, int] = {}
        # How many of the readers of each value have their operands in memory.
        self._storing: dict[Any, int] = {}
        # What keeps its order depends on all that came before it.
        self._of_effects = 0
        for equation in equations:
            self._add(equation)

    def _add(self, equation: Any, bit: int = 0) -> None:
        above = before = 0
        for x in self._read_by(equation):
            above |= self._above.get(x, 0)
            before = max(before, self._depth.get(x, 0))
        if _keeps_order(equation):
            above = self._of_effects = above | self._of_effects
        if equation.primitive.name in kinds.DOTS:
            bit = 1 << len(self._bit)
        if bit:
            self._bit[equation.outvars[0]] = bit
            above |= bit
        depth = before + is_stored_by(equation)
        for x in equation.outvars:
            self._maker[x] = equation
            self._above[x] = above
            self._depth[x] = depth

    def _read_by(self, equation: Any) -> Iterable[Any]:
        """Notes that an equation reads its operands, and returns each once."""
        values, stores = dict.fromkeys(variables(equation)), is_stored_by(equation)
        for x in values:
            self._readers.setdefault(x, []).append(equation)
            if stores:
                self._storing[x] = self._storing.get(x, 0) + 1
        return values

    @property
    def equations(self) -> list[Any]:
        """The equations that there are, in the order of their places."""
        return [self._equations[place] for place in sorted(self._equations)]

    def place(self, equation: Any) -> float:
        """Returns where an equation stands."""
        return self._place[id(equation)]

    def is_argument(self, x: Any) -> bool:
        """Whether a value is an argument of the function, and no constant."""
        return self.given.get(x, -1) >= len(self.jaxpr.constvars)

    def maker(self, x: Any) -> Any:
        """Returns the equation that makes a value; None if it is given."""
        return self._maker.get(x) if isinstance(x, core.Var) else None

    def readers(self, x: Any) -> list[Any]:
        """Returns the equations that read a value."""
        return self._readers.get(x, [])

    def only_reader(self, x: Any) -> Any:
        """Returns the equation that alone reads a value; None if there are more, or none."""
        readers = self.readers(x)
        return readers[0] if len(readers) == 1 and x not in self.results else None

    def above(self, x: Any) -> int:
        """Returns the bits of the products that a value depends on."""
        return self._above.get(x, 0)

    def depth(self, x: Any) -> int:
        """Returns how many products and the like come one after the other before a value."""
        return self._depth.get(x, 0)

    def depth_before(self, equation: Any) -> int:
        """Returns the depth of what an equation reads."""
        return max((self._depth.get(x, 0) for x in variables(equation)), default=0)

    def is_read_deeper(self, x: Any, depth: int) -> bool:
        """Whether one of a value's readers also reads a value of more than this depth."""
        depths = self._depth
        for equation in self._readers.get(x, ()):
            for y in equation.invars:
                if type(y) is not core.Literal and depths.get(y, 0) > depth:
                    return True
        return False

    def is_read_stored(self, x: Any) -> bool:
        """Whether a value is a result, or read by an equation that has its operands in memory."""
        return x in self.results or bool(self._storing.get(x))

    def is_stored(self, x: Any, *, but: Any = None) -> bool:
        """Whether a value is in memory, whatever one equation does with it."""
        made = self.maker(x)
        if made is None or is_stored_by(made) or x in self.results:
            return True
        if but is None:
            return self.is_read_stored(x)
        return any(reader is not but for reader in self.readers(x))

    def replace(self, equation: Any, new: Any) -> None:
        """Puts a product in the place of another."""
        of_one = equation.outvars[0]
        self.rename(equation, new)
        for x in new.outvars:
            self._above[x] = self._above[of_one] | self._above.get(x, 0)
            self._depth.setdefault(x, self._depth[of_one])
            self._bit[x] = self._bit[of_one]

    def rename(self, equation: Any, new: Any) -> None:
        """Puts an equation with other results in the place of another."""
        place = self._place[id(equation)]
        self.remove(equation)
        self._put(new, place)

    def _stand(self, equation: Any, place: float) -> None:
        self._equations[place] = equation
        self._place[id(equation)] = place

    def _put(self, equation: Any, place: float) -> None:
        self._stand(equation, place)
        self._read_by(equation)
        for x in equation.outvars:
            self._maker[x] = equation

    def insert(self, removed: Any, new: Any) -> None:
        """Adds an equation, about where one was that has been removed."""
        place = self._place[id(removed)]
        while place in self._equations:
            place += 1
        self._stand(new, place)
        self._add(new)

    def exchange(self, old: Sequence[Any], new: Sequence[Any], product: Any) -> None:
        """Puts equations in the place of others that make the same values for all other equations.

        Args:
            old: The others, in their order, which a product begins.
            new: The equations, in an order in which they can run. They read what is there before
                the others make what other equations read.
            product: The result of that product. All products among the equations count as it.
        """
        made, bit, size = {x for e in new for x in e.outvars}, self._bit[product], len(new)
        end = min(self.place(e) for e in old if not made.isdisjoint(e.outvars))
        for equation in old:
            self.remove(equation)
        for i, equation in enumerate(new):
            self._stand(equation, end - 1 + (1 + i) / (1 + size))
            self._add(equation, bit if equation.primitive is product_p else 0)

    def put_back(self, old: Sequence[Any], new: Sequence[Any]) -> None:
        """Takes back an exchange."""
        for equation in new:
            self.remove(equation)
        for equation in old:
            self._put(equation, self.place(equation))

    def remove(self, equation: Any) -> None:
        """Removes an equation."""
        del self._equations[self._place[id(equation)]]
        stores = is_stored_by(equation)
        for x in set(variables(equation)):
            self._readers[x] = [own for own in self._readers[x] if own is not equation]
            if stores:
                self._storing[x] -= 1

    def is_there(self, equation: Any) -> bool:
        """Whether an equation has been neither replaced nor removed."""
        return self._equations.get(self._place[id(equation)]) is equation

    def depends_more(self, results: Sequence[Any], on: Iterable[Any]) -> None:
        """Notes that results of a product, and what depends on it, depend on others, too."""
        more = 0
        for other in on:
            more |= self._above.get(other, 0)
        if not any(more & ~self._above[x] for x in results):
            return
        bit = self._bit[results[0]]
        for other, bits in self._above.items():
            if bits & bit:
                self._above[other] = bits | more

    def depends_anew(self, equation: Any) -> None:
        """Notes what results of an equation, and all that follows, depend on as it reads now."""
        queue = [equation]
        while queue:
            own = queue.pop()
            above = functools.reduce(operator.or_, map(self.above, variables(own)), 0)
            for x in own.outvars:
                found = above | self.above(x) | self.bit(own.outvars[0])
                if found != self.above(x):
                    self._above[x] = found
                    queue += self.readers(x)

    def bit(self, x: Any) -> int:
        """Returns the bit of the product that makes a value; 0 if none does."""
        return self._bit.get(x, 0)

    def remove_unread(self, suspects: Iterable[Any]) -> None:
        """Removes those of some equations that nobody reads."""
        found = {id(own): own for own in suspects if self.is_there(own)}
        for equation in sorted(found.values(), key=self.place, reverse=True):
            is_read = any(x in self.results or self.readers(x) for x in equation.outvars)
            if not is_read and not equation.effects:
                self.remove(equation)

    def in_order(self) -> list[Any]:
        """Returns the equations in an order in which they can run, nearest to that of their places.

        Raises:
            RuntimeError: There is none.
        """
        in_place = self.equations
        if _is_in_order(in_place):
            return in_place
        makers = {x: e for e in in_place for x in e.outvars}
        waits: dict[float, int] = {}
        wakes: dict[float, list[float]] = {}
        last = None
        for place, equation in sorted(self._equations.items()):
            before = {self._place[id(makers[x])] for x in variables(equation) if x in makers}
            if _keeps_order(equation):
                before |= set() if last is None else {last}
                last = place
            waits[place] = len(before)
            for other in before:
                wakes.setdefault(other, []).append(place)
        ready = [place for place, count in waits.items() if not count]
        heapq.heapify(ready)
        found = []
        while ready:
            place = heapq.heappop(ready)
            found.append(self._equations[place])
            for other in wakes.get(place, ()):
                waits[other] -= 1
                if not waits[other]:
                    heapq.heappush(ready, other)
        if len(found) < len(self._equations):
            raise RuntimeError("equations would have to run before each other")
        return found


def _is_in_order(equations: Sequence[Any]) -> bool:
    """Whether each equation reads only what is given, or was made before."""
    to_come = {x for e in equations for x in e.outvars}
    for equation in equations:
        if not to_come.isdisjoint(variables(equation)):
            return False
        to_come.difference_update(equation.outvars)
    return True


def _keeps_order(equation: Any) -> bool:
    """Whether an equation runs after all others like it that stand before it.

    Nobody sees the effects of simulated kernels, nor that an equation names an axis of a mesh.
    """
    if equation.primitive.name.startswith("pallas_gemm"):
        return False
    return any(type(own).__name__ != "NamedAxisEffect" for own in equation.effects)


def variables(equation: Any) -> list[Any]:
    """Returns the values that an equation reads, without numbers."""
    return [x for x in equation.invars if type(x) is not core.Literal]


def renamed(
    program: core.Jaxpr, given: Sequence[Any], made: Sequence[Any], like: Any
) -> tuple[Any, ...]:
    """Returns the equations of a program that was traced for another one, as a part of that.

    Args:
        program: The program.
        given: The values of the other one that it is given.
        made: Its results there.
        like: An equation of the other one: they have its place in the source, and its context.
    """
    known = dict(zip(program.invars, given, strict=True))
    known |= dict(zip(program.outvars, made, strict=True))
    return tuple(
        own.replace(
            invars=[x if isinstance(x, core.Literal) else known[x] for x in own.invars],
            outvars=[known.setdefault(x, core.Var(x.aval)) for x in own.outvars],
            source_info=like.source_info,
            ctx=like.ctx,
        )
        for own in program.eqns
    )


def called(equation: Any) -> core.Jaxpr | None:
    """Returns the function that an equation calls as a part of the pass that it is in."""
    name = equation.primitive.name
    if name not in flat.CALLS or name in kinds.CALLS_AGAIN:
        return None
    return equation.params.get(flat.CALLS[name])


def is_stored_by(equation: Any) -> bool:
    """Whether an equation has its operands and results in memory."""
    name = equation.primitive.name
    inner = called(equation) if name in flat.CALLS else None
    if inner is None:
        return kinds.is_alone(name)
    if inner not in _STORED_BY:
        _STORED_BY[inner] = any(map(is_stored_by, inner.eqns))
    return _STORED_BY[inner]


_STORED_BY: weakref.WeakKeyDictionary[core.Jaxpr, bool] = weakref.WeakKeyDictionary()
