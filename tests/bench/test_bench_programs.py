"""The programs of `bench`, started as anybody would: help, a missing extra, nothing to run on."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

import bench
from tests import forks

ROOT = pathlib.Path(__file__).parent.parent.parent
PROGRAMS = sorted(
    path.name for path in (ROOT / "bench").glob("*.py") if "if __name__" in path.read_text()
)
ON_A_GPU = sorted({*PROGRAMS} - {"demo.py", "figures.py", "loss_curve.py", "mesh_traffic.py"})


def started(
    program: pathlib.Path, *arguments: str, without: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program; `without` is a package that cannot be imported, and nor can JAX."""
    path = str(program)
    code = (
        "import runpy, sys\n"
        f"sys.argv = [{path!r}, *{list(arguments)!r}]\n"
        f"sys.modules[{without!r}] = sys.modules['jax'] = None\n"
        f"runpy.run_path({path!r}, run_name='__main__')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_programs_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "benchmarking.md").read_text()
    assert all(f"bench/{program}" in page for program in PROGRAMS)
    assert len(ON_A_GPU) == 12


STARTED = [
    *(ROOT / "bench" / program for program in PROGRAMS),
    *(path for path in (ROOT / "examples").glob("*.py") if "if __name__" in path.read_text()),
]


@pytest.mark.parametrize("program", STARTED, ids=lambda path: path.name)
def test_each_reads_its_command_line_as_the_others_do(program: pathlib.Path) -> None:
    text = program.read_text()
    assert "    command.start(" in text
    # `--help` begins with it, in a window of 80 columns.
    shown = ast.get_docstring(ast.parse(text)) or ""
    assert 0 < max(map(len, shown.splitlines())) <= 80


def test_help_works_and_is_no_failure() -> None:
    shown = forks.of_session().run_program(ROOT / "bench" / "demo.py", "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "The program of `make demo`" in shown.stdout


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    refused = forks.of_session().run_program(ROOT / "bench" / "parallel_bench.py")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.count("\n") == 1
    assert "this needs an NVIDIA GPU" in refused.stderr


# Neither gets as far as importing JAX, which takes seconds.
@pytest.mark.parametrize("program", STARTED, ids=lambda path: path.name)
def test_without_its_extra_it_says_so_in_one_line_and_has_help_all_the_same(
    program: pathlib.Path,
) -> None:
    package, extra = bench.NEEDED[program.parent.name]
    refused = started(program, without=package)
    assert (refused.returncode, refused.stdout) == (2, "")
    needs = f"this needs {package}: pip install '.[{extra}]'"
    assert refused.stderr == f"{program.stem}: {needs}\n"
    shown = started(program, "--help", without=package)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout == f"{ast.get_docstring(ast.parse(program.read_text()), clean=False)}\n"
