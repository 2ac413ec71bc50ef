"""Products on an explicit mesh: within one, arrays are split as on an automatic mesh.

Types say how arrays of an explicit mesh are split, and a reshape that merges two split dimensions
has no such type. So a product is computed as on an automatic mesh, and its result is given the type
that JAX's product would have. JAX can do that to any function (`jax.sharding.auto_axes`), but what
is kept for a gradient is then of the automatic mesh, and no program may hold both. Here the whole
is one primitive, and so is each of its derivatives: what passes between them is explicit.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, mlir
from jax.sharding import NamedSharding, PartitionSpec

from pallas_gemm.call import OF_RESULT, Call, Operands
from pallas_gemm.op import autodiff, function_of_sums, fused, in_blocks, linear
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.product import equally_varying, give_rules
from pallas_gemm.planning import numerics

explicit_p = core.Primitive("pallas_gemm_explicit")
explicit_p.multiple_results = True

Function = Callable[..., Sequence[jax.Array]]
"""A function of arrays on an automatic mesh: hashable, and equal to one that computes the same."""


def explicit_product(
    call: Call, contraction: Contraction, sharding: NamedSharding, *operands: jax.Array
) -> jax.Array:
    """Computes a product of operands on an explicit mesh; its result is split as told."""
    return computed(_Product(call, contraction), [sharding], *operands)[0]


def by_xla(
    call: Call, contraction: Contraction, sharding: NamedSharding, *operands: jax.Array
) -> jax.Array:
    """Computes the same by XLA."""
    return computed(_ByXla(call, contraction), [sharding], *operands)[0]


def computed(f: Function, shardings: Sequence[Any], *operands: jax.Array) -> list[jax.Array]:
    """Computes a function as on an automatic mesh; its results are split as told."""
    given = equally_varying(operands)
    avals = tuple(map(jax.typeof, given))
    jaxpr = _traced(f, tuple(shardings), avals, jax.sharding.get_abstract_mesh())
    return explicit_p.bind(*given, f=f, jaxpr=jaxpr)


@functools.lru_cache(maxsize=4096)
def _traced(
    f: Function, shardings: tuple[NamedSharding, ...], avals: tuple[Any, ...], context: Any
) -> core.ClosedJaxpr:
    del context  # What is traced depends on it.
    axes = shardings[0].mesh.explicit_axes
    run = jax.sharding.auto_axes(lambda *x: tuple(f(*x)), axes=axes, out_sharding=shardings)
    return jax.make_jaxpr(run)(*avals)


@dataclasses.dataclass(frozen=True)
class _Product:
    """A product, as a function of its operands."""

    call: Call
    contraction: Contraction

    def __call__(self, *operands: jax.Array) -> list[jax.Array]:
        return [in_blocks.multiplied(self.call, self.contraction, *operands)]


@dataclasses.dataclass(frozen=True)
class _ByXla:
    """A product that XLA computes, as a function of its operands."""

    call: Call
    contraction: Contraction

    def __call__(self, *operands: jax.Array) -> list[jax.Array]:
        return [in_blocks.by_xla(self.call, self.contraction, *operands)]


@dataclasses.dataclass(frozen=True)
class _Fused:
    """A function of a product, and how its sums are split."""

    call: Call
    contraction: Contraction
    function: function_of_sums.Function
    sums: NamedSharding

    def __call__(self, *operands: jax.Array) -> list[jax.Array]:
        factors, given = fused.factors_of(self.call, operands)
        dims, own = in_blocks.ready(self.call, self.contraction, factors)
        return fused.fused(self.call, dims, self.function, *own, *given)

    def apart(self, *operands: jax.Array) -> list[jax.Array]:
        """Computes the product, then the function by XLA."""

        def multiply(own: Call, dims: Contraction, *factors: jax.Array) -> jax.Array:
            return explicit_product(own, dims, self.sums, *factors)

        own = self.call, self.contraction, self.function
        return fused.apart(*own, *operands, multiply=multiply)


def explicit_fused(
    call: Call,
    contraction: Contraction,
    function: function_of_sums.Function,
    sums: NamedSharding,
    *operands: jax.Array,
) -> list[jax.Array]:
    """Computes a function of a product of operands on an explicit mesh.

    Args:
        call: The product.
        contraction: Its dimensions.
        function: The function.
        sums: How the product is to be split.
        *operands: The operands of the product, then of the function.
    """
    whole = _Fused(call, contraction, function, sums)
    results: Any = jax.make_jaxpr(whole.apart)(*operands).out_avals
    return computed(whole, [x.sharding for x in results], *operands)


@dataclasses.dataclass(frozen=True)
class _ProductChange:
    """How a product without activation changes: linear in the changes, which come last."""

    call: Call
    contraction: Contraction
    changed: tuple[bool, ...]

    def __call__(self, *operands: jax.Array) -> list[jax.Array]:
        primals, tangents = _primals_and_tangents(operands, self.changed)
        given, moved = self.call.unpack(primals), self.call.unpack(tangents)
        return [autodiff.change_without_activation(self.call, self.contraction, given, moved)]


@dataclasses.dataclass(frozen=True)
class _Change:
    """How the results of any function change: linear in the changes, which come last."""

    of: Function
    changed: tuple[bool, ...]

    def __call__(self, *operands: jax.Array) -> Sequence[jax.Array]:
        return linear.derived(self.of, *_primals_and_tangents(operands, self.changed))[1]


def _primals_and_tangents(operands: Sequence[Any], changed: Sequence[bool]) -> tuple[Any, Any]:
    """Takes operands apart; a tangent that there is not is None."""
    changes = iter(operands[len(changed) :])
    tangents = [next(changes) if moves else None for moves in changed]
    return operands[: len(changed)], tangents


def _filled(places: Sequence[bool], values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Puts values at these places of all operands."""
    rest = iter(values)
    return [next(rest) if own else x for own, x in zip(places, others, strict=True)]


@dataclasses.dataclass(frozen=True)
class _Transposed:
    """The cotangents of operands that a function is linear in, from those of its results.

    Attributes:
        of: The function.
        missing: Which operands it is linear in.
        kinds: (shape, dtype) of those.
    """

    of: Function
    missing: tuple[bool, ...]
    kinds: tuple[Any, ...]

    def __call__(self, *operands: jax.Array) -> Sequence[jax.Array]:
        known = iter(operands[: len(self.missing) - sum(self.missing)])
        others = [None if missing else next(known) for missing in self.missing]
        cotangents = operands[len(self.missing) - sum(self.missing) :]

        def of_missing(*missing: jax.Array) -> list[jax.Array]:
            return list(self.of(*_filled(self.missing, missing, others)))

        # In a `shard_map` along other axes, what it is linear in varies as the results do.
        like = jax.typeof(cotangents[0])
        how = {"sharding": NamedSharding(like.sharding.mesh, PartitionSpec())}
        how["manual_axis_type"] = like.manual_axis_type
        shapes = [jax.ShapeDtypeStruct(*kind, **how) for kind in self.kinds]
        return jax.linear_transpose(of_missing, *shapes)(list(cotangents))


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """A function under `vmap`."""

    of: Function
    dims: tuple[int | None, ...]

    def __call__(self, *operands: jax.Array) -> Sequence[jax.Array]:
        return jax.vmap(lambda *x: tuple(self.of(*x)), self.dims)(*operands)


@explicit_p.def_abstract_eval
def _abstract(*_: Any, jaxpr: core.ClosedJaxpr, **__: Any) -> Any:
    return jaxpr.out_avals


def _lowered(
    ctx: mlir.LoweringRuleContext, *operands: Any, jaxpr: core.ClosedJaxpr, **_: Any
) -> Any:
    return mlir.lower_fun(core.jaxpr_as_fun(jaxpr), multiple_results=True)(ctx, *operands)


def _shardings(jaxpr: core.ClosedJaxpr) -> list[Any]:
    avals: list[Any] = jaxpr.out_avals
    return [aval.sharding for aval in avals]


def _jvp(primals: Any, tangents: Any, *, f: Function, jaxpr: core.ClosedJaxpr) -> Any:
    shardings = _shardings(jaxpr)
    if isinstance(f, _Product) and not f.call.epilogue.blocks:
        result, change = _product_jvp(f, shardings[0], primals, linear.changes(tangents))
        return [result], [change]
    if isinstance(f, _Fused):
        why = "on an explicit mesh, XLA computes a function that is derived"
        numerics.refuse_promised(f.call.options, why)
        # All that is kept for the derivative has to be on the explicit mesh.
        return linear.derived(f.apart, primals, linear.changes(tangents))
    changes = [t for t in linear.changes(tangents) if t is not None]
    changed = tuple(t is not None for t in linear.changes(tangents))
    results = explicit_p.bind(*primals, f=f, jaxpr=jaxpr)
    return results, computed(_Change(f, changed), shardings, *primals, *changes)


def _product_jvp(f: _Product, sharding: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """As in `autodiff`, but for what each step is made of."""
    call, epilogue = f.call, f.call.epilogue
    given, moved = call.unpack(primals), call.unpack(tangents)
    if autodiff.needs_pre_activation(epilogue, moved):
        pairs = [
            _changed_product(_Product(before, dims), sharding, own, change)
            for before, dims, own, change in autodiff.pre_activations(
                call, f.contraction, given, moved
            )
        ]
        # What follows is elementwise, and types have to agree there.
        given, moved = (_like_result(f.contraction.aligned(x), sharding) for x in (given, moved))
        return autodiff.after_activation(call, pairs, given, moved)
    result, change = _changed_product(f, sharding, given, moved)
    if epilogue.activation is not None:
        change = jnp.where(result > 0, change, jnp.zeros_like(change))
    return result, change


def _like_result(x: Operands, sharding: Any) -> Operands:
    """Splits what the epilogue takes as the result is split, but for dimensions of size 1."""

    def resharded(array: Any) -> Any:
        spec = [
            None if size == 1 else axes
            for size, axes in zip(array.shape, sharding.spec, strict=False)
        ]
        return jax.sharding.reshard(array, NamedSharding(sharding.mesh, PartitionSpec(*spec)))

    named = {name: getattr(x, name) for name in OF_RESULT}
    return x._replace(**{name: resharded(y) for name, y in named.items() if y is not None})


def _changed_product(
    f: _Product, sharding: Any, given: Operands, moved: Operands
) -> tuple[jax.Array, jax.Array]:
    """Returns a product and its change, as if there were no activation."""
    operands = given.present()
    result = linear.named(computed(f, [sharding], *operands)[0])
    pairs = [t for x, t in zip(given, moved, strict=True) if x is not None]
    changed = tuple(t is not None for t in pairs)
    if not any(changed):
        return result, jnp.zeros_like(result)
    change = _ProductChange(f.call, f.contraction, changed)
    changes = [t for t in pairs if t is not None]
    return result, computed(change, [sharding], *operands, *changes)[0]


def _transpose(cotangents: Any, *operands: Any, f: Function, jaxpr: core.ClosedJaxpr) -> Any:
    missing = tuple(map(ad.is_undefined_primal, operands))
    wanted = [x.aval for x in operands if ad.is_undefined_primal(x)]
    if isinstance(f, _Product):
        linear.check_linear(f.call, sum(missing))
    if all(isinstance(g, ad.Zero) for g in cotangents):
        found = [ad.Zero(aval) for aval in wanted]
    else:
        transposed = _Transposed(f, missing, tuple((x.shape, x.dtype) for x in wanted))
        known = [x for x in operands if not ad.is_undefined_primal(x)]
        given = map(ad.instantiate_zeros, cotangents)
        # What JAX makes itself, such as a zero that a loop starts with, may be on no mesh.
        mesh = _shardings(jaxpr)[0].mesh
        whole = NamedSharding(mesh, PartitionSpec())
        shardings = [whole if x.sharding.mesh.empty else x.sharding for x in wanted]
        found = computed(transposed, shardings, *known, *given)
    return _filled(missing, found, [None] * len(missing))


def _batch(operands: Any, dims: Any, *, f: Function, jaxpr: core.ClosedJaxpr) -> Any:
    mapped = next((x, d) for x, d in zip(operands, dims, strict=True) if d is not None)
    axis = jax.typeof(mapped[0]).sharding.spec[mapped[1]]
    shardings = [
        NamedSharding(own.mesh, PartitionSpec(axis, *own.spec)) for own in _shardings(jaxpr)
    ]
    results = computed(_Mapped(f, tuple(dims)), shardings, *operands)
    return results, [0] * len(results)


give_rules(explicit_p, jvp=_jvp, transpose=_transpose, batch=_batch)
mlir.register_lowering(explicit_p, _lowered)
