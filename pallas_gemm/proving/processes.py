"""Programs in processes of their own: one that dies or hangs is a verdict, and not the end."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, NamedTuple

Told = Callable[[str], None]
"""Is handed each line of a program's standard output."""


@dataclasses.dataclass(frozen=True)
class End:
    """How a process ended.

    Attributes:
        code: Its exit status, negative for a signal.
        silent: It was killed, because it said nothing for too long.
        errors: The end of what it wrote to its standard error.
    """

    code: int
    silent: bool
    errors: str

    def __str__(self) -> str:
        how = "killed after it said nothing for too long" if self.silent else f"ended {self.code}"
        return f"{how}: {self.errors[-300:]}" if self.errors else how


Go = Callable[[Told], End]
"""Writes a line to a program that waits for it, and listens until it ends."""


@contextlib.contextmanager
def started(
    command: Sequence[str],
    patience: float,
    environment: Mapping[str, str],
    folder: pathlib.Path | None = None,
) -> Iterator[Go]:
    """Starts a command, and ends it with all that it started on leaving.

    Lines that it writes before it is told to go on are kept.

    Args:
        command: The program and its arguments.
        patience: Seconds without a line after which it is killed; they count from the word to go.
        environment: Its variables.
        folder: Where it runs; here if None.
    """
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(
            command,
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process,
    ):
        watched = _Watched(process, errors, patience)
        try:
            yield watched.go
        finally:
            if process.poll() is None:
                watched.end()


class _Watched(NamedTuple):
    """A program that waits for a word, and the patience with it."""

    process: subprocess.Popen[str]
    errors: IO[str]
    patience: float

    def go(self, told: Told) -> End:
        """See `Go`."""
        assert self.process.stdin
        assert self.process.stdout
        silent = threading.Event()

        def lose_patience() -> None:
            silent.set()
            self.end()

        timer = threading.Timer(self.patience, lose_patience)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError), self.process.stdin as word:
                word.write("\n")
            for line in self.process.stdout:
                timer.cancel()
                told(line.rstrip("\n"))
                timer = threading.Timer(self.patience, lose_patience)
                timer.start()
            code = self.process.wait()
        finally:
            timer.cancel()
        self.errors.seek(0)
        return End(code, silent.is_set(), self.errors.read())

    def end(self) -> None:
        """Kills the program, and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
