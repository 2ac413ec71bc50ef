"""Programs of the attack run in processes of their own: one that dies or hangs is one failure."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence

ROOT = pathlib.Path(__file__).parent.parent.parent


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
        return f"{how}: {self.errors[-300:]}"


def environment(**settings: str) -> dict[str, str]:
    """Returns what JAX is told: memory as it is needed, no results of earlier runs, no tables."""
    return {
        **os.environ,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_ENABLE_COMPILATION_CACHE": "0",
        "PALLAS_GEMM_CACHE_DIR": str(pathlib.Path(os.devnull, "no tables")),
        "PYTHONUNBUFFERED": "1",
        **settings,
    }


def run(
    command: Sequence[str],
    told: Callable[[str], None],
    patience: float,
    settings: Mapping[str, str],
) -> End:
    """Runs a command from the root of the repository.

    Args:
        command: The program and its arguments.
        told: Is handed each line of its standard output.
        patience: Seconds without a line after which it is killed.
        settings: Variables of its environment.
    """
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(**settings),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        silent = threading.Event()

        def kill() -> None:
            silent.set()
            process.kill()

        timer = threading.Timer(patience, kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            timer.cancel()
            told(line.rstrip("\n"))
            timer = threading.Timer(patience, kill)
            timer.start()
        code = process.wait()
        timer.cancel()
        errors.seek(0)
        return End(code, silent.is_set(), errors.read())


def module(name: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module of this folder."""
    return [sys.executable, "-m", f"tests.stress.{name}", *arguments]
