"""What a decision stands for: a function of the operands, with what is done around a kernel."""

import functools
from collections.abc import Callable
from typing import Any

from jax import lax

from pallas_gemm.call import FACTORS, Call, GroupedCall
from pallas_gemm.computer import multiplying
from pallas_gemm.kernels.windows import Window
from pallas_gemm.planning import halves, numerics
from pallas_gemm.planning.by_xla import xla, xla_groups
from pallas_gemm.planning.dispatch import Decision
from pallas_gemm.planning.plans import Plan
from pallas_gemm.planning.realign import Realigned
from pallas_gemm.problem import Problem


def of(decision: Decision, call: Call) -> Callable[..., Any]:
    """Returns the function of the operands that a decision stands for."""
    plan = decision.plan
    if plan is None:
        return functools.partial(xla.product, call)
    if plan.otherwise is not None:
        quick = _of_plan(decision, plan, halves.scaled(call))
        other: Callable[..., Any] = functools.partial(xla.product, call)
        if not by_xla_otherwise(plan, call):
            other = _of_plan(decision, plan.otherwise, call)
        return functools.partial(_as_elements_fit, call, _is_alone(plan), quick, other)
    return _of_plan(decision, plan, call)


def by_xla_otherwise(plan: Plan, call: Call) -> bool:
    """Whether XLA computes a product whose elements do not fit in arrays of float16.

    XLA computes a product of TF32 without groups as fast, so no second kernel is compiled for it.
    But only kernels keep promises, and a kernel may be named.
    """
    options = call.options
    asks_for_kernel = options.implementation is not None or options.numerics is not None
    return _is_alone(plan) and not asks_for_kernel and not isinstance(call, GroupedCall)


def _is_alone(plan: Plan) -> bool:
    """Whether each operand becomes one array."""
    return plan.realigned.scheme is not None and not plan.realigned.scheme.terms


def _of_plan(decision: Decision, plan: Plan, call: Call) -> Callable[..., Any]:
    realigned = plan.realigned
    simulator = decision.implementation == "interpret" and _simulator(realigned.problem)
    kernel = plan.architecture.build(realigned.problem, plan.config, plan.device, simulator)
    if realigned.scheme is not None:
        dtype = realigned.problem.out_dtype if realigned.unfused else call.out_dtype
        kernel = functools.partial(_converted, realigned, dtype, kernel)
    if isinstance(call, GroupedCall) or call.epilogue.program is not None:
        if realigned.steps:
            kernel = functools.partial(_of_factors, realigned, kernel)
        if isinstance(call, GroupedCall) and realigned.unfused is not None:
            return functools.partial(_unfused_groups, call, kernel)
        return kernel
    if decision.problem.terms:
        return kernel
    run = _fused if realigned.unfused is None else _unfused
    return functools.partial(run, call, realigned, kernel)


def of_parts(decision: Decision, window: Window) -> Callable[..., Any]:
    """Returns the kernel of a decision, which takes parts of arrays where they begin."""
    plan = decision.plan
    assert plan is not None
    problem, build = plan.realigned.problem, plan.architecture.build
    simulator = decision.implementation == "interpret" and _simulator(problem)
    return build(problem, plan.config, plan.device, simulator, window)


def _as_elements_fit(
    call: Call, alone: bool, quick: Callable[..., Any], other: Callable[..., Any], *operands: Any
) -> Any:
    """Multiplies arrays of float16 where elements fit, which only the running program knows."""
    measured = halves.measured(call, operands, alone=alone)

    def scaled() -> Any:
        # What an operand is multiplied by belongs to the pass that splits it.
        return quick(*halves.scaled_operands(call, operands, measured))

    def looked_at_closely() -> Any:
        fits = halves.looked_at_closely(call, operands, measured)
        return lax.cond(fits, scaled, lambda: other(*operands))

    # XLA would look closely in any case if that were a condition of its own.
    return lax.cond(halves.fit(*measured, alone=alone), scaled, looked_at_closely)


def _of_factors(realigned: Realigned, kernel: Callable[..., Any], *operands: Any) -> Any:
    """Prepares factors, which come first, and restores the result."""
    ready = list(operands)
    for step in realigned.steps:
        if step.operand != "result":
            place = FACTORS.index(step.operand)
            ready[place] = step.apply(ready[place])
    return realigned.restore(kernel(*ready))


def _converted(realigned: Realigned, dtype: Any, kernel: Callable[..., Any], *operands: Any) -> Any:
    assert realigned.scheme is not None
    if realigned.scheme.apart:
        return realigned.scheme.added_up(kernel, operands, dtype)
    return kernel(*realigned.scheme.ready(operands, 1 + realigned.problem.sums))


def _fused(call: Call, realigned: Realigned, kernel: Callable[..., Any], *operands: Any) -> Any:
    ready = realigned.prepare(call.unpack(operands))
    return realigned.restore(kernel(*ready.present()))


def _unfused(call: Call, realigned: Realigned, kernel: Callable[..., Any], *operands: Any) -> Any:
    given = call.unpack(operands)
    sums = [
        realigned.restore(kernel(*realigned.prepare(own).present())) for own in call.each_sum(given)
    ]
    result = (
        sums[0]
        if call.epilogue.of_whole_sums.is_identity
        else xla.finish(call.epilogue, sums, given)
    )
    return result.astype(call.out_dtype)


def _unfused_groups(call: GroupedCall, kernel: Callable[..., Any], *operands: Any) -> Any:
    given, sizes = call.unpack(operands), call.sizes(operands)
    each = (own.present() for own in call.each_sum(given))
    sums = [kernel(a, b, sizes, *blocks) for a, b, *blocks in each]
    return xla_groups.applied(call, sums, given, sizes)


def _simulator(problem: Problem) -> Any:
    if problem.parts and not multiplying.adds_up_alike():
        why = (
            "NumPy, which multiplies in the simulator, does not add up alike everywhere on this"
            f" CPU; it does where {multiplying.ALIKE} is set before Python starts"
        )
        raise ValueError(numerics.why_not_kept(numerics.stating(problem), why))
    return simulator()


def simulator() -> Any:
    """Returns the parameters of JAX's simulator of kernels."""
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu.InterpretGPUParams()
