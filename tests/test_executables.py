"""Kept executables: only what is the same in all respects is not compiled again."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compiler  # noqa: TID251
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests import compilations, executables

OPERAND = np.arange(6, dtype=np.float32)


@pytest.fixture
def compiled(
    kept_executables: Callable[..., Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """What is compiled, and not taken from the folder."""
    modules = []

    def compile_and_load(backend: Any, module: Any, *others: Any) -> Any:
        modules.append(module)
        return kept_executables(backend, module, *others)

    kept = executables.kept(compile_and_load, tmp_path)
    monkeypatch.setattr(compiler, "backend_compile_and_load", kept)
    return modules


def doubled() -> Any:
    """A program that JAX has not seen, and is the same every time."""

    def double(x: jax.Array) -> jax.Array:
        return 2 * x

    return jax.jit(double)


def test_the_same_is_compiled_once(compiled: list[Any], tmp_path: pathlib.Path) -> None:
    for _ in range(3):
        np.testing.assert_array_equal(doubled()(OPERAND), 2 * OPERAND)
    assert len(compiled) == len(list(tmp_path.iterdir())) == 1


def test_whatever_differs_is_compiled_anew(compiled: list[Any]) -> None:
    def double(x: jax.Array) -> jax.Array:
        return 3 * x

    doubled()(OPERAND)
    np.testing.assert_array_equal(jax.jit(double)(OPERAND), 3 * OPERAND)
    doubled()(OPERAND[1:])
    doubled()(jax.device_put(OPERAND, jax.devices()[1]))
    assert len(compiled) == 4
    optimised = not jax.config.read("jax_disable_most_optimizations")
    options = {"xla_backend_optimization_level": 3 if optimised else 1}
    doubled().lower(OPERAND).compile(compiler_options=options)
    assert len(compiled) == 5


def test_another_library_or_processor_is_not_the_same(
    kept_executables: Callable[..., Any],
    compiled: list[Any],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    doubled()(OPERAND)
    common = executables._common(jax.local_devices()[0].client)
    assert len(common) == 2
    for part in range(len(common)):
        changed = [b"other" if i == part else each for i, each in enumerate(common)]
        monkeypatch.setattr(executables, "_common", lambda _, changed=changed: changed)
        kept = executables.kept(kept_executables, tmp_path)
        monkeypatch.setattr(compiler, "backend_compile_and_load", kept)
        doubled()(OPERAND)
    assert len(list(tmp_path.iterdir())) == 1 + len(common)


@pytest.mark.parametrize("factor", [2, 3])
def test_what_calls_a_function_of_python_is_not_kept(
    factor: int, compiled: list[Any], tmp_path: pathlib.Path
) -> None:
    result = jax.ShapeDtypeStruct(OPERAND.shape, OPERAND.dtype)
    multiplied = jax.jit(lambda x: jax.pure_callback(lambda x: factor * np.asarray(x), result, x))
    np.testing.assert_array_equal(multiplied(OPERAND), factor * OPERAND)
    assert compiled
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("factor", [2, 3])
def test_what_a_function_of_python_partitions_is_not_kept(
    factor: int, compiled: list[Any], tmp_path: pathlib.Path
) -> None:
    def partition(mesh: Mesh, given: Any, result: Any) -> tuple[Any, ...]:
        return mesh, lambda x: factor * x, result.sharding, tuple(x.sharding for x in given)

    multiplied = custom_partitioning(lambda x: factor * x)
    multiplied.def_partition(partition, sharding_rule="i -> i")
    halves = NamedSharding(Mesh(jax.devices()[:2], "x"), PartitionSpec("x"))
    result = jax.jit(multiplied)(jax.device_put(OPERAND, halves))
    np.testing.assert_array_equal(result, factor * OPERAND)
    assert compiled
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("length", [0, 5, -4])
def test_a_file_that_is_not_whole_is_as_none(
    length: int, compiled: list[Any], tmp_path: pathlib.Path
) -> None:
    doubled()(OPERAND)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:length])
    for _ in range(2):
        np.testing.assert_array_equal(doubled()(OPERAND), 2 * OPERAND)
    assert len(compiled) == 2
    assert compilations.read(file)


def test_text_and_costs_are_told_as_of_what_was_compiled(compiled: list[Any]) -> None:
    def told() -> tuple[Any, ...]:
        program = jax.jit(lambda x: jnp.sort(x) @ x).lower(OPERAND).compile()
        return program.as_text(), program.cost_analysis(), str(program.memory_analysis())

    assert told() == told()
    assert len(compiled) == 1
