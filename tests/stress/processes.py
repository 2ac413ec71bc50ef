"""How programs of the attack are started, each in a process of its own."""

import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence

from pallas_gemm.proving import processes
from pallas_gemm.proving.processes import End

ROOT = pathlib.Path(__file__).parent.parent.parent


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
    """Runs a command from the root of the repository, and waits until it has ended."""
    with processes.started(command, patience, environment(**settings), ROOT) as go:
        return go(told)


def module(name: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module of this folder."""
    return [sys.executable, "-m", f"tests.stress.{name}", *arguments]
