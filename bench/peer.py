"""What a peer is, whom we are measured against: a small adapter, with the same face for each."""

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

from bench.products import Operands, Results
from bench.shapes import Case
from bench.workers import Program

Runner = Callable[[Any], Any]
"""Takes operands in the peer's own form, starts the computation, and returns its results."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way of a peer to compute a case.

    Attributes:
        label: Its name among the peer's candidates; may be empty.
        build: Compiles it. Candidates of one peer may be built by several threads at once, if the
            peer says so.
        program: The function to compile, if another process can lower it.
    """

    label: str
    build: Callable[[], Runner]
    program: Program | None = None

    @classmethod
    def of(cls, label: str, program: Program) -> Self:
        """Returns the candidate that is a program."""
        return cls(label, program.compiled, program)


class Peer(Protocol):
    """One implementation.

    Attributes:
        name: As on the command line and in tables.
        threads: Whether candidates may be built in several threads.
    """

    name: str
    threads: bool

    def absent(self) -> str | None:
        """Returns why it cannot be used here, or None."""
        ...

    def refusal(self, case: Case) -> str | None:
        """Returns why it cannot compute a case, or None."""
        ...

    def candidates(self, case: Case) -> Sequence[Candidate]:
        """Returns the ways to compute a case that it does not refuse."""
        ...

    def adopt(self, operands: Operands) -> Any:
        """Returns operands in the peer's form, without a copy."""
        ...

    def wait(self, results: Any) -> None:
        """Returns when results have been computed."""
        ...

    def export(self, results: Any) -> Results:
        """Returns results as JAX arrays."""
        ...


def missing(module: str, package: str) -> str | None:
    """Returns that a package is not installed, or None if its module can be found."""
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    return None if found else f"{package} is not installed"
