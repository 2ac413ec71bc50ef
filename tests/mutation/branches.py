"""A plugin of pytest that says which branches of kernels tests take one way alone.

    python -m pytest -n 0 -p tests.mutation.branches tests/kernels/hopper/test_hopper_simulated.py

Python decides by sizes while a kernel is traced, and the kernel decides again while it runs. Both
count, of the tests that are named: those that simulate a kernel, and compare its numbers.
"""

import collections
import dis
import itertools
import linecache
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from tests.mutation import reached

WATCHED = str(reached.ROOT / "pallas_gemm" / "kernels")
_TOOL = sys.monitoring.COVERAGE_ID
_BRANCH = sys.monitoring.events.BRANCH
_WORDS = {
    "POP_JUMP_IF_FALSE": ("true", "false"),
    "POP_JUMP_IF_TRUE": ("false", "true"),
    "POP_JUMP_IF_NONE": ("not None", "None"),
    "POP_JUMP_IF_NOT_NONE": ("None", "not None"),
}
"""What a condition is where Python goes on, and where it jumps."""


class Branches:
    """Which ways are taken: of Python's jumps, and of what kernels decide by the line of each."""

    def __init__(self) -> None:
        self._jumps: dict[tuple[types.CodeType, int], dis.Instruction] = {}
        self._taken: dict[tuple[types.CodeType, int], set[bool]] = collections.defaultdict(set)
        self.decided: dict[tuple[str, int], set[int]] = collections.defaultdict(set)
        sys.monitoring.use_tool_id(_TOOL, "branches")
        sys.monitoring.register_callback(_TOOL, _BRANCH, self._take)

    def watch(self, code: types.CodeType) -> None:
        """Watches a module's code, and that of all functions in it."""
        if not code.co_filename.startswith(WATCHED):
            return
        sys.monitoring.set_local_events(_TOOL, code, _BRANCH)
        every = list(dis.get_instructions(code))
        failing = {x.offset for x in every if x.opname == "LOAD_ASSERTION_ERROR"}
        for own, following in itertools.pairwise(every):
            if own.opname in _WORDS and failing.isdisjoint((own.argval, following.offset)):
                self._jumps[code, own.offset] = own
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self.watch(constant)

    def _take(self, code: types.CodeType, offset: int, destination: int) -> object:
        own = self._jumps.get((code, offset))
        if own is None:
            return sys.monitoring.DISABLE
        taken = self._taken[code, offset]
        taken.add(destination == own.argval)
        return sys.monitoring.DISABLE if len(taken) == 2 else None

    def report(self) -> Iterator[str]:
        """Yields how many branches are taken, and where one is taken one way alone."""
        alone = list[str]()
        for (code, offset), taken in self._taken.items():
            if len(taken) == 1:
                own = self._jumps[code, offset]
                word = _WORDS[own.opname][taken.copy().pop()]
                alone.append(_said(code.co_filename, own.positions, f"is always {word}"))
        yield f"{len(self._taken)} branches of Python, {len(alone)} of them one way alone"
        yield from sorted(alone)
        same = {place: taken for place, taken in self.decided.items() if len(taken) == 1}
        yield f"{len(self.decided)} branches of kernels, {len(same)} of them one way alone"
        for (path, line), (way,) in sorted(same.items()):
            at = dis.Positions(line, line, None, None)
            yield _said(path, at, f"takes way {way} alone")


def _said(path: str, at: Any, word: str) -> str:
    """Says what a branch does, after its place and what is there."""
    text = linecache.getline(path, at.lineno)
    if at.col_offset is not None and at.lineno == at.end_lineno:
        text = text.encode()[at.col_offset : at.end_col_offset].decode()
    return f"{pathlib.Path(path).relative_to(reached.ROOT)}:{at.lineno}: {text.strip()} {word}"


def watch_kernels(branches: Branches) -> None:
    """Notes which way the simulator takes where a kernel decides."""
    from jax._src import source_info_util  # noqa: TID251 - no other way

    from tests.quick import numpy_programs

    stock = numpy_programs.MAKERS["cond"]

    def noted(eqn: Any, **params: Any) -> Any:
        rule: Any = stock(eqn, **params)
        frame = source_info_util.user_frame(eqn.source_info.traceback)
        if frame is None or not frame.file_name.startswith(WATCHED):
            return rule
        taken = branches.decided[frame.file_name, frame.start_line]

        def run(which: Any, *values: Any) -> Any:
            taken.add(int(which))
            return rule(which, *values)

        return run

    numpy_programs.MAKERS["cond"] = noted


def pytest_configure(config: pytest.Config) -> None:
    """Watches what is imported from now on."""
    branches = Branches()
    config.stash[BRANCHES] = branches
    sys.meta_path.insert(0, reached.Finder(branches))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Watches kernels, now that JAX has its settings."""
    watch_kernels(session.config.stash[BRANCHES])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Says what was found."""
    for line in config.stash[BRANCHES].report():
        terminalreporter.write_line(line)


BRANCHES = pytest.StashKey[Branches]()
