"""Kernels that take parts of arrays, where these lie (`kernels/windows.py`)."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import mlir

from pallas_gemm.call import Call, Options, signature_of
from pallas_gemm.kernels.windows import Window
from pallas_gemm.op import kept_kernels
from pallas_gemm.op.canonical import Form
from pallas_gemm.op.mesh import mesh_context
from pallas_gemm.planning import implementation
from pallas_gemm.planning.dispatch import Decision

part_kernel_p = core.Primitive("pallas_gemm_part_kernel")
"""The work of a kernel on parts of arrays; its first operand says where they begin, if it asks."""
part_kernel_p.multiple_results = True


class Part(NamedTuple):
    """A kernel that takes parts of arrays.

    Attributes:
        call: The product of the parts.
        decision: How.
        window: Which arrays are larger.
        swapped: Its left operand is the right one of the contraction.
        types: Shapes and types of its results; none if it writes into the last operand.
    """

    call: Call
    decision: Decision
    window: Window
    swapped: bool = False
    types: tuple[Any, ...] = ()

    def run(self) -> Callable[..., Any]:
        """Returns the kernel."""
        return implementation.of_parts(self.decision, self.window)

    def made_of(self) -> tuple[Any, ...]:
        """Returns all that it depends on but its operands' shapes and types."""
        plan: Any = self.decision.plan
        how = (plan.architecture.name, plan.device, plan.realigned, plan.config, self.window)
        return (dataclasses.replace(self.call, options=Options()), *how)

    def __call__(self, start: Any, left: Any, right: Any, *others: Any) -> list[jax.Array]:
        """Computes it of a contraction's operands, from a place on."""
        factors = (right, left) if self.swapped else (left, right)
        first = jnp.reshape(jnp.asarray(start, jnp.int32), (1,))
        return part_kernel_p.bind(first, *factors, *others, part=self)


@part_kernel_p.def_abstract_eval
def _abstract(*avals: Any, part: Part) -> Any:
    last = (avals[-1].shape, avals[-1].dtype)
    return mesh_context.types_off_mesh(*(part.types or (last,)))


def _lowered(ctx: mlir.LoweringRuleContext, *operands: Any, part: Part) -> Any:
    if kept_kernels.is_lowered_as_it_runs(ctx.module_context):
        return kept_kernels.lower(ctx, operands, part, signature_of(ctx.avals_in))
    return mesh_context.lower_off_mesh(ctx, jax.jit(part.run()), operands)


mlir.register_lowering(part_kernel_p, _lowered, platform="cuda")


def why_whole(decision: Decision, form: Form) -> str | None:
    """Returns why a kernel takes no parts of a product's operands; None if it does."""
    plan = decision.plan
    if plan is None:
        return decision.reason
    if not plan.architecture.takes_parts:
        return f"the {plan.architecture.name} kernel takes no parts of arrays"
    if plan.realigned.passes or plan.realigned.steps or plan.realigned.unfused:
        return "operands are made ready for the kernel"
    if form.permutation is not None or not (form.a.is_free and form.b.is_free):
        return "the product is not one of matrices as they are stored"
    return None
