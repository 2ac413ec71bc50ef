"""The facts of meshes and devices while a program is traced and lowered."""

import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend import core
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType

from pallas_gemm.call import Call, signature_of

ONE_DEVICES = "it is one device's"
"""Why several devices do not share a product that each computes for itself."""


def device_request(call: Call, operands: Sequence[Any]) -> core.ClosedJaxpr | None:
    """Returns what makes JAX tell a product's lowering the devices; None where that is no use."""
    return request_of(call.options.implementation, operands)


def request_of(implementation: str | None, operands: Sequence[Any]) -> core.ClosedJaxpr | None:
    """Returns the same for what an implementation is to compute of operands."""
    meshes = _meshes(operands)
    alone = any(not mesh.empty for mesh in meshes) and all(mesh.size <= 1 for mesh in meshes)
    if implementation == "interpret" or alone or why_not_shared(*meshes) is not None:
        return None
    return _asks_for_devices()


def is_on_mesh(*operands: Any) -> bool:
    """Whether a product of these operands is known to be for several devices that share it."""
    meshes = _meshes([x for x in operands if isinstance(x, jax.Array)])
    return any(mesh.size > 1 for mesh in meshes) and why_not_shared(*meshes) is None


def is_partial_sum(aval: Any) -> bool:
    """Whether the type of an operand says that it, or its gradient, is a sum still to be made."""
    spec, in_shard_map = aval.sharding.spec, aval.manual_axis_type
    return bool(spec.reduced or spec.unreduced or in_shard_map.unreduced)


def _meshes(operands: Sequence[Any]) -> list[AbstractMesh]:
    """Returns the meshes that operands and the context name; some may be empty."""
    types: Any = [
        x.aval if isinstance(x, core.Var | core.Literal) else jax.typeof(x) for x in operands
    ]
    return [*(x.sharding.mesh for x in types), jax.sharding.get_abstract_mesh()]


def why_not_shared(*meshes: AbstractMesh) -> str | None:
    """Returns why a product on these meshes cannot be shared out; None if it can."""
    for mesh in meshes:
        if AxisType.Manual in mesh.axis_types:
            manual = all(kind == AxisType.Manual for kind in mesh.axis_types)
            return ONE_DEVICES if manual else "the mesh is manual along some axes only"
        if not mesh.empty and mesh.abstract_device is None:
            return "the mesh is abstract and names no device"
    if len({tuple(mesh.shape.items()) for mesh in meshes if mesh.size > 1}) > 1:
        return "the operands are on different meshes"
    return None


def is_one_devices(context: Any) -> bool:
    """Whether a program, or the part of it that is being lowered, is that of a single device.

    Args:
        context: The `axis_context` of the module that is being lowered.
    """
    if hasattr(context, "manual_axes"):
        return context.mesh.size == 1 or set(context.manual_axes) == set(context.mesh.axis_names)
    return getattr(context, "num_devices", 1) == 1


def why_not_partitioned(module: Any) -> str | None:
    """Returns why a program for several devices cannot ask us about parts; None if it can.

    Args:
        module: The context of the module that is being lowered.
    """
    if hasattr(module.axis_context, "manual_axes"):
        return "the mesh is manual along some axes only"
    if module.lowering_parameters.for_export:
        return "an exported program is partitioned where we are not"
    if not jax.config.jax_use_shardy_partitioner:
        return "the Shardy partitioner is off"
    if module.axis_context.device_assignment is None:
        return "JAX does not tell the devices"
    return None


@functools.cache
def _asks_for_devices() -> core.ClosedJaxpr:
    """Returns a program that nobody runs, which makes JAX tell the devices to what it is part of.

    A lowering rule learns them only in programs that hold a primitive known to need them.
    """
    nothing = custom_partitioning(lambda x: x)
    nothing.def_partition(lambda *_: None, sharding_rule="i -> i")
    with jax.sharding.use_abstract_mesh(no_mesh()):
        return jax.make_jaxpr(nothing)(np.zeros(1, np.float32))


def lower_off_mesh(
    ctx: mlir.LoweringRuleContext, run: Callable[..., Any], operands: Sequence[Any]
) -> Any:
    """Lowers a function of arrays whose types say nothing of a mesh, whatever those around it say.

    Kernels take no arrays that vary along the axes of a `shard_map`, or are split by their types.
    """
    types = types_off_mesh(*signature_of(ctx.avals_in))
    with jax.sharding.use_abstract_mesh(no_mesh()):
        lower = mlir.lower_fun(lambda *x: jax.tree.leaves(run(*x)), multiple_results=True)
        inner = ctx.replace(avals_in=types)
        result = lower(inner, *operands)
    if inner.tokens_out is not None:
        # Where the simulator has got to, from one call to the next.
        ctx.set_tokens_out(inner.tokens_out)
    return result


_IN_SHARE: contextvars.ContextVar[bool] = contextvars.ContextVar("in_share", default=False)


def lower_share(
    ctx: mlir.LoweringRuleContext, run: Callable[..., Any], operands: Sequence[Any]
) -> Any:
    """Lowers what one device of a mesh computes, where the partitioner asks for it."""
    before = _IN_SHARE.set(True)
    try:
        return lower_off_mesh(ctx, run, operands)
    finally:
        _IN_SHARE.reset(before)


def may_call_back() -> bool:
    """Whether what is lowered may call Python: JAX loses the functions of a partitioner's parts."""
    return not _IN_SHARE.get()


@functools.lru_cache(maxsize=1024)
def types_off_mesh(*signature: Any) -> Any:
    """Returns the types of arrays on no mesh."""
    with jax.sharding.use_abstract_mesh(no_mesh()):
        shapes = [jax.ShapeDtypeStruct(*operand) for operand in signature]
        return jax.make_jaxpr(lambda *arrays: arrays)(*shapes).in_avals


@functools.cache
def no_mesh() -> AbstractMesh:
    """Returns the mesh of a program that has none."""
    return AbstractMesh((), ())
