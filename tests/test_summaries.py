"""Kept summaries: a kernel is compiled unless the file knows it, and the file is not believed."""

import pathlib
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm import gemm, offline
from tests import compilations, conftest, summaries
from tests.summaries import Findings, Summaries, write

pytestmark = pytest.mark.filterwarnings("ignore:.*lacks a kernel")

OPERAND = jax.ShapeDtypeStruct((128,), jnp.float32)
SPILLING = offline.Report(
    target="h200",
    kernel="kernel",
    grid=(1, 1, 1),
    cluster=(1, 1, 1),
    threads=128,
    registers=255,
    spill_store_bytes=64,
    spill_load_bytes=72,
    shared_memory_bytes=1024,
    tensor_memory_columns=0,
    serialized=("ptxas info : (C7510) wgmma instructions are serialized",),
    ptx="",
    log="",
)


def kernel_of(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    def kernel(source: Any, target: Any) -> None:
        target[...] = function(source[...])

    return plgpu.kernel(kernel, out_type=OPERAND)


def twice(x: jax.Array) -> jax.Array:
    return x + x


def squared(x: jax.Array) -> jax.Array:
    return x * x


def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return kernel_of(twice)(x), kernel_of(squared)(x)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those that have been compiled."""
    seen = []

    def reports(program: bytearray, _: str) -> tuple[offline.Report, ...]:
        seen.append(compilations.text_of(program))
        return (SPILLING,)

    monkeypatch.setattr(offline, "_reports", reports)
    return seen


@pytest.fixture
def file(tmp_path: pathlib.Path, programs: list[str]) -> pathlib.Path:
    """What the compiler said of two kernels."""
    file = tmp_path / "summaries.jsonl"
    file.touch()
    own = Summaries(file)
    own.of(kernel_of(twice), OPERAND, target="h200")
    own.reports(kernel_of(squared), OPERAND, target="h200")
    write(file, own.lines())
    assert len(file.read_text().splitlines()) == len(programs) == 2
    programs.clear()
    return file


def test_what_the_file_knows_is_not_compiled(file: pathlib.Path, programs: list[str]) -> None:
    (found,) = Summaries(file).of(kernel_of(squared), OPERAND, target="h200")
    assert (found.registers, found.spill_bytes) == (255, 64 + 72)
    assert (found.serialized,) == SPILLING.serialized
    assert programs == []


def test_anything_else_is_compiled(file: pathlib.Path, programs: list[str]) -> None:
    own = Summaries(file)
    with pytest.warns(UserWarning, match="lacks a kernel"):
        own.of(kernel_of(jnp.negative), OPERAND, target="h200")
    own.of(kernel_of(squared), OPERAND, target="h100")
    assert len(programs) == 2


def test_a_program_is_compiled_with_the_kernels_that_the_file_knows(
    file: pathlib.Path, programs: list[str]
) -> None:
    Summaries(file).of(both, OPERAND, target="h200")
    file.write_text("")
    Summaries(file).of(both, OPERAND, target="h200")
    assert programs[0] == programs[1]


def test_a_kernel_of_ours_that_was_lowered_before_is_compiled_too(
    tmp_path: pathlib.Path, programs: list[str]
) -> None:
    operand = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
    file = tmp_path / "summaries.jsonl"
    file.touch()
    for _ in range(2):
        # Another function each time, of which JAX remembers nothing.
        def square(a: Any) -> Any:
            return gemm(a, a, implementation="hopper")

        Summaries(file).of(square, operand, target="h200")
    assert programs[0] == programs[1]


def test_what_nobody_asks_for_is_not_written(file: pathlib.Path, programs: list[str]) -> None:
    lines = file.read_text().splitlines()
    own = Summaries(file)
    own.of(kernel_of(squared), OPERAND, target="h200")
    write(file, own.lines())
    (line,) = file.read_text().splitlines()
    assert line in lines
    assert programs == []


def test_what_several_workers_know_is_one_line_for_each_program(
    file: pathlib.Path, programs: list[str]
) -> None:
    one, other = Summaries(file), Summaries(file)
    for own, read in ((one, launched), (other, threads)):
        own.of(kernel_of(squared), OPERAND, target="h200")
        own.findings(read, kernel_of(squared), OPERAND, target="h200", anew=True)
    other.of(kernel_of(twice), OPERAND, target="h200")
    write(file, one.lines() + other.lines())
    in_one_order = file.read_text()
    write(file, other.lines() + one.lines())
    assert file.read_text() == in_one_order
    assert len(in_one_order.splitlines()) == 2
    programs.clear()
    known = Summaries(file)
    for read in (launched, threads):
        known.findings(read, kernel_of(squared), OPERAND, target="h200", anew=False)
    known.of(kernel_of(twice), OPERAND, target="h200")
    assert programs == []


def config_of(**attributes: Any) -> Any:
    """Stands for what a process of pytest is told."""
    asked = {"getoption": lambda name: name == "write_summaries"}
    return types.SimpleNamespace(stash=pytest.Stash(), **asked, **attributes)


def test_workers_of_a_run_hand_over_what_they_know(
    file: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, controller = file.read_text(), config_of()
    monkeypatch.setattr(summaries, "FILE", file)
    for function in (twice, squared):
        monkeypatch.setattr(summaries, "KEPT", Summaries(file))
        summaries.KEPT.of(kernel_of(function), OPERAND, target="h200")
        worker = config_of(workeroutput={})
        conftest.pytest_sessionfinish(types.SimpleNamespace(config=worker), 0)
        node = types.SimpleNamespace(config=controller, workeroutput=worker.workeroutput)
        conftest.pytest_testnodedown(node)
    crashed = types.SimpleNamespace(config=controller)
    conftest.pytest_testnodedown(crashed)
    file.write_text("")
    monkeypatch.setattr(summaries, "KEPT", Summaries(file))
    session = types.SimpleNamespace(config=controller)
    conftest.pytest_sessionfinish(session, pytest.ExitCode.TESTS_FAILED)
    assert not file.read_text()
    conftest.pytest_sessionfinish(session, pytest.ExitCode.OK)
    assert file.read_text() == written


def test_a_file_that_the_compiler_contradicts_is_noticed(
    file: pathlib.Path, programs: list[str]
) -> None:
    file.write_text(file.read_text().replace("255", "254"))
    with pytest.raises(AssertionError, match="make summaries"):
        Summaries(file).reports(kernel_of(squared), OPERAND, target="h200")
    assert len(programs) == 1


def threads(report: offline.Report) -> Findings:
    return {"threads": report.threads}


def launched(report: offline.Report) -> Findings:
    return {"threads": report.threads, "grid": list(report.grid)}


def found(
    file: pathlib.Path, read: Callable[[offline.Report], Findings] = threads, *, anew: bool = False
) -> Findings:
    """Has the file say, or keep, what a function reads of a kernel."""
    own = Summaries(file)
    # What another test asks of the same kernel is in the same line.
    own.of(kernel_of(squared), OPERAND, target="h200")
    said = own.findings(read, kernel_of(squared), OPERAND, target="h200", anew=anew)
    write(file, own.lines())
    return said


def test_what_is_read_of_a_kernel_is_kept_until_what_reads_it_changes(
    file: pathlib.Path, programs: list[str]
) -> None:
    assert found(file) == found(file) == {"threads": 128}
    assert len(programs) == 1
    assert found(file, launched) == found(file, launched) == {"threads": 128, "grid": [1, 1, 1]}
    assert len(programs) == 2
    (line,) = file.read_text().splitlines()
    assert line.count("threads") == 1


def test_a_finding_that_the_compiler_contradicts_is_noticed(
    file: pathlib.Path, programs: list[str]
) -> None:
    found(file)
    assert found(file, anew=True) == {"threads": 128}
    file.write_text(file.read_text().replace('"threads": 128', '"threads": 256'))
    assert found(file) == {"threads": 256}
    with pytest.raises(AssertionError, match="make summaries"):
        found(file, anew=True)
    assert len(programs) == 3
