"""What XLA compiled for the CPU, kept between the programs of a run, and between runs.

Half of what a small program takes is to compile it, and the same ones come again and again: other
tests make them, the other worker, or the next run. What XLA makes of a module is a function of the
module, of its options and devices, and of the library. All of them are in the digest.
"""

import io
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jaxlib
import pytest
from jax._src import compiler  # noqa: TID251 - no setting writes a file as a whole
from jax.extend.backend import get_backend
from jaxlib import xla_client
from jaxlib.mlir import ir, passmanager

from tests import compilations

PARTITIONED = b"CustomSPMDPartitioning"
"""In a module that XLA asks functions of Python about, which it names by where they are in memory.
"""


def install(monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path) -> None:
    """Has what is not in the folder compiled for as long as the patch lasts."""
    compilations.remove_unused(folder)
    stock = compiler.backend_compile_and_load
    monkeypatch.setattr(compiler, "backend_compile_and_load", kept(stock, folder))


def kept(compile_and_load: Callable[..., Any], folder: pathlib.Path) -> Callable[..., Any]:
    """Returns the function that loads what is in the folder, and compiles the rest.

    Args:
        compile_and_load: Compiles. What it loads from elsewhere, XLA does not write whole.
        folder: Where executables are kept.
    """
    cpu = get_backend("cpu")
    common = _common(cpu)

    def loaded(
        backend: Any,
        module: ir.Module,
        devices: Any,
        options: Any,
        host_callbacks: Sequence[Any],
        *others: Any,
    ) -> Any:
        arguments = backend, module, devices, options, host_callbacks, *others
        if backend is not cpu or host_callbacks or others:
            return compile_and_load(*arguments)
        text = _without_places(module)
        if PARTITIONED in text:
            return compile_and_load(*arguments)
        parts = [text, options.SerializeAsString(), repr([each.id for each in devices]).encode()]
        file = folder / f"{compilations.digest_of([*common, *parts])}.gz"
        if (executable := compilations.read(file)) is not None:
            return backend.deserialize_executable(executable, devices, options)
        compiled = compile_and_load(*arguments)
        compilations.write(file, compiled.serialize())
        return compiled

    return loaded


def _common(cpu: Any) -> list[bytes]:
    """Returns what is the same for all programs of a process: the library and the processor."""
    topology = xla_client.get_topology_for_devices(cpu.devices())
    versions = jaxlib.__version__, cpu.platform_version
    return [repr((versions, os.environ.get("XLA_FLAGS"))).encode(), topology.serialize()]


def _without_places(module: ir.Module) -> bytes:
    """Returns a module as bytes, without where its operations come from."""
    written = io.BytesIO()
    with module.context:
        copy = module.operation.clone(ip=False)
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(copy)
        copy.write_bytecode(written)
    return written.getvalue()
