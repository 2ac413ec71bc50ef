"""The statistics of a token's logits, and their gradients, one chunk of words after the other.

    z = softcap(scale * hidden @ weight + bias)      logits: they exist for one chunk at a time
    statistics    log(sum(exp(z))), z of the label, sum(z)
    slopes        d(loss)/d(hidden @ weight) = softmax(z) * g + ..., in the type of the operands

Every loss of a token that depends on these statistics has its gradients from the slopes.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.export import is_symbolic_dim

from pallas_gemm.call import Call
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.function_of_sums import Function, traced
from pallas_gemm.op.fused import fused
from pallas_gemm.op.loss_plan import DEFAULT_WORDS, Chunks, Memory, chunks, takes_parts
from pallas_gemm.op.product import product
from pallas_gemm.problem import Epilogue

BLOCKS = 8
"""In how many steps slopes take the place of all logits."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """The facts of a last layer that are fixed while it is traced.

    Attributes:
        call: The product of hidden and weight, without a look at how they are stored.
        transposed: The weight is stored `[words, width]`.
        bias: There is one value per word to add.
        scale: Scales the product.
        softcap: Logits stay between minus this and this; None if they are not bounded.
        total: The sum of a token's logits is wanted.
        memory: The caller's word or number for the memory of the gradients.
    """

    call: Call
    transposed: bool = False
    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None
    total: bool = False
    memory: Memory = None

    @property
    def axis(self) -> int:
        """The axis of words of the weight."""
        return 0 if self.transposed else 1

    @property
    def contraction(self) -> Contraction:
        """The dimensions of the product: tokens, words, and the width that is contracted."""
        return Contraction("mk", "nk" if self.transposed else "kn", "mn")

    def chunks(self, hidden: Any, weight: Any) -> Chunks:
        """Returns how the words are divided for the gradients."""
        words, size = weight.shape[self.axis], np.dtype(hidden.dtype).itemsize
        tokens, width = hidden.shape
        in_place = takes_parts(self.call.options.target, tokens, width, words, size)
        return chunks(tokens, width, words, size, self.memory, in_place=in_place)

    def slices(self, hidden: Any, weight: Any) -> Chunks:
        """Returns how they are divided where no kernel takes parts of arrays, whatever was planned.

        Where that takes more memory than the caller says, it is the least that is possible.
        """
        own = (*hidden.shape, weight.shape[self.axis], np.dtype(hidden.dtype).itemsize)
        least = chunks(*own, "least")
        if isinstance(self.memory, int) and self.memory < least.bytes:
            return least
        return chunks(*own, self.memory)

    def logits(self, sums: jax.Array, bias: Sequence[jax.Array]) -> jax.Array:
        """Computes the logits of some words."""
        z = sums if self.scale == 1 else sums * self.scale
        for values in bias:
            z = z + values.astype(z.dtype)[None]
        return z if self.softcap is None else self.softcap * jnp.tanh(z * (1 / self.softcap))


class Given(NamedTuple):
    """The operands of a last layer.

    Attributes:
        hidden: The tokens, `[tokens, width]`.
        weight: `[width, words]`, or transposed.
        labels: A word for each token; one that is none has no logit of its label.
        bias: One array, or none.
    """

    hidden: jax.Array
    weight: jax.Array
    labels: jax.Array
    bias: tuple[jax.Array, ...]

    @classmethod
    def of(cls, operands: Sequence[Any]) -> "Given":
        """Names the operands."""
        hidden, weight, labels, *bias = operands
        return cls(hidden, weight, labels, tuple(bias))

    def words(self, layer: Layer, start: Any, size: int) -> "Given":
        """Returns the operands of some words, by which labels are counted then."""
        if size == self.weight.shape[layer.axis]:
            return self
        return Given(
            self.hidden,
            lax.dynamic_slice_in_dim(self.weight, start, size, layer.axis),
            self.labels - start,
            tuple(lax.dynamic_slice_in_dim(x, start, size, 0) for x in self.bias),
        )


class Wanted(NamedTuple):
    """The operands whose gradients are wanted."""

    hidden: bool
    weight: bool
    bias: bool


class Slopes(NamedTuple):
    """How a loss changes with the statistics of each token.

    Attributes:
        log_sum_exp: The statistic itself.
        of_log_sum_exp: The change with it.
        of_label: The change with the label's logit.
        of_total: The change with the sum of logits; none if that is not wanted.
    """

    log_sum_exp: jax.Array
    of_log_sum_exp: jax.Array
    of_label: jax.Array
    of_total: tuple[jax.Array, ...]

    def leaves(self) -> list[jax.Array]:
        """Returns the arrays that there are."""
        return jax.tree.leaves(self)


def statistics_of_sums(
    layer: Layer, given: Given, *, keep: bool = False, in_kernel: bool = False
) -> Function:
    """Returns the function of the product that computes the statistics.

    Args:
        layer: The layer.
        given: Its operands.
        keep: The product, in the type of its operands, is one more result. The statistics are of
            what is kept: then the slopes of a token add up to what they should.
        in_kernel: A kernel computes it, which rounds where it is told to; XLA has its own word.
    """
    sums, *others = _types(layer, given)
    kept = np.dtype(given.hidden.dtype) if keep else None
    return _statistics(layer, kept, in_kernel, sums, tuple(others))


@functools.lru_cache(maxsize=1024)
def _statistics(
    layer: Layer, kept: Any, in_kernel: bool, sums: Any, others: tuple[Any, ...]
) -> Function:
    def statistics(s: jax.Array, labels: jax.Array, *bias: jax.Array) -> list[jax.Array]:
        rounded = [] if kept is None else [s.astype(kept)]
        if kept is not None and in_kernel:
            s = rounded[0].astype(s.dtype)
        elif kept is not None and kept != s.dtype:
            bits = jnp.finfo(kept)
            s = lax.reduce_precision(s, bits.nexp, bits.nmant)
        z = layer.logits(s, bias)
        of_label = jnp.sum(jnp.where(_is_label(s, labels), z, 0), axis=-1)
        total = [jnp.sum(z, axis=-1)] if layer.total else []
        return [jax.nn.logsumexp(z, axis=-1), of_label, *total, *rounded]

    return traced(statistics, sums, *others)


def slopes_of_sums(layer: Layer, given: Given, with_bias: bool, slopes: Slopes) -> Function:
    """Returns the function of the product that computes the slopes, and the gradient of a bias."""
    sums, *others = _types(layer, given)
    own = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in slopes.leaves()]
    return _slopes(layer, with_bias, np.dtype(given.hidden.dtype), sums, (*own, *others))


@functools.lru_cache(maxsize=1024)
def _slopes(
    layer: Layer, with_bias: bool, dtype: Any, sums: Any, others: tuple[Any, ...]
) -> Function:
    count = 3 + layer.total

    def slopes(s: jax.Array, *rest: jax.Array) -> list[jax.Array]:
        log_sum_exp, of_log_sum_exp, of_label, *of_total = (x[:, None] for x in rest[:count])
        labels, *bias = rest[count:]
        z = layer.logits(s, bias)
        g = jnp.exp(z - log_sum_exp) * of_log_sum_exp
        g = g + jnp.where(_is_label(s, labels), of_label, 0)
        for own in of_total:
            g = g + own
        if layer.softcap is not None:
            g = g * (1 - jnp.square(z * (1 / layer.softcap)))
        of_sums = g if layer.scale == 1 else g * layer.scale
        return [of_sums.astype(dtype), *([jnp.sum(g, axis=0)] if with_bias else [])]

    return traced(slopes, sums, *others)


def _is_label(s: jax.Array, labels: jax.Array) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, s.shape, 1) == labels[:, None]


def _types(layer: Layer, given: Given) -> list[jax.ShapeDtypeStruct]:
    shape = (given.hidden.shape[0], given.weight.shape[layer.axis])
    others = (given.labels, *given.bias)
    return [
        jax.ShapeDtypeStruct(shape, layer.call.out_dtype),
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in others),
    ]


def at_once(
    layer: Layer, keep: bool, *operands: jax.Array, in_kernel: bool = False
) -> list[jax.Array]:
    """Computes the statistics, and the product if it is to be kept, with one product."""
    given = Given.of(operands)
    function = statistics_of_sums(layer, given, keep=keep, in_kernel=in_kernel)
    own = (given.hidden, given.weight, given.labels, *given.bias)
    return fused(layer.call, layer.contraction, function, *own)


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
    left = step(None, 0, parts.first)
    starts = parts.first + parts.each * jnp.arange(parts.count - 1, dtype=jnp.int32)

    def next_chunk(left: Any, start: Any) -> Any:
        # Nothing of a chunk begins before the last one has ended.
        return step(*_one_after_the_other(left, start), parts.each), None

    return left if parts.count == 1 else lax.scan(next_chunk, left, starts, unroll=together)[0]


def empty(given: Given, shape: Sequence[int], dtype: Any) -> jax.Array:
    """Returns an array to be written, which varies along the axes that the operands vary along."""
    x = lax.empty(shape, dtype)
    axes = jax.typeof(given.hidden).manual_axis_type.varying
    return lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def gradients(
    layer: Layer,
    wanted: Wanted,
    given: Given,
    slopes: Slopes,
    kept: jax.Array | None,
    by: "Way | None" = None,
) -> list[jax.Array | None]:
    """Computes the gradients of the hidden tokens, the weight and the bias, as far as wanted.

    Args:
        layer: The layer.
        wanted: The operands whose gradients are wanted.
        given: Its operands.
        slopes: How the loss changes with its statistics.
        kept: The product of hidden and weight, if the forward pass kept it.
        by: How chunks are computed; None for slices of the operands.
    """
    parts = layer.chunks(given.hidden, given.weight)
    if kept is not None:
        parts = dataclasses.replace(parts, each=parts.words, kept=True)
    way = Slices(layer, parts) if by is None else by

    def step(found: Any, start: Any, size: Any) -> Any:
        at = start, size
        own = way.words(given, start, size)
        if kept is None:
            g, *of_bias = way.slopes(wanted.bias, own, slopes, at)
        else:
            g, *of_bias = _in_the_place_of(kept, layer, wanted.bias, own, slopes)
        hidden, weight, bias = (None, None, None) if found is None else found
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


class Way(Protocol):
    """How a chunk of words is computed; `at` is where it begins, and how many words it has."""

    @property
    def parts(self) -> Chunks:
        """The chunks."""
        ...

    @property
    def together(self) -> int:
        """Chunks in a round of the loop."""
        ...

    def words(self, given: Given, start: Any, size: int) -> Given:
        """Returns the operands of some words, by which labels are counted then."""
        ...

    def slopes(self, with_bias: bool, own: Given, slopes: Slopes, at: Any) -> list[jax.Array]:
        """Computes the slopes of some words, and the gradient of their bias."""
        ...

    def hidden(self, g: jax.Array, weight: jax.Array, before: Any, at: Any) -> jax.Array:
        """Adds the gradient of the tokens by some words to that by the words before."""
        ...

    def weight(self, g: jax.Array, given: Given, before: Any, at: Any) -> jax.Array:
        """Puts the gradient of the weight of some words where it belongs."""
        ...


class Slices(NamedTuple):
    """Chunks as products of slices of the operands.

    Attributes:
        layer: The layer.
        parts: The chunks.
    """

    layer: Layer
    parts: Chunks

    together = 2
    """They read and write sums in turn, without a copy between them."""

    def words(self, given: Given, start: Any, size: int) -> Given:
        """See `Way`."""
        return given.words(self.layer, start, size)

    def slopes(self, with_bias: bool, own: Given, slopes: Slopes, at: Any) -> list[jax.Array]:
        """See `Way`."""
        del at
        layer = self.layer
        function = slopes_of_sums(layer, own, with_bias, slopes)
        rest = (*slopes.leaves(), own.labels, *own.bias)
        return fused(layer.call, layer.contraction, function, own.hidden, own.weight, *rest)

    def hidden(self, g: jax.Array, weight: jax.Array, before: Any, at: Any) -> jax.Array:
        """See `Way`."""
        del at
        of_left = self.layer.contraction.of_left.with_letters(residual="mk")
        call = self.layer.call
        call = call.plain(g.dtype if self.parts.count == 1 else call.out_dtype)
        if before is None:
            return product(call, of_left, g, weight)
        call = dataclasses.replace(call, epilogue=Epilogue(residual=True))
        return product(call, of_left, g, weight, before)

    def weight(self, g: jax.Array, given: Given, before: Any, at: Any) -> jax.Array:
        """See `Way`."""
        call = self.layer.call.plain(g.dtype)
        found = product(call, self.layer.contraction.of_right, given.hidden, g)
        return _put(given, found, before, given.weight, at[0], self.layer.axis)
