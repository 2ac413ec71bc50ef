"""What a module of programs prints, run where no GPU is looked for."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent


def printed(module: str) -> Any:
    """Runs a module of these tests in a process of its own, and returns the JSON that it prints."""
    return json.loads(output(module))


def output(module: str, **settings: str) -> str:
    """Runs a module in a process of its own, and returns what it prints.

    Args:
        module: Of these tests.
        **settings: Variables of its environment.
    """
    run = subprocess.run(
        [sys.executable, "-m", module],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout
