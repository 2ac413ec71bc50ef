"""The example's transformer in `flax.linen`: with stock layers, with our hook, with our layers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import pallas_gemm
from examples.hooks import hook_of
from examples.settings import Attention, Settings
from pallas_gemm.flax import linen as fused


class Gated(nn.Module):
    """SwiGLU of stock layers; `pallas_gemm.flax.linen.GatedDense` has the same parameters."""

    features: int
    options: Any

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns `silu(inputs @ gate) * (inputs @ up)`."""
        gate = nn.Dense(self.features, use_bias=False, name="gate", **self.options)(inputs)
        up = nn.Dense(self.features, use_bias=False, name="up", **self.options)(inputs)
        return nn.silu(gate) * up


class Block(nn.Module):
    """Attention and a gated feed-forward network, each added to what comes in.

    Attributes:
        settings: The sizes.
        layers: "stock", "hooks" (stock layers with `pallas_gemm.dot_general`), "fp8_blocks" (stock
            layers with that of a `pallas_gemm.Recipe`), or "fused".
        attention: The implementation that computes it.
    """

    settings: Settings
    layers: str
    attention: Attention

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns what the next block takes, of the shape of `x`."""
        settings, dtype = self.settings, self.settings.type()
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": dtype}
        norm = functools.partial(nn.RMSNorm, **types)
        inputs = norm(name="attention_norm")(x)
        heads = (*x.shape[:-1], settings.heads, settings.head_size)
        query, key, value = (x.reshape(heads) for x in self._projections(inputs))
        mixed = jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation=self.attention
        )
        # XLA makes one pass of a sum and the norm that follows it: `residual=` is no faster.
        x = x + self._dense(mixed.reshape(x.shape), settings.width, "out")
        inputs = norm(name="feed_forward_norm")(x)
        if self.layers == "fused":
            hidden = fused.GatedDense(settings.hidden, name="swiglu", **types)(inputs)
        else:
            hidden = Gated(settings.hidden, self._hooked(types), name="swiglu")(inputs)
        return x + self._dense(hidden, settings.width, "down")

    def _projections(self, inputs: jax.Array) -> tuple[jax.Array, ...]:
        names, width, dtype = ("query", "key", "value"), self.settings.width, self.settings.type()
        if self.layers == "fused":
            options: dict[str, Any] = {"dtype": dtype, "param_dtype": dtype, "use_bias": False}
            return fused.projections(inputs, dict.fromkeys(names, width), **options)
        return tuple(self._dense(inputs, width, name) for name in names)

    def _dense(self, inputs: jax.Array, features: int, name: str) -> jax.Array:
        dtype = self.settings.type()
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": dtype, "use_bias": False}
        if self.layers == "fused":
            return fused.Dense(features, name=name, **options)(inputs)
        return nn.Dense(features, name=name, **self._hooked(options))(inputs)

    def _hooked(self, options: dict[str, Any]) -> dict[str, Any]:
        return options | hook_of(self.layers)


class Loss(nn.Module):
    """The layer of the logits and their loss at once; its parameter is that of the layer."""

    settings: Settings

    @nn.compact
    def __call__(self, x: jax.Array, labels: jax.Array) -> jax.Array:
        """Returns the mean over tokens of how unlikely each label is."""
        shape, dtype = (x.shape[-1], self.settings.vocabulary), self.settings.type()
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape, dtype)
        return pallas_gemm.linear_cross_entropy(x, kernel, labels)


class Transformer(nn.Module):
    """Tokens to the logits of the tokens that follow.

    Attributes:
        settings: The sizes.
        layers: As for `Block`.
        attention: As for `Block`.
    """

    settings: Settings
    layers: str
    attention: Attention

    @nn.compact
    def __call__(self, tokens: jax.Array, labels: jax.Array | None = None) -> jax.Array:
        """Returns logits `[batch, sequence, vocabulary]`; with labels, their mean loss."""
        settings, dtype = self.settings, self.settings.type()
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": dtype}
        x = nn.Embed(settings.vocabulary, settings.width, name="tokens", **types)(tokens)
        places = nn.Embed(settings.sequence, settings.width, name="places", **types)
        x = x + places(jnp.arange(tokens.shape[1]))[None]
        for i in range(settings.blocks):
            x = Block(settings, self.layers, self.attention, name=f"block_{i}")(x)
        x = nn.RMSNorm(name="norm", **types)(x)
        if labels is not None:
            return Loss(settings, name="logits")(x, labels)
        dense: Any = nn.Dense if self.layers != "fused" else fused.Dense
        # Logits are of 16 bits, whatever the blocks are.
        hook = {} if self.layers in ("stock", "fused") else hook_of("hooks")
        return dense(settings.vocabulary, use_bias=False, name="logits", **types, **hook)(x)


def init(settings: Settings, key: jax.Array) -> Any:
    """Returns parameters; they are those of all kinds of layers."""
    tokens = jnp.zeros((1, settings.sequence), jnp.int32)
    return Transformer(settings, "stock", "xla").init(key, tokens)["params"]


def apply(
    settings: Settings, layers: str, attention: Attention, params: Any, *tokens: jax.Array
) -> Any:
    """Returns the logits of tokens; of tokens and labels, the mean loss."""
    return Transformer(settings, layers, attention).apply({"params": params}, *tokens)
