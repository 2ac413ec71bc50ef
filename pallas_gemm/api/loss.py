"""The last layer and its loss: a product and the cross entropy of what it returns, at once."""

import math
import numbers
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from pallas_gemm.api import arguments, request
from pallas_gemm.api.eager import compiled
from pallas_gemm.call import Call, Options
from pallas_gemm.op.loss.loss import statistics
from pallas_gemm.op.loss.loss_chunks import over_words
from pallas_gemm.op.loss.loss_layer import Layer
from pallas_gemm.op.loss.loss_plan import Memory
from pallas_gemm.op.mesh import explicit
from pallas_gemm.op.mesh.reduction import reduction_dtype
from pallas_gemm.planning import precision as precisions
from pallas_gemm.planning.numerics import refuse
from pallas_gemm.planning.targeting import known_target

TYPES = ("bfloat16", "float16", "float32", "float64")
ARRAYS = ("hidden", "weight", "labels", "bias")
AxisName = str | tuple[str, ...] | None
"""Axes of a `jax.shard_map` along which the words are split."""


class LogProbs(NamedTuple):
    """The opinion of a last layer on the label of each token.

    >>> perplexity = jnp.exp(-jnp.mean(linear_log_probs(x, w, labels).log_probs))

    Attributes:
        log_probs: The logarithm of the probability of the label.
        log_sum_exp: The logarithm of the sum of `exp(logits)`.
        label_logits: The label's logit; `log_probs` is this minus `log_sum_exp`.
    """

    log_probs: jax.Array
    log_sum_exp: jax.Array
    label_logits: jax.Array


jax.export.register_namedtuple_serialization(LogProbs, serialized_name="pallas_gemm.LogProbs")


@compiled(*ARRAYS)
def linear_cross_entropy(  # noqa: PLR0913 - each is a keyword
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    bias: jax.Array | None = None,
    transpose_weight: bool = False,
    ignore_index: int | None = None,
    label_smoothing: float = 0,
    z_loss: float = 0,
    softcap: float | None = None,
    scale: float = 1,
    reduction: Literal["mean", "sum", "none"] = "mean",
    memory: Memory = None,
    axis_name: AxisName = None,
) -> jax.Array:
    """Computes the cross entropy of `hidden @ weight` and labels, without an array of the logits.

        logits = softcap * tanh((scale * hidden @ weight + bias) / softcap)
        loss   = log_sum_exp - (1 - label_smoothing) * logit of the label
                 - label_smoothing * mean(logits) + z_loss * log_sum_exp**2

    Sums, logits and losses are in float32. Gradients take four products as large as the layer's
    own, or three if the logits are kept, in the type of the operands; `memory` says which.

    >>> loss = linear_cross_entropy(x, w, labels)
    >>> dx, dw = jax.grad(linear_cross_entropy, argnums=(0, 1))(x, w, labels)

    Args:
        hidden: The tokens, `[..., width]`.
        weight: The matrix of the last layer, `[width, words]`, of the same type.
        labels: The word of each token, `[...]`, an integer. As in NumPy, -1 is the last word. The
            loss of a token whose label is no word is NaN, as in optax.
        bias: A value for each word; -inf leaves a word out, unless a softcap bounds its logit.
        transpose_weight: The weight is stored `[words, width]`, as an embedding is.
        ignore_index: A token with this label has no loss and no gradient, and does not count.
        label_smoothing: The share of the label that goes to all words alike, from 0 to 1.
        z_loss: How much of the squared log-sum-exp is added.
        softcap: Bounds the logits; None does not.
        scale: A number that the product is scaled with.
        reduction: "mean" over the tokens that count, which is 0 if none does; "sum"; or "none" for
            a loss of each token.
        memory: The memory of the gradients beside operands and results: "least", "fastest", which
            keeps all logits, or a number of bytes. With "least", logits may wait in the array that
            is to be the gradient of the weight; None keeps nothing for the backward pass.
        axis_name: The axes of a `jax.shard_map` along which words are split: `weight` and `bias`
            are a device's part of the words, `labels` count all words.

    Returns:
        The loss in float32 (float64 if the operands are).

    Raises:
        TypeError: Labels are no integers, or types or numbers are not legal.
        ValueError: Shapes do not fit, `memory` is less than what is needed, or there is no such
            axis.
    """
    smoothing = _number("label_smoothing", label_smoothing, 0, 1)
    z_loss = _number("z_loss", z_loss, 0, _limits(hidden).max)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} is unknown; legal: 'mean', 'sum', 'none'")
    how = _How(transpose_weight, softcap, scale, memory, axis_name, ignore_index, smoothing != 0)
    found = _found((hidden, weight, labels, bias), how)
    losses = found.log_sum_exp - (1 - smoothing) * found.label_logits
    if smoothing:
        losses = losses - smoothing / found.words * found.total
    if z_loss:
        losses = losses + z_loss * jnp.square(found.log_sum_exp)
    losses = jnp.where(found.counts, losses, 0)
    if reduction == "none":
        return losses
    total = jnp.sum(losses)
    if reduction == "sum":
        return total
    return total / jnp.maximum(jnp.sum(found.counts, dtype=losses.dtype), 1)


@compiled(*ARRAYS)
def linear_log_probs(  # noqa: PLR0913 - each is a keyword
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    bias: jax.Array | None = None,
    transpose_weight: bool = False,
    softcap: float | None = None,
    scale: float = 1,
    memory: Memory = None,
    axis_name: AxisName = None,
) -> LogProbs:
    """Computes the log-probability of each token's label, without an array of the logits.

    Perplexities, importance ratios and losses of your own are made of these; all three results
    have gradients, from the same products as those of `linear_cross_entropy`.

    >>> log_probs, log_sum_exp, label_logits = linear_log_probs(x, w, labels)

    Args:
        hidden: As for `linear_cross_entropy`.
        weight: As for `linear_cross_entropy`.
        labels: As for `linear_cross_entropy`; what is no word has NaN.
        bias: As for `linear_cross_entropy`.
        transpose_weight: As for `linear_cross_entropy`.
        softcap: As for `linear_cross_entropy`.
        scale: As for `linear_cross_entropy`.
        memory: As for `linear_cross_entropy`.
        axis_name: As for `linear_cross_entropy`.

    Returns:
        The results, each of the shape of the labels, in float32 (float64 if the operands are).

    Raises:
        TypeError: As for `linear_cross_entropy`.
        ValueError: As for `linear_cross_entropy`.
    """
    how = _How(transpose_weight, softcap, scale, memory, axis_name)
    found = _found((hidden, weight, labels, bias), how)
    log_probs = found.label_logits - found.log_sum_exp
    return LogProbs(log_probs, found.log_sum_exp, found.label_logits)


@compiled("hidden", "weight", "labels", "where")
def softmax_cross_entropy_with_integer_labels(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    axis: int = -1,
    where: jax.Array | None = None,
) -> jax.Array:
    """Computes optax's function of the same name for the logits `hidden @ weight`.

    >>> losses = softmax_cross_entropy_with_integer_labels(x, w, labels)

    Args:
        hidden: As for `linear_cross_entropy`.
        weight: As for `linear_cross_entropy`.
        labels: As for `linear_cross_entropy`.
        axis: The axis of words, which is the last one.
        where: The tokens that count, a bool for each; others have the loss 0.

    Returns:
        The loss of each token.

    Raises:
        TypeError: As for `linear_cross_entropy`.
        ValueError: As for `linear_cross_entropy`, or the axis is another, or `where` has no value
            for each token.
    """
    last = np.ndim(labels)
    if axis not in (-1, last):
        raise ValueError(f"axis must be the last one of the logits, -1 or {last}, got {axis!r}")
    losses = linear_cross_entropy(hidden, weight, labels, reduction="none")
    if where is None:
        return losses
    where = arguments.array("where", where)
    if where.dtype != np.bool_:
        raise TypeError(
            f"where must be of bool, got {where.dtype}: where != 0 is; weights are multiplied with"
            " the losses"
        )
    if where.shape != losses.shape:
        raise ValueError(
            f"where must have a value for each token, shape {list(losses.shape)}, got"
            f" {list(where.shape)}; words are left out by a bias of -inf in linear_cross_entropy"
        )
    return jnp.where(where, losses, 0)


class _How(NamedTuple):
    """The arguments that are no arrays, as they were given.

    Attributes:
        transpose_weight: As for `linear_cross_entropy`, as are those that follow.
        softcap: The bound of logits.
        scale: The factor of the product.
        memory: The memory of the gradients.
        axis_name: The axes along which words are split.
        ignore_index: The label that does not count.
        total: The sum of the logits is wanted.
    """

    transpose_weight: Any
    softcap: Any
    scale: Any
    memory: Any
    axis_name: Any
    ignore_index: Any = None
    total: bool = False


class _Found(NamedTuple):
    """The statistics of each token.

    Attributes:
        log_sum_exp: The log-sum-exp of its logits.
        label_logits: Its label's logit.
        total: The sum of its logits; None if it is not wanted.
        counts: Whether it counts.
        words: How many there are.
    """

    log_sum_exp: jax.Array
    label_logits: jax.Array
    total: Any
    counts: jax.Array
    words: int


def _found(given: tuple[Any, ...], how: _How) -> _Found:
    """Checks the arguments, and computes the statistics of each token."""
    transposed = arguments.flag("transpose_weight", how.transpose_weight)
    hidden, weight, labels, bias = given
    hidden, weight, labels = _arrays(hidden, weight, labels, transposed)
    limits, cap = _limits(hidden), how.softcap
    layer = Layer(
        _call(hidden, weight),
        transposed,
        bias is not None,
        _number("scale", how.scale, limits.min, limits.max),
        # Logits are multiplied by its reciprocal.
        None if cap is None else _number("softcap", cap, limits.tiny, 1 / limits.tiny),
        how.total,
        _memory(how.memory),
    )
    bias = None if bias is None else _bias(bias, weight.shape[layer.axis])
    own = weight.shape[layer.axis]
    words, first = own, 0
    if how.axis_name is not None:
        words = own * arguments.axis_size(how.axis_name, several=True)
        first = own * lax.axis_index(how.axis_name)
    ignored = how.ignore_index
    counts = jnp.ones(labels.shape, bool) if ignored is None else _differ(labels, _index(ignored))
    labels = _as_int32(labels)
    named = jnp.where(labels < 0, labels + words, labels)
    is_word = (named >= 0) & (named < words)
    # One that is no word, or does not count, is none of any chunk's.
    picked = jnp.where(is_word & counts, named - first, -1)
    results = _statistics(layer, hidden, weight, picked, bias)
    if how.axis_name is not None:
        results = over_words(results, how.axis_name)
    log_sum_exp, of_label, *totals = results
    of_label = jnp.where(is_word | ~counts, of_label, jnp.nan)
    return _Found(log_sum_exp, of_label, totals[0] if totals else None, counts, words)


def _statistics(layer: Layer, hidden: Any, weight: Any, labels: Any, bias: Any) -> list[Any]:
    given = (hidden, weight, labels, *(() if bias is None else (bias,)))
    run = _OfTokens(layer)
    if not request.is_explicit(*given):
        return run(*given)
    sharding = jax.typeof(hidden).sharding
    own = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:-1]))
    return explicit.computed(run, [own] * (2 + layer.total), *given)


class _OfTokens(NamedTuple):
    """The statistics of tokens in any number of dimensions."""

    layer: Layer

    def __call__(self, *operands: jax.Array) -> list[jax.Array]:
        hidden, weight, labels, *bias = operands
        tokens = (math.prod(labels.shape), hidden.shape[-1])
        results = statistics(
            self.layer, hidden.reshape(tokens), weight, labels.reshape(tokens[0]), *bias
        )
        return [x.reshape(labels.shape) for x in results]


def _limits(hidden: Any) -> Any:
    """Returns the limits of the type in which losses are computed."""
    is_double = getattr(hidden, "dtype", None) == np.float64
    return np.finfo(np.float64 if is_double else np.float32)


def _call(hidden: Any, weight: Any) -> Call:
    refuse("the log-sum-exp adds up along rows, in an order that depends on the tiles")
    options = Options(target=known_target(hidden, weight), reduced=reduction_dtype())
    return Call(_limits(hidden).dtype, precision=precisions.resolve(None), options=options)


def _arrays(hidden: Any, weight: Any, labels: Any, transposed: bool) -> Any:
    """Returns the operands but the bias as arrays.

    Raises:
        TypeError: One is of a type that is not legal.
        ValueError: Their shapes do not fit.
    """
    hidden, weight = arguments.array("hidden", hidden), arguments.array("weight", weight)
    labels = arguments.array("labels", labels)
    if hidden.dtype.name not in TYPES:
        raise TypeError(f"hidden must be of {', '.join(TYPES)}, got {hidden.dtype}")
    if weight.dtype != hidden.dtype:
        raise TypeError(
            f"weight must be of the type of hidden, {hidden.dtype}, got {weight.dtype}:"
            " weight.astype(hidden.dtype) is"
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels must be integers, the words' numbers, got {labels.dtype}")
    if hidden.ndim < 1:
        raise ValueError("hidden must have at least one dimension, got shape []")
    stored = "[words, width]" if transposed else "[width, words]"
    if weight.ndim != 2:
        raise ValueError(f"weight must be {stored}, got shape {list(weight.shape)}")
    width, words = weight.shape[::-1] if transposed else weight.shape
    if hidden.shape[-1] != width:
        other = f"; transpose_weight={not transposed} would fit" * (hidden.shape[-1] == words)
        raise ValueError(
            f"hidden{list(hidden.shape)} and weight{list(weight.shape)}, {stored}, must agree in"
            f" width, got {hidden.shape[-1]} and {width}{other}"
        )
    if words == 0:
        raise ValueError(f"weight must have at least one word, got shape {list(weight.shape)}")
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels must have a value for each token, shape {list(hidden.shape[:-1])}, got"
            f" {list(labels.shape)}"
        )
    return hidden, weight, labels


def _bias(bias: Any, words: int) -> Any:
    """Returns the bias as an array.

    Raises:
        TypeError: It is of no floating-point type.
        ValueError: It has no value for each word.
    """
    bias = arguments.array("bias", bias)
    if bias.shape != (words,):
        raise ValueError(
            f"bias must have a value for each word, shape [{words}], got {list(bias.shape)}"
        )
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"bias must be of a floating-point type, got {bias.dtype}")
    return bias


def _number(name: str, value: Any, least: Any, most: Any) -> float:
    """Returns an argument that is a number within bounds.

    Raises:
        TypeError: It is no number that is known while tracing.
        ValueError: It is beyond the bounds.
    """
    own = arguments.number(name, value)
    # Limits of NumPy's types would round the number.
    if not float(least) <= own <= float(most):
        raise ValueError(f"{name} must be a number from {least:g} to {most:g}, got {value!r}")
    return own


def _memory(value: Any) -> Memory:
    """Returns what the caller says of memory.

    Raises:
        TypeError: It is neither a word nor a number.
        ValueError: The word is unknown.
    """
    if value is None or value in ("least", "fastest"):
        return value
    if isinstance(value, str):
        raise ValueError(f"memory={value!r} is unknown; legal: None, 'least', 'fastest', bytes")
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(
            f"memory must be None, 'least', 'fastest' or a number of bytes, got"
            f" {type(value).__name__}: {value!r:.80}"
        )
    return int(value)


def _index(value: Any) -> int:
    """Returns the label that does not count.

    Raises:
        TypeError: It is no integer.
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(
            f"ignore_index must be an integer or None, got {type(value).__name__}: {value!r:.80}"
        )
    return int(value)


def _differ(labels: Any, index: int) -> Any:
    """Returns which labels are others than a number, which their type may not have."""
    own = jnp.iinfo(labels.dtype)
    if not own.min <= index <= own.max:
        return jnp.ones(labels.shape, bool)
    return labels != np.asarray(index, labels.dtype)


def _as_int32(labels: Any) -> Any:
    """Returns labels in the type in which a kernel compares them; no other becomes a word by it."""
    limits, own = jnp.iinfo(np.int32), jnp.iinfo(labels.dtype)
    if own.max > limits.max:
        labels = jnp.clip(labels, max(own.min, limits.min), limits.max)
    return labels.astype(np.int32)
