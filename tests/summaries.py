"""What the compiler says of kernels, a line each: `summaries.jsonl`, which is committed.

To compile a kernel takes longer than to lower it, and what comes of it follows from its module, the
target and the compilers. A line is found by a digest of these and by nothing else: for a kernel
that changed, or another release of a compiler, there is none, and it is compiled. So an old line
costs its place, and never says anything wrong. A line may also keep what tests find in the
instructions, by a digest of the function that reads them. Tests compile a sample of what they read,
the same one on any day, and hold what the compiler says of it, and what they find, against the
file.

`make summaries` compiles what the file lacks, and writes it without the lines that nobody asks for.
"""

import collections
import functools
import hashlib
import inspect
import json
import pathlib
import warnings
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from pallas_gemm import offline
from pallas_gemm.op import kept_kernels
from tests import compilations, early_reads, known_kernels, parting

FILE = pathlib.Path(__file__).with_suffix(".jsonl")
SAMPLED = 8
"""Tests compile one in so many of the kernels whose instructions they read."""


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

Findings = dict[str, Any]
"""Of one kernel: values of JSON."""


class Summaries:
    """A file of summaries, and which of them this run has asked for.

    Arguments and errors of `of`, `reports` and `findings` are those of `offline.compile_reports`.
    """

    def __init__(self, file: pathlib.Path) -> None:
        self._file = file
        self._wrong = f"{file} is wrong: empty it, and make summaries"
        self._known: dict[str, Kernels] = {}
        self._found: dict[tuple[str, str], Findings] = {}
        for names, *rows in map(json.loads, file.read_text().splitlines()):
            if isinstance(rows[-1], dict):
                self._found |= {(names, by): found for by, found in rows.pop().items()}
            self._known[names] = tuple(map(Summary._make, rows))
        self._asked: dict[str, Kernels] = {}
        self._read: dict[str, dict[str, Findings]] = {}

    def of(self, fn: Callable[..., Any], *operands: Any, target: str) -> Kernels:
        """Returns what the file says of the kernels of a program, or else the compiler."""
        known = {name for names in self._known for name in names.split()}
        names, program = _lowered(fn, operands, target, known)
        if names in self._known:
            self._asked[names] = self._known[names]
            return self._known[names]
        warnings.warn(f"{self._file.name} lacks a kernel: make summaries", stacklevel=2)
        if not known.isdisjoint(names.split()):
            # Kernels that are known are empty in what JAX remembers of the first time.
            jax.clear_caches()
            names, program = _lowered(fn, operands, target, ())
        return self._note(names, offline._reports(program, target))

    def reports(
        self, fn: Callable[..., Any], *operands: Any, target: str
    ) -> tuple[offline.Report, ...]:
        """Returns what the compiler says of a program; fails where the file says otherwise."""
        return self._compared(*_lowered(fn, operands, target, ()), target)

    def findings(
        self,
        read: Callable[[offline.Report], Findings],
        fn: Callable[..., Any],
        *operands: Any,
        target: str,
        anew: bool,
    ) -> Findings:
        """Returns what the file says that a function reads of a kernel, or else what it does read.

        Args:
            read: The function. Of what it calls, all but modules is inside it.
            anew: Whether to compile in any case, and to fail where the file says otherwise.
        """
        by = hashlib.sha256(inspect.getsource(read).encode()).hexdigest()[:16]
        known = () if anew else {names for names, reader in self._found if reader == by}
        names, program = _lowered(fn, operands, target, known)
        if names in known:
            self._asked[names], found = self._known[names], self._found[names, by]
        else:
            if not anew:
                warnings.warn(f"{self._file.name} lacks a kernel: make summaries", stacklevel=2)
            (report,) = self._compared(names, program, target)
            found = read(report)
            assert self._found.get((names, by), found) == found, self._wrong
        self._read.setdefault(names, {})[by] = found
        return found

    def lines(self) -> list[str]:
        """Returns lines of the file: of what has been asked for, and no more."""
        return [
            json.dumps([names, *kernels, self._read.get(names, {})])
            for names, kernels in self._asked.items()
        ]

    def _compared(self, names: str, program: bytearray, target: str) -> tuple[offline.Report, ...]:
        found = offline._reports(program, target)
        said = self._note(names, found)
        assert self._known.get(names, said) == said, self._wrong
        return found

    def _note(self, names: str, reports: tuple[offline.Report, ...]) -> Kernels:
        for report in reports:
            assert not (apart := parting.apart(report.ptx)), f"threads of a warp part: {apart}"
            assert not (early := early_reads.early(report.ptx)), f"sums are read early: {early}"
        self._asked[names] = tuple(map(_summary, reports))
        return self._asked[names]


def write(file: pathlib.Path, lines: Iterable[str]) -> None:
    """Writes a file: one line for each program, with all that some lines say of it."""
    known: dict[str, list[Any]] = {}
    found: dict[str, Findings] = collections.defaultdict(dict)
    for names, *kernels, findings in map(json.loads, lines):
        known[names] = kernels
        found[names] |= findings
    with file.open("w") as out:
        for names in sorted(known):
            findings = dict(sorted(found[names].items()))
            row = [names, *known[names], *filter(None, [findings])]
            print(json.dumps(row), file=out)


def in_sample(position: int) -> bool:
    """Returns whether the kernel at a position of a list is compiled in every run of the tests."""
    return position % SAMPLED == 0


def _lowered(
    fn: Callable[..., Any], operands: Sequence[Any], target: str, known: Container[str]
) -> tuple[str, bytearray]:
    """Returns the names of a program's kernels, and the program, in which known ones are empty."""
    offline.check_target(target)
    digest = functools.partial(compilations.digest, target=target)
    # What this process lowered before is not lowered again, and a known kernel is empty afterwards.
    kept_kernels._lowered.cache_clear()
    with known_kernels.left_alone(digest, known) as names:
        program = offline.exported(fn, *operands)
    kept_kernels._lowered.cache_clear()
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
