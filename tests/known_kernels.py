"""Lowers no kernel that is known, and gives each a name by which to know it; or empties all.

Most of the time that it takes to lower a kernel goes into the layouts of its values, which JAX
infers from the module that Pallas made of it. The name is a digest of that module.
"""

import contextlib
from collections.abc import Callable, Container, Iterator
from typing import Any

import pytest
from jax._src.pallas.mosaic_gpu import lowering  # noqa: TID251 - no setting
from jax.experimental.mosaic.gpu import core
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import gpu

KNOWN = "pallas_gemm.known"
"""Attribute of a module that is not lowered any further."""


@contextlib.contextmanager
def left_alone(digest: Callable[[str], str], known: Container[str]) -> Iterator[list[str]]:
    """Gives the names of kernels as they are lowered; what holds a known one cannot be compiled.

    Args:
        digest: Makes a name of a module as text.
        known: Names of kernels.
    """
    lower, serialise = core.lower_mgpu_module, core._run_serde_pass
    names: list[str] = []

    def lowered(module: ir.Module, context: Any, semantics: Any, **options: Any) -> None:
        text = module.operation.get_asm(enable_debug_info=False)
        names.append(digest(f"{text}\n{semantics} {sorted(options.items())}"))
        if names[-1] in known:
            module.operation.attributes[KNOWN] = ir.UnitAttr.get(module.context)
        else:
            lower(module, context, semantics, **options)

    def serialised(module: ir.Module, **options: Any) -> ir.Module:
        if KNOWN in module.operation.attributes:
            with module.context, ir.Location.unknown():
                module = ir.Module.create()
        return serialise(module, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "lower_mgpu_module", lowered)
        patch.setattr(core, "_run_serde_pass", serialised)
        yield names


def emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has each kernel do nothing: what surrounds it is compiled as ever, and it in no time."""

    def lowered(module: ir.Module, context: Any, *_: Any, **__: Any) -> None:
        _empty(module.operation)
        context.scratch.finalize_size()

    monkeypatch.setattr(core, "lower_mgpu_module", lowered)
    # What is erased is not made: that takes as long as all that surrounds it.
    monkeypatch.setattr(lowering, "lower_jaxpr_to_mosaic_gpu", lambda *_: ())


def _empty(operation: Any) -> None:
    """Leaves one barrier in what is launched."""
    for block in (block for region in operation.regions for block in region):
        if isinstance(operation.opview, gpu.LaunchOp):
            for inner in list(block.operations)[-2::-1]:
                inner.operation.erase()
            with ir.InsertionPoint.at_block_begin(block), operation.location:
                # What does nothing at all is not launched.
                gpu.barrier()
        else:
            for inner in block.operations:
                _empty(inner.operation)
