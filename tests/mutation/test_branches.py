"""The plugin that tells branches of kernels which tests take one way alone."""

import pathlib
import sys
from collections.abc import Iterator

import jax
import pytest
from jax import lax

from tests.mutation import branches
from tests.quick import numpy_programs

SOURCE = """
def told(x, y):
    assert x != 7
    if x and y > 2:
        return 1
    for _ in range(x):
        x -= 1
    return 2 if y is None else 3
"""


@pytest.fixture
def watching() -> Iterator[branches.Branches]:
    """Leaves the place of the tool free."""
    yield branches.Branches()
    sys.monitoring.free_tool_id(sys.monitoring.COVERAGE_ID)


def test_each_condition_that_was_one_thing_alone_is_told(
    watching: branches.Branches, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, found = str(pathlib.Path(branches.WATCHED, "m.py")), {}
    lines = SOURCE.splitlines(keepends=True)
    monkeypatch.setattr(branches.linecache, "getline", lambda _, number: lines[number - 1])
    code = compile(SOURCE, path, "exec")
    watching.watch(code)
    exec(code, found)
    found["told"](0, 1)
    found["told"](1, 2)
    assert list(watching.report()) == [
        "3 branches of Python, 2 of them one way alone",
        "pallas_gemm/kernels/m.py:4: y > 2 is always false",
        "pallas_gemm/kernels/m.py:8: y is None is always not None",
        "0 branches of kernels, 0 of them one way alone",
    ]
    found["told"](1, 3)
    assert [line.partition(": ")[2] for line in watching.report()][1:2] == [
        "y is None is always not None"
    ]


def test_code_elsewhere_is_not_watched(watching: branches.Branches) -> None:
    found = {}
    code = compile(SOURCE, "m.py", "exec")
    watching.watch(code)
    exec(code, found)
    found["told"](0, 1)
    assert next(watching.report()).startswith("0 branches")


def test_what_a_kernel_decides_while_it_runs_is_told(
    watching: branches.Branches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(branches, "WATCHED", __file__)
    monkeypatch.setattr(numpy_programs, "MAKERS", dict(numpy_programs.MAKERS))
    branches.watch_kernels(watching)
    jaxpr = jax.make_jaxpr(lambda x: lax.cond(x > 0, lambda: x, lambda: -x))(1)
    program = numpy_programs.Program(jaxpr.jaxpr)
    assert program(3) == [3]
    *_, count, line = watching.report()
    assert count == "1 branches of kernels, 1 of them one way alone"
    assert line.startswith("tests/mutation/test_branches.py:")
    assert line.endswith("lambda: -x))(1) takes way 1 alone")
    assert program(-3) == [3]
    assert list(watching.report())[-1] == "1 branches of kernels, 0 of them one way alone"
