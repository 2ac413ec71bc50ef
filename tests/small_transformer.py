"""A small transformer whose rows are sequences, as a program would write it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm import gemm


@dataclasses.dataclass(frozen=True)
class Transformer:
    """Two layers of attention and feed-forward network, without embeddings.

    Attributes:
        width: Of a token.
        heads: Of attention.
        hidden: Of the feed-forward network.
        keep: What is done to each maximum and sum along a row.
        options: Of every product.
    """

    width: int
    heads: int
    hidden: int
    keep: Callable[[Any], Any]
    options: dict[str, Any]

    def weights(self) -> list[jax.Array]:
        """Draws the matrices of a layer, which both layers share."""
        d, rng = self.width, np.random.default_rng(0)
        shapes = (d, 3 * d), (d, d), (d, self.hidden), (self.hidden, d)
        drawn = (rng.normal(size=shape) * shape[0] ** -0.5 for shape in shapes)
        return [jnp.asarray(w, jnp.bfloat16) for w in drawn]

    def __call__(self, x: jax.Array, weights: Sequence[jax.Array]) -> jax.Array:
        """Computes all tokens of all sequences."""
        qkv, out, up, down = weights
        for _ in range(2):
            heads = self._dot(self._normed(x), qkv).reshape(*x.shape[:-1], 3, self.heads, -1)
            x = x + self._dot(self._attended(heads).reshape(x.shape), out)
            x = x + self._dot(jax.nn.gelu(self._dot(self._normed(x), up)), down)
        return x

    def _dot(self, x: jax.Array, w: jax.Array) -> jax.Array:
        return gemm(x, w, **self.options)

    def _normed(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        mean = self.keep(jnp.mean(y * y, -1, keepdims=True))
        return (y * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype)

    def _attended(self, heads: jax.Array) -> jax.Array:
        q, k, v = (heads[..., i, :, :].swapaxes(1, 2) for i in range(3))
        how = {"transpose_b": True, "preferred_element_type": jnp.float32}
        scores = gemm(q, k, **how, **self.options) * q.shape[-1] ** -0.5
        causal = jnp.tril(jnp.ones((q.shape[2],) * 2, bool))
        scores = jnp.where(causal, scores, -jnp.inf)
        shares = jnp.exp(scores - self.keep(scores.max(-1, keepdims=True)))
        shares = shares / self.keep(shares.sum(-1, keepdims=True))
        return gemm(shares.astype(q.dtype), v, **self.options).swapaxes(1, 2)
