"""How a product with a function as epilogue is shared out among the devices of a mesh.

    before, after    what the kernel takes, and what follows it: ordinary operations, split by XLA
    the program      each device runs it on its part of the sums, in the kernel where one takes it
    reductions       of parts of rows or columns: added up, or compared, over the devices
    k is split       sums are added up over the devices first, and XLA runs the program

Each axis of the mesh splits one dimension, as `sharing` says of the product. A dimension that its
axes do not divide is not split.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core
from jax.interpreters import mlir
from jax.sharding import Mesh

from pallas_gemm.call import NO_EPILOGUE, Call, Signature, signature_of
from pallas_gemm.device import Device
from pallas_gemm.kernels.functions import exponentials, places
from pallas_gemm.kernels.functions.axes import Names
from pallas_gemm.kernels.functions.parts import Split as Parts
from pallas_gemm.op import lowering
from pallas_gemm.op.canonical import Form, merged
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.mesh import mesh_axes, mesh_context, sharing
from pallas_gemm.op.mesh.mesh_axes import Split
from pallas_gemm.op.mesh.parts import handed_out, note, part_p, share
from pallas_gemm.op.mesh.resharding import Placement
from pallas_gemm.op.product import lower_by
from pallas_gemm.planning import dispatch, numerics
from pallas_gemm.planning.by_xla import xla_program
from pallas_gemm.planning.dispatch import Decision
from pallas_gemm.program import ADDING, ARGMAX, LOGSUMEXP, Program, Result

NOT_IN_ORDER = "the dimensions of the result are not batch, rows and columns, in this order"
PARTS = "+"
"""The dimension that both parts of log-sum-exps are in front of the others."""


@dataclasses.dataclass(frozen=True)
class Shared:
    """A product and the program of its epilogue.

    Attributes:
        call: The product, with float32 sums and no epilogue but a gate.
        contraction: Its dimensions: batch, rows and columns, in this order.
        program: The steps that follow the sums.
        letters: The dimensions of what the program takes.
    """

    call: Call
    contraction: Contraction
    program: Program
    letters: tuple[str, ...]

    @property
    def names(self) -> Names:
        """The dimensions of the sums."""
        return names_of(self.contraction)

    @property
    def plain(self) -> Call:
        """The call for one sum."""
        return dataclasses.replace(self.call, epilogue=NO_EPILOGUE)

    @property
    def of_operands(self) -> list[str]:
        """The dimensions of each operand."""
        rights = [self.contraction.rhs] * self.program.sums
        return [self.contraction.lhs, *rights, *self.letters]

    @property
    def of_results(self) -> list[str]:
        """The dimensions of each result."""
        return [
            PARTS * (own.vectors > 1) + self.names.of_kind(own.kind) for own in self.program.results
        ]

    def factors(self, operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Returns the factors among the operands, and what the program takes."""
        end = 1 + self.program.sums
        return operands[:end], operands[end:]

    def types(self, *shapes: Sequence[int]) -> list[jax.ShapeDtypeStruct]:
        """Returns the types of the results for factors of these shapes."""
        dims = self.contraction
        sizes = dims.sizes(*shapes[:2]) | {PARTS: 2}
        pairs = zip(self.of_results, self.program.results, strict=True)
        return [
            jax.ShapeDtypeStruct(tuple(sizes[x] for x in letters), own.dtype)
            for letters, own in pairs
        ]

    def by_xla(self, *operands: Any) -> list[Any]:
        """Computes the results by XLA."""
        (a, *rights), given = self.factors(operands)
        sums = [self.contraction.by_xla(self.plain, a, b) for b in rights]
        return self.finished(sums, given)

    def finished(self, sums: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        """Runs the program by XLA."""
        pairs = list(zip(given, self.letters, strict=True))
        return xla_program.run(self.program, self.names, sums, pairs)


def names_of(contraction: Contraction, lead: str = "") -> Names:
    """Returns the dimensions of the sums of a product, some of which are a batch of products."""
    whole = contraction.whole or contraction.out

    def uncut(letters: str) -> str:
        return "".join(x for x in letters if x in whole and x not in lead)

    return Names(whole, uncut(contraction.rows), uncut(contraction.columns))


def shared_program(call: Call, contraction: Contraction, parts: Parts, *operands: Any) -> list[Any]:
    """Computes a function of a product, of which XLA hands out parts to the devices of a mesh."""
    shared = Shared(call, contraction, parts.program, tuple(parts.letters))
    factors, given = shared.factors(operands)
    every = (*factors, *parts.spread(given))
    run = handed_out(
        functools.partial(program_part_p.bind, shared=shared),
        functools.partial(_partition, shared),
        mesh_axes.sharding_rule(contraction, shared.of_operands, shared.of_results, PARTS),
        reduction_factors=mesh_axes.reduced_factors(contraction),
    )
    return parts.finished(given, run(*every))


def _partition(
    shared: Shared, mesh: Mesh, gpu: Device | None, args: Sequence[Any], results: Any
) -> tuple[Any, ...]:
    """Says what one device computes; see `handed_out`."""
    call = shared.call if shared.call.options.target else shared.call.with_target(gpu)
    shared = dataclasses.replace(shared, call=call)
    factors, _ = shared.factors(args)
    wanted = [mesh_axes.placement(x.sharding, len(x.shape), mesh) for x in factors]
    wanted.append(_wanted(shared, mesh, results))
    signature = signature_of(factors)
    split, _ = sharing.share_out(call, shared.contraction, signature, mesh, tuple(wanted))
    split = _evenly(shared, split, [x.shape for x in factors])
    _refuse_parts(shared, split)

    def shardings(each: Sequence[str]) -> list[Any]:
        axes = {**split.axes, PARTS: ()}
        return [split.sharding(tuple(axes[x] for x in own)) for own in each]

    local = [
        split.local(x.shape, split.placement(own, scattered=False))
        for x, own in zip(factors, shared.of_operands, strict=False)
    ]
    run = share(_Share(shared, split), signature_of(shared.types(*local)))
    return run, shardings(shared.of_results), tuple(shardings(shared.of_operands))


def _wanted(shared: Shared, mesh: Mesh, results: Sequence[Any]) -> Placement:
    """Returns how the sums had best be split for the results: as the first that says so is."""
    found: dict[str, tuple[str, ...]] = dict.fromkeys(shared.contraction.out, ())
    taken: set[str] = set()
    for letters, x in zip(shared.of_results, results, strict=True):
        for letter, axes in zip(
            letters, mesh_axes.placement(x.sharding, len(x.shape), mesh), strict=True
        ):
            if letter in found and not found[letter] and taken.isdisjoint(axes):
                found[letter] = axes
                taken |= {*axes}
    return tuple(found.values())


def _evenly(shared: Shared, split: Split, shapes: Sequence[Any]) -> Split:
    """Returns a split without the dimensions that it does not divide; sums are not scattered."""
    dims = shared.contraction
    sizes = dims.sizes(*shapes[:2])
    axes = {x: own if sizes[x] % split.size(own) == 0 else () for x, own in split.axes.items()}
    return dataclasses.replace(split, axes=axes, scattered=dict.fromkeys(dims.out, ()))


def refuse_unpromised(call: Call, parts: Parts | str) -> None:
    """Raises an error if a call promises the bits of a function that XLA computes.

    Args:
        call: The product.
        parts: The function, or why XLA computes all of it.
    """
    if (promised := call.options.numerics) is None:
        return
    why = None
    if left := parts if isinstance(parts, str) else parts.left:
        why = f"XLA computes the epilogue, or a part of it: {left}"
    elif promised.chunk is not None and _adds_up_rows(parts):
        why = "the epilogue adds up rows, and only gradients of right operands do so in chunks"
    if why:
        numerics.refuse_promised(call.options, why)


def _adds_up_rows(parts: Parts | str) -> bool:
    assert isinstance(parts, Parts)
    return any(own.kind == "n" and own.reduction in ADDING for own in parts.program.reductions)


def _refuse_parts(shared: Shared, split: Split) -> None:
    """Raises an error if devices add up sums whose bits are promised."""
    options = shared.call.options
    columns = any(split.axes[letter] for letter in shared.names.columns)
    adding = [x for x in shared.program.reductions if x.kind == "m" and x.reduction in ADDING]
    if options.parts and columns and adding:
        why = f"the mesh splits the columns ({split}), along which the epilogue adds up"
        numerics.refuse_promised(options, why)
    if split.contracted:
        why = f"the mesh splits what is summed over ({split}), and devices add up their sums"
        numerics.refuse_promised(options, why)


@dataclasses.dataclass(frozen=True, eq=False)
class _Share:
    """The part of a product and its program that one device computes.

    Attributes:
        shared: The whole.
        split: Which axes of the mesh split what.
    """

    shared: Shared
    split: Split

    def __call__(self, *operands: jax.Array) -> list[jax.Array]:
        """Computes it from the device's parts of the operands."""
        shared, split = self.shared, self.split
        (a, *rights), given = shared.factors(operands)
        if split.contracted:
            sums = [self._sum(a, b) for b in rights]
            results = shared.finished(sums, given)
        else:
            note(*_of_device(shared, signature_of(operands))[:2], str(split))
            results = program_part_p.bind(*operands, shared=shared)
        sizes = dict(zip(shared.contraction.rhs, rights[0].shape, strict=True))
        pairs = zip(results, shared.program.results, strict=True)
        return [self._over_devices(x, own, sizes) for x, own in pairs]

    def _sum(self, a: jax.Array, b: jax.Array) -> jax.Array:
        plain, dims = self.shared.plain, self.shared.contraction
        matrices = merged(plain, dims, signature_of((a, b)))
        note(matrices.call, matrices.signature, str(self.split))
        total = part_p.bind(a, b, call=plain, contraction=dims)
        return lax.psum(total, self.split.contracted)

    def _over_devices(self, x: jax.Array, result: Result, sizes: Mapping[str, int]) -> jax.Array:
        """Reduces a result over the devices that have other columns, or other rows, of the same."""
        names = self.shared.names
        gone = {"m": names.columns, "n": names.rows, "mn": ""}[result.kind]
        axes = tuple(axis for letter in gone for axis in self.split.axes[letter])
        if axes and result.reduction == ARGMAX:
            return places.across(x, axes, math.prod(sizes[letter] for letter in gone))
        return ACROSS[result.reduction](x, axes) if axes else x


ACROSS: dict[str, Callable[..., Any]] = {
    "sum": lax.psum,
    "max": lax.pmax,
    "min": lax.pmin,
    LOGSUMEXP: exponentials.across,
}
"""How the parts of a reduction that devices have become the whole."""

program_part_p = core.Primitive("pallas_gemm_program_part")
"""The product and the program of one device, by a kernel or by XLA."""
program_part_p.multiple_results = True

program_kernel_p = core.Primitive("pallas_gemm_program_kernel")
"""The kernel's part of a function, computed of matrices."""
program_kernel_p.multiple_results = True


@program_part_p.def_abstract_eval
def _abstract_part(*avals: Any, shared: Shared) -> Any:
    return jax.make_jaxpr(shared.by_xla)(*avals).out_avals


@program_kernel_p.def_effectful_abstract_eval
def _abstract_kernel(*avals: Any, call: Call, decision: Decision, **_: Any) -> Any:
    results = mesh_context.types_off_mesh(*kernel_types(call, decision))
    return results, lowering.effects(call, signature_of(avals))


def kernel_types(call: Call, decision: Decision) -> Signature:
    """Returns the shapes and types of what a kernel computes of matrices."""
    problem = decision.problem
    batch = (problem.batch,) if problem.batch > 1 else ()
    shapes = {"mn": problem.out_shape, "m": (*batch, problem.m), "n": (*batch, problem.n)}
    program = call.epilogue.program
    assert program is not None
    return tuple(
        ((own.vectors,) * (own.vectors > 1) + shapes[own.kind], np.dtype(own.dtype))
        for own in program.results
    )


def _lowered_part(ctx: mlir.LoweringRuleContext, *operands: Any, shared: Shared, gpu: bool) -> Any:
    shared = dataclasses.replace(shared, call=lowering.planned(shared.call, gpu))
    run: Callable[..., Any] = shared.by_xla
    signature = signature_of(ctx.avals_in)
    call, own, form = _of_device(shared, signature)
    # The function was split for rows and columns that are no batch.
    is_other = is_turned(form) or set(form.lead) != set(shared.names.batch)
    decision = None if is_other else dispatch.decide(call, own)
    if decision is not None and decision.plan is not None:
        kernel = lowering.bound(program_kernel_p, call, decision)
        run = functools.partial(_of_matrices, shared, form, kernel)
    elif (promised := shared.call.options.numerics) is not None:
        why = NOT_IN_ORDER if is_other and gpu else numerics.ELSEWHERE
        run = lowering.refused_as_it_runs(numerics.why_not_kept(promised, why), run)
    return mesh_context.lower_off_mesh(ctx, run, operands)


def _of_device(shared: Shared, signature: Signature) -> tuple[Call, Signature, Form]:
    """Returns what a kernel computes of a device's operands, and how they become matrices."""
    factors, given = shared.factors(signature)
    matrices = merged(shared.call, shared.contraction, tuple(factors))
    each = zip(shared.program.operands, shared.letters, given, strict=True)
    names = shared.names
    others = [(names.merged(own.kind, of, shape), dtype) for own, of, (shape, dtype) in each]
    call = matrices.call.with_program(shared.program)
    return call, (*matrices.signature, *others), matrices.form


def is_turned(form: Form) -> bool:
    """Whether the result of a product of matrices is not in the order of the contraction's."""
    return form.swapped or form.permutation is not None


def _of_matrices(
    shared: Shared, form: Form, kernel: Callable[..., Any], *operands: jax.Array
) -> list[jax.Array]:
    """Computes the results of one device by a kernel."""
    (a, *rights), given = shared.factors(operands)
    each = zip(given, shared.letters, shared.program.operands, strict=True)
    ready = [x.reshape(shared.names.merged(own.kind, of, x.shape)) for x, of, own in each]
    results = kernel(form.a.apply(a), *map(form.b.apply, rights), *ready)
    types = shared.types(a.shape, rights[0].shape)
    return [x.reshape(own.shape) for x, own in zip(results, types, strict=True)]


lower_by(program_part_p, _lowered_part)
lower_by(program_kernel_p, lowering.lowered_kernel)
