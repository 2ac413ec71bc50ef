"""A last layer: what is fixed of it, its operands, and the functions of its product.

    z = softcap(scale * hidden @ weight + bias)      logits
    statistics    log(sum(exp(z))), z of the label, sum(z)
    slopes        d(loss)/d(hidden @ weight) = softmax(z) * g + ..., in the type of the operands

Every loss of a token that depends on these statistics has its gradients from the slopes.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gemm.call import Call
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.function_of_sums import Function, traced
from pallas_gemm.op.loss.loss_plan import (
    Chunks,
    Memory,
    chunks,
    takes_parts,
    that_takes_parts,
    waiting,
)


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
        sizes, target = self._sizes(hidden, weight), self.call.options.target
        if target is None and takes_parts(that_takes_parts(), *sizes):
            # A GPU that is known later may do with fewer bytes than slices of operands.
            chunks(*sizes, self.memory, in_place=True)
            return self.slices(hidden, weight)
        return chunks(*sizes, self.memory, in_place=takes_parts(target, *sizes))

    def waiting(self, hidden: Any, weight: Any) -> Chunks:
        """Returns the same where the gradient of the weight is wanted: logits may wait in it."""
        parts = self.chunks(hidden, weight)
        if self.memory != "least" or self.transposed:
            return parts
        return waiting(parts, *hidden.shape)

    def while_traced(self) -> "Layer":
        """Returns the layer as it is traced: for a GPU that takes parts, if none is known yet.

        Whether logits are kept, or may wait, is a part of the program before it is lowered.
        """
        if self.call.options.target is not None:
            return self
        return dataclasses.replace(self, call=self.call.with_target(that_takes_parts()))

    def slices(self, hidden: Any, weight: Any) -> Chunks:
        """Returns how they are divided where no kernel takes parts of arrays, whatever was planned.

        Where that takes more memory than the caller says, it is the least that is possible.
        """
        own = self._sizes(hidden, weight)
        least = chunks(*own, "least")
        if isinstance(self.memory, int) and self.memory < least.bytes:
            return least
        return chunks(*own, self.memory)

    def _sizes(self, hidden: Any, weight: Any) -> tuple[Any, Any, Any, int]:
        """Returns tokens, width, words, and the bytes of an element."""
        return (*hidden.shape, weight.shape[self.axis], np.dtype(hidden.dtype).itemsize)

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

    def of_tokens(self, start: int, end: int) -> "Given":
        """Returns the operands of some tokens, or their types."""
        hidden, labels = (_of_tokens(x, start, end) for x in (self.hidden, self.labels))
        return self._replace(hidden=hidden, labels=labels)


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

    def of_tokens(self, start: int, end: int) -> "Slopes":
        """Returns those of some tokens, or their types."""
        of_some: Slopes = jax.tree.map(lambda x: _of_tokens(x, start, end), self)
        return of_some


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


def _of_tokens(x: Any, start: int, end: int) -> Any:
    """Returns some rows of an array, or their type."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((end - start, *x.shape[1:]), x.dtype)
    return x if (start, end) == (0, x.shape[0]) else lax.slice_in_dim(x, start, end)


def empty(given: Given, shape: Sequence[int], dtype: Any) -> jax.Array:
    """Returns an array to be written, which varies along the axes that the operands vary along."""
    x = lax.empty(shape, dtype)
    axes = jax.typeof(given.hidden).manual_axis_type.varying
    return lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x
