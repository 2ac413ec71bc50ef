"""The example's transformer in `flax.nnx`: with stock layers, with our hook, with our layers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_gemm
from examples.hooks import hook_of
from examples.settings import Attention, Settings
from pallas_gemm.flax import nnx as fused


class Gated(nnx.Module):
    """SwiGLU of stock layers; `pallas_gemm.flax.nnx.GatedDense` has the same parameters."""

    def __init__(self, inputs: int, features: int, **options: Any) -> None:
        """Makes the parameters; `options` are those of `nnx.Linear`."""
        self.gate = nnx.Linear(inputs, features, use_bias=False, **options)
        self.up = nnx.Linear(inputs, features, use_bias=False, **options)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns `silu(inputs @ gate) * (inputs @ up)`."""
        return nnx.silu(self.gate(inputs)) * self.up(inputs)


def _kinds(layers: str) -> tuple[Any, Any]:
    """Returns how a layer and a gated layer of a kind are made."""
    if layers == "fused":
        return fused.Linear, fused.GatedDense
    hook = hook_of(layers)
    return functools.partial(nnx.Linear, **hook), functools.partial(Gated, **hook)


class Block(nnx.Module):
    """Attention and a gated feed-forward network, each added to what comes in."""

    def __init__(
        self, settings: Settings, layers: str, attention: Attention, *, rngs: nnx.Rngs
    ) -> None:
        """Makes the parameters.

        Args:
            settings: The sizes.
            layers: "stock", "hooks" (stock layers with `pallas_gemm.dot_general`), "fp8_blocks"
                (stock layers with that of a `pallas_gemm.Recipe`), or "fused".
            attention: The implementation that computes it.
            rngs: Where initial values come from.
        """
        self.settings, self.layers, self.attention = settings, layers, attention
        dtype = settings.type()
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        linear, gated = _kinds(layers)
        square = functools.partial(
            linear, settings.width, settings.width, use_bias=False, **options
        )
        self.query, self.key, self.value, self.out = (square() for _ in range(4))
        self.swiglu = gated(settings.width, settings.hidden, **options)
        self.down = linear(settings.hidden, settings.width, use_bias=False, **options)
        self.attention_norm, self.feed_forward_norm = (
            nnx.RMSNorm(settings.width, **options) for _ in range(2)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns what the next block takes, of the shape of `x`."""
        inputs = self.attention_norm(x)
        heads = (*x.shape[:-1], self.settings.heads, self.settings.head_size)
        projections = (self.query, self.key, self.value)
        if self.layers == "fused":
            projected = fused.projections(inputs, projections)
        else:
            projected = tuple(layer(inputs) for layer in projections)
        query, key, value = (x.reshape(heads) for x in projected)
        mixed = jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation=self.attention
        )
        # XLA makes one pass of a sum and the norm that follows it: `residual=` is no faster.
        x = x + self.out(mixed.reshape(x.shape))
        return x + self.down(self.swiglu(self.feed_forward_norm(x)))


class Transformer(nnx.Module):
    """Tokens to the logits of the tokens that follow."""

    def __init__(
        self, settings: Settings, layers: str, attention: Attention, *, rngs: nnx.Rngs
    ) -> None:
        """Makes the parameters; the arguments are those of `Block`."""
        dtype = settings.type()
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.tokens = nnx.Embed(settings.vocabulary, settings.width, **options)
        self.places = nnx.Embed(settings.sequence, settings.width, **options)
        self.blocks = nnx.List(
            [Block(settings, layers, attention, rngs=rngs) for _ in range(settings.blocks)]
        )
        self.norm = nnx.RMSNorm(settings.width, **options)
        # Logits are of 16 bits, whatever the blocks are.
        self.logits = _kinds("hooks" if layers == "fp8_blocks" else layers)[0](
            settings.width, settings.vocabulary, use_bias=False, **options
        )

    def __call__(self, tokens: jax.Array, labels: jax.Array | None = None) -> jax.Array:
        """Returns logits `[batch, sequence, vocabulary]`; with labels, their mean loss."""
        x = self.tokens(tokens) + self.places(jnp.arange(tokens.shape[1]))[None]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if labels is not None:
            return pallas_gemm.linear_cross_entropy(x, self.logits.kernel[...], labels)
        return self.logits(x)


def init(settings: Settings, key: jax.Array) -> Any:
    """Returns parameters; they are those of all kinds of layers."""
    return nnx.state(Transformer(settings, "stock", "xla", rngs=nnx.Rngs(key)), nnx.Param)


def apply(
    settings: Settings, layers: str, attention: Attention, params: Any, *tokens: jax.Array
) -> Any:
    """Returns the logits of tokens; of tokens and labels, the mean loss."""

    def made() -> Transformer:
        return Transformer(settings, layers, attention, rngs=nnx.Rngs(0))

    model, _ = nnx.split(nnx.eval_shape(made))
    return nnx.merge(model, params)(*tokens)
