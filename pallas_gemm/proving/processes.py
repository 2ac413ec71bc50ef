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
        assert process.stdin
        assert process.stdout
        word, lines = process.stdin, process.stdout

        def end() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        def go(told: Told) -> End:
            silent = threading.Event()

            def lose_patience() -> None:
                silent.set()
                end()

            timer = threading.Timer(patience, lose_patience)
            timer.start()
            try:
                with contextlib.suppress(BrokenPipeError), word:
                    word.write("\n")
                for line in lines:
                    timer.cancel()
                    told(line.rstrip("\n"))
                    timer = threading.Timer(patience, lose_patience)
                    timer.start()
                code = process.wait()
            finally:
                timer.cancel()
            errors.seek(0)
            return End(code, silent.is_set(), errors.read())

        try:
            yield go
        finally:
            if process.poll() is None:
                end()


def run(
    command: Sequence[str],
    told: Told,
    patience: float,
    environment: Mapping[str, str],
    folder: pathlib.Path | None = None,
) -> End:
    """Runs a command that waits for nothing: see `started`."""
    with started(command, patience, environment, folder) as go:
        return go(told)
