"""Blocks of a matrix in 8 bits as one primitive, because a kernel writes both ways from one read.

    x[m, k]  ──▶  along k    values [m, k], scales [m, k / g]
             ──▶  along m    values [k, m], scales [m / g, k]

It has no derivative. On a mesh, each device quantizes its part (`quantize_partition`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from pallas_gemm.call import Signature, signature_of
from pallas_gemm.kernels import quantize as blocks
from pallas_gemm.kernels.quantize import Quantization
from pallas_gemm.op import kept_kernels
from pallas_gemm.op.mesh import mesh_context, quantize_partition
from pallas_gemm.op.product import run_as_jax_does
from pallas_gemm.planning import quantize as planning
from pallas_gemm.planning import targeting

quantize_p = core.Primitive("pallas_gemm_quantize")
quantize_p.multiple_results = True
_part_p = core.Primitive("pallas_gemm_quantize_part")
"""The part of one device; its arrays are on no mesh, whatever the types around it say."""
_part_p.multiple_results = True

NO_DERIVATIVE = (
    "quantize has no derivative, because values of 8 bits have none: give it"
    " jax.lax.stop_gradient(x), or put jax.custom_vjp around the whole product"
)


def quantize(x: jax.Array, how: Quantization, implementation: str | None = None) -> list[Any]:
    """Quantizes blocks of a matrix, or of several: returns values and scales of each way."""
    return quantize_p.bind(
        x,
        how=how,
        implementation=implementation,
        target=targeting.known_target(x),
        devices=mesh_context.request_of(implementation, (x,)),
    )


@quantize_p.def_effectful_abstract_eval
def _abstract(x: Any, *, how: Quantization, implementation: str | None, **_: Any) -> Any:
    results = _types(how, x)
    if implementation != "interpret":
        return results, set()
    return results, _effects(how, signature_of((x,)))


@_part_p.def_abstract_eval
def _abstract_part(x: Any, *, how: Quantization, **_: Any) -> Any:
    return _types(how, *mesh_context.types_off_mesh(*signature_of((x,))))


@functools.lru_cache(maxsize=1024)
def _types(how: Quantization, x: Any) -> Any:
    return jax.make_jaxpr(functools.partial(blocks.by_xla, how=how))(x).out_avals


@functools.lru_cache(maxsize=1024)
def _effects(how: Quantization, signature: Signature) -> Any:
    """Returns the effects of the simulator, which calls back into Python in order."""
    run = planning.decide(how, signature, None, "interpret").run()
    return jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(*own) for own in signature)).effects


def _lowered(
    ctx: mlir.LoweringRuleContext, x: Any, *, devices: Any, gpu: bool, **asked: Any
) -> Any:
    """Lowers it for one device, or for several that share the array."""
    if mesh_context.is_one_devices(ctx.module_context.axis_context):
        return _lowered_part(ctx, x, gpu=gpu, **asked)
    how, target = asked["how"], asked["target"]
    if devices is None or mesh_context.why_not_partitioned(ctx.module_context):
        run = functools.partial(blocks.by_xla, how=how)
    else:
        part = functools.partial(_part_p.bind, how=how, implementation=asked["implementation"])
        run = functools.partial(quantize_partition.shared, how, part, target)
    return mlir.lower_fun(run, multiple_results=True)(ctx, x)


def _lowered_part(
    ctx: mlir.LoweringRuleContext,
    x: Any,
    *,
    how: Quantization,
    implementation: str | None,
    target: Any,
    gpu: bool,
) -> Any:
    """Lowers what one device quantizes."""
    signature = signature_of(tuple(ctx.avals_in))
    device = (target or targeting.first_gpu()) if gpu else None
    chosen = planning.decide(how, signature, device, implementation)
    kept = gpu and chosen.plan is not None and implementation != "interpret"
    if kept and kept_kernels.is_lowered_as_it_runs(ctx.module_context):
        return kept_kernels.lower(ctx, (x,), chosen, signature)
    return mesh_context.lower_off_mesh(ctx, chosen.run(), (x,))


def _jvp(*_: Any, **__: Any) -> Any:
    raise TypeError(NO_DERIVATIVE)


def _batch(operands: Any, dims: Any, **options: Any) -> Any:
    """Maps it: one leading dimension more."""
    results = quantize_p.bind(jnp.moveaxis(operands[0], dims[0], 0), **options)
    return results, [0] * len(results)


run_as_jax_does(quantize_p)
ad.primitive_jvps[quantize_p] = _jvp
batching.primitive_batchers[quantize_p] = _batch
for _primitive, _rule in ((quantize_p, _lowered), (_part_p, _lowered_part)):
    mlir.register_lowering(_primitive, functools.partial(_rule, gpu=False))
    mlir.register_lowering(_primitive, functools.partial(_rule, gpu=True), platform="cuda")
