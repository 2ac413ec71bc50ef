"""Kernels as they were lowered: each once in a process, and kept on disk for the next.

Lowering a kernel takes about a second of Python, nine tenths of it in JAX's passes for kernels.
What comes out depends on nothing but what it is filed under: what is computed, the plan, the
sources of this package, the versions of JAX, and what JAX reads while it lowers. A file is whole or
not there, and says what it must hold; one that holds something else is made anew. The program
around the kernels is lowered in each process, and XLA compiles all of it, as ever.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.extend import core
from jax.extend.backend import get_default_device
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jax.interpreters import mlir

from pallas_gemm.call import Call, Options, Signature
from pallas_gemm.computer import garbage, kept_files, versions
from pallas_gemm.kernels.functions.activations import ACTIVATIONS
from pallas_gemm.op.mesh import mesh_context
from pallas_gemm.planning import implementation
from pallas_gemm.planning.dispatch import Decision

SETTINGS = (
    "jax_enable_x64",
    "jax_explicit_x64_dtypes",
    "jax_pallas_enable_debug_checks",
    "jax_pallas_poison_buffers",
    "jax_use_hlo_logistic_lowering",
    "jax_use_simplified_jaxpr_constants",
)
"""Settings of JAX that change what a kernel becomes; a release may not have all."""
VARIABLES = "MOSAIC_GPU_"
"""How environment variables begin that do."""


def is_lowered_as_it_runs(module: Any) -> bool:
    """Whether a program is lowered for this release of JAX, and not for readers of older ones.

    Args:
        module: The context of the module that is being lowered.
    """
    parameters = module.lowering_parameters
    return not parameters.for_export or parameters.export_ignore_forward_compatibility


class Kernel(Protocol):
    """A kernel, as what it is made of; equal ones are one kernel."""

    def run(self) -> Callable[..., Any]:
        """Returns the kernel, with what is done before and after it."""

    def made_of(self) -> tuple[Any, ...]:
        """Returns all that it depends on but its operands' shapes and types."""


class Product(NamedTuple):
    """The kernel of a decision about a product."""

    call: Call
    decision: Decision

    def run(self) -> Callable[..., Any]:
        """Returns what the decision stands for."""
        return implementation.of(self.decision, self.call)

    def made_of(self) -> tuple[Any, ...]:
        """Returns the call and how it is computed."""
        plan: Any = self.decision.plan
        how = (plan.architecture.name, plan.device, plan.realigned, plan.config)
        if (other := plan.otherwise) is not None:
            by_xla = implementation.by_xla_otherwise(plan, self.call)
            how += (by_xla, other.realigned, other.config)
        # Where the plan comes from, and what was named for it, makes no difference any more.
        return (dataclasses.replace(self.call, options=Options()), *how)


def lower(
    ctx: mlir.LoweringRuleContext, operands: Sequence[Any], kernel: Kernel, signature: Signature
) -> Any:
    """Lowers a kernel, or takes what it became before."""
    # A program that takes a kernel from a file must tell the compiler where its library is, too.
    importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    whole = ctx.module_context
    module = ir.Module.parse(_lowered(kernel, signature, _settings()), whole.context)
    name = mlir.merge_mlir_modules(
        whole.module, "pallas_gemm", module, dst_symtab=whole.symbol_table
    )
    called: Any = whole.symbol_table[name]
    symbol = ir.FlatSymbolRefAttr.get(name)
    return func.CallOp(called.type.results, symbol, list(operands)).results


@functools.lru_cache(maxsize=1024)
def _lowered(kernel: Kernel, signature: Signature, settings: str) -> bytes:
    """Returns the module of a kernel, with what is done before and after it, as bytecode."""
    path = _path(kernel, signature, settings)
    if path is not None and (kept := _read(path)):
        return kept
    made = _lowered_anew(kernel.run(), signature)
    if path is not None:
        kept_files.keep(path, hashlib.sha256(made).digest() + made)
    return made


def _lowered_anew(run: Callable[..., Any], signature: Signature) -> bytes:
    shapes = [jax.ShapeDtypeStruct(*operand) for operand in signature]
    with jax.sharding.use_abstract_mesh(mesh_context.no_mesh()), garbage.uncollected():
        traced = jax.jit(run, keep_unused=True).trace(*shapes)
        module: Any = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    return mlir.module_to_bytecode(module)


def _text(value: Any) -> str:
    """Returns a text that tells a value from all others, in whatever process.

    Raises:
        TypeError: There is none.
    """
    match value:
        case None | bool() | int() | float() | str():
            return repr(value)
        case np.dtype():
            return value.name
        case np.ndarray():
            return f"{value.dtype.name}{value.shape}{hashlib.sha256(value.tobytes()).hexdigest()}"
        case tuple():
            return f"({', '.join(map(_text, value))})"
        case Mapping():
            return _text(tuple(sorted(value.items())))
        case jax.lax.Precision() | core.Primitive():
            return str(value)
    if dataclasses.is_dataclass(value):
        fields = [_text(getattr(value, field.name)) for field in dataclasses.fields(value)]
        return f"{type(value).__qualname__}({', '.join(fields)})"
    for name, function in ACTIVATIONS.items():
        if value is function:
            return name
    raise TypeError(f"{value!r} has no text that lasts")


def _settings() -> str:
    """Returns what JAX reads while it lowers a kernel."""
    settings = [(name, getattr(jax.config, name, None)) for name in SETTINGS]
    variables = sorted(x for x in os.environ.items() if x[0].startswith(VARIABLES))
    # It lowers for the GPU that there is, whatever the program around the kernel is for.
    capability = getattr(get_default_device(), "compute_capability", None)
    return repr((settings, variables, capability))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _path(kernel: Kernel, signature: Signature, settings: str) -> Any:
    """Returns the file of a kernel; None where nothing can be kept."""
    made_by = versions.of_sources("pallas_gemm/**/*.py", "schedules/**/*.py")
    # What a function of the caller's computes is known in this process alone.
    with contextlib.suppress(TypeError, OSError):
        name = _digest(_text((*kernel.made_of(), signature)))
        return kept_files.folder() / _digest(made_by, settings)[:16] / name
    return None


def _read(path: pathlib.Path) -> bytes | None:
    """Returns what a file holds, if that is what it says it holds."""
    held = kept_files.read(path) or b""
    check, content = held[:32], held[32:]
    return content if hashlib.sha256(content).digest() == check else None
