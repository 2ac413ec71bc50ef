"""How the suite itself behaves: a deadlock fails its test, and plugins of others do no harm."""

import ast
import os
import pathlib
import platform
import subprocess
import sys
import tomllib
import types
from typing import Any

import pytest

from tests import conftest, linking

ROOT = pathlib.Path(__file__).parent.parent

DEADLOCK = """
import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu


def test_that_nobody_arrives():
    def awaits(out_gmem, barrier):
        plgpu.barrier_wait(barrier)
        out_gmem[...] = jnp.zeros((128,), jnp.float32)

    kernel = plgpu.kernel(
        awaits,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=[plgpu.Barrier()],
        interpret=plgpu.InterpretGPUParams(),
    )
    kernel().block_until_ready()


def test_after_it():
    pass
"""

WARNING = """
import warnings

import pytest


class OthersWarning(pytest.PytestWarning):
    pass


def pytest_configure(config):
    warnings.warn(OthersWarning("Benchmarks are automatically disabled because xdist is active."))
"""


def run(folder: pathlib.Path, test: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs a test module with this project's settings."""
    (folder / "test_module.py").write_text(test)
    settings = ("-c", ROOT / "pyproject.toml", f"--rootdir={folder}", "-p", "no:cacheprovider")
    return subprocess.run(
        [sys.executable, "-m", "pytest", *settings, *options, folder / "test_module.py"],
        cwd=folder,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_deadlock_in_the_simulator_fails_its_test_and_no_other(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path, DEADLOCK, "-n1", "--dist=worksteal", "--override-ini=timeout=1")
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "crashed while running 'test_module.py::test_that_nobody_arrives'" in done.stdout


def test_the_settings_end_a_test_that_takes_minutes() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert 0 < options["timeout"] <= 600


def test_what_few_tests_need_does_not_keep_the_others_from_being_collected() -> None:
    """As on a computer with a GPU that has only what most tests need."""
    own = {"_pytest", "bench", "examples", "pallas_gemm", "schedules", "tests"}
    # SciPy comes with JAX, and PyYAML with Flax.
    needed = {"absl", "flax", "hypothesis", "jax", "jaxlib", "numpy", "pytest", "rich"}
    needed |= {"equinox", "optax", "scipy", "yaml"}
    imported = set[str]()
    for file in (ROOT / "tests").rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Import):
                imported.update(name.name.partition(".")[0] for name in node.names)
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module).partition(".")[0])
    assert imported - sys.stdlib_module_names - own == needed


def test_a_plugin_that_warns_when_it_starts_ends_nothing(tmp_path: pathlib.Path) -> None:
    (tmp_path / "others.py").write_text(WARNING)
    done = run(tmp_path, "def test_nothing():\n    pass\n", "-p", "others")
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_files_of_long_tests_are_there_and_begin_first(
    tmp_path: pathlib.Path, pytestconfig: pytest.Config
) -> None:
    files = {file.name for file in (ROOT / "tests").rglob("test_*.py")}
    assert files >= conftest.EARLY
    tests = [
        types.SimpleNamespace(
            path=tmp_path / name, nodeid=nodeid, get_closest_marker=lambda _: None
        )
        for nodeid, name in enumerate(["test_a.py", *sorted(conftest.EARLY), "test_b.py"])
    ]
    conftest.pytest_collection_modifyitems(pytestconfig, tests)
    last = len(conftest.EARLY) + 1
    assert [test.nodeid for test in tests] == [*range(1, last), 0, last]


@pytest.mark.each_value
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("kind", "number"), [("a", 0), ("b", 1)])
@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
def test_values_that_are_combined(size: int, kind: str, number: int, layout: str) -> None:
    assert size
    assert layout
    assert number == "ab".index(kind)


@pytest.mark.every_other
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
def test_values_that_are_many(size: int, layout: str) -> None:
    assert size
    assert layout


@pytest.mark.parametrize(
    ("test", "chosen"),
    [
        (test_values_that_are_combined, ["NN-a-0-1", "NT-b-1-2", "TN-a-0-3", "NN-b-1-4"]),
        (test_values_that_are_many, ["NN-1", "NT-2", "TN-1"]),
    ],
)
def test_some_cases_are_in_every_run(
    test: Any, chosen: list[str], request: pytest.FixtureRequest
) -> None:
    items = request.session.items
    own = [x.name for x in items if getattr(x, "originalname", "") == test.__name__]
    # If one test is named, no others are collected.
    assert sorted(own) in ([], sorted(f"{test.__name__}[{case}]" for case in chosen))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flag is of x86-64")
def test_what_needs_float16_is_skipped_on_a_processor_that_lacks_it() -> None:
    tests = "tests/api/test_gemm.py::test_types_are_those_of_jax_numpy"
    chosen = [f"{tests}[None-{name}]" for name in ("float16", "bfloat16")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *chosen],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2"},
        check=False,
    )
    assert "1 passed, 1 skipped" in done.stdout, done.stdout
    assert "XLA cannot link float16 for this processor" in done.stdout


@pytest.mark.parametrize(
    "text", ["assert 1 == 2", f"INTERNAL: {linking.UNLINKED}", f"UNIMPLEMENTED: {linking.UNTAKEN}"]
)
def test_where_xla_can_do_what_a_test_needs_a_failure_is_one(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linking, "why_untaken", lambda: None)
    report = types.SimpleNamespace(failed=True, outcome="failed", longrepr=text)
    assert linking.skipped(report).outcome == "failed"


def test_what_plain_jax_cannot_multiply_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linking, "why_untaken", lambda: "XLA cannot")
    report = types.SimpleNamespace(failed=True, outcome="failed", location=("a.py", 3, "test_a"))
    report.longrepr = f"UNIMPLEMENTED: {linking.UNTAKEN}"
    assert linking.skipped(report).outcome == "skipped"
    assert report.longrepr == ("a.py", 3, "Skipped: XLA cannot")
