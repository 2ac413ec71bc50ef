"""What the product becomes in a compiled program: its type, and its form on each platform.

A program for several devices gets a product that XLA shares out among them (`partitioning`). What
one device computes, a kernel or XLA's product, is decided for its part alone.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from pallas_gemm.config import GemmConfig
from pallas_gemm.op import partition
from pallas_gemm.op.partition import part_p
from pallas_gemm.op.product import apart, blades, fan_p, product_p, spread
from pallas_gemm.planning import dispatch, targeting, xla
from pallas_gemm.planning.architectures import ARCHITECTURES
from pallas_gemm.planning.call import Call, Signature


@part_p.def_effectful_abstract_eval
@product_p.def_effectful_abstract_eval
def _abstract(*avals: Any, call: Call, **_: Any) -> Any:
    """The result has the type of XLA's product, with its sharding and manual axes.

    The simulator calls back into Python in order, which JAX has to know.
    """
    result = _result_aval(call, avals)
    if call.options.implementation != "interpret":
        return result, set()
    return result, _simulator_effects(call, _signature(avals))


@fan_p.def_abstract_eval
def _abstract_fan(a: Any, *rest: Any, call: Call, **_: Any) -> list[Any]:
    """Each result has the type of its own product; no fan is simulated."""
    return [_result_aval(call, (a, *own)) for own in blades(call, rest)]


@functools.lru_cache(maxsize=4096)
def _result_aval(call: Call, avals: tuple[Any, ...]) -> Any:
    return jax.make_jaxpr(functools.partial(xla.product, call))(*avals).out_avals[0]


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
    if partition.is_one_devices(ctx.module_context.axis_context):
        return _lowered_part(ctx, *operands, call=call, gpu=gpu)
    if call.options.implementation == "interpret":
        raise ValueError(
            "implementation='interpret' simulates the kernel of one GPU, but this program is for"
            " several devices; inside `jax.shard_map` over all axes of the mesh each has its own"
        )
    if call.pieces > 1:
        run = functools.partial(apart, call)
    elif devices is None or partition.why_not(ctx.module_context):
        run = functools.partial(xla.product, call)
    else:
        run = functools.partial(partition.product, call)
    return mlir.lower_fun(run, multiple_results=False)(ctx, *operands)


def _lowered_part(ctx: mlir.LoweringRuleContext, *operands: Any, call: Call, gpu: bool) -> Any:
    """Lowers what one device computes."""
    if gpu and call.options.target is None:
        call = call.with_target(targeting.first_gpu())
    if not gpu:
        _refuse_gpu_kernel(call)
        if call.options.implementation != "interpret":
            call = call.with_target(None)
    signature = _signature(ctx.avals_in)
    decision = dispatch.decide(call, signature)
    if decision.plan is not None:
        run = _traced_once(call, signature, decision.plan.config)
    elif call.pieces > 1:
        run = functools.partial(apart, call)
    else:
        run = dispatch.implement(decision, call)
    return partition.lower_off_mesh(ctx, run, operands)


@functools.lru_cache(maxsize=1024)
def _traced_once(call: Call, signature: Signature, config: GemmConfig) -> Callable[..., Any]:
    """Returns a product whose kernel is traced once, however many programs it is part of."""
    decision = dispatch.decide(call, signature)
    # Tables of tuned configs make it another one, which is why it is a part of the key.
    assert decision.plan is not None
    assert decision.plan.config == config
    return jax.jit(dispatch.implement(decision, call))


def _refuse_gpu_kernel(call: Call) -> None:
    asked = call.options.implementation
    if asked in [architecture.name for architecture in ARCHITECTURES]:
        raise ValueError(
            f"implementation={asked!r} needs an NVIDIA GPU, but this program is compiled for"
            " another platform; None takes what there is, 'interpret' simulates the kernel"
        )


def _lowered_fan(ctx: mlir.LoweringRuleContext, *operands: Any, call: Call, **_: Any) -> Any:
    return mlir.lower_fun(functools.partial(spread, call), multiple_results=True)(ctx, *operands)


mlir.register_lowering(fan_p, _lowered_fan)
for _primitive, _rule in ((product_p, _lowered), (part_p, _lowered_part)):
    mlir.register_lowering(_primitive, functools.partial(_rule, gpu=False))
    mlir.register_lowering(_primitive, functools.partial(_rule, gpu=True), platform="cuda")
