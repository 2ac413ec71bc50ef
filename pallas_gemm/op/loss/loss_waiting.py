"""Statistics of a last layer, whose logits wait in the array of the weight's gradient.

The gradient of the weight is as large as the weight, and is there after the backward pass anyway.
Until a chunk of it is computed, logits may be where it will be: it has room for those of `width`
tokens. So they take no memory of their own, and are not computed again.

    forward     the logits of the first tokens are kept     `[width, words]`
    backward    a chunk of words is read, then its gradient is stored there

The statistics of these tokens are computed from the logits that are kept, which are rounded.

Whether they wait is known when the program is lowered for a GPU. Where none do, nothing reads the
array in which they would: then it is the weight.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import mlir

from pallas_gemm.op import lowering
from pallas_gemm.op.loss import loss_windows
from pallas_gemm.op.loss.loss_layer import Given, Layer
from pallas_gemm.op.mesh import mesh_context
from pallas_gemm.op.product import equally_varying, give_rules, lower_by

Statistics = Callable[..., Sequence[jax.Array]]
waiting_p = core.Primitive("pallas_gemm_loss_waiting")
"""The statistics of each token, and the array in which logits wait."""
waiting_p.multiple_results = True


def waiting(layer: Layer, statistics: Statistics, *operands: jax.Array) -> list[jax.Array]:
    """Computes the statistics of each token, and the array in which logits wait, if any do.

    Args:
        layer: The layer.
        statistics: Computes the statistics of tokens, and keeps the product if it is told to.
        *operands: Hidden, weight, labels, and the bias if there is one.
    """
    return waiting_p.bind(*equally_varying(operands), layer=layer, statistics=statistics)


def _computed(
    layer: Layer, statistics: Statistics, *operands: jax.Array, gpu: bool = False
) -> list[jax.Array]:
    """Keeps the logits of the first tokens; those that follow have statistics alone."""
    hidden, weight, labels, *bias = operands
    tokens, width = hidden.shape
    some = min(tokens, width)
    planned = dataclasses.replace(layer, call=lowering.planned(layer.call, gpu))
    if not planned.waiting(hidden, weight).waits:
        return _none_wait(layer, statistics, *operands)
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


def _none_wait(layer: Layer, statistics: Statistics, *operands: jax.Array) -> list[jax.Array]:
    """Computes the statistics, where no logits wait."""
    return [*statistics(layer, *operands), operands[1]]


def kernels(avals: Sequence[Any]) -> list[tuple[list[Any], bool]]:
    """Returns the types of the operands of each kernel, and whether it keeps logits."""
    hidden, weight, labels, *bias = avals
    tokens, some = hidden.shape[0], min(hidden.shape)

    def of(size: int) -> list[Any]:
        types = (jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for x in (hidden, labels))
        own, of_labels = types
        return [own, weight, of_labels, *bias]

    return [(of(some), True), *([(of(tokens - some), False)] if some < tokens else [])]


@waiting_p.def_abstract_eval
def _abstract(*avals: Any, layer: Layer, statistics: Statistics) -> Any:
    own = functools.partial(statistics, layer)
    of_tokens = jax.make_jaxpr(own)(*avals).out_avals
    return [*of_tokens, avals[1]]


def _lowered(
    ctx: mlir.LoweringRuleContext, *operands: Any, layer: Layer, statistics: Statistics, gpu: bool
) -> Any:
    if mesh_context.is_one_devices(ctx.module_context.axis_context):
        run = functools.partial(_computed, layer, statistics, gpu=gpu)
        return mesh_context.lower_off_mesh(ctx, run, operands)
    run = functools.partial(_none_wait, layer, statistics)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


def _batch(operands: Any, dims: Any, *, layer: Layer, statistics: Statistics) -> Any:
    run = functools.partial(_none_wait, layer, statistics)
    results = jax.vmap(run, tuple(dims))(*operands)
    return results, [0] * len(results)


give_rules(waiting_p, batch=_batch)
lower_by(waiting_p, _lowered)
