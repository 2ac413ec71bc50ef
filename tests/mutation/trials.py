"""A plugin of pytest that runs tests of mutants, each mutant in a process of its own.

A session settles everything, imports what takes long and is not ours, and then collects nothing
itself. For each mutant it parts in two: the child goes on with the tests that were chosen for the
mutant, and imports the changed module instead of the one on the disk; the parent waits for it.

    session ──▶ imports JAX ──▶ fork ──▶ mutant 1: imports ours, collects, runs its tests, ends
                                fork ──▶ mutant 2 ...

So a mutant takes seconds where a process from scratch takes ten more, and an endless loop, a
deadlock or a crash is the child's alone. Processes that tests start see the module on the disk.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import pathlib
import signal
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest

ROOT = pathlib.Path(__file__).parents[2]
COMMON = (
    *("hypothesis", "jax", "jax.numpy", "jax.experimental.pallas.mosaic_gpu", "absl.testing"),
    *("jax.experimental.shard_map", "flax.linen", "flax.nnx", "optax", "rich.console", "scipy"),
)
"""What most tests import, and none of it ours."""
SLOWER = 6
"""How much longer than without a mistake tests may take."""
GRACE = 40
"""Seconds for imports and collection, on a busy computer."""


class Round(NamedTuple):
    """Tests of a mutant that one process runs.

    Attributes:
        tests: In this order, and none after one that fails.
        seconds: What they take without a mistake.
    """

    tests: Sequence[str]
    seconds: float


class Verdict(NamedTuple):
    """What became of a mutant.

    Attributes:
        noticed: A test failed, or took much too long.
        by: Which one; or "import", "time" or "crash".
        ran: How many tests were run.
        seconds: How long it took.
    """

    noticed: bool
    by: str
    ran: int
    seconds: float


class Job(NamedTuple):
    """A mutant and its tests.

    Attributes:
        module: The module's name.
        source: Its text, with the mistake; None for none.
        rounds: Run one after the other until a test fails.
        done: Told of the verdict.
    """

    module: str
    source: str | None
    rounds: Sequence[Round]
    done: Callable[[Verdict], None]


class _Changed(importlib.machinery.SourceFileLoader):
    """Loads another text than the file's."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> types.CodeType:
        """See `importlib`."""
        return compile(self._source, self.get_filename(fullname), "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, changed."""

    def __init__(self, name: str, source: str) -> None:
        self._name, self._source = name, source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See `importlib`."""
        if fullname != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Changed(fullname, spec.origin, self._source)
        return spec


class Trials:
    """The plugin."""

    def __init__(self, jobs: Iterable[Job], workers: int) -> None:
        self._jobs, self._workers = iter(jobs), workers
        self._running: dict[int, _Running] = {}
        self._chosen: dict[str, int] = {}
        self._report = -1
        self._ran = 0

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Parts in two for each mutant; only the children come back from here."""
        for name in COMMON:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        ours = [name for name in sys.modules if name.partition(".")[0] == "pallas_gemm"]
        assert not ours, f"{ours} would be the same in all children"
        for job in self._jobs:
            while len(self._running) >= self._workers:
                if self._wait(session):
                    return
            if self._start(session, _Running(job)):
                return
        while self._running:
            if self._wait(session):
                return
        pytest.exit("all mutants are done", 0)

    def _start(self, session: pytest.Session, running: "_Running") -> bool:
        """Starts the next round of a mutant; True in the child."""
        tests, seconds = running.job.rounds[running.round]
        reads, writes = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            os.close(writes)
            running.pipe, running.until = reads, time.time() + GRACE + SLOWER * seconds
            self._running[pid] = running
            return False
        os.setpgid(0, 0)
        os.close(reads)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        self._report = writes
        self._chosen = {test: rank for rank, test in enumerate(tests)}
        session.config.args = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        if running.job.source is not None:
            sys.meta_path.insert(0, _Finder(running.job.module, running.job.source))
        return True

    def _wait(self, session: pytest.Session) -> bool:
        """Waits for a child to end or to be late; True in the child of its next round."""
        while True:
            for pid, running in self._running.items():
                ended, status = os.waitpid(pid, os.WNOHANG)
                late = time.time() > running.until
                if ended or late:
                    return self._end(session, pid, None if late and not ended else status)
            time.sleep(0.05)

    def _end(self, session: pytest.Session, pid: int, status: int | None) -> bool:
        running = self._running.pop(pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if status is None:
            os.waitpid(pid, 0)
        said = b""
        while part := os.read(running.pipe, 1 << 16):
            said += part
        os.close(running.pipe)
        noticed, by, ran = json.loads(said) if said else (True, "crash", 0)
        if status is None:
            noticed, by = True, "time"
        running.ran += ran
        running.round += 1
        if not noticed and running.round < len(running.job.rounds):
            return self._start(session, running)
        seconds = round(time.time() - running.began, 1)
        running.job.done(Verdict(noticed, by, running.ran, seconds))
        return False

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keeps the tests that were chosen, in their order."""
        items[:] = [item for item in items if item.nodeid in self._chosen]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Orders them, after whatever else does."""
        session.items.sort(key=lambda item: self._chosen[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tells of the first test that fails, and ends."""
        self._ran += report.when == "call"
        if report.failed:
            self._tell(noticed=True, by=report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Tells of a module that cannot be imported, and ends."""
        if report.failed:
            self._tell(noticed=True, by=f"import of {report.nodeid}")

    def pytest_sessionfinish(self) -> None:
        """Tells that no test failed, and ends."""
        if self._report >= 0:
            self._tell(noticed=False, by="")

    def _tell(self, *, noticed: bool, by: str) -> None:
        os.write(self._report, json.dumps([noticed, by, self._ran]).encode())
        # What is left, such as threads that wait for each other, is of no interest.
        os._exit(0)


class _Running:
    """A mutant whose tests run."""

    def __init__(self, job: Job) -> None:
        self.job, self.began = job, time.time()
        self.round = self.ran = 0
        self.pipe, self.until = -1, 0.0


def run(jobs: Iterable[Job], workers: int) -> None:
    """Runs mutants, so many at a time."""
    # The same examples in each process.
    os.environ["CI"] = "1"
    options = ["-q", "-n0", "--capture=no", "-m", "not gpu and not stress", str(ROOT / "tests")]
    pytest.main(options, plugins=[Trials(jobs, workers)])


def names(paths: Iterable[str]) -> Iterator[str]:
    """Yields the names of modules."""
    for path in paths:
        yield path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
