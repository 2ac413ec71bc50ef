"""A plugin of pytest that writes which lines each test reaches, and how long the test takes.

    python -m pytest -n 0 -p tests.mutation.reached --reached=FILE tests/op

Each line of the file is a record of one test: {"test", "seconds", "lines": {path: [number, ...]}}.
The first is of no test: what is reached while modules are imported. A line that runs once in a
process, such as in a cached function, is reached by the first test that needs it, and by no other.
"""

import importlib.abc
import importlib.machinery
import json
import pathlib
import sys
import time
import types
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ("pallas_gemm", "schedules")
_TOOL = sys.monitoring.COVERAGE_ID
_LINE = sys.monitoring.events.LINE


class Lines:
    """The lines that are reached, of code that is watched."""

    def __init__(self) -> None:
        self._seen: dict[str, set[int]] = {}
        sys.monitoring.use_tool_id(_TOOL, "reached lines")
        sys.monitoring.register_callback(_TOOL, _LINE, self._reach)

    def watch(self, code: types.CodeType) -> None:
        """Watches a module's code, and that of all functions in it."""
        sys.monitoring.set_local_events(_TOOL, code, _LINE)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self.watch(constant)

    def taken(self) -> dict[str, list[int]]:
        """Returns what was reached since the last call."""
        found = {path: sorted(lines) for path, lines in sorted(self._seen.items())}
        self._seen.clear()
        sys.monitoring.restart_events()
        return found

    def _reach(self, code: types.CodeType, line: int) -> object:
        path = code.co_filename.removeprefix(f"{ROOT}/")
        self._seen.setdefault(path, set()).add(line)
        # Once for each test is enough.
        return sys.monitoring.DISABLE


class _Loader(importlib.machinery.SourceFileLoader):
    """Has the code of a module watched before it runs."""

    def __init__(self, name: str, path: str, lines: Lines) -> None:
        super().__init__(name, path)
        self._lines = lines

    def get_code(self, fullname: str) -> types.CodeType | None:
        """See `importlib`."""
        code = super().get_code(fullname)
        if code is not None:
            self._lines.watch(code)
        return code


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of the packages, to be watched."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See `importlib`."""
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None and spec.has_location:
            spec.loader = _Loader(fullname, spec.origin, self._lines)
        return spec


class Recorder:
    """Writes a record of each test."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._lines = file, Lines()
        sys.meta_path.insert(0, Finder(self._lines))

    def write(self, test: str, seconds: float) -> None:
        """Writes what was reached since the last record."""
        record = {"test": test, "seconds": round(seconds, 3), "lines": self._lines.taken()}
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def pytest_collection_finish(self) -> None:
        """Tells what is reached by import."""
        self.write("", 0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Tells what a test reaches, with its fixtures."""
        start = time.perf_counter()
        try:
            return (yield)
        finally:
            self.write(item.nodeid, time.perf_counter() - start)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the name of the file."""
    parser.addoption("--reached", type=pathlib.Path, help="write which lines each test reaches")


def pytest_configure(config: pytest.Config) -> None:
    """Watches what is imported from now on."""
    path = config.getoption("reached")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        recorder = Recorder(path.open("w", buffering=1))
        config.pluginmanager.register(recorder)
