"""Runs Python code as `subprocess.run` would, in forks of a process that has imported JAX.

To import JAX and the package takes a process as long as to compile a kernel. What JAX settles when
it is first used, such as the architecture that it compiles for, each fork settles for itself.
"""

import atexit
import gc
import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from pallas_gemm import offline
from tests import compilations

ROOT = pathlib.Path(__file__).parent.parent
SETTINGS = (*compilations.SETTINGS, "PYTHON")
"""How variables of the environment begin that a process may read when it imports."""
IMPORTED = ("jax.experimental.pallas.mosaic_gpu", "pallas_gemm.offline")
AS_A_PROGRAM = """
import os, pathlib, runpy, sys
del sys.argv[0]
folder = sys.argv.pop(0)
sys.path[0] = str(pathlib.Path(sys.argv[0]).parent)
os.chdir(folder)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Forks:
    """Stands for the module `subprocess` where it runs code that imports JAX."""

    DEVNULL = subprocess.DEVNULL

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: subprocess.Popen[str] | None = None
        self._settings: dict[str, str] = {}

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, **_: Any
    ) -> subprocess.CompletedProcess[str]:
        """Runs `[sys.executable, "-c", code, *arguments]`, and captures what it prints.

        Without an environment, the variables are those of this process, and settings those of the
        process that is forked if there is one: nothing is imported again.
        """
        executable, option, *code_and_arguments = command
        assert (executable, option) == (sys.executable, "-c")
        if env is None:
            others = {k: v for k, v in os.environ.items() if not k.startswith(SETTINGS)}
            env = os.environ if self._server is None else others | self._settings
        with (
            self._lock,
            tempfile.NamedTemporaryFile("r") as out,
            tempfile.NamedTemporaryFile("r") as err,
        ):
            request = [code_and_arguments, dict(env), out.name, err.name]
            status = self._ask(json.dumps(request), env)
            return subprocess.CompletedProcess(list(command), status, out.read(), err.read())

    def run_program(
        self, path: pathlib.Path, *arguments: str, folder: pathlib.Path = ROOT
    ) -> subprocess.CompletedProcess[str]:
        """Runs `python path *arguments` in a folder."""
        return self.run([sys.executable, "-c", AS_A_PROGRAM, str(folder), str(path), *arguments])

    def close(self) -> None:
        """Ends the process."""
        if self._server is not None:
            self._server.communicate()
            self._server = None

    def _ask(self, request: str, env: Mapping[str, str]) -> int:
        settings = {k: v for k, v in env.items() if k.startswith(SETTINGS)}
        if self._server is None or settings != self._settings:
            self.close()
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.forks"],
                cwd=ROOT,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._settings = settings
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(request, file=self._server.stdin, flush=True)
        return int(self._server.stdout.readline())


def of_session() -> Forks:
    """Returns those that `conftest.py` has kernels compiled in."""
    assert isinstance(offline.subprocess, Forks)
    return offline.subprocess


def main() -> None:
    """Forks for each request on the standard input, and says how that one ended."""
    # What is imported stays, and a fork ends before what it leaves behind is much.
    gc.disable()
    for module in IMPORTED:
        importlib.import_module(module)
    # JAX warns that forks lack its threads, of which none has begun.
    warnings.simplefilter("ignore", RuntimeWarning)
    for request in sys.stdin:
        if child := os.fork():
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            continue
        (code, *arguments), env, *printed = json.loads(request)
        for stream, path in enumerate([os.devnull, *printed]):
            os.dup2(os.open(path, os.O_RDWR), stream)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = ["-c", *arguments]
        warnings.resetwarnings()
        end(_status_of(code))
    end(0)


def _status_of(code: str) -> int:
    """Runs code, and returns the status with which a process of its own would end."""
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def end(status: int) -> NoReturn:
    """Ends the process when all has been done but to free what it imported: half a second."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
