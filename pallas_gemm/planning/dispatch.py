"""What computes a product, and why: a kernel where one takes it and is fast, else XLA.

A decision depends on the product, the shapes and types of its operands, the GPU that it is for, and
the tables of tuned configs in use. It is made when a program is lowered, after `vmap`, `grad` and
partitioning have said their part; `explain` and the checks of what a caller names make it earlier.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from pallas_gemm.config import GemmConfig
from pallas_gemm.device import Device
from pallas_gemm.kernels import activations
from pallas_gemm.planning import heuristics, precision, tables, xla, xla_faster
from pallas_gemm.planning.architectures import ARCHITECTURES, Architecture
from pallas_gemm.planning.call import NO_EPILOGUE, Call, Options, Signature
from pallas_gemm.planning.realign import Realigned, realign
from pallas_gemm.problem import Problem
from schedules import OnlineSchedule, Schedule

Reasons = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a kernel computes a product.

    Attributes:
        architecture: Whose kernel it is.
        device: The GPU that is planned for.
        realigned: What the kernel computes, and the steps around it.
        config: The kernel's config.
        source: Where the config comes from.
        seconds: The predicted time of the kernel and the steps.
        unfused: Why XLA applies the epilogue; None if the kernel does.
    """

    architecture: Architecture
    device: Device
    realigned: Realigned
    config: GemmConfig
    source: str
    seconds: float
    unfused: str | None = None


@dataclasses.dataclass(frozen=True)
class Decision:
    """What computes a product, and why.

    Attributes:
        implementation: "xla", "interpret", or the name of an architecture.
        problem: What is computed.
        reason: Why this implementation.
        plan: How the kernel does it; None for XLA.
        refused: (what, reasons) of each kernel that does not compute it.
        mesh: How a mesh has to do with it; None for the product of a single device.
    """

    implementation: str
    problem: Problem
    reason: str
    plan: Plan | None = None
    refused: tuple[tuple[str, Reasons], ...] = ()
    mesh: str | None = None


def decide(call: Call, signature: Signature) -> Decision:
    """Decides what computes a call with operands of these shapes and types.

    Args:
        call: The product; its target is None for anything but a GPU.
        signature: Shape and type of each operand.

    Raises:
        ValueError: The implementation, config or schedule that the call names cannot compute it;
            the message has every reason.
    """
    options, problem = call.options, call.problem(signature)
    if options.implementation == "xla":
        return Decision("xla", problem, "implementation='xla'")
    if 0 in (problem.m, problem.n, problem.k, problem.batch):
        return Decision("xla", problem, "a dimension is empty")
    if options.target is None and not options.names_something:
        return Decision("xla", problem, "no GPU is planned for")
    refused: list[tuple[str, Reasons]] = []
    possible = False
    for architecture in ARCHITECTURES:
        if not _comes_into_question(call, architecture):
            continue
        plan = _plan(call, signature, architecture)
        if not isinstance(plan, Plan):
            refused.append((architecture.name, plan))
            continue
        possible = True
        if why := _why_not(call, problem, plan):
            refused.append((architecture.name, (why,)))
            continue
        name = options.implementation or architecture.name
        reason = "the kernel for this GPU" if options.implementation is None else f"{name} is named"
        return Decision(name, problem, reason, plan, tuple(refused))
    if not possible:
        _raise_if_named(call, refused)
    if options.target is None:
        why = "no GPU is planned for"
    else:
        why = "no kernel is as fast" if possible else "no kernel takes it"
    return Decision("xla", problem, why, None, tuple(refused))


def _comes_into_question(call: Call, architecture: Architecture) -> bool:
    """Whether to look at a kernel at all, for what is named or to say why it is not used."""
    asked = call.options.implementation
    if asked == "interpret":
        return architecture is _simulated(call.options)
    return asked is None or asked == architecture.name


def _simulated(options: Options) -> Architecture:
    """Returns whose kernel to simulate: the planned GPU's, or else the one that has the config."""
    for architecture in ARCHITECTURES:
        if options.target is not None and architecture.fits(options.target):
            return architecture
    for architecture in ARCHITECTURES:
        if options.config is not None and isinstance(options.config, architecture.load().config):
            return architecture
    return ARCHITECTURES[0]


def _why_not(call: Call, problem: Problem, plan: Plan) -> str | None:
    """Returns why a kernel that could compute a product does not, None if it does."""
    options = call.options
    if options.implementation is not None:
        return None
    if options.target is None or not plan.architecture.fits(options.target):
        return _wrong_capability(plan.architecture, options.target)
    if options.names_something or plan.source != "heuristics":
        return None
    why = xla_faster.why_xla(problem)
    # That is where it was measured; on other GPUs it is what is expected.
    return f"XLA is faster on an H200: {why}" if why else None


def _wrong_capability(architecture: Architecture, device: Device | None) -> str:
    if device is None:
        return "no GPU is planned for"
    major, minor = device.compute_capability
    needed = ".".join(map(str, architecture.capability))
    needed += ".x" if len(architecture.capability) == 1 else ""
    return f"it needs compute capability {needed}, {device.kind} has {major}.{minor}"


def _raise_if_named(call: Call, refused: list[tuple[str, Reasons]]) -> None:
    """Raises if what is named can nowhere compute a product."""
    named = [
        f"{name}={value!r}"
        for name in ("implementation", "config", "schedule")
        if (value := getattr(call.options, name)) is not None
    ]
    if named:
        reasons = (f"{name}: {', '.join(reasons)}" for name, reasons in refused)
        raise ValueError(f"{', '.join(named)} cannot compute this product: {'; '.join(reasons)}")


def _plan(call: Call, signature: Signature, architecture: Architecture) -> Plan | Reasons:
    """Returns how an architecture's kernel computes a call, or why it cannot."""
    prepared = _prepared(call, signature, architecture.name)
    if not isinstance(prepared, _Prepared):
        return prepared
    options, problem, device = call.options, prepared.realigned.problem, prepared.device
    if (
        options.config is None
        and options.schedule is None
        and options.implementation != "interpret"
    ):
        # In pieces or not, it takes the same steps.
        found = tables.find(dataclasses.replace(problem, pieces=()), device)
        if found is not None:
            seconds = heuristics.seconds(problem, found.config, device, architecture)
            return prepared.plan(found.config, f"tuned ({found.source})", seconds)
    if isinstance(prepared.choice, tuple):
        return prepared.choice
    return prepared.plan(prepared.choice.config, prepared.source, prepared.choice.seconds)


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """All of a plan that does not depend on tables of tuned configs."""

    architecture: Architecture
    device: Device
    realigned: Realigned
    choice: heuristics.Choice | Reasons
    source: str
    unfused: str | None

    def plan(self, config: GemmConfig, source: str, seconds: float) -> Plan:
        """Returns the plan with a config."""
        total = seconds + heuristics.pass_seconds(self.realigned, self.device)
        return Plan(
            self.architecture, self.device, self.realigned, config, source, total, self.unfused
        )


@functools.lru_cache(maxsize=4096)
def _prepared(call: Call, signature: Signature, name: str) -> _Prepared | Reasons:
    architecture = next(a for a in ARCHITECTURES if a.name == name)
    device = _planned_device(call, architecture)
    if device is None:
        return (_wrong_capability(architecture, call.options.target),)
    try:
        kernel = architecture.load()
    except ImportError as error:
        return (f"it cannot be loaded: {error}",)
    (_, a_dtype), (_, b_dtype), *_ = signature
    if why := precision.kernel_refusal(call.precision, (a_dtype, b_dtype)):
        return (why,)
    unfused = _why_unfused(call, signature)
    reasons: list[str] = []
    # Operands in pieces have no epilogue.
    ways = (None,) if call.problem(signature).pieces else (None, "the kernel refuses the epilogue")
    for reason in (unfused,) if unfused else ways:
        variant = sums_only(call, signature) if reason else call
        own = signature[:2] if reason else signature
        realigned = realign(variant, own, lambda posed: kernel.problem_refusals(posed, device))
        if realigned is not None:
            choice, source = _choose(call, realigned.problem, device, architecture)
            return _Prepared(architecture, device, realigned, choice, source, reason)
        reasons += kernel.problem_refusals(variant.problem(own), device)
    return tuple(dict.fromkeys(reasons))


def _planned_device(call: Call, architecture: Architecture) -> Device | None:
    """Returns the GPU to plan for: an example where another decides whether a kernel runs at all.

    None if the kernel is out of the question because the GPU is of another generation.
    """
    options = call.options
    if options.target is not None and architecture.fits(options.target):
        return options.target
    if options.target is None or (
        options.names_something and options.implementation in (None, "interpret")
    ):
        return architecture.example
    return None


def _why_unfused(call: Call, signature: Signature) -> str | None:
    """Returns why no kernel can apply an epilogue, None if one might."""
    residual = call.unpack(signature).residual
    if residual is not None and residual[1] != call.out_dtype:
        return f"the residual is {residual[1]} and the result {call.out_dtype}"
    return activations.kernel_refusal(call.epilogue.activation)


def sums_only(call: Call, signature: Signature) -> Call:
    """Returns the call for the sums that XLA applies an epilogue to."""
    wide = xla.wide_dtype(signature[0][1], call.out_dtype)
    return dataclasses.replace(call, out_dtype=wide, epilogue=NO_EPILOGUE)


def _choose(
    call: Call, problem: Problem, device: Device, architecture: Architecture
) -> tuple[heuristics.Choice | Reasons, str]:
    """Returns the config that is named, or the best one by the heuristics, or why there is none."""
    options, kernel = call.options, architecture.load()
    if options.config is not None:
        named = _named_config(options.config, call, problem, device, kernel.config)
        if not isinstance(named, GemmConfig):
            return named, "argument"
        seconds = heuristics.seconds(problem, named, device, architecture)
        return heuristics.Choice(named, seconds), "argument"
    if options.implementation != "interpret" and options.schedule is None:
        best = heuristics.best(problem, device, architecture)
        return best or ("none of the configs that are considered is legal",), "heuristics"
    choices = heuristics.rank(problem, device, architecture)
    if options.implementation == "interpret":
        # The simulator's time goes with the size of the tiles, and it knows no pairs of CTAs.
        choices = tuple(
            sorted(choices, key=lambda c: (c.config.cluster_size, math.prod(c.config.tile)))
        )
    if options.schedule is not None:
        return _with_schedule(options.schedule, choices, problem, device), "heuristics"
    if not choices:
        return ("none of the configs that are considered is legal",), "heuristics"
    return choices[0], "heuristics"


def _named_config(
    config: GemmConfig, call: Call, problem: Problem, device: Device, kind: type[GemmConfig]
) -> GemmConfig | Reasons:
    if not isinstance(config, kind):
        return (f"it takes a {kind.__name__}, got a {type(config).__name__}",)
    if call.options.schedule is not None:
        config = dataclasses.replace(config, schedule=call.options.schedule)
    return config.refusals(problem, device) or config


def _with_schedule(
    schedule: str | Schedule | OnlineSchedule,
    choices: tuple[heuristics.Choice, ...],
    problem: Problem,
    device: Device,
) -> heuristics.Choice | Reasons:
    """Returns the fastest choice whose grid the schedule is made for."""
    grids: dict[tuple[int, int], tuple[int, int]] = {}
    for choice in choices:
        config = choice.config.reordered(schedule)
        if not config.refusals(problem, device):
            return dataclasses.replace(choice, config=config)
        grids.setdefault(config.stacked_grid(problem), config.tile)
    legal = ", ".join(f"{grid} for tiles of {tile}" for grid, tile in grids.items())
    if isinstance(schedule, str):
        return (f"schedule={schedule!r} fits none of the grids {legal}",)
    return (f"schedule is made for the grid {schedule.grid}; legal are {legal}",)


def implement(decision: Decision, call: Call) -> Callable[..., Any]:
    """Returns the function of the operands that a decision stands for."""
    plan = decision.plan
    if plan is None:
        return functools.partial(xla.product, call)
    simulator = decision.implementation == "interpret" and _simulator()
    kernel = plan.architecture.load().build(
        plan.realigned.problem, plan.config, plan.device, simulator
    )
    if decision.problem.pieces:
        return kernel
    if plan.unfused is None:
        return functools.partial(_fused, call, plan.realigned, kernel)
    return functools.partial(_unfused, call, plan.realigned, kernel)


def _fused(call: Call, realigned: Realigned, kernel: Callable[..., Any], *operands: Any) -> Any:
    ready = realigned.prepare(call.unpack(operands))
    return realigned.restore(kernel(*ready.present()))


def _unfused(call: Call, realigned: Realigned, kernel: Callable[..., Any], *operands: Any) -> Any:
    given = call.unpack(operands)
    sums = []
    for b in (given.b, given.up):
        if b is not None:
            ready = realigned.prepare(type(given)(given.a, b))
            sums.append(realigned.restore(kernel(ready.a, ready.b)))
    result = sums[0] if call.epilogue.is_identity else xla.finish(call.epilogue, sums, given)
    return result.astype(call.out_dtype)


def _simulator() -> Any:
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu.InterpretGPUParams()
