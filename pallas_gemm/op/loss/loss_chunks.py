"""The statistics of a token's logits, and their gradients, one chunk of words after the other.

Logits exist for one chunk at a time. `loss_layer` has the functions of the product.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim

from pallas_gemm.op.fused import fused
from pallas_gemm.op.loss.loss_layer import (
    Given,
    Layer,
    Slopes,
    Wanted,
    empty,
    slopes_of_sums,
    statistics_of_sums,
)
from pallas_gemm.op.loss.loss_plan import DEFAULT_WORDS, Chunks, together
from pallas_gemm.op.loss.loss_windows import Windows
from pallas_gemm.op.product import product
from pallas_gemm.problem import Epilogue

BLOCKS = 8
"""In how many steps slopes take the place of all logits."""


def at_once(
    layer: Layer, keep: bool, *operands: jax.Array, in_kernel: bool = False
) -> list[jax.Array]:
    """Computes the statistics, and the product if it is to be kept, with one product."""
    given = Given.of(operands)
    function = statistics_of_sums(layer, given, keep=keep, in_kernel=in_kernel)
    own = (given.hidden, given.weight, given.labels, *given.bias)
    return fused(layer.call, layer.contraction, function, *own)


def by_kernel(layer: Layer, keep: bool, *operands: jax.Array) -> list[jax.Array]:
    """Computes the same in a kernel: where tiles leave much, of some tokens after the others.

    A product that is kept is in one array, which is larger than that.
    """
    given = Given.of(operands)
    tokens = given.hidden.shape[0]
    # Of the log-sum-exp a tile leaves two numbers.
    each = together(tokens, given.weight.shape[layer.axis], 2 + layer.total)
    if keep or each == tokens:
        return at_once(layer, keep, *operands, in_kernel=True)
    found: list[list[jax.Array]] = []
    for start in range(0, tokens, each):
        end = min(start + each, tokens)
        hidden, labels = (lax.slice_in_dim(x, start, end) for x in (given.hidden, given.labels))
        if found:
            # The labels wait: hidden would be copied to.
            labels, found[-1] = _one_after_the_other(labels, found[-1])
        own = (hidden, given.weight, labels, *given.bias)
        found.append(at_once(layer, keep, *own, in_kernel=True))
    return [jnp.concatenate(own) for own in zip(*found, strict=True)]


def by_chunks(layer: Layer, keep: bool, *operands: jax.Array) -> list[jax.Array]:
    """Computes the same for one chunk of words after the other."""
    given = Given.of(operands)
    parts = layer.chunks(given.hidden, given.weight)
    if is_symbolic_dim(parts.words) or parts.words <= min(parts.each, DEFAULT_WORDS):
        return at_once(layer, keep, *operands)
    parts = dataclasses.replace(parts, each=min(parts.each, DEFAULT_WORDS), kept=False)
    shape = (given.hidden.shape[0], parts.words)
    whole = [empty(given, shape, given.hidden.dtype)] if keep else []

    def step(found: Any, start: Any, size: int) -> list[jax.Array]:
        own = given.words(layer, start, size)
        new = at_once(layer, keep, own.hidden, own.weight, own.labels, *own.bias)
        count = len(new) - keep
        before, kept = ([], whole) if found is None else (found[:count], found[count:])
        kept = [lax.dynamic_update_slice_in_dim(x, new[count], start, 1) for x in kept]
        if not before:
            return [*new[:count], *kept]
        sums = (x + y for x, y in zip(before[1:], new[1:count], strict=True))
        return [jnp.logaddexp(before[0], new[0]), *sums, *kept]

    return _over(parts, step)


def over_words(results: Sequence[jax.Array], axes: Any) -> list[jax.Array]:
    """Combines the statistics of the words that each device has: two small all-reduces."""
    log_sum_exp, *sums = results
    largest = lax.pmax(lax.stop_gradient(log_sum_exp), axes)
    # Without a finite logit there is nothing to stay below.
    finite = jnp.where(jnp.isfinite(largest), largest, 0)
    exp, *sums = lax.psum((jnp.exp(log_sum_exp - finite), *sums), axes)
    return [jnp.log(exp) + finite, *sums]


def _over(parts: Chunks, step: Callable[..., Any], together: int = 2) -> Any:
    """Computes the chunks in turn.

    Args:
        parts: The chunks.
        step: Takes what the chunks before have left, None at first, and where a chunk begins and
            how many words it has.
        together: Chunks in a round of the loop.
    """
    left = step(None, parts.begin, parts.first)
    if parts.count == 1:
        return left

    def next_chunk(found: Any, _: None) -> Any:
        # Nothing of a chunk begins before the last one has ended.
        left, start = _one_after_the_other(*found)
        return (step(left, start, parts.each), start + parts.each), None

    others = jnp.int32(0 if parts.begin else parts.first)
    length = parts.count - 1
    return lax.scan(next_chunk, (left, others), length=length, unroll=together)[0][0]


def gradients(
    layer: Layer,
    wanted: Wanted,
    given: Given,
    slopes: Slopes,
    kept: jax.Array | None,
    by: "Slices | Windows | None" = None,
    waiting: jax.Array | None = None,
) -> list[jax.Array | None]:
    """Computes the gradients of the hidden tokens, the weight and the bias, as far as wanted.

    Args:
        layer: The layer.
        wanted: The operands whose gradients are wanted.
        given: Its operands.
        slopes: How the loss changes with its statistics.
        kept: The product of hidden and weight, if the forward pass kept it.
        by: How chunks are computed; None for slices of the operands.
        waiting: The array in which logits wait, and which is to be the gradient of the weight, if
            that is how chunks are computed.
    """
    way = Slices.of(layer, given, at_once=kept is not None) if by is None else by
    # Before the loop, in which each chunk would slice them.
    some, tokens = way.parts.waiting[0], given.hidden.shape[0]
    of_tokens = slopes.of_tokens(0, some), slopes.of_tokens(some, tokens)

    def step(found: Any, start: Any, size: Any) -> Any:
        at = start, size
        own = way.words(given, start, size)
        hidden, weight, bias = (None, waiting, None) if found is None else found
        if kept is None:
            g, *of_bias = _slopes_of(way, layer, wanted.bias, own, of_tokens, at, weight)
        else:
            g, *of_bias = _in_the_place_of(kept, layer, wanted.bias, own, slopes)
        if wanted.hidden:
            hidden = way.hidden(g, own.weight, hidden, at)
        if wanted.hidden and wanted.weight:
            # In this order the sums before, and the weight, are gone when its gradient comes.
            g, hidden = _one_after_the_other(g, hidden)
        if wanted.weight:
            weight = way.weight(g, given, weight, at)
        if wanted.bias:
            bias = _put(given, of_bias[0], bias, given.bias[0], start, 0)
        return hidden, weight, bias

    hidden, weight, bias = _over(way.parts, step, way.together)
    return [None if hidden is None else hidden.astype(given.hidden.dtype), weight, bias]


def _slopes_of(
    way: "Slices | Windows",
    layer: Layer,
    with_bias: bool,
    own: Given,
    slopes: tuple[Slopes, Slopes],
    at: Any,
    weight: Any,
) -> list[jax.Array]:
    """Computes the slopes of some words, of the first tokens from logits that wait."""
    some, tokens = way.parts.waiting[0], own.hidden.shape[0]
    of_first, of_others = slopes
    found: list[jax.Array] = []
    if some < tokens:
        found = way.slopes(with_bias, own.of_tokens(some, tokens), of_others, at, some)
    if not some:
        return found
    first = own.of_tokens(0, some)
    start = jnp.int32(0), jnp.int32(at[0])
    logits = lax.dynamic_slice(weight, start, (some, at[1]))
    of_words: Any = jax.ShapeDtypeStruct((weight.shape[0], at[1]), weight.dtype)
    types = first._replace(weight=of_words)
    function = slopes_of_sums(layer, types, with_bias, of_first)
    sums = logits.astype(layer.call.out_dtype)
    waiting = function(sums, *of_first.leaves(), first.labels, *first.bias)
    if not found:
        return waiting
    g = lax.dynamic_update_slice_in_dim(found[0], waiting[0], 0, 0)
    return [g, *(x + y for x, y in zip(found[1:], waiting[1:], strict=True))]


def below(above: int, own: Given, found: Sequence[jax.Array]) -> list[jax.Array]:
    """Puts slopes below those of other tokens, which are still to come."""
    g, *of_bias = found
    if not above:
        return [g, *of_bias]
    whole = empty(own, (above + g.shape[0], g.shape[1]), g.dtype)
    return [lax.dynamic_update_slice_in_dim(whole, g, above, 0), *of_bias]


def _one_after_the_other(*arrays: Any) -> Any:
    """Lets all that follows begin when all of these arrays are there."""
    return lax.optimization_barrier(arrays)


def _in_the_place_of(
    kept: jax.Array, layer: Layer, with_bias: bool, own: Given, slopes: Slopes
) -> list[jax.Array]:
    """Computes the slopes where the product lies, some tokens at a time: XLA then needs no other.

    As one pass, XLA was seen to write the slopes of a kernel's result beside it.
    """
    tokens = kept.shape[0]
    blocks = 1 if is_symbolic_dim(tokens) or tokens % BLOCKS else BLOCKS

    def of(start: Any, size: int, g: jax.Array) -> list[jax.Array]:
        def part(x: jax.Array) -> jax.Array:
            return x if blocks == 1 else lax.dynamic_slice_in_dim(x, start, size, 0)

        some = own._replace(hidden=part(own.hidden), labels=part(own.labels))
        slopes_: Slopes = jax.tree.map(part, slopes)
        function = slopes_of_sums(layer, some, with_bias, slopes_)
        sums = part(g).astype(layer.call.out_dtype)
        return function(sums, *slopes_.leaves(), some.labels, *some.bias)

    if blocks == 1:
        return of(0, tokens, kept)
    size = tokens // blocks

    def step(found: Any, start: Any) -> Any:
        g, *before = found
        new, *of_bias = of(start, size, g)
        total = [x + y for x, y in zip(before, of_bias, strict=True)]
        return [lax.dynamic_update_slice_in_dim(g, new, start, 0), *total], None

    zeros = [jnp.zeros_like(x, layer.call.out_dtype) for x in own.bias] if with_bias else []
    return lax.scan(step, [kept, *zeros], size * jnp.arange(blocks, dtype=jnp.int32))[0]


def _put(
    given: Given, new: jax.Array, into: jax.Array | None, like: jax.Array, start: Any, axis: int
) -> jax.Array:
    """Puts a chunk of a gradient where it belongs in the whole."""
    new = new.astype(like.dtype)
    if new.shape == like.shape:
        return new
    into = empty(given, like.shape, like.dtype) if into is None else into
    return lax.dynamic_update_slice_in_dim(into, new, start, axis)


class Slices(NamedTuple):
    """Chunks as products of slices of the operands; see `loss_windows.Windows`.

    Attributes:
        layer: The layer.
        parts: The chunks.
    """

    layer: Layer
    parts: Chunks

    together = 2
    """They read and write sums in turn, without a copy between them."""

    @classmethod
    def of(cls, layer: Layer, given: Given, *, at_once: bool) -> Self:
        """Returns the chunks of a layer; a single one where the product of all words was kept."""
        parts = layer.chunks(given.hidden, given.weight)
        if at_once:
            parts = dataclasses.replace(parts, each=parts.words, kept=True)
        return cls(layer, parts)

    def words(self, given: Given, start: Any, size: int) -> Given:
        """Returns the operands of some words, by which labels are counted then."""
        return given.words(self.layer, start, size)

    def slopes(
        self, with_bias: bool, own: Given, slopes: Slopes, at: Any, above: int
    ) -> list[jax.Array]:
        """Computes the slopes of some words, and their bias's gradient, below room for others."""
        del at
        layer = self.layer
        function = slopes_of_sums(layer, own, with_bias, slopes)
        rest = (*slopes.leaves(), own.labels, *own.bias)
        found = fused(layer.call, layer.contraction, function, own.hidden, own.weight, *rest)
        return below(above, own, found)

    def hidden(self, g: jax.Array, weight: jax.Array, before: Any, at: Any) -> jax.Array:
        """Adds the gradient of the tokens by some words to that by the words before."""
        del at
        of_left = self.layer.contraction.of_left.with_letters(residual="mk")
        call = self.layer.call
        call = call.plain(g.dtype if self.parts.count == 1 else call.out_dtype)
        if before is None:
            return product(call, of_left, g, weight)
        call = dataclasses.replace(call, epilogue=Epilogue(residual=True))
        return product(call, of_left, g, weight, before)

    def weight(self, g: jax.Array, given: Given, before: Any, at: Any) -> jax.Array:
        """Puts the gradient of the weight of some words where it belongs."""
        call = self.layer.call.plain(g.dtype)
        found = product(call, self.layer.contraction.of_right, given.hidden, g)
        return _put(given, found, before, given.weight, at[0], self.layer.axis)
