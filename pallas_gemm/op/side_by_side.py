"""A gated product whose gate and up lie side by side in one array.

    y = x @ w                            w is [k, 2n], [k, 2, n] or [2, k, n]
    z = silu(y[:, :n]) * y[:, n:]        any function of both halves

The kernel is that of a gated product. It reads each half of `w` where it lies. Where it cannot, the
halves are two arrays, and all else is as for those.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core
from jax.interpreters import mlir

from pallas_gemm.call import Call, Signature, signature_of
from pallas_gemm.kernels.functions import vectors
from pallas_gemm.kernels.windows import Window
from pallas_gemm.op import fused, linear, lowering
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.function_of_sums import Function
from pallas_gemm.op.mesh import mesh_context
from pallas_gemm.op.mesh.fused_partition import kernel_types
from pallas_gemm.op.part_kernels import Part, part_kernel_p, why_whole
from pallas_gemm.op.product import give_rules, lower_by

side_by_side_p = core.Primitive("pallas_gemm_side_by_side")
side_by_side_p.multiple_results = True


class Half(NamedTuple):
    """A half of an array.

    Attributes:
        axis: The dimension that is cut.
        index: 0 for the first half, 1 for the second one.
    """

    axis: int
    index: int

    def of(self, x: jax.Array) -> jax.Array:
        """Returns this half of an array."""
        size = x.shape[self.axis] // 2
        start = self.index * size
        return lax.slice_in_dim(x, start, start + size, axis=self.axis)


class SideBySide(NamedTuple):
    """A function of two products, whose right operands are halves of one array.

    Attributes:
        call: The gated product, with float32 sums.
        contraction: Its dimensions, those of a half.
        function: The function of the sums.
        axis: The dimension of the array that is cut in half.
        halves: For each operand of the function that is a half of what is given: which half.
    """

    call: Call
    contraction: Contraction
    function: Function
    axis: int
    halves: tuple[Half | None, ...] = ()

    def apart(self, a: jax.Array, both: jax.Array, *given: jax.Array) -> list[jax.Array]:
        """Computes it of the halves as arrays of their own."""
        factors = (Half(self.axis, i).of(both) for i in range(2))
        return fused.fused(
            self.call, self.contraction, self.function, a, *factors, *self.cut(given)
        )

    def cut(self, given: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the operands of the function."""
        pairs = itertools.zip_longest(self.halves, given)
        return [x if half is None else half.of(x) for half, x in pairs]

    def signature(self, signature: Signature) -> Signature:
        """Returns shapes and types of the operands with the halves as arrays of their own."""
        types = [jax.ShapeDtypeStruct(*own) for own in signature]

        def halves(a: Any, both: Any, *given: Any) -> list[Any]:
            return [a, *(Half(self.axis, i).of(both) for i in range(2)), *self.cut(given)]

        return signature_of(jax.eval_shape(halves, *types))

    def plan(self, signature: Signature) -> fused.Fused | str:
        """Returns how a kernel computes it where the halves lie, or why none does."""
        own = self.signature(signature)
        found = fused.plan(self.call, self.contraction, self.function, own)
        if isinstance(found, str):
            return found
        shape = signature[1][0]
        why = self._why_apart(shape) or why_whole(found.decision, found.form)
        if why is None and self.is_deep(shape) and _has_part_of_step(found):
            why = "the last step of k would read the other half"
        return why or found

    def vectors(
        self, found: fused.Fused, shapes: Sequence[tuple[int, ...]]
    ) -> dict[int, tuple[int, int]]:
        """Returns which vectors of a kernel are read where they lie.

        Args:
            found: How the kernel computes it.
            shapes: The shapes of the operands of the function, as they are given.

        Returns:
            For each place among the operands of the kernel: which operand of the function it is,
            and which half of what is given.
        """
        places = {}
        pairs = zip(vectors.given(found.split), found.split.program.operands, strict=True)
        for place, (number, operand) in enumerate(pairs):
            if number is None or operand.kind != "n" or number >= len(self.halves):
                continue
            half = self.halves[number]
            if half is not None and math.prod(shapes[number][: half.axis]) == 1:
                places[place] = number, half.index
        return places

    def is_deep(self, shape: Sequence[Any]) -> bool:
        """Whether the halves of an array follow one another along what is contracted."""
        return self._real(shape)[:1] in self.contraction.contracted

    def _real(self, shape: Sequence[Any]) -> str:
        """Returns the letters of more than one element, from the one that is cut on.

        Where a half has one element of it, the halves follow one another along the next of these.
        """
        half = (shape[self.axis] // 2, *shape[self.axis + 1 :])
        pairs = zip(self.contraction.rhs[self.axis :], half, strict=True)
        return "".join(x for x, size in pairs if size != 1)

    def _why_apart(self, shape: Sequence[Any]) -> str | None:
        real = self._real(shape)
        group = self.contraction.contracted if self.is_deep(shape) else self.contraction.columns
        before = self.contraction.rhs[: self.axis]
        is_first = real[:1] in group and not set(before) & set(group)
        return None if real and is_first else "the halves of the array are no halves of a matrix"


def _has_part_of_step(found: fused.Fused) -> bool:
    """Whether the last step of k is not whole."""
    plan: Any = found.decision.plan
    problem = plan.realigned.problem
    return problem.k % plan.config.tile_k(problem) > 0


def _run(own: SideBySide, signature: Signature, *, gpu: bool) -> Callable[..., list[jax.Array]]:
    """Returns what computes it on one device."""
    own = own._replace(call=lowering.planned(own.call, gpu))
    found = own.plan(signature)
    return own.apart if isinstance(found, str) else functools.partial(_by_kernel, own, found)


def _by_kernel(
    own: SideBySide, found: fused.Fused, a: jax.Array, both: jax.Array, *given: jax.Array
) -> list[jax.Array]:
    right = found.form.b
    along = len(right.shape) - (2 if right.transposed != own.is_deep(both.shape) else 1)
    shape = list(right.shape)
    shape[along] *= 2
    whole = both.reshape(shape)
    prepared, places = found.split.prepared(own.cut(given)), []
    for place, (number, half) in own.vectors(found, [x.shape for x in given]).items():
        prepared[place] = given[number].reshape(2, -1)
        places.append((place, half))
    window = Window(beside=along, vectors=tuple(places))
    types = kernel_types(found.call, found.decision)
    part = Part(found.call, found.decision, window, types=types)
    run: Callable[..., Any] = functools.partial(part_kernel_p.bind, part=part)
    if found.decision.implementation == "interpret":
        run = _traced_once(part)
    results = run(found.form.a.apply(a), whole, whole, *prepared)
    return found.split.finished(own.cut(given), results)


@functools.lru_cache(maxsize=1024)
def _traced_once(part: Part) -> Callable[..., Any]:
    """Returns the simulation of a kernel that is traced once, in however many programs it is."""
    return jax.jit(part.run())


@side_by_side_p.def_effectful_abstract_eval
def _abstract(*avals: Any, own: SideBySide, **_: Any) -> Any:
    return jax.make_jaxpr(own.apart)(*avals).out_avals, effects(own, avals)


def effects(own: SideBySide, avals: Any) -> Any:
    """Returns the effects of it: the simulator calls back into Python."""
    given = signature_of(avals)
    return lowering.effects_of(own.call, functools.partial(_run, own, given, gpu=False), given)


def _lowered(
    ctx: mlir.LoweringRuleContext, *operands: Any, own: SideBySide, gpu: bool, **_: Any
) -> Any:
    if not mesh_context.is_one_devices(ctx.module_context.axis_context):
        return mlir.lower_fun(own.apart, multiple_results=True)(ctx, *operands)
    run = _run(own, signature_of(ctx.avals_in), gpu=gpu)
    return mesh_context.lower_off_mesh(ctx, run, operands)


def _jvp(primals: Any, tangents: Any, *, own: SideBySide, **_: Any) -> Any:
    return linear.derived(own.apart, primals, linear.changes(tangents))


def _transpose(cotangents: Sequence[Any], *operands: Any, own: SideBySide, **_: Any) -> list[Any]:
    return linear.transposed(own.apart, cotangents, operands)


def _batch(
    operands: Sequence[Any], dims: Sequence[Any], *, own: SideBySide, **_: Any
) -> tuple[list[Any], list[int]]:
    results = jax.vmap(own.apart, tuple(dims))(*operands)
    return results, [0] * len(results)


give_rules(side_by_side_p, jvp=_jvp, transpose=_transpose, batch=_batch)
lower_by(side_by_side_p, _lowered)
