"""What a module of programs prints, run where no GPU is looked for."""

import gc
import importlib
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FLAGS = (
    # Nothing can be timed where no GPU is, and to prepare it takes a third of compiling.
    "--xla_gpu_autotune_level=0",
    # No fusion runs.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
"""Of XLA: programs are the same."""


def printed(module: str) -> Any:
    """Runs a module of these tests in a process of its own, and returns the JSON that it prints."""
    return json.loads(output(module))


def output(module: str, **settings: str) -> str:
    """Runs `main` of a module in a process of its own, and returns what it prints.

    Args:
        module: Of these tests.
        **settings: Variables of its environment.
    """
    flags = [os.environ.get("XLA_FLAGS", ""), *FLAGS]
    run = subprocess.run(
        [sys.executable, "-m", "tests.programs", module],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags), **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def main() -> None:
    """Runs `main` of a module as the tests run: kernels are lowered quickly.

    To look for garbage takes a fifth of its time, and the process ends soon.
    """
    gc.disable()
    from tests import forks
    from tests.quick import lowering as quick_lowering

    with pytest.MonkeyPatch.context() as patch:
        quick_lowering.install(patch)
        importlib.import_module(sys.argv[1]).main()
    forks.end(0)


if __name__ == "__main__":
    main()
