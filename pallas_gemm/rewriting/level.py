"""One function of a traced program: its equations, who makes each value, and who reads it."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jax.extend import core

from pallas_gemm.rewriting import kinds


class Level:
    """The equations of a function, without those of the functions that it calls.

    Attributes:
        equations: In an order in which they can run.
        results: What the function returns.
    """

    def __init__(self, equations: Iterable[Any], results: Sequence[Any]) -> None:
        self.equations = list(equations)
        self.results = {x for x in results if isinstance(x, core.Var)}
        self._maker: dict[Any, Any] = {}
        self._readers: dict[Any, list[Any]] = {}
        for equation in self.equations:
            for x in equation.outvars:
                self._maker[x] = equation
            for x in {x for x in equation.invars if isinstance(x, core.Var)}:
                self._readers.setdefault(x, []).append(equation)

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

    def is_stored(self, x: Any, *, but: Any) -> bool:
        """Whether a value is in memory, whatever one equation does with it."""
        made = self.maker(x)
        if made is None or kinds.is_apart(made) or x in self.results:
            return True
        return any(reader is not but for reader in self.readers(x))


def without_dead(
    equations: Sequence[Any], results: Iterable[Any], suspects: Collection[int]
) -> list[Any]:
    """Returns equations without those that nobody reads any more.

    Args:
        equations: In their order.
        results: What the function returns.
        suspects: The `id` of those that may have lost their readers.
    """
    wanted = {x for x in results if isinstance(x, core.Var)}
    kept = []
    for equation in reversed(equations):
        is_dead = wanted.isdisjoint(equation.outvars) and not equation.effects
        if id(equation) in suspects and is_dead:
            continue
        kept.append(equation)
        wanted.update(x for x in equation.invars if isinstance(x, core.Var))
    return kept[::-1]
