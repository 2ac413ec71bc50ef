"""Blocks of a matrix in 8 bits as one primitive, because a kernel writes both ways from one read.

    x[m, k]  ──▶  along k    values [m, k], scales [m, k / g]
             ──▶  along m    values [k, m], scales [m / g, k]

Where groups of rows are told apart, each begins with a tile along m, and zeros fill up its last
one. The second operand says where tiles are (`kernels/quantize.py`).

It has no derivative. On a mesh, each device quantizes its part (`quantize_partition`).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import mlir

from pallas_gemm.call import Signature, signature_of
from pallas_gemm.device import Device
from pallas_gemm.kernels import quantize as blocks
from pallas_gemm.kernels.quantize import Quantization
from pallas_gemm.op import kept_kernels, lowering
from pallas_gemm.op.mesh import explicit, mesh_context, quantize_partition
from pallas_gemm.op.product import equally_varying, give_rules, lower_by
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


def quantize(
    x: jax.Array, *tiles: jax.Array, how: Quantization, implementation: str | None = None
) -> list[Any]:
    """Quantizes blocks of a matrix, or of several: returns values and scales of each way.

    Tiles are those of groups of rows, if these are told apart.
    """
    given = equally_varying((x, *tiles))
    run = _Whole(how, implementation, targeting.known_target(x))
    shardings = quantize_partition.result_shardings(how, *given)
    if shardings is None or shardings[0].mesh.size == 1:
        return run(*given)
    return explicit.computed(run, shardings, *given)


class _Whole(NamedTuple):
    """A function that quantizes an array, with the arguments of `quantize`."""

    how: Quantization
    implementation: str | None
    target: Device | None

    def __call__(self, *given: jax.Array) -> list[Any]:
        devices = mesh_context.request_of(self.implementation, given)
        return quantize_p.bind(*given, **self._asdict(), devices=devices)


@quantize_p.def_effectful_abstract_eval
def _abstract(*given: Any, how: Quantization, implementation: str | None, **_: Any) -> Any:
    results = _types(how, *given)
    if implementation != "interpret":
        return results, set()
    return results, _effects(how, signature_of(given))


@_part_p.def_abstract_eval
def _abstract_part(*given: Any, how: Quantization, **_: Any) -> Any:
    return _types(how, *mesh_context.types_off_mesh(*signature_of(given)))


def _types(how: Quantization, *given: Any) -> Any:
    # Of an array on no mesh, they depend on the mesh that is in use.
    return _types_on(jax.sharding.get_abstract_mesh(), how, *given)


@functools.lru_cache(maxsize=1024)
def _types_on(_: Any, how: Quantization, *given: Any) -> Any:
    return jax.make_jaxpr(functools.partial(blocks.by_xla, how=how))(*given).out_avals


@functools.lru_cache(maxsize=1024)
def _effects(how: Quantization, signature: Signature) -> Any:
    """Returns the effects of the simulator, which calls back into Python in order."""
    run = planning.decide(how, signature, None, "interpret").run()
    return jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(*own) for own in signature)).effects


def _lowered(
    ctx: mlir.LoweringRuleContext, *given: Any, devices: Any, gpu: bool, **asked: Any
) -> Any:
    """Lowers it for one device, or for several that share the array."""
    if mesh_context.is_one_devices(ctx.module_context.axis_context):
        return _lowered_part(ctx, *given, gpu=gpu, **asked)
    lowering.refuse_simulation(asked["implementation"])
    how, target = asked["how"], asked["target"]
    if devices is None or mesh_context.why_not_partitioned(ctx.module_context):
        run = functools.partial(blocks.by_xla, how=how)
    else:
        part = functools.partial(_part_p.bind, how=how, implementation=asked["implementation"])
        run = functools.partial(quantize_partition.shared, how, part, target)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *given)


def _lowered_part(
    ctx: mlir.LoweringRuleContext,
    *given: Any,
    how: Quantization,
    implementation: str | None,
    target: Any,
    gpu: bool,
) -> Any:
    """Lowers what one device quantizes."""
    signature = signature_of(ctx.avals_in)
    device = (target or targeting.first_gpu()) if gpu else None
    chosen = planning.decide(how, signature, device, implementation)
    kept = gpu and chosen.plan is not None and implementation != "interpret"
    if kept and kept_kernels.is_lowered_as_it_runs(ctx.module_context):
        return kept_kernels.lower(ctx, given, chosen, signature)
    return mesh_context.lower_off_mesh(ctx, chosen.run(), given)


def _jvp(*_: Any, **__: Any) -> Any:
    raise TypeError(NO_DERIVATIVE)


def _batch(operands: Any, dims: Any, **options: Any) -> Any:
    """Maps it: one leading dimension more. XLA does it where groups are told apart."""
    if len(operands) > 1:
        results = jax.vmap(functools.partial(blocks.by_xla, how=options["how"]), dims)(*operands)
        return results, [0] * len(results)
    results = quantize_p.bind(jnp.moveaxis(operands[0], dims[0], 0), **options)
    return results, [0] * len(results)


give_rules(quantize_p, jvp=_jvp, batch=_batch)
lower_by(quantize_p, _lowered)
lower_by(_part_p, _lowered_part)
