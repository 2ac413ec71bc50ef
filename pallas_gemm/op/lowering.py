"""What the product becomes in a compiled program: its type, and its form on each platform.

A program for several devices gets a product that XLA shares out among them (`partition`). The
choice between a kernel and XLA's product is made for the part of one device alone.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core
from jax.extend.mlir import ir
from jax.interpreters import mlir

from pallas_gemm.call import Call, GroupedCall, Signature, signature_of
from pallas_gemm.op import kept_kernels, stored
from pallas_gemm.op.canonical import merged
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.mesh import mesh_context, partition
from pallas_gemm.op.mesh.parts import part_p
from pallas_gemm.op.product import lower_by, product_p
from pallas_gemm.planning import dispatch, ignored, implementation, numerics, targeting
from pallas_gemm.planning.architectures import ARCHITECTURES
from pallas_gemm.planning.by_xla import xla, xla_groups
from pallas_gemm.planning.dispatch import Decision
from pallas_gemm.planning.sums import Sums

SUMS = "pallas_gemm_sums"
"""The attribute of an operation in a compiled program that says how its sums are made."""
whole_p = core.Primitive("pallas_gemm_whole")
"""A product whose operands are what they are; the primitive of all transformations becomes one."""
kernel_p = core.Primitive("pallas_gemm_kernel")
"""The product of matrices that a kernel computes for one device."""


@part_p.def_effectful_abstract_eval
@whole_p.def_effectful_abstract_eval
@product_p.def_effectful_abstract_eval
def _abstract(*avals: Any, call: Call, contraction: Contraction, **_: Any) -> Any:
    result = types_by(avals, contraction.by_xla, call)[0]
    return result, effects(*merged(call, contraction, signature_of(avals))[:2])


@functools.lru_cache(maxsize=4096)
def types_by(avals: tuple[Any, ...], by_xla: Callable[..., Any], *static: Any) -> list[Any]:
    """Returns the types of what XLA computes, with shardings and manual axes."""
    return jax.make_jaxpr(functools.partial(by_xla, *static))(*avals).out_avals


@kernel_p.def_effectful_abstract_eval
def _abstract_kernel(*avals: Any, call: Call, decision: Decision, **_: Any) -> Any:
    assert decision.plan is not None
    (result,) = mesh_context.types_off_mesh((decision.plan.realigned.out_shape, call.out_dtype))
    return result, effects(call, signature_of(avals))


@functools.lru_cache(maxsize=4096)
def effects(call: Call, signature: Signature) -> Any:
    """Returns the effects of a product: the simulator calls back into Python in order.

    Nobody else needs to know that several kernels write into one result.
    """

    def made() -> Callable[..., Any]:
        decision = dispatch.decide(call, signature)
        if decision.plan is None:
            # XLA computes what is empty.
            return lambda *_: []
        return _telling(call, decision, _traced_once(call, decision))

    return effects_of(call, made, signature)


def effects_of(call: Call, made: Callable[[], Callable[..., Any]], signature: Signature) -> Any:
    """Returns the effects of what `made` returns, which computes a call: none if none simulates."""
    if call.options.implementation != "interpret":
        return set()
    inside = jax.make_jaxpr(lambda x: jax.freeze(jax.new_ref(x)))(0.0).effects
    # As it is lowered, so that a kernel is traced once.
    with jax.sharding.use_abstract_mesh(mesh_context.no_mesh()):
        operands = [jax.ShapeDtypeStruct(*operand) for operand in signature]
        return jax.make_jaxpr(made())(*operands).effects - inside


def _lowered(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    call: Call,
    contraction: Contraction,
    devices: Any,
    gpu: bool,
) -> Any:
    """Lowers a whole product, for one device or for several that share it."""
    if mesh_context.is_one_devices(ctx.module_context.axis_context):
        return _lowered_part(ctx, *operands, call=call, contraction=contraction, gpu=gpu)
    refuse_simulation(call.options.implementation)
    if devices is None or mesh_context.why_not_partitioned(ctx.module_context):
        refuse_unshared(call, ctx.module_context)
        run = functools.partial(contraction.by_xla, call)
    else:
        run = functools.partial(partition.shared_product, call, contraction)
    return mlir.lower_fun(run, multiple_results=False)(ctx, *operands)


def _lowered_in_place(
    ctx: mlir.LoweringRuleContext, *operands: Any, call: Call, contraction: Contraction, **how: Any
) -> Any:
    """Lowers a product where it stands, which shows what makes its operands.

    A kernel reads an operand as it is stored, where the program transposes it just before.
    """
    platforms = tuple(ctx.platforms or ctx.module_context.platforms)
    given, places, gpu = signature_of(ctx.avals_in), (), platforms == ("cuda",)
    if mesh_context.is_one_devices(ctx.module_context.axis_context) and len(platforms) == 1:
        turned = [_turned(x, shape) for x, (shape, _) in zip(operands, given, strict=True)]
        if any(turned):
            found = stored.as_stored(planned(call, gpu), contraction, given, turned)
            contraction, given, places = found
    if not places:
        # Is lowered once for all of its kind.
        run = functools.partial(whole_p.bind, call=call, contraction=contraction, **how)
        return mlir.lower_fun(run, multiple_results=False)(ctx, *operands)
    read = [x.owner.operands[0] if i in places else x for i, x in enumerate(operands)]
    inner = ctx.replace(avals_in=mesh_context.types_off_mesh(*given))
    result = _lowered_part(inner, *read, call=call, contraction=contraction, gpu=gpu)
    if inner.tokens_out is not None:
        ctx.set_tokens_out(inner.tokens_out)
    return result


def _turned(operand: Any, shape: tuple[Any, ...]) -> stored.Turned | None:
    """Returns how a value of the module was transposed; None if it was not."""
    owner = operand.owner
    if getattr(owner, "name", None) != "stablehlo.transpose":
        return None
    permutation = tuple(ir.DenseI64ArrayAttr(owner.attributes["permutation"]))
    before = tuple(shape[permutation.index(i)] for i in range(len(shape)))
    return stored.Turned(permutation, before)


def refuse_unshared(call: Call, module: Any) -> None:
    """Raises an error if XLA shares out a product of which something is promised."""
    why = mesh_context.why_not_partitioned(module) or "it is on no mesh that kernels know"
    numerics.refuse_promised(call.options, why)


def refuse_simulation(implementation: str | None) -> None:
    """Raises an error if what several devices compute is to be simulated."""
    if implementation == "interpret":
        raise ValueError(
            "implementation='interpret' simulates the kernel of one GPU, but this program is for"
            " several devices; inside `jax.shard_map` over all axes of the mesh each has its own"
        )


def _lowered_part(
    ctx: mlir.LoweringRuleContext, *operands: Any, call: Call, contraction: Contraction, gpu: bool
) -> Any:
    """Lowers what one device computes: its dimensions are merged, if a kernel computes it."""
    call = planned(call, gpu)
    matrices = merged(call, contraction, signature_of(ctx.avals_in))
    kernel = kernel_of(matrices.call, matrices.signature)
    by_xla = functools.partial(contraction.by_xla, call)
    return mesh_context.lower_off_mesh(ctx, matrices.around(kernel) if kernel else by_xla, operands)


def planned[C: Call](call: C, gpu: bool) -> C:
    """Returns a call with the GPU to plan for.

    Raises:
        ValueError: The kernel of a GPU is named, or a promise made that only kernels keep, and the
            program is for no GPU.
    """
    if gpu:
        own = call if call.options.target else call.with_target(targeting.first_gpu())
        if own.options.target is None:
            why = 'no GPU is planned for; with target("h200"): one is'
            numerics.refuse_promised(call.options, why)
        return own
    if call.options.implementation == "interpret":
        return call
    asked = call.options.implementation
    if asked in [architecture.name for architecture in ARCHITECTURES]:
        raise ValueError(
            f"implementation={asked!r} needs an NVIDIA GPU, but this program is compiled for"
            " another platform; None takes what there is, 'interpret' simulates the kernel"
        )
    if call.options.target is None:
        numerics.refuse_promised(call.options, numerics.ELSEWHERE)
    return call.with_target(None)


def kernel_of(call: Call, signature: Signature) -> Callable[..., Any] | None:
    """Returns the function of matrices that a kernel computes; None if XLA multiplies them.

    Args:
        call: The product, with the GPU to plan for.
        signature: Shapes and types of its operands.
    """
    decision = dispatch.decide(call, signature)
    if decision.plan is None:
        ignored.warn_of_options(call.options, decision.reason)
        problem = decision.problem
        is_empty = 0 in (problem.m, problem.n, problem.k, problem.batch)
        if call.options.numerics is not None and not is_empty:
            words = numerics.why_not_kept(call.options.numerics, numerics.ELSEWHERE)
            by_xla = xla_groups.by_jax if isinstance(call, GroupedCall) else xla.product
            return refused_as_it_runs(words, functools.partial(by_xla, call))
        return None
    return bound(kernel_p, call, decision)


def bound(primitive: core.Primitive, call: Call, decision: Decision) -> Callable[..., Any]:
    """Returns the function that a kernel computes."""
    kernel = functools.partial(primitive.bind, call=call, decision=decision)
    return _telling(call, decision, kernel)


def _telling(call: Call, decision: Decision, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a kernel of which the program says how its sums are made, if something is promised.

    JAX traces it once for all programs that say the same of it.
    """
    if call.options.numerics is None:
        return kernel

    def run(*operands: Any) -> Any:
        with set_xla_metadata(**{SUMS: str(Sums.of(decision))}):
            return kernel(*operands)

    return run


def refused_as_it_runs(words: str, by_xla: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what stands where a program for a GPU is compiled for another platform.

    It may be compiled, and looked at. It raises an error if it runs. A part that a device of a mesh
    has cannot do that: its results are no numbers instead, or the least integers.

    Args:
        words: The error's.
        by_xla: Computes the same by XLA, which is promised nothing of.
    """

    def refuse(*_: Any) -> Any:
        raise ValueError(words)

    def run(*operands: Any) -> Any:
        results = jax.eval_shape(by_xla, *operands)
        if mesh_context.may_call_back():
            return jax.pure_callback(refuse, results, *operands)
        return jax.tree.map(_no_number, results)

    return run


def _no_number(x: jax.ShapeDtypeStruct) -> jax.Array:
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.full(x.shape, jnp.nan if is_float else jnp.iinfo(x.dtype).min, x.dtype)


def lowered_kernel(
    ctx: mlir.LoweringRuleContext, *operands: Any, call: Call, decision: Decision, gpu: bool
) -> Any:
    """Lowers what a kernel computes."""
    if gpu and kept_kernels.is_lowered_as_it_runs(ctx.module_context):
        product = kept_kernels.Product(call, decision)
        return kept_kernels.lower(ctx, operands, product, signature_of(ctx.avals_in))
    return mesh_context.lower_off_mesh(ctx, _traced_once(call, decision), operands)


@functools.lru_cache(maxsize=1024)
def _traced_once(call: Call, decision: Decision) -> Callable[..., Any]:
    """Returns a kernel, or its simulation, that is traced once, in however many programs it is."""
    return jax.jit(implementation.of(decision, call))


lower_by(whole_p, _lowered)
lower_by(part_p, _lowered_part)
lower_by(kernel_p, lowered_kernel)
# JAX lowers what it caches apart from the program, where nobody sees what makes the operands.
mlir.register_lowering(product_p, _lowered_in_place, cacheable=False)
