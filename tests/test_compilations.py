"""Kept compilations: only what is the same in all respects is not compiled again."""

import os
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm import offline
from tests import compilations

OPERAND = jax.ShapeDtypeStruct((128,), jnp.float32)
KERNEL = """
def copy(source, target):
    target[...] = source[...]
"""


class Compiler:
    """Counts what it compiles."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, _: bytearray, target: str) -> str:
        self.count += 1
        return f"for {target}, number {self.count}"


@pytest.fixture(scope="module")
def sine() -> bytearray:
    return offline.exported(jnp.sin, OPERAND)


@pytest.fixture(scope="module")
def cosine() -> bytearray:
    return offline.exported(jnp.cos, OPERAND)


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


def test_the_same_is_compiled_once(
    compiler: Compiler, sine: bytearray, tmp_path: pathlib.Path
) -> None:
    said = [compilations.kept(compiler, tmp_path)(sine, "h200") for _ in range(3)]
    assert said == ["for h200, number 1"] * 3
    assert len(list(tmp_path.iterdir())) == 1


def kernel_at(file: pathlib.Path, line: int) -> Callable[[jax.Array], jax.Array]:
    names = {}
    exec(compile("\n" * line + KERNEL, file, "exec"), names)
    return plgpu.kernel(names["copy"], out_type=OPERAND)


def test_where_a_kernel_stands_is_not_in_its_digest(
    compiler: Compiler, tmp_path: pathlib.Path
) -> None:
    # The program is different too: it says which line exported it.
    one = offline.exported(kernel_at(tmp_path / "one.py", 1), OPERAND)
    other = offline.exported(kernel_at(tmp_path / "folder" / "other.py", 7), OPERAND)
    assert one != other
    assert compilations.kept(compiler, tmp_path)(one, "h200").endswith("number 1")
    assert compilations.kept(compiler, tmp_path)(other, "h200").endswith("number 1")


def test_whatever_differs_is_compiled_anew(
    compiler: Compiler,
    sine: bytearray,
    cosine: bytearray,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = compilations.kept(compiler, tmp_path)
    compiled(sine, "h200")
    compiled(cosine, "h200")
    compiled(sine, "h100")
    assert compiler.count == 3
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} --xla_gpu_of_another_kind")
        compiled(sine, "h200")
    with monkeypatch.context() as patch:
        patch.setattr(compilations, "_version", lambda _: "another")
        compiled(sine, "h200")
    assert compiler.count == 5
    with monkeypatch.context() as patch:
        # What the compiler for the CPU does.
        patch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} --xla_cpu_of_another_kind=1")
        patch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.123")
        patch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        # Where packages are installed.
        for name in ("MOSAIC_GPU_CUDA_ROOT", "MOSAIC_GPU_RUNTIME_LIB_PATH"):
            here, there = compilations._INSTALLED, "/elsewhere"
            patch.setenv(name, os.environ[name].replace(here, there))
        patch.setattr(compilations, "_INSTALLED", there)
        compiled(sine, "h200")
    assert compiler.count == 5


@pytest.mark.parametrize("length", [0, 5, -4])
def test_a_file_that_is_not_whole_is_as_none(
    length: int, compiler: Compiler, sine: bytearray, tmp_path: pathlib.Path
) -> None:
    compiled = compilations.kept(compiler, tmp_path)
    compiled(sine, "h200")
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:length])
    assert compiled(sine, "h200").endswith("number 2")
    assert compiled(sine, "h200").endswith("number 2")


def test_what_the_compiler_refuses_is_not_kept(sine: bytearray, tmp_path: pathlib.Path) -> None:
    def refuses(program: bytearray, target: str) -> str:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        compilations.kept(refuses, tmp_path)(sine, "h200")
    assert list(tmp_path.iterdir()) == []
