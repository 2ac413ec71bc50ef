"""Programs on computers without a GPU: JAX's plugin tells them nothing of CUDA's libraries."""

import ctypes
import os
import pathlib
import subprocess
import sys

import pytest

from pallas_gemm.computer import driver, occupancy


@pytest.mark.parametrize(
    ("library", "given", "expected"),
    [
        ("no_such_library.so", {}, {driver.SKIPS_CHECK: "1"}),
        ("no_such_library.so", {driver.SKIPS_CHECK: ""}, {driver.SKIPS_CHECK: ""}),
        ("libc.so.6", {}, {}),
    ],
    ids=["no driver", "what was said stays", "a driver"],
)
def test_the_check_is_skipped_where_there_is_no_driver(
    library: str,
    given: dict[str, str],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(occupancy, "LIBRARY", library)
    monkeypatch.setattr(os, "environ", dict(given))
    driver.skip_check_without_driver()
    assert os.environ == expected


def test_a_program_that_imports_us_finds_the_cpu_without_a_word() -> None:
    try:
        ctypes.CDLL(occupancy.LIBRARY)
    except OSError:
        pass
    else:
        pytest.skip("here is a driver")
    others = {name: text for name, text in os.environ.items() if name != "JAX_PLATFORMS"}
    asked = subprocess.run(
        [sys.executable, "-c", "import jax, pallas_gemm; print(jax.default_backend())"],
        cwd=pathlib.Path(__file__).parents[2],
        env=others,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (asked.stdout, asked.stderr) == ("cpu\n", "")
