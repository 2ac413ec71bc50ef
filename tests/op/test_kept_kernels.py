"""Lowered kernels are kept: in the process, and in the user's folder for the next one."""

import gc
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallas_gemm
from pallas_gemm import gemm
from pallas_gemm.computer import kept_files, versions
from pallas_gemm.computer.user_folder import FOLDER_VARIABLE
from pallas_gemm.op import kept_kernels, lowering

OPERANDS = (jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16),) * 2


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[list[Any]]:
    """What is lowered rather than taken from what is kept; the user's folder is empty at first."""
    found = []
    anew = kept_kernels._lowered_anew

    def noted(run: Any, signature: Any) -> bytes:
        found.append(signature)
        return anew(run, signature)

    monkeypatch.setattr(kept_kernels, "_lowered_anew", noted)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    kept_kernels._lowered.cache_clear()
    yield found
    # What was made for a folder is not for other tests.
    kept_kernels._lowered.cache_clear()


def _text(**options: Any) -> str:
    """Returns a program with a kernel, traced anew."""
    with pallas_gemm.target("h200"):
        traced = jax.jit(lambda a, b: gemm(a, b, transpose_b=True, **options)).trace(*OPERANDS)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in (folder / "kernels").rglob("*") if path.is_file()]


def test_a_kernel_is_lowered_once_for_every_program(
    made: list[Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _text()
    assert first.count("mosaic_gpu_v2") == 1
    assert _text() == first
    assert len(made) == 1
    # As in another process.
    kept_kernels._lowered.cache_clear()
    assert _text() == first
    assert len(made) == 1
    # What was damaged is made anew, and whole again.
    [path] = _files(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    monkeypatch.setattr(
        kept_kernels, "_lowered_anew", lambda *_: made.append("again") or whole[32:]
    )
    kept_kernels._lowered.cache_clear()
    assert _text() == first
    assert (made[1:], _files(tmp_path), path.read_bytes()) == (["again"], [path], whole)


@pytest.fixture
def instant(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """As `made`, where no kernel is lowered: each becomes the same module."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in OPERANDS]
    module = kept_kernels._lowered_anew(
        lambda a, b: jnp.matmul(a, b.T), tuple((x.shape, x.dtype) for x in shapes)
    )
    made.clear()

    def noted(run: Any, signature: Any) -> bytes:
        made.append(signature)
        return module

    monkeypatch.setattr(kept_kernels, "_lowered_anew", noted)
    return made


def test_what_changes_a_kernel_changes_its_name(
    instant: list[Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options in ({}, {"activation": "gelu"}, {"alpha": 0.5}, {"schedule": "hilbert"}):
        _text(**options)
    assert len(instant) == len(_files(tmp_path)) == 4
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    _text()
    with jax.enable_x64(True):
        _text()
    kept_kernels._lowered.cache_clear()
    monkeypatch.setattr(versions, "of_sources", lambda *_: "another")
    _text()
    assert len(instant) == len(_files(tmp_path)) == 7


def test_a_function_of_the_callers_is_kept_in_its_process_alone(
    instant: list[Any], tmp_path: pathlib.Path
) -> None:
    def squared(x: jax.Array) -> jax.Array:
        return x * x

    _text(activation=squared)
    _text(activation=squared)
    assert (len(instant), _files(tmp_path)) == (1, [])


def test_a_program_runs_as_well_where_nothing_can_be_kept(
    instant: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, os.devnull)
    _text()
    assert len(instant) == 1


def test_an_exported_program_is_lowered_for_readers_of_older_releases(
    instant: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for_readers: list[Any] = []
    monkeypatch.setattr(lowering, "_traced_once", lambda *what: for_readers.append(what) or jnp.dot)
    with pallas_gemm.target("h200"):
        b = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
        jax.export.export(jax.jit(gemm), platforms=["cuda"])(OPERANDS[0], b)
    assert (len(for_readers), instant) == (1, [])


def test_a_kernel_is_neither_kept_nor_taken_where_that_is_switched_off(
    instant: list[Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _text()
    [path] = _files(tmp_path)
    monkeypatch.setenv(kept_files.LIMIT_VARIABLE, "0")
    for activation in (None, "gelu"):
        kept_kernels._lowered.cache_clear()
        _text(activation=activation)
    assert len(instant) == 3
    assert _files(tmp_path) == [path]


def test_a_kernel_that_another_user_can_write_is_lowered_anew(
    instant: list[Any], tmp_path: pathlib.Path
) -> None:
    _text()
    [path] = _files(tmp_path)
    path.chmod(0o664)
    kept_kernels._lowered.cache_clear()
    _text()
    # And is replaced by one that nobody else can write.
    assert (len(instant), path.stat().st_mode & 0o777) == (2, 0o644)


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_a_kernel_is_lowered_and_as_ever_afterwards(
    collects: bool,
) -> None:
    seen = []

    def run(a: Any, b: Any) -> Any:
        seen.append(gc.isenabled())
        return jnp.matmul(a, b.T)

    def failing(*_: Any) -> Any:
        raise ArithmeticError

    signature = tuple((x.shape, x.dtype) for x in OPERANDS)
    if not collects:
        gc.disable()
    try:
        kept_kernels._lowered_anew(run, signature)
        seen.append(gc.isenabled())
        with pytest.raises(ArithmeticError):
            kept_kernels._lowered_anew(failing, signature)
        seen.append(gc.isenabled())
    finally:
        gc.enable()
    assert seen == [False, collects, collects]
