"""How a kernel computes a product: what is done before and after it, and its config.

There may be several ways. The one that is predicted to take the least time is taken.
"""

import dataclasses
import functools

import numpy as np

from pallas_gemm.call import FACTORS, NO_EPILOGUE, Call, GroupedCall, Options, Signature
from pallas_gemm.config import GemmConfig
from pallas_gemm.device import Device
from pallas_gemm.kernels.functions import activations
from pallas_gemm.planning import architectures as known_kernels
from pallas_gemm.planning import halves, precision, prediction
from pallas_gemm.planning import scheme as schemes
from pallas_gemm.planning.architectures import Architecture
from pallas_gemm.planning.by_xla import xla
from pallas_gemm.planning.choice import Reasons, choose
from pallas_gemm.planning.realign import (
    Realigned,
    Refusals,
    converted,
    realign,
    realign_function,
    realign_groups,
)
from pallas_gemm.planning.scheme import Scheme
from pallas_gemm.problem import Problem


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a kernel computes a product.

    Attributes:
        architecture: The architecture of the kernel.
        device: The GPU that is planned for.
        realigned: The problem of the kernel, and the steps before and after it.
        config: The kernel's config.
        source: Where the config comes from.
        seconds: The predicted time of the kernel and the steps.
        over_xla: How much faster than XLA the kernel was when it was tuned; None if nobody looked,
            or if there is more to do now: XLA was timed with operands as the kernel takes them.
        otherwise: How it is computed where elements differ too much in size for this; None if any
            may be multiplied so.
    """

    architecture: Architecture
    device: Device
    realigned: Realigned
    config: GemmConfig
    source: str
    seconds: float
    over_xla: float | None = None
    otherwise: "Plan | None" = None


def wrong_capability(architecture: Architecture, device: Device | None) -> str:
    """Says what a kernel needs that a GPU lacks."""
    if device is None:
        return "no GPU is planned for"
    needed = ".".join(map(str, architecture.capability))
    return f"it {device.lacks(needed + ('.x' if len(architecture.capability) == 1 else ''))}"


def plan(
    call: Call, signature: Signature, problem: Problem, architecture: Architecture
) -> Plan | Reasons:
    """Returns how an architecture's kernel computes a call, or why it cannot."""
    device = _planned_device(call.options, architecture)
    if device is None:
        return (wrong_capability(architecture, call.options.target),)
    realigned = _realigned(call, signature, device, architecture)
    if not isinstance(realigned, Realigned):
        return realigned
    found = _with_config(call, problem, device, architecture, realigned)
    if not isinstance(found, Plan):
        return found
    found = _faster(found, _through_registers(call, signature, found))
    return _faster(found, _in_float16(call, signature, found, architecture))


def _faster(plan: Plan, other: Plan | None) -> Plan:
    """Returns the one of two plans that is predicted to take less time."""
    return plan if other is None or plan.seconds <= other.seconds else other


def _through_registers(call: Call, signature: Signature, other: Plan) -> Plan | None:
    """Returns a plan that takes a right operand through registers that another one transposes.

    None if no kernel does so, or if a config of another one is named.
    """
    options, device, own = call.options, other.device, known_kernels.WIDENED
    turned = {step.operand for step in other.realigned.steps if step.action == "transpose"}
    is_named = (options.config, options.schedule, options.numerics) != (None, None, None)
    if is_named or "b" not in turned or not own.fits(device):
        return None
    realigned = _realigned(call, signature, device, own)
    return _as_planned(call, signature, device, own, realigned)


def _in_float16(
    call: Call, signature: Signature, other: Plan, architecture: Architecture
) -> Plan | None:
    """Returns a plan by arrays of float16 that stands for another one; None if there is none."""
    if other.seconds <= halves.DECIDING_SECONDS:
        return None
    dtypes = tuple(dtype for _, dtype in signature[:2])
    scheme = schemes.in_float16(call, other.realigned.scheme, dtypes)
    if scheme is None:
        return None
    scaled = halves.scaled(call), halves.scaled_signature(call, signature)
    realigned = _by_scheme(*scaled, other.device, architecture, scheme)
    quick = _as_planned(*scaled, other.device, architecture, realigned)
    if quick is None or quick.realigned.unfused is not None:
        return None
    seconds = quick.seconds + halves.DECIDING_SECONDS
    # Others are compared with XLA, which multiplies them as TF32 where elements do not fit.
    if isinstance(call, GroupedCall) and seconds > halves.ALONE_AT_MOST * other.seconds:
        return None
    return dataclasses.replace(quick, seconds=seconds, otherwise=other)


def _as_planned(
    call: Call,
    signature: Signature,
    device: Device,
    architecture: Architecture,
    realigned: Realigned | Reasons,
) -> Plan | None:
    """Returns the plan of what is done beside a kernel; None if there is none."""
    if not isinstance(realigned, Realigned):
        return None
    found = _with_config(call, call.problem(signature), device, architecture, realigned)
    return found if isinstance(found, Plan) else None


def _with_config(
    call: Call,
    problem: Problem,
    device: Device,
    architecture: Architecture,
    realigned: Realigned,
) -> Plan | Reasons:
    """Returns how a kernel computes what is done beside it, or why it cannot."""
    chosen = choose(call.options, realigned.problem, device, architecture)
    config = chosen.config
    if not isinstance(config, GemmConfig):
        return config
    # Without the epilogue, a gated product is two.
    runs = (problem.sums if realigned.unfused else 1) * realigned.kernels
    seconds = runs * prediction.seconds(realigned.problem, config, device, architecture)
    seconds += runs * prediction.passes_seconds(realigned, device)
    seconds += prediction.epilogue_seconds(problem, realigned, device)
    as_timed = not (realigned.passes or realigned.unfused or problem.terms)
    over_xla = chosen.over_xla if as_timed else None
    return Plan(architecture, device, realigned, config, chosen.source, seconds, over_xla)


def _planned_device(options: Options, architecture: Architecture) -> Device | None:
    """Returns the GPU to plan for: an example where another decides whether a kernel runs at all.

    None if the kernel is out of the question because the GPU is of another generation.
    """
    if options.target is not None and architecture.fits(options.target):
        return options.target
    if options.target is None or (
        options.names_something and options.implementation in (None, "interpret")
    ):
        return architecture.example
    return None


@functools.lru_cache(maxsize=4096)
def _realigned(
    call: Call, signature: Signature, device: Device, architecture: Architecture
) -> Realigned | Reasons:
    """Returns what a kernel computes of a call, and what is done around it, or why it cannot."""
    (_, a_dtype), (_, b_dtype), *_ = signature
    is_widened = architecture is known_kernels.WIDENED
    widened = schemes.beside_16_bits(call, (a_dtype, b_dtype)) if is_widened else None
    scheme = widened or schemes.of_call(call, signature)
    if scheme is None:
        why = precision.kernel_refusal(call.precision, (a_dtype, b_dtype))
        if why:
            return (why,)
        return _way(call, signature, lambda p: architecture.problem_refusals(p, device))
    says_parts = scheme.terms or scheme.longest_sum
    if says_parts and (asked := call.options.numerics) is not None and asked.part is not None:
        return (f"{scheme.name} says itself in which parts products are summed up",)
    return _by_scheme(call, signature, device, architecture, scheme)


def _by_scheme(
    call: Call, signature: Signature, device: Device, architecture: Architecture, scheme: Scheme
) -> Realigned | Reasons:
    """Returns the same of operands that become arrays of another type first."""
    way = _way(
        call,
        scheme.signature(call, signature),
        lambda p: architecture.problem_refusals(scheme.whole(p), device),
    )
    if not isinstance(way, Realigned):
        return way
    named = call.unpack(signature)._asdict()
    names = FACTORS[:1] if scheme.of_left else FACTORS
    types = {name: named[name][1] for name in names if named[name] is not None}
    return converted(way, scheme, types)


def _way(call: Call, signature: Signature, refusals: Refusals) -> Realigned | Reasons:
    """Returns what a kernel that says what it refuses computes of a call, or why it cannot."""
    unfused = activations.kernel_refusal(call.epilogue.activation)
    problem = call.problem(signature)
    if problem.in_groups:
        sums = {"epilogue": NO_EPILOGUE, "out_dtype": _sums(call, signature)}
        has_program = call.epilogue.program is not None
        bare = None if has_program else dataclasses.replace(problem, **sums)
        return realign_groups(problem, bare, unfused, refusals)
    if call.epilogue.program is not None:
        return realign_function(problem, refusals) or tuple(refusals(problem))
    reasons: list[str] = []
    for fused in (True, False):
        # A sum of products has no epilogue.
        if (fused and unfused) or (not fused and problem.terms):
            continue
        variant, own = (call, signature)
        if not fused:
            variant, given = sums_only(call, signature), call.unpack(signature)
            scales = (getattr(given, name) for name in variant.epilogue.blocks)
            own = (*signature[:2], *scales)
        realigned = realign(variant, own, refusals)
        if realigned is not None:
            why = None if fused else unfused or "; ".join(dict.fromkeys(reasons))
            return dataclasses.replace(realigned, unfused=why)
        reasons += refusals(variant.problem(own))
    return tuple(dict.fromkeys(reasons))


def sums_only(call: Call, signature: Signature) -> Call:
    """Returns the call for the sums that XLA applies an epilogue to."""
    return call.sums(_sums(call, signature))


def _sums(call: Call, signature: Signature) -> np.dtype:
    blocks = bool(call.epilogue.blocks)
    return xla.wide_dtype(signature[0][1], signature[1][1], call.out_dtype, blocks=blocks)
