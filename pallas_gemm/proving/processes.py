"""Programs in processes of their own: one that dies or hangs is a verdict, and not the end."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence


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


def run(
    command: Sequence[str],
    told: Callable[[str], None],
    patience: float,
    environment: Mapping[str, str],
    folder: pathlib.Path | None = None,
) -> End:
    """Runs a command, and ends it with all that it started if it is silent for too long.

    Args:
        command: The program and its arguments.
        told: Is handed each line of its standard output.
        patience: Seconds without a line after which it is killed.
        environment: Its variables.
        folder: Where it runs; here if None.
    """
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(
            command,
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process,
    ):
        silent = threading.Event()

        def end() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        def lose_patience() -> None:
            silent.set()
            end()

        timer = threading.Timer(patience, lose_patience)
        timer.start()
        try:
            for line in process.stdout or ():
                timer.cancel()
                told(line.rstrip("\n"))
                timer = threading.Timer(patience, lose_patience)
                timer.start()
            code = process.wait()
        except BaseException:
            end()
            raise
        finally:
            timer.cancel()
        errors.seek(0)
        return End(code, silent.is_set(), errors.read())
