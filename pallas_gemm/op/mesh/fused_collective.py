"""Products whose rows travel from device to device while a kernel computes them.

    gathered     device 0    own rows ──▶ rows of device 1 ──▶ rows of device 2 ──▶ rows of device 3
                             meanwhile they arrive, and its own go to the devices 3, 2 and 1

    scattered    device 0    rows of device 1 ──▶ rows of device 2 ──▶ rows of device 3 ──▶ its own
                             each tile is stored in the memory of its owner, who adds up in the end

Nothing is left to send when such a kernel ends, and no other kernel takes SMs from it. XLA knows
where in memory the arrays of the other devices are, and makes all devices wait for one another
before such a kernel starts. Where this is not possible, XLA's collectives send before the product,
or after it.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from pallas_gemm.call import Call, Signature, signature_of
from pallas_gemm.computer import occupancy
from pallas_gemm.config import GemmConfig
from pallas_gemm.device import Device
from pallas_gemm.kernels.exchange import Exchange
from pallas_gemm.op.mesh import mesh_context
from pallas_gemm.op.mesh.parts import note
from pallas_gemm.op.product import equally_varying, product_of_matrices
from pallas_gemm.planning import dispatch, heuristics, plans, prediction, targeting
from pallas_gemm.planning.architectures import Architecture
from pallas_gemm.problem import Problem


@dataclasses.dataclass(frozen=True)
class GatheredProduct:
    """A product with the rows of all devices.

    Attributes:
        call: The product of one device, with all rows.
        axes: The axes of the mesh along which the devices lie.
    """

    call: Call
    axes: tuple[str, ...]
    gathers = True

    @property
    def out_dtype(self) -> Any:
        """Type of the result."""
        return self.call.out_dtype

    def by_xla(self, a: jax.Array, *rest: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Computes it with a collective."""
        every = lax.all_gather(a, self.axes, axis=a.ndim - 2, tiled=True)
        return product_of_matrices(self.call, every, *rest), every

    def whole(self, signature: Signature, devices: int) -> Signature:
        """Returns the operands of the product of one device."""
        ((rows, k), dtype), *rest = signature
        return (((rows * devices, k), dtype), *rest)


@dataclasses.dataclass(frozen=True)
class ScatteredProduct:
    """A sum of products, of whose rows each device gets some.

    Attributes:
        call: The product of one device; its result has the type that sums travel in.
        axes: The axes of the mesh along which they are added up, and rows are split.
        out_dtype: Type of the result.
    """

    call: Call
    axes: tuple[str, ...]
    out_dtype: Any
    gathers = False

    def by_xla(self, a: jax.Array, b: jax.Array) -> tuple[jax.Array]:
        """Computes it with a collective."""
        total = product_of_matrices(self.call, a, b)
        total = lax.psum_scatter(total, self.axes, scatter_dimension=total.ndim - 2, tiled=True)
        return (total.astype(self.out_dtype),)

    def whole(self, signature: Signature, devices: int) -> Signature:
        """Returns the operands of the product of one device."""
        del devices
        return signature


FusedCollective = GatheredProduct | ScatteredProduct

fused_collective_p = core.Primitive("pallas_gemm_collective")
fused_collective_p.multiple_results = True


def gathered_product(how: GatheredProduct, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the product with the rows of all devices, and those rows."""
    result, every = fused_collective_p.bind(*equally_varying(operands), how=how)
    return result, every


def scattered_product(how: ScatteredProduct, *operands: jax.Array) -> jax.Array:
    """Returns this device's rows of the sum over all devices of `a @ b`."""
    return fused_collective_p.bind(*equally_varying(operands), how=how)[0]


@fused_collective_p.def_abstract_eval
def _abstract(*avals: Any, how: FusedCollective) -> Any:
    return jax.make_jaxpr(how.by_xla)(*avals).out_avals


def _jvp(primals: Any, tangents: Any, *, how: FusedCollective) -> Any:
    """Derives it as XLA computes it; first derivatives in reverse mode are `collective`'s own."""
    changes = tuple(ad.instantiate_zeros(t) for t in tangents)
    return jax.jvp(how.by_xla, tuple(primals), changes)


def _batched(operands: Any, dims: Any, *, how: FusedCollective) -> Any:
    results = jax.vmap(how.by_xla, dims)(*operands)
    return results, [0] * len(results)


def _lowered(ctx: mlir.LoweringRuleContext, *operands: Any, how: FusedCollective) -> Any:
    """Lowers it for another platform than a GPU."""
    return mlir.lower_fun(how.by_xla, multiple_results=True)(ctx, *operands)


def _lowered_for_gpu(ctx: mlir.LoweringRuleContext, *operands: Any, how: FusedCollective) -> Any:
    """Lowers it for a GPU."""
    fused = _in_kernel(ctx, how)
    if fused is None:
        return _lowered(ctx, *operands, how=how)
    return mesh_context.lower_off_mesh(ctx, fused, operands)


mlir.register_lowering(fused_collective_p, _lowered)
mlir.register_lowering(fused_collective_p, _lowered_for_gpu, platform="cuda")
ad.primitive_jvps[fused_collective_p] = _jvp
batching.primitive_batchers[fused_collective_p] = _batched


def _in_kernel(ctx: mlir.LoweringRuleContext, how: FusedCollective) -> Callable[..., Any] | None:
    """Returns the function of the operands that sends in the kernel, None if there is none."""
    module: Any = ctx.module_context
    if why_not_among(module):
        return None
    mesh, call = module.axis_context.mesh, how.call
    exchange = Exchange(tuple(mesh.shape.items()), how.axes, how.gathers)
    if call.options.target is None:
        call = call.with_target(targeting.first_gpu() or targeting.absent_gpu(mesh))
    signature = signature_of(ctx.avals_in)
    if len(signature[0][0]) != 2:
        return None
    whole = how.whole(signature, exchange.size)
    plan = _planned(call, whole, exchange)
    # A mesh may be named with its axes taken apart.
    rows = "the rows along " + ", ".join(dict.fromkeys(x.partition(":")[0] for x in how.axes))
    if isinstance(plan, str):
        note(call, whole, f"{rows}; XLA's collective sends them: {plan}")
        return None
    note(call, whole, f"{rows}; the kernel sends them", plan)
    problem = plan.realigned.problem
    return _traced_once(
        plan.architecture, problem, plan.config, plan.device, exchange, how.out_dtype
    )


def _planned(call: Call, whole: Signature, exchange: Exchange) -> plans.Plan | str:
    """Returns how a kernel computes a product and exchanges its rows, or why none does."""
    if exchange.size == 1:
        return "there is one device"
    decision = dispatch.decide(call, whole)
    plan = decision.plan
    if plan is None or decision.implementation != plan.architecture.name:
        return decision.reason
    plan = plan.otherwise or plan
    if (collective := plan.architecture.collective) is None:
        return f"the {plan.architecture.name} kernel exchanges no rows"
    problem = plan.realigned.problem
    if plan.realigned.unfused or problem != call.problem(whole):
        return plan.realigned.unfused or "the operands or the result are realigned"
    why: str | None = "no config is legal"
    for candidate in _candidates(call, plan):
        why = next(collective().refusals(problem, candidate.config, exchange), None)
        if why is None:
            return candidate
    return str(why)


@functools.lru_cache(maxsize=1024)
def _traced_once(
    architecture: Architecture,
    problem: Problem,
    config: GemmConfig,
    device: Device,
    exchange: Exchange,
    out_dtype: Any,
) -> Callable[..., Any]:
    """Returns a function whose kernel is traced once, however many layers call it."""
    assert architecture.collective is not None
    return jax.jit(architecture.collective().build(problem, config, device, exchange, out_dtype))


def why_not_among(module: Any) -> str | None:
    """Returns why the devices of a program cannot store in each other's memory.

    Args:
        module: The context of the module that is being lowered.
    """
    mesh = getattr(module.axis_context, "mesh", None)
    if not isinstance(mesh, jax.sharding.Mesh) or not mesh_context.is_one_devices(
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
    return _why_apart(devices)


def _why_apart(devices: Iterable[jax.Device]) -> str | None:
    """Returns why GPUs of this computer do not reach each other's memory, None if they do."""
    numbers: list[Any] = [getattr(device, "local_hardware_id", None) for device in devices]
    if targeting.first_gpu() is None or None in numbers:
        # They are not here, but will be where the program runs.
        return None
    try:
        near = occupancy.reach_each_other(tuple(numbers))
    except occupancy.DriverError as error:
        return str(error)
    return None if near else "the GPUs do not reach each other's memory"


def _candidates(call: Call, plan: plans.Plan) -> Iterator[plans.Plan]:
    """Yields the plan of the product alone, and others if it may be another one."""
    yield plan
    if not call.options.names_something:
        problem, device, architecture = plan.realigned.problem, plan.device, plan.architecture
        for config in heuristics.rank(problem, device, architecture):
            seconds = prediction.seconds(problem, config, device, architecture)
            yield dataclasses.replace(plan, config=config, source="heuristics", seconds=seconds)
