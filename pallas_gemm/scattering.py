"""A product of partial sums whose rows go where they belong as soon as they are computed.

    device 0      a0 @ b0 ──▶ rows of device 1, 2, 3, 0 ──▶ stored in the memory of their owner
    device 1      a1 @ b1 ──▶ rows of device 2, 3, 0, 1 ──▶ ...
                                                            all are there ──▶ added up

The kernel stores every tile in the memory of the device that owns its rows, over NVLink, while the
next tile is computed: nothing is left to send when it ends, and no other kernel takes SMs from it.
What devices sent is then added up in one pass. Where that is not possible the product is reduced
and scattered by XLA's collective, when it is done.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core
from jax.interpreters import batching, mlir

from pallas_gemm import dispatch, heuristics, partitioning, targeting
from pallas_gemm.call import Call
from pallas_gemm.hopper_config import HopperConfig
from pallas_gemm.problem import Problem
from pallas_gemm.product import equally_varying, product

scattered_p = core.Primitive("pallas_gemm_scattered")


@dataclasses.dataclass(frozen=True)
class Scattering:
    """How partial sums are added up and handed out.

    Attributes:
        call: The product of one device; its result has the type that sums travel in.
        axis: The axis of the mesh along which they are added up, and rows are split.
        out_dtype: Type of the result.
    """

    call: Call
    axis: str
    out_dtype: Any

    def by_xla(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Computes it with a collective."""
        total = product(self.call, a, b)
        rows = total.ndim - 2
        total = lax.psum_scatter(total, self.axis, scatter_dimension=rows, tiled=True)
        return total.astype(self.out_dtype)


def scattered(how: Scattering, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns this device's rows of the sum over all devices of `a @ b`."""
    return scattered_p.bind(*equally_varying((a, b)), how=how)


@scattered_p.def_abstract_eval
def _abstract(a: Any, b: Any, *, how: Scattering) -> Any:
    return jax.make_jaxpr(how.by_xla)(a, b).out_avals[0]


def _lowered(ctx: mlir.LoweringRuleContext, a: Any, b: Any, *, how: Scattering) -> Any:
    """Lowers it for another platform than a GPU."""
    return mlir.lower_fun(how.by_xla, multiple_results=False)(ctx, a, b)


def _lowered_for_gpu(ctx: mlir.LoweringRuleContext, a: Any, b: Any, *, how: Scattering) -> Any:
    """Lowers it for a GPU."""
    fused = _fused(ctx, how)
    if fused is None:
        return _lowered(ctx, a, b, how=how)
    return partitioning.lower_off_mesh(ctx, fused, (a, b))


def _batched(operands: Any, dims: Any, *, how: Scattering) -> Any:
    run = jax.vmap(how.by_xla, dims)
    return run(*operands), 0


mlir.register_lowering(scattered_p, _lowered)
mlir.register_lowering(scattered_p, _lowered_for_gpu, platform="cuda")
batching.primitive_batchers[scattered_p] = _batched


def _fused(ctx: mlir.LoweringRuleContext, how: Scattering) -> Any:
    """Returns the function of the operands that scatters in the kernel, None if there is none."""
    if why_not_among(ctx.module_context) is not None or any(
        len(x.shape) != 2 for x in ctx.avals_in
    ):
        return None
    mesh = ctx.module_context.axis_context.mesh
    call = how.call
    if call.options.target is None:
        call = call.with_target(targeting.first_gpu() or targeting.absent_gpu(mesh))
    signature = tuple((tuple(x.shape), np.dtype(x.dtype)) for x in ctx.avals_in)
    plan = _plan(call, signature, how.axis, mesh.shape[how.axis])
    if plan is None:
        return None
    return functools.partial(_run, plan, how)


def why_not_among(module: Any) -> str | None:
    """Returns why the devices of a program cannot store in each other's memory.

    Args:
        module: The context of the module that is being lowered.
    """
    mesh = getattr(module.axis_context, "mesh", None)
    if not isinstance(mesh, jax.sharding.Mesh) or not partitioning.is_one_devices(
        module.axis_context
    ):
        return "the mesh is not manual along all axes"
    if module.lowering_parameters.for_export:
        return "the program is exported"
    devices = mesh.devices.ravel()
    if [device.id for device in devices] != list(range(devices.size)):
        return "the devices of the mesh are not in order"
    if len({device.process_index for device in devices}) > 1:
        return "the devices belong to several processes"
    return None


def _plan(call: Call, signature: Any, axis: str, size: int) -> Any:
    from pallas_gemm.kernels import collecting
    from pallas_gemm.kernels.plan import HopperPlan, Scatter

    decision = dispatch.decide(call, signature)
    if decision.implementation != "hopper" or decision.plan.unfused:
        return None
    problem, device = decision.plan.realigned.problem, decision.plan.device
    if problem != call.problem(signature) or problem.m % size:
        return None
    if collecting.refusal((problem.m // size, problem.n)) is not None:
        return None
    for config in _configs(problem, decision.plan):
        rows = config.tile[0] * config.cluster[0]
        if not config.mirrored and problem.m // size % rows == 0:
            return HopperPlan(problem, config, device, Scatter(axis, size))
    return None


def _configs(problem: Problem, plan: dispatch.Plan) -> Iterator[HopperConfig]:
    yield plan.config
    for choice in heuristics.rank(problem, plan.device, plan.architecture):
        yield choice.config


def _run(plan: Any, how: Scattering, a: jax.Array, b: jax.Array) -> jax.Array:
    from pallas_gemm.kernels import collecting, hopper

    parts = hopper.build(plan)(a, b)
    return collecting.add_up(parts, how.out_dtype, how.axis)
