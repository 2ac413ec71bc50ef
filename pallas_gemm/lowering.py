"""What the product becomes in a compiled program: its type, and its form on each platform.

Partitioning among devices belongs here, between the primitive and what `dispatch` decides on, where
operands are matrices and derivatives and `vmap` are done. JAX tells `custom_partitioning` the
devices only where it finds it in a program, so the primitive has to carry it as a jaxpr among its
parameters, around a primitive for the product of one device's part.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from pallas_gemm import dispatch, targeting
from pallas_gemm.architectures import ARCHITECTURES
from pallas_gemm.call import Call, Signature
from pallas_gemm.config import GemmConfig
from pallas_gemm.kernels import xla
from pallas_gemm.product import product_p


@product_p.def_effectful_abstract_eval
def _abstract(*avals: Any, call: Call) -> Any:
    """The result has the type of XLA's product, with its sharding and manual axes.

    The simulator calls back into Python in order, which JAX has to know.
    """
    result = _result_aval(call, avals)
    if call.options.implementation != "interpret":
        return result, set()
    return result, _simulator_effects(call, _signature(avals))


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


def _lowered(ctx: mlir.LoweringRuleContext, *operands: Any, call: Call, gpu: bool) -> Any:
    if gpu and call.options.target is None:
        call = call.with_target(targeting.first_gpu())
    if not gpu:
        _refuse_gpu_kernel(call)
        if call.options.implementation != "interpret":
            call = call.with_target(None)
    signature = _signature(ctx.avals_in)
    decision = dispatch.decide(call, signature)
    if decision.plan is None:
        run = dispatch.implement(decision, call)
    else:
        run = _traced_once(call, signature, decision.plan.config)
    return mlir.lower_fun(run, multiple_results=False)(ctx, *operands)


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


mlir.register_lowering(product_p, functools.partial(_lowered, gpu=False))
mlir.register_lowering(product_p, functools.partial(_lowered, gpu=True), platform="cuda")
