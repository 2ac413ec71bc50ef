"""Blocks of a matrix in 8 bits as one primitive, because a kernel writes both ways from one read.

    x[m, k]  ──▶  along k    values [m, k], scales [m, k / g]
             ──▶  along m    values [k, m], scales [m / g, k]

It has no derivative. On a mesh whose devices share the array, XLA computes it.
"""

import functools
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from pallas_gemm.call import Signature, signature_of
from pallas_gemm.kernels import quantize as blocks
from pallas_gemm.kernels.quantize import Quantization
from pallas_gemm.op import kept_kernels, mesh_context
from pallas_gemm.op.product import run_as_jax_does
from pallas_gemm.planning import quantize as planning
from pallas_gemm.planning import targeting

quantize_p = core.Primitive("pallas_gemm_quantize")
quantize_p.multiple_results = True

NO_DERIVATIVE = (
    "quantize has no derivative, because values of 8 bits have none: give it"
    " jax.lax.stop_gradient(x), or put jax.custom_vjp around the whole product"
)


def quantize(x: jax.Array, how: Quantization, implementation: str | None = None) -> list[Any]:
    """Quantizes blocks of a matrix, or of several: returns values and scales of each axis."""
    target = targeting.known_target(x)
    return quantize_p.bind(x, how=how, implementation=implementation, target=target)


@quantize_p.def_effectful_abstract_eval
def _abstract(x: Any, *, how: Quantization, implementation: str | None, **_: Any) -> Any:
    results = _types(how, x)
    if implementation != "interpret":
        return results, set()
    return results, _effects(how, ((tuple(x.shape), np.dtype(x.dtype)),))


@functools.lru_cache(maxsize=1024)
def _types(how: Quantization, x: Any) -> Any:
    return jax.make_jaxpr(functools.partial(blocks.by_xla, how=how))(x).out_avals


@functools.lru_cache(maxsize=1024)
def _effects(how: Quantization, signature: Signature) -> Any:
    """Returns the effects of the simulator, which calls back into Python in order."""
    run = planning.decide(how, signature, None, "interpret").run()
    return jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(*own) for own in signature)).effects


def _lowered(
    ctx: mlir.LoweringRuleContext,
    x: Any,
    *,
    how: Quantization,
    implementation: str | None,
    target: Any,
    gpu: bool,
) -> Any:
    signature = signature_of(tuple(ctx.avals_in))
    alone = mesh_context.is_one_devices(ctx.module_context.axis_context)
    if not alone and implementation is None:
        implementation = "xla"
    device = (target or targeting.first_gpu()) if gpu else None
    chosen = planning.decide(how, signature, device, implementation)
    if chosen.plan is None:
        return mlir.lower_fun(chosen.run(), multiple_results=True)(ctx, x)
    if (
        gpu
        and implementation != "interpret"
        and kept_kernels.is_lowered_as_it_runs(ctx.module_context)
    ):
        return kept_kernels.lower(ctx, (x,), chosen, signature)
    return mesh_context.lower_off_mesh(ctx, chosen.run(), (x,))


def _jvp(*_: Any, **__: Any) -> Any:
    raise TypeError(NO_DERIVATIVE)


def _batch(operands: Any, dims: Any, **options: Any) -> Any:
    """Maps it: one leading dimension more."""
    results = quantize_p.bind(jax.numpy.moveaxis(operands[0], dims[0], 0), **options)
    return results, [0] * len(results)


run_as_jax_does(quantize_p)
ad.primitive_jvps[quantize_p] = _jvp
batching.primitive_batchers[quantize_p] = _batch
mlir.register_lowering(quantize_p, functools.partial(_lowered, gpu=False))
mlir.register_lowering(quantize_p, functools.partial(_lowered, gpu=True), platform="cuda")
