"""What the compiler said of a lowered module, kept between runs of the tests.

A compilation is a function of the module, the target, the releases of the compiler and the settings
of its process. All of them are in the digest: a kernel that changed is compiled anew. Where its
lines stand is not: nothing follows from that, and one line of a comment would move most of them.
"""

import contextlib
import functools
import gzip
import hashlib
import importlib.metadata
import os
import pathlib
import re
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax.export
import pytest
from jax.experimental.mosaic.gpu import core
from jax.interpreters import mlir
from jaxlib.mlir import ir, passmanager

from pallas_gemm import offline

Compile = Callable[[bytearray, str], str]

COMPILERS = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt"),
    *("nvidia-cuda-nvcc", "nvidia-nvvm"),
)
SETTINGS = ("XLA_", "JAX_", "MOSAIC_", "LIBTPU_", "CUDA_")
UNREAD_VARIABLES = ("XLA_PYTHON_CLIENT_", "JAX_SKIP_CUDA_")
"""How those begin that no compiler reads; `bench` and `doctor` set one each for their process."""
_UNREAD_FLAGS = re.compile(r" *--xla_(cpu|force_host|backend_extra_options=xla_cpu)_[\w=]+")
"""Of XLA's flags: those of the CPU's compiler."""
_INSTALLED = str(pathlib.Path(core.__file__).parents[4])
"""The folder of packages, in which JAX names the assembler and its own libraries."""
UNUSED_SECONDS = 14 * 24 * 3600
"""A file that was not read for so long is removed."""


def kept(compile_elsewhere: Compile, folder: pathlib.Path) -> Compile:
    """Returns the function that compiles what is not in the folder."""
    remove_unused(folder)

    def compiled(program: bytearray, target: str) -> str:
        file = folder / f"{digest(text_of(program), target)}.gz"
        if (known := read(file)) is not None:
            return known.decode()
        notes = compile_elsewhere(program, target)
        write(file, notes.encode())
        return notes

    return compiled


def remove_unused(folder: pathlib.Path) -> None:
    """Removes from a folder the files that have long not been read."""
    for file in folder.iterdir():
        # Another run of the tests may have written, or removed, it meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if time.time() - file.stat().st_mtime > UNUSED_SECONDS:
                file.unlink()


def anonymous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a kernel lowered to the same module every time, in any process, from any folder.

    JAX numbers the modules of a process, and tells where each operation comes from.
    """
    stock = core._run_serde_pass

    def serialised(module: ir.Module, **options: Any) -> ir.Module:
        name = ir.StringAttr.get("kernel", module.context)
        module.operation.attributes["mosaic_gpu.dump_basename"] = name
        passes = passmanager.PassManager.parse("builtin.module(strip-debuginfo)", module.context)
        passes.run(module.operation)
        return stock(module, **options)

    monkeypatch.setattr(core, "_run_serde_pass", serialised)


def digest(module: str, target: str) -> str:
    """Returns a digest of all that the compiler's notes on a module depend on."""
    described = target.encode(), offline.described(target).encode()
    parts = [module.encode(), *described, pathlib.Path(offline.__file__).read_bytes()]
    parts += [_version(package).encode() for package in COMPILERS]
    given = sorted(
        item
        for item in os.environ.items()
        if item[0].startswith(SETTINGS) and not item[0].startswith(UNREAD_VARIABLES)
    )
    parts.append(_UNREAD_FLAGS.sub("", repr(given)).replace(_INSTALLED, "").encode())
    return digest_of(parts)


def digest_of(parts: Sequence[bytes]) -> str:
    """Returns a digest of bytes in some parts."""
    # Each by its own digest, so that no byte moves from one part to the next unseen.
    digests = b"".join(hashlib.sha256(part).digest() for part in parts)
    return hashlib.sha256(digests).hexdigest()[:32]


def text_of(program: bytearray) -> str:
    """Returns an exported program as text, without where its operations come from."""
    text = jax.export.deserialize(program).mlir_module()
    with mlir.make_ir_context():
        return str(ir.Module.parse(text).operation.get_asm(enable_debug_info=False))


@functools.cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def read(file: pathlib.Path) -> bytes | None:
    """Returns what was written to a file; None if there is none, or it is not whole."""
    try:
        content = gzip.decompress(file.read_bytes())
    except (OSError, EOFError, ValueError, zlib.error):
        return None
    if not content:
        # An empty file decompresses to nothing without an error.
        return None
    file.touch()
    return content


def write(file: pathlib.Path, content: bytes) -> None:
    """Writes a file as a whole: another worker sees all of it, or nothing."""
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as other:
        # Compressed more, a twentieth is saved in three times the time.
        other.write(gzip.compress(content, compresslevel=1))
    pathlib.Path(other.name).replace(file)
