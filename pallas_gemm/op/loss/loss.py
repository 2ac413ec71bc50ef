"""The statistics of a last layer's logits as one primitive, so that no logits are ever whole.

    log(sum(exp(z))), z of the label, sum(z)      z = softcap(scale * hidden @ weight + bias)

`loss_chunks` computes them, and the gradients. A kernel that has the whole function as its
epilogue computes them with one product; elsewhere XLA computes one chunk of words after the other.

Their change with the operands is a second primitive, which is linear: in reverse mode it becomes
the gradients by chunks, in forward mode a product for each operand that moves.

A third one also makes the array in which logits wait. The gradient of the weight is as large as the
weight, and is there after the backward pass anyway. Until a chunk of it is computed, logits may be
where it will be: it has room for those of `width` tokens. So they take no memory of their own, and
are not computed again.

    forward     the logits of the first tokens are kept     `[width, words]`
    backward    a chunk of words is read, then its gradient is stored there

The statistics of these tokens are computed from the logits that are kept, which are rounded.
Whether they wait is known when the program is lowered for a GPU. Where none do, nothing reads the
array in which they would: then it is the weight.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, mlir

from pallas_gemm.call import Signature, signature_of
from pallas_gemm.op import fused, linear, lowering
from pallas_gemm.op.batching import fronted, one_by_one
from pallas_gemm.op.function_of_sums import Function
from pallas_gemm.op.loss import loss_chunks, loss_layer, loss_partition, loss_windows
from pallas_gemm.op.loss.loss_gradient import gradients
from pallas_gemm.op.loss.loss_layer import Given, Layer, Slopes, Wanted
from pallas_gemm.op.mesh import mesh_context
from pallas_gemm.op.mesh.resharding import Axes
from pallas_gemm.op.product import computed_by, equally_varying, give_rules, lower_by, product

statistics_p = core.Primitive("pallas_gemm_loss")
statistics_p.multiple_results = True
change_p = core.Primitive("pallas_gemm_loss_change")
"""How the statistics change with the operands that move, the changes of which come last."""
change_p.multiple_results = True
waiting_p = core.Primitive("pallas_gemm_loss_waiting")
"""The statistics of each token, and the array in which logits wait."""
waiting_p.multiple_results = True

FACTORS = 2
"""The first operands: hidden and weight. Labels follow, then the bias if there is one."""


def statistics(layer: Layer, *operands: jax.Array, keep: bool = False) -> list[jax.Array]:
    """Computes the statistics of each token, and the product if it is to be kept.

    Args:
        layer: The layer.
        *operands: Hidden `[tokens, width]`, weight, labels, and the bias if there is one.
        keep: The product is one more result, in the type of its operands.
    """
    return computed_by(statistics_p, layer.call, operands, layer=layer, keep=keep)


@dataclasses.dataclass(frozen=True)
class Statistics:
    """The statistics of each token, and the product if it is kept, as what a mesh shares out.

    Attributes:
        layer: The layer.
        keep: The product is kept.
    """

    layer: Layer
    keep: bool

    @property
    def operands(self) -> tuple[str, ...]:
        """The dimensions of each operand."""
        return loss_partition.dimensions_of(self.layer)

    @property
    def results(self) -> tuple[str, ...]:
        """The dimensions of each result."""
        return ("t",) * (FACTORS + self.layer.total) + ("tw",) * self.keep

    def run(self, *operands: jax.Array) -> Sequence[jax.Array]:
        """Computes it from what one device has."""
        return statistics(self.layer, *operands, keep=self.keep)

    on_one_device = run

    def combine(self, results: Sequence[jax.Array], axes: dict[str, Axes]) -> Sequence[jax.Array]:
        """Combines what devices have of the words of a token."""
        if not axes["w"]:
            return results
        count = FACTORS + self.layer.total
        return [*loss_chunks.over_words(results[:count], axes["w"]), *results[count:]]


def by_one_kernel(layer: Layer, keep: bool, signature: Signature) -> bool:
    """Whether a kernel computes all of it, and leaves no array of tokens and words behind."""
    shapes = [jax.ShapeDtypeStruct(*own) for own in signature]
    function = function_of(layer, keep, shapes)
    found = fused.plan(layer.call, layer.contraction, function, signature)
    if isinstance(found, str) or found.decision.plan is None:
        return False
    return len(found.split.program.arrays) == keep


def function_of(layer: Layer, keep: bool, operands: Sequence[Any]) -> Function:
    """Returns the function of the product that a kernel computes."""
    return loss_layer.statistics_of_sums(layer, Given.of(operands), keep=keep, in_kernel=True)


@statistics_p.def_abstract_eval
def _abstract(*avals: Any, layer: Layer, keep: bool, **_: Any) -> Any:
    return _types(layer, keep, avals)


@functools.lru_cache(maxsize=4096)
def _types(layer: Layer, keep: bool, avals: tuple[Any, ...]) -> list[Any]:
    """Returns the types of the results, with their shardings and manual axes."""

    def like(hidden: Any, weight: Any, *_: Any) -> Any:
        sums = layer.contraction.by_xla(layer.call, hidden, weight)
        of_tokens = [jnp.max(sums, axis=-1)] * (FACTORS + layer.total)
        return [*of_tokens, *([sums.astype(hidden.dtype)] if keep else [])]

    return jax.make_jaxpr(like)(*avals).out_avals


def _lowered(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    layer: Layer,
    keep: bool,
    devices: Any,
    gpu: bool,
) -> Any:
    if not mesh_context.is_one_devices(ctx.module_context.axis_context):
        run = functools.partial(loss_chunks.by_chunks, layer, keep)
        if devices is not None and not mesh_context.why_not_partitioned(ctx.module_context):
            work = Statistics(layer, keep)
            run = functools.partial(loss_partition.shared, work)
        return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)
    own = dataclasses.replace(layer, call=lowering.planned(layer.call, gpu))
    signature = signature_of(ctx.avals_in)
    whole = gpu and by_one_kernel(own, keep, signature)
    run = functools.partial(loss_chunks.by_kernel if whole else loss_chunks.by_chunks, own, keep)
    return mesh_context.lower_off_mesh(ctx, run, operands)


def _jvp(primals: Any, tangents: Any, *, layer: Layer, keep: bool, **_: Any) -> Any:
    given = Given.of(primals)
    moves_weight = linear.changes(tangents)[1] is not None
    traced = layer.while_traced()
    if moves_weight and not keep and traced.waiting(given.hidden, given.weight).waits:
        results = waiting_p.bind(*equally_varying(primals), layer=layer)
        return _with_changes(primals, tangents, results, layer=layer, waits=True)
    keeping = keep or traced.chunks(given.hidden, given.weight).kept
    results = statistics(layer, *primals, keep=keeping)
    return _with_changes(primals, tangents, results, layer=layer, keep=keep)


def _jvp_of_waiting(primals: Any, tangents: Any, *, layer: Layer, **_: Any) -> Any:
    """Derives statistics. Logits that wait say nothing that the operands do not."""
    results = waiting_p.bind(*equally_varying(primals), layer=layer)
    own, changes = _with_changes(primals, tangents, results, layer=layer, waits=True)
    kept = results[-1]
    return [*own, kept], [*changes, ad.Zero(jax.typeof(kept))]


def _with_changes(
    primals: Any,
    tangents: Any,
    results: Sequence[Any],
    *,
    layer: Layer,
    keep: bool = False,
    waits: bool = False,
) -> Any:
    """Returns results that are wanted, and how they change."""
    results = list(map(linear.named, results))
    hidden, weight, _, *bias = linear.changes(tangents)
    moves = (hidden, weight, *bias)
    moved = tuple(x is not None for x in moves)
    kept = results[FACTORS + layer.total :]
    own = equally_varying((*primals, results[0], *kept, *(x for x in moves if x is not None)))
    how = {"layer": layer, "moved": moved, "kept": bool(kept), "keep": keep, "waits": waits}
    return results[: FACTORS + layer.total + keep], change_p.bind(*own, **how)


def kernels(avals: Sequence[Any]) -> list[tuple[list[Any], bool]]:
    """Returns the types of the operands of each kernel, and whether it keeps logits that wait."""
    hidden, weight, labels, *bias = avals
    tokens, some = hidden.shape[0], min(hidden.shape)

    def of(size: int) -> list[Any]:
        types = (jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for x in (hidden, labels))
        own, of_labels = types
        return [own, weight, of_labels, *bias]

    return [(of(some), True), *([(of(tokens - some), False)] if some < tokens else [])]


@waiting_p.def_abstract_eval
def _abstract_waiting(*avals: Any, layer: Layer) -> Any:
    return [*_types(layer, False, avals), avals[1]]


def _none_wait(layer: Layer, *operands: jax.Array) -> list[jax.Array]:
    """Computes the statistics, where no logits wait."""
    return [*statistics(layer, *operands), operands[1]]


def _waiting(layer: Layer, *operands: jax.Array, gpu: bool = False) -> list[jax.Array]:
    """Keeps the logits of the first tokens; those that follow have statistics alone."""
    hidden, weight, labels, *bias = operands
    tokens, width = hidden.shape
    some = min(tokens, width)
    planned = dataclasses.replace(layer, call=lowering.planned(layer.call, gpu))
    if not planned.waiting(hidden, weight).waits:
        return _none_wait(layer, *operands)
    # A kernel stores into the larger array; without one, another is made.
    by_kernel = gpu and some < width
    if by_kernel and (results := loss_windows.statistics(planned, Given.of(operands))):
        return results
    *found, kept = statistics(layer, hidden[:some], weight, labels[:some], *bias, keep=True)
    if some < width:
        kept = jnp.pad(kept, ((0, width - some), (0, 0)))
    if some < tokens:
        others = statistics(layer, hidden[some:], weight, labels[some:], *bias)
        found = [jnp.concatenate(own) for own in zip(found, others, strict=True)]
    return [*found, kept]


def _lowered_waiting(ctx: mlir.LoweringRuleContext, *operands: Any, layer: Layer, gpu: bool) -> Any:
    if mesh_context.is_one_devices(ctx.module_context.axis_context):
        run = functools.partial(_waiting, layer, gpu=gpu)
        return mesh_context.lower_off_mesh(ctx, run, operands)
    run = functools.partial(_none_wait, layer)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


def _batch_waiting(operands: Any, dims: Any, *, layer: Layer) -> Any:
    results = jax.vmap(functools.partial(_none_wait, layer), tuple(dims))(*operands)
    return results, [0] * len(results)


def _taken_apart(operands: Sequence[Any], layer: Layer, moved: Any, kept: bool) -> Any:
    """Returns operands of a change: given, the log-sum-exp, what was kept, and the changes."""
    count = FACTORS + 1 + layer.bias
    given, (log_sum_exp, *rest) = Given.of(operands[:count]), operands[count:]
    changes = iter(rest[kept:])
    moves = [next(changes) if is_moved else None for is_moved in moved]
    return given, log_sum_exp, rest[0] if kept else None, moves


def _change(
    *operands: jax.Array, layer: Layer, moved: Any, kept: bool, keep: bool, **_: Any
) -> list[jax.Array]:
    """Computes the change of the statistics: in forward mode, from whole arrays of logits."""
    given, _, _, changes = _taken_apart(operands, layer, moved, kept)

    def whole(hidden: jax.Array, weight: jax.Array, *bias: jax.Array) -> list[jax.Array]:
        sums = layer.contraction.by_xla(layer.call, hidden, weight)
        results = loss_layer.statistics_of_sums(layer, given)(sums, given.labels, *bias)
        return [*results, *([sums.astype(given.hidden.dtype)] if keep else [])]

    return linear.derived(whole, (given.hidden, given.weight, *given.bias), changes)[1]


@change_p.def_abstract_eval
def _abstract_change(*avals: Any, layer: Layer, keep: bool, **_: Any) -> Any:
    return _types(layer, keep, avals[: FACTORS + 1 + layer.bias])


def _transpose(
    cotangents: Any,
    *operands: Any,
    layer: Layer,
    moved: Any,
    kept: bool,
    keep: bool,
    waits: bool,
) -> list[Any]:
    given, log_sum_exp, kept_product, moves = _taken_apart(operands, layer, moved, kept)
    others = [None] * (len(operands) - sum(moved))
    cotangents, of_product = (cotangents[:-1], cotangents[-1]) if keep else (cotangents, None)
    if isinstance(of_product, ad.Zero):
        of_product = None
    if of_product is None and all(isinstance(g, ad.Zero) for g in cotangents):
        return [*others, *(ad.Zero(x.aval) for x in moves if x is not None)]
    of_log_sum_exp, of_label, *of_total = map(ad.instantiate_zeros, cotangents)
    slopes = Slopes(log_sum_exp, of_log_sum_exp, of_label, tuple(of_total))
    wanted = Wanted(*(*(x is not None for x in moves), False)[: len(Wanted._fields)])
    found = gradients(layer, wanted, given, slopes, kept_product, waits=waits)
    if of_product is not None:
        found = _with_product(layer, given, found, of_product)
    return [*others, *(g for g, move in zip(found, moves, strict=False) if move is not None)]


def _with_product(layer: Layer, given: Given, found: list[Any], g: jax.Array) -> list[Any]:
    """Adds what comes of the product that was kept, which second derivatives depend on."""
    hidden, weight, *bias = found
    dims = layer.contraction
    if hidden is not None:
        call = layer.call.plain(hidden.dtype)
        hidden = hidden + product(call, dims.of_left, g, given.weight)
    if weight is not None:
        call = layer.call.plain(weight.dtype)
        weight = weight + product(call, dims.of_right, given.hidden, g)
    return [hidden, weight, *bias]


def _change_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    run = functools.partial(_change, **params)
    return linear.derived(run, primals, linear.changes(tangents))


def _batch(operands: Any, dims: Any, *, layer: Layer, keep: bool, **_: Any) -> Any:
    """Maps it: more tokens, or one layer after the other where each has a weight of its own."""
    hidden, weight, labels, *bias = operands
    run = functools.partial(statistics, layer, keep=keep)
    if any(d is not None for d in (dims[1], *dims[3:])):
        results = one_by_one(run, operands, dims)
        return results, [0] * len(results)
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    hidden, labels = (fronted(x, d, size) for x, d in ((hidden, dims[0]), (labels, dims[2])))
    tokens = hidden.shape[1]
    hidden, labels = (x.reshape(size * tokens, *x.shape[2:]) for x in (hidden, labels))
    results = run(hidden, weight, labels, *bias)
    return [x.reshape(size, tokens, *x.shape[1:]) for x in results], [0] * len(results)


def _batch_change(operands: Any, dims: Any, **params: Any) -> Any:
    run = functools.partial(_change, **params)
    results = jax.vmap(run, tuple(dims))(*operands)
    return results, [0] * len(results)


give_rules(statistics_p, jvp=_jvp, batch=_batch)
give_rules(change_p, jvp=_change_jvp, transpose=_transpose, batch=_batch_change)
give_rules(waiting_p, jvp=_jvp_of_waiting, batch=_batch_waiting)
lower_by(statistics_p, _lowered)
lower_by(waiting_p, _lowered_waiting)
mlir.register_lowering(change_p, mlir.lower_fun(_change, multiple_results=True))
