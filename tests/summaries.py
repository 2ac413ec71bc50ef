"""What the compiler says of kernels, a line each: `summaries.jsonl`, which is committed.

To compile a kernel takes longer than to lower it, and what comes of it follows from its module, the
target and the compilers. A line is found by a digest of these and by nothing else: for a kernel
that changed, or another release of a compiler, there is none, and it is compiled. So an old line
costs its place, and never says anything wrong. Tests that read instructions compile what they read,
and hold what the compiler says of it against the file.

`make summaries` compiles all anew and writes the file, without the lines that nobody asks for.
"""

import functools
import json
import pathlib
import warnings
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

from pallas_gemm import offline
from tests import compilations, known_kernels

FILE = pathlib.Path(__file__).with_suffix(".jsonl")


class Summary(NamedTuple):
    """What an `offline.Report` says, without the instructions."""

    kernel: str
    registers: int
    spill_bytes: int
    shared_memory_bytes: int
    tensor_memory_columns: int
    serialized: str


Kernels = tuple[Summary, ...]
"""Of one program."""


class Summaries:
    """A file of summaries, and which of them this run has asked for.

    Arguments and errors of `of` and `reports` are those of `offline.compile_reports`.
    """

    def __init__(self, file: pathlib.Path) -> None:
        self._file = file
        lines = file.read_text().splitlines()
        self._known = {
            names: tuple(map(Summary._make, rows)) for names, *rows in map(json.loads, lines)
        }
        self._asked: dict[str, Kernels] = {}

    def of(self, fn: Callable[..., Any], *operands: Any, target: str) -> Kernels:
        """Returns what the file says of the kernels of a program, or else the compiler."""
        known = {name for names in self._known for name in names.split()}
        names, program = _lowered(fn, operands, target, known)
        if names in self._known:
            self._asked[names] = self._known[names]
            return self._known[names]
        warnings.warn(f"{self._file.name} lacks a kernel: make summaries", stacklevel=2)
        if not known.isdisjoint(names.split()):
            names, program = _lowered(fn, operands, target, ())
        return self._note(names, offline._reports(program, target))

    def reports(
        self, fn: Callable[..., Any], *operands: Any, target: str
    ) -> tuple[offline.Report, ...]:
        """Returns what the compiler says of a program; fails where the file says otherwise."""
        names, program = _lowered(fn, operands, target, ())
        found = offline._reports(program, target)
        said = self._note(names, found)
        assert self._known.get(names, said) == said, f"{self._file} is wrong: make summaries"
        return found

    def forget(self) -> None:
        """Has everything compiled."""
        self._known.clear()

    def write(self) -> None:
        """Writes the file: what has been asked for, and no more."""
        lines = (json.dumps([names, *self._asked[names]]) for names in sorted(self._asked))
        self._file.write_text("".join(f"{line}\n" for line in lines))

    def _note(self, names: str, reports: tuple[offline.Report, ...]) -> Kernels:
        self._asked[names] = tuple(map(_summary, reports))
        return self._asked[names]


def _lowered(
    fn: Callable[..., Any], operands: Sequence[Any], target: str, known: Container[str]
) -> tuple[str, bytearray]:
    """Returns the names of a program's kernels, and the program, in which known ones are empty."""
    offline.check_target(target)
    digest = functools.partial(compilations.digest, target=target)
    with known_kernels.left_alone(digest, known) as names:
        program = offline.exported(fn, *operands)
    assert names, "there is no kernel to compile"
    return " ".join(names), program


def _summary(report: offline.Report) -> Summary:
    return Summary(
        kernel=report.kernel,
        registers=report.registers,
        spill_bytes=report.spill_bytes,
        shared_memory_bytes=report.shared_memory_bytes,
        tensor_memory_columns=report.tensor_memory_columns,
        serialized="\n".join(report.serialized),
    )


KEPT = Summaries(FILE)
"""Of all tests."""
