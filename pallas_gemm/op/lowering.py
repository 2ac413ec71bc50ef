"""What the product becomes in a compiled program: its type, and its form on each platform.

A program for several devices gets a product that XLA shares out among them (`partition`). What
one device computes, a kernel or XLA's product, is decided for its part alone.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from pallas_gemm.op import kept_kernels, mesh_context, partition
from pallas_gemm.op.parts import part_p
from pallas_gemm.op.product import product_p
from pallas_gemm.planning import dispatch, ignored, targeting, xla
from pallas_gemm.planning.architectures import ARCHITECTURES
from pallas_gemm.planning.call import Call, Signature
from pallas_gemm.planning.dispatch import Decision


@part_p.def_effectful_abstract_eval
@product_p.def_effectful_abstract_eval
def _abstract(*avals: Any, call: Call, **_: Any) -> Any:
    return result_and_effects(xla.product, call, avals)


def result_and_effects(by_xla: Callable[..., Any], call: Call, avals: tuple[Any, ...]) -> Any:
    """Returns the type of what XLA computes, with its sharding and manual axes, and its effects.

    The simulator calls back into Python in order, which JAX has to know.
    """
    result = _type_by_xla(by_xla, call, avals)
    if call.options.implementation != "interpret":
        return result, set()
    return result, _simulator_effects(call, _signature(avals))


def result_type(call: Call, avals: tuple[Any, ...]) -> Any:
    """Returns the type of a product's result."""
    return _type_by_xla(xla.product, call, avals)


@functools.lru_cache(maxsize=4096)
def _type_by_xla(by_xla: Callable[..., Any], call: Call, avals: tuple[Any, ...]) -> Any:
    return jax.make_jaxpr(functools.partial(by_xla, call))(*avals).out_avals[0]


@functools.lru_cache(maxsize=4096)
def _simulator_effects(call: Call, signature: Signature) -> Any:
    run = dispatch.implement(dispatch.decide(call, signature), call)
    operands = [jax.ShapeDtypeStruct(*operand) for operand in signature]
    return jax.make_jaxpr(run)(*operands).effects


def _signature(avals: Any) -> Signature:
    return tuple((tuple(aval.shape), np.dtype(aval.dtype)) for aval in avals)


def _lowered(
    ctx: mlir.LoweringRuleContext, *operands: Any, call: Call, devices: Any, gpu: bool
) -> Any:
    """Lowers a whole product, for one device or for several that share it."""
    if mesh_context.is_one_devices(ctx.module_context.axis_context):
        return _lowered_part(ctx, *operands, call=call, gpu=gpu)
    if call.options.implementation == "interpret":
        raise ValueError(
            "implementation='interpret' simulates the kernel of one GPU, but this program is for"
            " several devices; inside `jax.shard_map` over all axes of the mesh each has its own"
        )
    if devices is None or mesh_context.why_not_partitioned(ctx.module_context):
        run = functools.partial(xla.product, call)
    else:
        run = functools.partial(partition.shared_product, call)
    return mlir.lower_fun(run, multiple_results=False)(ctx, *operands)


def _lowered_part(ctx: mlir.LoweringRuleContext, *operands: Any, call: Call, gpu: bool) -> Any:
    return lower_for_one_device(ctx, operands, call, gpu=gpu)


def lower_for_one_device(
    ctx: mlir.LoweringRuleContext,
    operands: Sequence[Any],
    call: Call,
    *,
    gpu: bool,
    without_kernel: Callable[..., Any] | None = None,
) -> Any:
    """Lowers what one device computes.

    Args:
        ctx: As JAX gives it to a lowering rule.
        operands: Of the call, lowered.
        call: What is computed.
        gpu: The program is for a GPU.
        without_kernel: Computes it from operands where no kernel does; None for XLA's product.
    """
    if gpu and call.options.target is None:
        call = call.with_target(targeting.first_gpu())
    if not gpu:
        _refuse_gpu_kernel(call)
        if call.options.implementation != "interpret":
            call = call.with_target(None)
    signature = _signature(ctx.avals_in)
    decision = dispatch.decide(call, signature)
    if decision.plan is None:
        ignored.warn_of_options(call.options, decision.reason)
        run = without_kernel or dispatch.implement(decision, call)
    elif gpu and kept_kernels.is_lowered_as_it_runs(ctx.module_context):
        return kept_kernels.lower(ctx, operands, call, decision, signature)
    else:
        run = _traced_once(call, decision)
    return mesh_context.lower_off_mesh(ctx, run, operands)


@functools.lru_cache(maxsize=1024)
def _traced_once(call: Call, decision: Decision) -> Callable[..., Any]:
    """Returns a kernel, or its simulation, that is traced once, in however many programs it is."""
    return jax.jit(dispatch.implement(decision, call))


def _refuse_gpu_kernel(call: Call) -> None:
    asked = call.options.implementation
    if asked in [architecture.name for architecture in ARCHITECTURES]:
        raise ValueError(
            f"implementation={asked!r} needs an NVIDIA GPU, but this program is compiled for"
            " another platform; None takes what there is, 'interpret' simulates the kernel"
        )


for _primitive, _rule in ((product_p, _lowered), (part_p, _lowered_part)):
    mlir.register_lowering(_primitive, functools.partial(_rule, gpu=False))
    mlir.register_lowering(_primitive, functools.partial(_rule, gpu=True), platform="cuda")
