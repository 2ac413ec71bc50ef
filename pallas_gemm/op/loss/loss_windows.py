"""The gradients of a last layer by kernels that take some words of whole arrays.

    slopes       read their words of the weight where they lie
    of tokens    likewise; what is added to is replaced
    of weight    is written where it belongs

So nothing passes over memory between the products, and there is no second array of sums
(`kernels/windows.py`). `loss_chunks` has the loop over chunks of words. Where logits wait in the
gradient of the weight (`loss`), slopes of those tokens are made of them in one pass.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from pallas_gemm.call import Call, Signature, signature_of
from pallas_gemm.kernels.windows import Window
from pallas_gemm.op import fused
from pallas_gemm.op.canonical import Form, merged
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.function_of_sums import Function
from pallas_gemm.op.loss import loss_layer
from pallas_gemm.op.loss.loss_layer import Given, Layer, Slopes, Wanted
from pallas_gemm.op.loss.loss_plan import STEP, Chunks
from pallas_gemm.op.mesh.fused_partition import kernel_types
from pallas_gemm.op.part_kernels import Part, why_whole
from pallas_gemm.planning import dispatch
from pallas_gemm.planning.architectures import architecture_of
from pallas_gemm.planning.dispatch import Decision
from pallas_gemm.problem import Epilogue


class Products(NamedTuple):
    """The kernels of a chunk of words.

    Attributes:
        slopes: This kernel computes the slopes. The function beside it says the rest. None if the
            logits of all tokens wait.
        first: This one computes the gradient of the tokens, for the first words.
        more: The same for other words, added to the gradient for the words before.
        weight: This one computes the gradient of the weight.
    """

    slopes: tuple[Part, fused.Fused] | None
    first: Part
    more: Part
    weight: Part


class Windows(NamedTuple):
    """Chunks by kernels; `at` is where one begins, and how many words it has.

    Attributes:
        parts: The chunks.
        of: The kernels, by the words of a chunk.
    """

    parts: Chunks
    of: dict[int, Products]

    together = 1
    """Chunks in a round of the loop."""

    def words(self, given: Given, start: Any, size: int) -> Given:
        """Returns the operands of some words: of the weight, all."""
        bias = tuple(lax.dynamic_slice_in_dim(x, start, size, 0) for x in given.bias)
        return given._replace(labels=given.labels - start, bias=bias)

    def slopes(
        self, with_bias: bool, own: Given, slopes: Slopes, at: Any, above: int
    ) -> list[jax.Array]:
        """Computes the slopes of some words below those of other tokens, and their bias's gradient.

        There is room for this many other tokens above.
        """
        start, size = at
        found = self.of[size].slopes
        del with_bias  # The function knows.
        assert found is not None
        kernel, function = found
        given = function.split.prepared((*slopes.leaves(), own.labels, *own.bias))
        into = []
        if above:
            shape = (above + own.hidden.shape[0], size)
            into = [loss_layer.empty(own, shape, own.hidden.dtype)]
        results = kernel(start, own.hidden, own.weight, *given, *into)
        return _finished(function, (*slopes.leaves(), own.labels, *own.bias), results, above)

    def hidden(self, g: jax.Array, weight: jax.Array, before: Any, at: Any) -> jax.Array:
        """Adds the gradient of the tokens by some words to that by the words before."""
        start, size = at
        if before is None:
            return self.of[size].first(start, g, weight)[0]
        return self.of[size].more(start, g, weight, before)[0]

    def weight(self, g: jax.Array, given: Given, before: Any, at: Any) -> jax.Array:
        """Puts the gradient of the weight of some words where it belongs."""
        start, size = at
        if before is None:
            before = loss_layer.empty(given, given.weight.shape, given.weight.dtype)
        return self.of[size].weight(start, given.hidden, g, before)[0]


def _finished(
    function: fused.Fused, given: Sequence[Any], results: Sequence[Any], above: int
) -> list[jax.Array]:
    """Computes the results of a function: one of them is the larger array that it is a part of."""
    place, rows = _place(function), function.decision.problem.m
    parts = list(results)
    parts[place] = lax.slice_in_dim(results[place], above, above + rows)
    found = function.split.finished(given, parts)
    found[_output(function)] = results[place]
    return found


def _place(function: fused.Fused) -> int:
    """Which result of a kernel has a value for each element."""
    return [own.kind for own in function.split.program.results].index("mn")


def _output(function: fused.Fused) -> int:
    """Which result of the function that is."""
    return list(function.split.flat.outputs).index(function.split.results[_place(function)])


def planned(
    layer: Layer, parts: Chunks, wanted: Wanted, given: Given, slopes: Slopes
) -> Windows | str:
    """Returns how kernels compute the gradients of a layer by parts, or why they do not.

    Args:
        layer: The layer, with the GPU to plan for.
        parts: The chunks.
        wanted: The operands whose gradients are wanted.
        given: Its operands, or their types.
        slopes: How the loss changes with its statistics, likewise.
    """
    layer = dataclasses.replace(layer, call=_by_kernel(layer.call))
    found: dict[int, Products] = {}
    for size in {parts.first, parts.each}:
        products = _products(layer, parts, wanted, _types(layer, given, size), slopes)
        if isinstance(products, str):
            return products
        found[size] = products
    return Windows(parts, found)


def _by_kernel(call: Call) -> Call:
    """Returns a call that names the kernel: XLA copies parts, even where its product is faster."""
    own = None if call.options.target is None else architecture_of(call.options.target)
    if own is None or call.options.implementation is not None:
        return call
    return dataclasses.replace(
        call, options=dataclasses.replace(call.options, implementation=own.name)
    )


def _types(layer: Layer, given: Given, size: int) -> Given:
    """Returns the types of the operands of some words."""
    hidden, labels = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (given.hidden, given.labels))
    stored = list(given.weight.shape)
    stored[layer.axis] = size
    weight = jax.ShapeDtypeStruct(tuple(stored), given.weight.dtype)
    bias = tuple(jax.ShapeDtypeStruct((size,), x.dtype) for x in given.bias)
    taken: Any = (hidden, weight, labels, bias)
    return Given(*taken)


def _products(
    layer: Layer, parts: Chunks, wanted: Wanted, own: Given, slopes: Slopes
) -> Products | str:
    """Returns the kernels for chunks of these sizes, or why there are none."""
    hidden, weight = (signature_of((x,))[0] for x in (own.hidden, own.weight))
    (tokens, width), dtype = hidden
    size, axis = weight[0][layer.axis], layer.axis
    of_slopes, some = None, parts.waiting[0]
    if some < tokens:
        others = own.of_tokens(some, tokens), slopes.of_tokens(some, tokens)
        of_slopes = _of_slopes(layer, wanted.bias, *others, above=some)
    g, sums = ((tokens, size), dtype), ((tokens, width), np.dtype(layer.call.out_dtype))
    dims = layer.contraction
    into = layer.call.plain(sums[1])
    adding = dataclasses.replace(into, epilogue=Epilogue(residual=True))
    of_left = dims.of_left.with_letters(residual="mk")
    every = (
        _part(into, dims.of_left, (g, weight), Window(right=axis), (sums,)),
        _part(adding, of_left, (g, weight, sums), Window(right=axis, in_place=True)),
        _part(layer.call.plain(dtype), dims.of_right, (hidden, g), Window(result=axis)),
    )
    for found in (of_slopes, *every):
        if isinstance(found, str):
            return found
    made: Any = (of_slopes, *every)
    if some and _reaches_beyond(made[-1], size):
        return "tiles would be stored where other logits wait"
    return Products(*made)


def _reaches_beyond(part: Part, words: int) -> bool:
    """Whether the last tiles of the gradient of the weight reach beyond a chunk that is full."""
    plan: Any = part.decision.plan
    problem = plan.config.as_computed(plan.realigned.problem)
    return words % STEP == 0 and plan.config.reach(problem)[not problem.transpose_out] > words


def _of_slopes(layer: Layer, with_bias: bool, own: Given, slopes: Slopes, *, above: int) -> Any:
    function = loss_layer.slopes_of_sums(layer, own, with_bias, slopes)
    given = (own.hidden, own.weight, *slopes.leaves(), own.labels, *own.bias)
    window = Window(right=layer.axis, below=above or None)
    return _of_function(layer, function, given, window, above + own.hidden.shape[0])


def _of_function(
    layer: Layer, function: Function, given: Sequence[Any], window: Window, rows: int
) -> tuple[Part, fused.Fused] | str:
    """Returns the kernel of a function, one result of which is in an array of this many rows.

    Or why no kernel takes parts of its operands.
    """
    found = fused.plan(layer.call, layer.contraction, function, signature_of(given))
    if isinstance(found, str):
        return found
    decision = _uncut(found.decision)
    if why := _why_not(decision, found.form):
        return why
    types = [
        ((rows, shape[1]) if len(shape) > 1 and own.kind == "mn" else shape, dtype)
        for own, (shape, dtype) in zip(
            found.split.program.results, kernel_types(found.call, decision), strict=True
        )
    ]
    return Part(found.call, decision, window, False, tuple(types)), found


def statistics(layer: Layer, given: Given) -> list[jax.Array] | None:
    """Computes the statistics, and logits in an array like the weight; None if no kernel does."""
    layer = dataclasses.replace(layer, call=_by_kernel(layer.call))
    function = loss_layer.statistics_of_sums(layer, given, keep=True, in_kernel=True)
    own = (given.hidden, given.weight, given.labels, *given.bias)
    planned = _of_function(layer, function, own, Window(below=0), given.weight.shape[0])
    if isinstance(planned, str):
        return None
    part, found = planned
    whole = loss_layer.empty(given, given.weight.shape, given.weight.dtype)
    prepared = found.split.prepared(own[2:])
    return _finished(found, own[2:], part(0, *own[:2], *prepared, whole), 0)


def _part(
    call: Call,
    contraction: Contraction,
    signature: Signature,
    window: Window,
    types: tuple[Any, ...] = (),
) -> Part | str:
    matrices = merged(call, contraction, signature)
    decision, swapped = dispatch.decide(matrices.call, matrices.signature), matrices.form.swapped
    decision = _uncut(decision)
    if why := _why_not(decision, matrices.form):
        return why
    return Part(matrices.call, decision, window.mirrored() if swapped else window, swapped, types)


def _uncut(decision: Decision) -> Decision:
    """Returns a decision whose last tiles are whole, as all others are."""
    plan = decision.plan
    if plan is None or not getattr(plan.config, "split_last", None):
        return decision
    config = dataclasses.replace(plan.config, split_k=1, split_last=None)
    return dataclasses.replace(decision, plan=dataclasses.replace(plan, config=config))


def _why_not(decision: Decision, form: Form) -> str | None:
    """Returns why a kernel takes no chunk of words of a product's operands; None if it does."""
    if why := why_whole(decision, form):
        return why
    plan: Any = decision.plan
    return "its tiles are cut along k" if plan.config.split_k > 1 else None
