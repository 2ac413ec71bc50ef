"""A traced program with our products in it: only the equations that change are others.

All others stay as they were, with their names and places. So shardings, donated arrays, effects
and the user's lines survive.
"""

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from pallas_gemm.kernels.functions import lines
from pallas_gemm.planning import prediction
from pallas_gemm.rewriting import kinds, products
from pallas_gemm.rewriting.elementwise import bytes_of
from pallas_gemm.rewriting.few_bits import few_bits_of
from pallas_gemm.rewriting.flattened import with_rows_apart
from pallas_gemm.rewriting.folds import Fold, Folder
from pallas_gemm.rewriting.grams import gram_of
from pallas_gemm.rewriting.inlining import inlined
from pallas_gemm.rewriting.kept import computed_again
from pallas_gemm.rewriting.level import Level
from pallas_gemm.rewriting.products import Dense, How
from pallas_gemm.rewriting.scattered import chosen
from pallas_gemm.rewriting.side_by_side import beside_of
from pallas_gemm.rewriting.signs import asked_of_results
from pallas_gemm.rewriting.sums import sum_of


@dataclasses.dataclass(frozen=True)
class Found:
    """A product of JAX's own in a program.

    Attributes:
        equation: The product.
        why: Why it is still JAX's; None if a kernel computes it.
        times: How often it runs.
        folded: The operations around it that the kernel computes, too.
    """

    equation: Any
    why: str | None = None
    times: int = 1
    folded: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        """Types and shapes of the operands and of the result."""
        return products.text_of(self.equation)

    @property
    def place(self) -> str | None:
        """The user's line; None if nobody knows."""
        return lines.place(self.equation.source_info)

    @property
    def answer(self) -> str:
        """The fate of the product, in words."""
        if self.why is not None:
            return f"left: {self.why}"
        return f"by a kernel, with {', '.join(self.folded)}" if self.folded else "by a kernel"


class Rewritten(NamedTuple):
    """A function, rewritten.

    Attributes:
        jaxpr: The function.
        found: The products in it, and in what it calls.
    """

    jaxpr: core.Jaxpr
    found: tuple[Found, ...]


class Rewriter:
    """Rewrites functions, each once however often it is called."""

    def __init__(self, how: How) -> None:
        self._how = how
        self._folder = Folder(how)
        self._known: dict[int, tuple[Any, Rewritten]] = {}

    def rewritten(self, jaxpr: core.Jaxpr) -> Rewritten:
        """Returns a function with our products."""
        known = self._known.get(id(jaxpr))
        if known is None:
            # The function is kept beside the answer, so that no other has its number.
            known = self._known[id(jaxpr)] = (jaxpr, self._rewritten(jaxpr))
        return known[1]

    def _rewritten(self, jaxpr: core.Jaxpr) -> Rewritten:
        found: list[Found] = []
        inside = [self._inside(equation, found) for equation in jaxpr.eqns]
        equations = inside
        if dots := sum(map(_is_dot, inside)):
            flat = with_rows_apart(jaxpr, chosen(jaxpr, inlined(jaxpr, inside)))
            flat = asked_of_results(flat)
            equations = self._with_products(Level(jaxpr, flat), found)
            if _are_the_same(equations, flat) and sum(map(_is_dot, flat)) == dots:
                equations = inside
        if _are_the_same(equations, jaxpr.eqns):
            return Rewritten(jaxpr, tuple(found))
        old = frozenset().union(*(e.effects for e in jaxpr.eqns))
        effects = frozenset(jaxpr.effects).union(*(e.effects - old for e in equations))
        return Rewritten(jaxpr.replace(eqns=equations, effects=effects), tuple(found))

    def _inside(self, equation: Any, found: list[Found]) -> Any:
        """Returns an equation with what it calls rewritten."""
        names = kinds.INNER.get(equation.primitive.name)
        if names is None:
            return equation
        params, effects = dict(equation.params), frozenset(equation.effects)
        if params.get("policy") is not None and not params.get("differentiated", True):
            # Its policy knows JAX's product, and is asked when it is derived.
            return equation
        often = params.get("length", 1) if equation.primitive.name == "scan" else 1
        is_same = True
        for name in names:
            given: Any = params.get(name)
            each: tuple[Any, ...] = given if isinstance(given, tuple) else (given,)
            if not all(isinstance(own, core.Jaxpr) for own in each):
                return equation
            new = [self.rewritten(own) for own in each]
            for own in new:
                found += [dataclasses.replace(x, times=x.times * often) for x in own.found]
            is_same = is_same and all(a.jaxpr is b for a, b in zip(new, each, strict=True))
            # Some of a function's effects end where it is called.
            effects = effects.union(
                *(a.jaxpr.effects - b.effects for a, b in zip(new, each, strict=True))
            )
            inner = tuple(own.jaxpr for own in new)
            params[name] = inner if isinstance(given, tuple) else inner[0]
        return equation if is_same else equation.replace(params=params, effects=effects)

    def _with_products(self, level: Level, found: list[Found]) -> list[Any]:
        """Returns the equations of a function with our products."""
        unread: list[Any] = []
        ours: list[tuple[Dense, Found]] = []
        for equation in level.equations:
            if equation.primitive.name not in kinds.DOTS or lines.is_ours(equation.source_info):
                continue
            if not self._is_meant(equation):
                continue
            with equation.ctx.manager:
                new = self._product(equation, level, unread)
            if isinstance(new, Dense):
                ours.append((new, Found(equation, new.left)))
            else:
                found.append(Found(equation, new))
        level.remove_unread(unread)
        self._combine(level, ours, found)
        level.remove_unread(unread)
        return level.in_order()

    def _combine(self, level: Level, ours: list[tuple[Dense, Found]], found: list[Found]) -> None:
        """Lets products be kernels with what is around them, or with each other."""
        by_result = {own.out: own for own, _ in ours}
        folded: dict[Any, tuple[str, ...]] = {}
        folds: list[Fold] = []
        for own, record in ours:
            if own.out not in folded:
                equation = level.maker(own.out)
                with equation.ctx.manager:
                    best = self._combined(level, own, by_result)
                folded |= {} if best is None else best.told
                for out in folded:
                    by_result.pop(out, None)
                folds += [best] if isinstance(best, Fold) else []
            names = folded.get(own.out)
            found.append(
                record if names is None else dataclasses.replace(record, why=None, folded=names)
            )
        if not self._how.exact:
            computed_again(level, self._folder, folds)

    def _combined(self, level: Level, own: Dense, ours: Mapping[Any, Dense]) -> Any:
        """Lets a product be a kernel with others; returns what it is with them."""
        together = sum_of(level, own, ours, self._how)
        if together is not None and together.saved <= 0:
            together = None
        each = (
            self._folder.fold(level, own, ours),
            together,
            gram_of(own, self._how),
            few_bits_of(level, own, self._how),
            beside_of(level, own, self._how, self._folder),
        )
        there = [x for x in each if x is not None]
        if not there:
            return None
        best = max(there, key=lambda x: x.saved)
        best.apply(level)
        return best

    def _is_meant(self, equation: Any) -> bool:
        if self._how.only is None:
            return True
        place = lines.place(equation.source_info)
        return place is not None and any(name in place for name in self._how.only)

    def _product(self, equation: Any, level: Level, unread: list[Any]) -> Dense | str | None:
        """Puts our product in the place of JAX's if a kernel computes it alone.

        Returns the product, or why it stays JAX's whatever is around it.

        Args:
            equation: The product.
            level: The function that it is in.
            unread: Notes what is perhaps not read any more.
        """
        if equation.primitive.name == "ragged_dot_general":
            new = products.grouped(equation, self._how)
            if isinstance(new, str):
                return new
            level.replace(equation, new)
            return None
        own = products.dense(equation, self._how)
        if isinstance(own, str):
            return own
        for name, x in zip(("lhs", "rhs"), own.factors, strict=True):
            own = self._of_stored(own, name, level.maker(x), level, unread)
        if own.left is not None:
            # XLA reads transposed operands as they are stored, too.
            return own
        own = self._as_wanted(own, level)
        new = products.equation_of(own.call, own.dims, own.factors, own.out, equation)
        level.replace(equation, new)
        return own

    def _as_wanted(self, own: Dense, level: Level) -> Dense:
        """Returns a product without the transpositions of its result, if it can do without.

        There may be two that cancel: the gradient of `w` in `x @ w.T` has them.
        """
        turns: list[Any] = []
        stored = [(own.dims.out, own.out)]
        while (turn := level.only_reader(stored[-1][1])) and turn.primitive.name == "transpose":
            letters = "".join(stored[-1][0][i] for i in turn.params["permutation"])
            turns.append(turn)
            stored.append((letters, turn.outvars[0]))
        for count in range(len(turns), 0, -1):
            new = products.turned(own, self._how, out=stored[count])
            if new is not None and new.left is None:
                for turn in turns[:count]:
                    level.remove(turn)
                return new
        return own

    def _of_stored(
        self, own: Dense, name: str, turn: Any, level: Level, unread: list[Any]
    ) -> Dense:
        """Returns a product without the transposition of an operand, if it can do without."""
        if turn is None or turn.primitive.name != "transpose":
            return own
        (before,) = turn.invars
        order, letters = turn.params["permutation"], getattr(own.dims, name)
        stored = "".join(letters[order.index(i)] for i in range(len(letters)))
        new = products.turned(own, self._how, **{name: (stored, before)})
        if new is None:
            return own
        seconds = own.seconds
        if level.is_stored(before, but=turn):
            # Else the operation that makes it writes it transposed.
            seconds += prediction.pass_seconds(2 * bytes_of(before), self._how.device)
        if new.seconds > seconds:
            return own
        unread.append(turn)
        return new


def _is_dot(equation: Any) -> bool:
    return equation.primitive.name in kinds.DOTS


def _are_the_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))
