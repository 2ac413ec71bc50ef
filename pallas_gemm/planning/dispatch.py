"""What computes a product, and why: a kernel where one takes it and is fast, else XLA.

A decision depends on the product, the shapes and types of its operands, the GPU that it is for, and
the tables of tuned configs in use. It is made once, when a program is lowered, after `vmap`, `grad`
and partitioning have said their part; `explain` makes it earlier. `check` decides nothing: it
refuses what a caller names and no kernel can do.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from jax.export import is_symbolic_dim

from pallas_gemm.call import Call, Options, Signature, SymmetricCall
from pallas_gemm.kernels.element_types import BITS, SINGLE
from pallas_gemm.planning import architectures as known_kernels
from pallas_gemm.planning import halves, numerics, plans, prediction, proof
from pallas_gemm.planning.architectures import Architecture, architecture_of
from pallas_gemm.planning.by_xla import copies, odd_sizes, xla_faster, xla_time
from pallas_gemm.planning.choice import Reasons
from pallas_gemm.planning.plans import Plan
from pallas_gemm.problem import Problem

OTHER_GPU = "it needs compute capability"
"""How a reason begins that says that a kernel is for other GPUs."""
WIDENED_ROWS = 16384
"""With fewer rows the kernel for weights of few bits is faster. In int4 with groups of 128, 8192 x
14336 x 4096 takes 1290 us on an H200, and 1380 by XLA. 16384 x 2048 x 2048 takes 183 and 181."""
HALF_AT_MOST = 0.95
"""Half of a symmetric result may be predicted to take this share of the time of the whole."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """The implementation that computes a product, and why.

    Attributes:
        implementation: "xla", "interpret", or the name of an architecture.
        problem: The product.
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
        ValueError: The implementation, config or schedule that the call names cannot compute it, or
            no kernel of its GPU keeps what is promised. The message has every reason.
    """
    options, problem = call.options, call.problem(signature)
    if reason := _why_no_kernel(call, problem):
        return Decision("xla", problem, reason)
    refused: list[tuple[str, Reasons]] = []
    why = "no kernel takes it"
    for architecture, plan in _plans(call, signature, problem):
        if not isinstance(plan, Plan):
            refused.append((architecture.name, plan))
        elif untrusted := _why_untrusted(options, plan):
            why = "the kernel for this GPU is not trusted"
            refused.append((architecture.name, (untrusted,)))
        elif slower := (
            _why_not(call, signature, problem, plan) or _why_apart(call, signature, problem, plan)
        ):
            why = "no kernel is as fast"
            refused.append((architecture.name, (slower,)))
        else:
            named = options.implementation
            reason = f"{named} is named" if named else _why_this(plan)
            return Decision(named or architecture.name, problem, reason, plan, tuple(refused))
    device = options.target
    if device is None:
        why = "no GPU is planned for"
    elif (own := architecture_of(device)) is None:
        has = ".".join(map(str, device.compute_capability))
        why = f"no kernel is for compute capability {has} ({device.kind})"
    elif options.config is not None and not isinstance(options.config, own.config):
        given, taken = type(options.config).__name__, own.config.__name__
        why = f"config is a {given}, and the kernel for {device.kind} takes a {taken}"
    if device is not None:
        others = [f"{name}: {', '.join(reasons)}" for name, reasons in refused]
        numerics.refuse_promised(options, why, others)
    return Decision("xla", problem, why, None, tuple(refused))


def check(call: Call, signature: Signature) -> None:
    """Refuses what a call names where no kernel can compute it, before anything is traced.

    Raises:
        ValueError: As for `decide`.
    """
    problem = call.problem(signature)
    if not _why_no_kernel(call, problem):
        any(isinstance(plan, Plan) for _, plan in _plans(call, signature, problem))


def why_impossible(call: Call, signature: Signature) -> str | None:
    """Returns why nothing that the call names can compute it; None if something can."""
    try:
        check(call, signature)
    except ValueError as error:
        return str(error)
    return None


def _why_no_kernel(call: Call, problem: Problem) -> str | None:
    """Returns why no kernel is considered; None if one is.

    Raises:
        ValueError: None can be, and something is named.
    """
    if call.options.implementation == "xla":
        return "implementation='xla'"
    if 0 in (problem.m, problem.n, problem.k, problem.batch):
        return "a dimension is empty"
    if any(map(is_symbolic_dim, (problem.m, problem.n, problem.k, problem.batch))):
        why = "a size is a symbol, and a kernel is compiled for numbers"
        numerics.refuse_promised(call.options, why)
        if call.options.names_something:
            raise ValueError(
                f"{problem} has sizes that are symbols, and a kernel is compiled for numbers: leave"
                " out implementation, config and schedule, or name 'xla'"
            )
        return why
    if call.options.target is None and not call.options.names_something:
        return "no GPU is planned for"
    return None


def _plans(
    call: Call, signature: Signature, problem: Problem
) -> Iterator[tuple[Architecture, Plan | Reasons]]:
    """Yields how each kernel that comes into question computes a call, or why it cannot.

    Raises:
        ValueError: None can, and something is named.
    """
    refused: list[tuple[str, Reasons]] = []
    possible = False
    known = known_kernels.of_problem(problem, call.options.config)
    for architecture in known:
        if _comes_into_question(call.options, architecture, known):
            plan = plans.plan(call, signature, problem, architecture)
            yield architecture, plan
            if isinstance(plan, Plan):
                possible = True
            else:
                refused.append((architecture.name, plan))
    named = [
        f"{name}={value!r}"
        for name in ("implementation", "config", "schedule")
        if (value := getattr(call.options, name)) is not None
    ]
    if named and not possible:
        reasons = (f"{name}: {', '.join(reasons)}" for name, reasons in refused)
        if call.options.numerics is not None:
            named.append(str(call.options.numerics))
        raise ValueError(f"{', '.join(named)} cannot compute this product: {'; '.join(reasons)}")


def _comes_into_question(
    options: Options, architecture: Architecture, known: Sequence[Architecture]
) -> bool:
    """Whether to look at a kernel at all, for what is named or to say why it is not used."""
    asked, config = options.implementation, options.config
    if asked == "interpret":
        return architecture is _simulated(options, known)
    if asked is None:
        return config is None or isinstance(config, architecture.config)
    return asked == architecture.name


def _simulated(options: Options, known: Sequence[Architecture]) -> Architecture:
    """Returns whose kernel to simulate: the planned GPU's, or else the one that has the config."""
    for architecture in known:
        if options.target is not None and architecture.fits(options.target):
            return architecture
    for architecture in known:
        if isinstance(options.config, architecture.config):
            return architecture
    return known[0]


def _why_untrusted(options: Options, plan: Plan) -> str | None:
    """Returns why a kernel is not taken because nobody knows whether it works on a GPU."""
    names_kernel = options.implementation is not None or options.config is not None
    if names_kernel or options.target is None or not plan.architecture.fits(options.target):
        return None
    return proof.why_untrusted(plan.architecture, options.target)


def _why_this(plan: Plan) -> str:
    proven = proof.found(plan.architecture.name, plan.device.kind)
    return "the kernel for this GPU" + (f", proven here on {proven.when}" if proven else "")


def _why_not(call: Call, signature: Signature, problem: Problem, plan: Plan) -> str | None:
    """Returns why a kernel that could compute a product does not, None if it does."""
    options = call.options
    if options.implementation is not None:
        return None
    if options.target is None or not plan.architecture.fits(options.target):
        return plans.wrong_capability(plan.architecture, options.target)
    # XLA scales blocks in memory, in float32 where there are no weights of few bits.
    is_narrow = plan.realigned.problem.b_dtype in BITS
    is_widened = is_narrow and plan.architecture is known_kernels.WIDENED
    in_memory = problem.blocks is not None and not is_widened
    if options.names_something or options.numerics is not None or problem.in_groups or in_memory:
        return None
    if plan.source != "heuristics":
        if plan.over_xla is None or plan.over_xla >= 1:
            return None
        return f"XLA was {1 / plan.over_xla:.3f} times as fast as what is {plan.source}"
    if isinstance(call, SymmetricCall):
        return _why_whole(call, signature, plan)
    return (_why_not_widened if is_widened else _why_xla)(call, problem, plan)


def _why_xla(call: Call, problem: Problem, plan: Plan) -> str | None:
    """Returns why XLA is as fast: as predicted where either prepares operands, else as measured."""
    by_xla = xla_time.seconds(problem, plan.device, call.precision)
    # Both cast alike.
    prepares = any(step.bytes and step.action != "cast" for step in plan.realigned.passes)
    prepares = prepares or xla_time.transposes(problem) or odd_sizes.is_slow(problem)
    prepares = prepares or copies.copied(problem) > 0
    is_tf32 = plan.realigned.problem.a_dtype == SINGLE
    if by_xla is not None and (prepares or is_tf32):
        slower = _why_not_prepared(plan, by_xla)
        # The rules were measured with 16 bits. They leave two of 72 bare products of
        # `h200_tf32.csv` to XLA. Kernels run at 0.84 and 1.06 there. None of the 72 is tiny.
        # Products that go through registers were not among them.
        is_turned = plan.architecture is known_kernels.WIDENED
        if slower or is_turned or not (is_tf32 and problem.epilogue.is_identity):
            return slower
    faster = 1.0 if by_xla is None else by_xla / plan.seconds
    as_given = plan.realigned.scheme is None and not is_tf32
    own = problem if as_given else plan.realigned.problem
    why = xla_faster.why_xla(own, faster)
    known = "is faster" if plan.device.machine.is_measured else "is expected to be faster"
    return f"XLA {known}: {why}" if why else None


def _why_not_prepared(plan: Plan, by_xla: float) -> str | None:
    """Returns why XLA is predicted to be as fast as a kernel with what is done around it."""
    scheme = plan.realigned.scheme
    is_one = plan.otherwise is not None and scheme is not None and not scheme.terms
    most = halves.ALONE_AT_MOST if is_one else 1
    if plan.seconds < most * by_xla:
        return None
    how = " with what prepares operands" if plan.realigned.passes else ""
    how = f" of {scheme}" if scheme is not None else how
    return (
        f"XLA is predicted to take {by_xla * 1e6:.0f} us, and the kernel"
        f" {plan.seconds * 1e6:.0f} us{how}"
    )


def _why_not_widened(call: Call, problem: Problem, plan: Plan) -> str | None:
    """Returns why weights of few bits are widened in memory, None if they are in the kernel."""
    by_xla = xla_time.seconds(problem, plan.device, call.precision)
    if problem.blocks is None or by_xla is None or problem.batch * problem.m < WIDENED_ROWS:
        return None
    if plan.seconds < by_xla:
        return None
    widening = xla_time.widening_seconds(problem, plan.device)
    return (
        f"XLA is predicted to take {by_xla * 1e6:.0f} us, of which it widens weights in memory for"
        f" {widening * 1e6:.0f} us, and the kernel that widens them {plan.seconds * 1e6:.0f} us"
    )


def _why_apart(call: Call, signature: Signature, problem: Problem, plan: Plan) -> str | None:
    """Returns why XLA applies a function to a product of float32; None if the kernel does.

    The product is multiplied in arrays of float16 then, which takes no function, and no groups.
    """
    is_named = call.options.names_something or call.options.numerics is not None
    is_one = problem.a_dtype == SINGLE and not problem.in_groups
    if call.epilogue.program is None or not is_one or is_named:
        return None
    alone = decide(plans.sums_only(call, signature), signature[: 1 + problem.sums]).plan
    if alone is None or alone.otherwise is None:
        return None
    apart = alone.seconds + prediction.program_seconds(problem, plan.device)
    if plan.seconds <= apart:
        return None
    return (
        f"the kernel takes {plan.seconds * 1e6:.0f} us, and a product in arrays of float16, with"
        f" the function by XLA, {apart * 1e6:.0f} us"
    )


def _why_whole(call: SymmetricCall, signature: Signature, half: Plan) -> str | None:
    """Returns why all of a symmetric result is computed as fast as half of it, None if it is not.

    So it is where either takes one wave. 512 and 1024 cubed take 3.3 and 5.9 us by half on an H200,
    and 3.3 and 5.4 as a whole; 2048 cubed 15.9 and 24.0.
    """
    whole = plans.plan(call.whole, signature, call.whole.problem(signature), half.architecture)
    if not isinstance(whole, Plan) or half.seconds < HALF_AT_MOST * whole.seconds:
        return None
    return f"half of it takes {half.seconds * 1e6:.0f} us, and all {whole.seconds * 1e6:.0f} us"
