"""What a product becomes in a compiled program: a kernel where one takes it, else XLA's product."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from pallas_gemm import heuristics, targeting
from pallas_gemm.architectures import ARCHITECTURES, Architecture
from pallas_gemm.call import Call, Signature
from pallas_gemm.config import GemmConfig
from pallas_gemm.device import Device
from pallas_gemm.kernels import xla
from pallas_gemm.problem import Problem
from pallas_gemm.product import product_p
from pallas_gemm.realign import Realigned, realign


@dataclasses.dataclass(frozen=True)
class Decision:
    """What computes a product, and why.

    Attributes:
        implementation: "xla", "interpret", or the name of an architecture.
        problem: What is computed.
        reason: Why this implementation.
        config: The kernel's config; None for XLA.
        realigned: What the kernel computes instead, and the steps around it; None for XLA.
        device: The GPU that is planned for; None if there is none.
        architecture: Whose kernel it is; None for XLA.
        seconds: The predicted time of kernel and steps; None for XLA.
        refused: (what, reasons) of everything that cannot compute it.
    """

    implementation: str
    problem: Problem
    reason: str
    config: GemmConfig | None = None
    realigned: Realigned | None = None
    device: Device | None = None
    architecture: Architecture | None = None
    seconds: float | None = None
    refused: tuple[tuple[str, tuple[str, ...]], ...] = ()


@functools.lru_cache(maxsize=4096)
def decide(call: Call, signature: Signature) -> Decision:
    """Decides what computes a call with operands of these shapes and types.

    Args:
        call: The product; its target is None for anything but a GPU.
        signature: Shape and type of each operand.

    Raises:
        ValueError: The implementation, config or schedule that the call names cannot compute it;
            the message has every reason.
    """
    problem = call.problem(signature)
    asked, device = call.options.implementation, call.options.target
    if asked == "xla":
        return Decision("xla", problem, "implementation='xla'")
    refused = []
    for architecture in ARCHITECTURES:
        if asked not in (None, "interpret", architecture.name):
            continue
        found = _try(architecture, call, problem)
        if isinstance(found, Decision):
            return dataclasses.replace(found, refused=tuple(refused))
        refused.append((architecture.name, found))
        if asked == "interpret":
            break
    if asked is not None:
        reasons = "; ".join(reason for _, reasons in refused for reason in reasons)
        raise ValueError(f"implementation={asked!r} cannot compute this product: {reasons}")
    why = "no GPU is planned for" if device is None else "no kernel takes it"
    return Decision("xla", problem, why, device=device, refused=tuple(refused))


def _try(architecture: Architecture, call: Call, problem: Problem) -> Decision | tuple[str, ...]:
    """Returns the decision for an architecture's kernel, or why it cannot be."""
    asked, device = call.options.implementation, call.options.target
    if device is None or (asked == "interpret" and not architecture.fits(device)):
        if asked is None:
            return ("no GPU is planned for",)
        device = architecture.example
    if not architecture.fits(device):
        major, minor = device.compute_capability
        wanted = ".".join(map(str, architecture.capability))
        return (
            f"the {architecture.name} kernel needs compute capability {wanted},"
            f" {device.kind} has {major}.{minor}",
        )
    try:
        kernel = architecture.load()
    except ImportError as error:
        return (str(error),)
    realigned = realign(problem, kernel.problem_refusals)
    if realigned is None:
        return tuple(kernel.problem_refusals(problem))
    choices = heuristics.rank(realigned.problem, device, architecture)
    if asked == "interpret":
        choices = tuple(sorted(choices, key=lambda c: c.config.tile[0] * c.config.tile[1]))
    if not choices:
        return ("no config",)
    best = choices[0]
    name = "interpret" if asked == "interpret" else architecture.name
    return Decision(
        name,
        problem,
        f"fastest of {len(choices)} configs by the model"
        if asked is None
        else f"implementation={asked!r}",
        best.config,
        realigned,
        device,
        architecture,
        best.seconds,
    )


def implement(decision: Decision, call: Call) -> Callable[..., jax.Array]:
    """Returns the function of the operands that a decision stands for."""
    if decision.implementation == "xla":
        return functools.partial(xla.product, call)
    interpret = _simulator() if decision.implementation == "interpret" else False
    realigned = decision.realigned
    kernel = decision.architecture.load().build(
        realigned.problem, decision.config, decision.device, interpret
    )

    def run(*operands: jax.Array) -> jax.Array:
        ready = realigned.prepare(call.unpack(operands))
        return realigned.restore(kernel(*ready.present()))

    return run


def _simulator() -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams()


@functools.lru_cache(maxsize=4096)
def _result_aval(call: Call, avals: tuple[Any, ...]) -> Any:
    return jax.make_jaxpr(functools.partial(xla.product, call))(*avals).out_avals[0]


@functools.lru_cache(maxsize=4096)
def _simulator_effects(call: Call, signature: Signature) -> Any:
    decision = decide(call, signature)
    operands = [jax.ShapeDtypeStruct(*operand) for operand in signature]
    return jax.make_jaxpr(implement(decision, call))(*operands).effects


@product_p.def_effectful_abstract_eval
def _abstract(*avals: Any, call: Call) -> Any:
    """The result has the type of XLA's product, with its sharding and manual axes.

    The simulator calls back into Python in order, which JAX has to know.
    """
    result = _result_aval(call, avals)
    if call.options.implementation != "interpret":
        return result, set()
    return result, _simulator_effects(call, _signature(avals))


def _signature(avals: Any) -> Signature:
    return tuple((tuple(aval.shape), np.dtype(aval.dtype)) for aval in avals)


def _lowered(ctx: mlir.LoweringRuleContext, *operands: Any, call: Call, gpu: bool) -> Any:
    device = call.options.target
    if gpu and device is None:
        device = targeting.first_gpu()
    if not gpu:
        _refuse_gpu_kernel(call)
        device = device if call.options.implementation == "interpret" else None
    run = implement(decide(call.with_target(device), _signature(ctx.avals_in)), call)
    return mlir.lower_fun(run, multiple_results=False)(ctx, *operands)


def _refuse_gpu_kernel(call: Call) -> None:
    asked = call.options.implementation
    if asked in [architecture.name for architecture in ARCHITECTURES]:
        raise ValueError(
            f"implementation={asked!r} needs an NVIDIA GPU, but this program is compiled for"
            " another platform; None takes what there is, 'interpret' simulates the kernel"
        )


mlir.register_lowering(product_p, functools.partial(_lowered, gpu=False))
mlir.register_lowering(product_p, functools.partial(_lowered, gpu=True), platform="cuda")
