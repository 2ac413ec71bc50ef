"""What the compiler said of a lowered module, kept between runs of the tests.

A compilation is a function of the module, the target, the releases of the compiler and the settings
of its process. All of them are in the name of the file: a kernel that changed is compiled anew.
"""

import gzip
import hashlib
import importlib.metadata
import os
import pathlib
import tempfile
import time
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from jax.experimental.mosaic.gpu import core
from jaxlib.mlir import ir

from pallas_gemm import offline

Compile = Callable[[bytearray, str], str]

COMPILERS = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc")
SETTINGS = ("XLA_", "JAX_", "MOSAIC_", "LIBTPU_", "CUDA_")
UNUSED_SECONDS = 14 * 24 * 3600
"""A file that was not read for so long is removed."""


def kept(compile_elsewhere: Compile, folder: pathlib.Path) -> Compile:
    """Returns the function that compiles what is not in the folder."""
    for file in folder.iterdir():
        if time.time() - file.stat().st_mtime > UNUSED_SECONDS:
            file.unlink(missing_ok=True)

    def compiled(program: bytearray, target: str) -> str:
        file = folder / f"{_name(program, target)}.gz"
        if (notes := _read(file)) is not None:
            return notes
        notes = compile_elsewhere(program, target)
        _write(file, notes)
        return notes

    return compiled


def unnumbered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a kernel lowered to the same module every time: JAX numbers those of a process."""
    stock = core._run_serde_pass

    def serialised(module: ir.Module, **options: Any) -> ir.Module:
        name = ir.StringAttr.get("kernel", module.context)
        module.operation.attributes["mosaic_gpu.dump_basename"] = name
        return stock(module, **options)

    monkeypatch.setattr(core, "_run_serde_pass", serialised)


def _name(program: bytearray, target: str) -> str:
    """Returns a digest of all that the compiler's notes depend on."""
    described = target.encode(), offline.described(target).encode()
    parts = [bytes(program), *described, pathlib.Path(offline.__file__).read_bytes()]
    parts += [_version(package).encode() for package in COMPILERS]
    given = sorted(item for item in os.environ.items() if item[0].startswith(SETTINGS))
    parts.append(repr(given).encode())
    # Each by its own digest, so that no byte moves from one part to the next unseen.
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _read(file: pathlib.Path) -> str | None:
    """Returns what is in a file; None if there is none, or it is not whole."""
    try:
        notes = gzip.decompress(file.read_bytes()).decode()
    except (OSError, EOFError, ValueError, zlib.error):
        return None
    if not notes:
        # An empty file decompresses to nothing without an error.
        return None
    file.touch()
    return notes


def _write(file: pathlib.Path, notes: str) -> None:
    """Writes a file as a whole: another worker sees all of it, or nothing."""
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as other:
        other.write(gzip.compress(notes.encode()))
    pathlib.Path(other.name).replace(file)
