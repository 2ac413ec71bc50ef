"""A small transformer whose rows are sequences, as a program would write it."""

import dataclasses
from collections.abc import Sequence
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
        options: Of every product.
        by_products: Sums along rows are products with ones.
    """

    width: int
    heads: int
    hidden: int
    options: dict[str, Any]
    by_products: bool = False

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
        return (y * jax.lax.rsqrt(self._total(y * y) / self.width + 1e-6)).astype(x.dtype)

    def _total(self, x: jax.Array) -> jax.Array:
        """Adds up each row."""
        if not self.by_products:
            return x.sum(-1, keepdims=True)
        return gemm(x, jnp.ones((x.shape[-1], 8), x.dtype), **self.options)[..., :1]

    def _attended(self, heads: jax.Array) -> jax.Array:
        q, k, v = (heads[..., i, :, :].swapaxes(1, 2) for i in range(3))
        how = {"transpose_b": True, "preferred_element_type": jnp.float32}
        scores = gemm(q, k, **how, **self.options) * q.shape[-1] ** -0.5
        causal = jnp.tril(jnp.ones((q.shape[2],) * 2, bool))
        scores = jnp.where(causal, scores, -jnp.inf)
        shares = jnp.exp(scores - scores.max(-1, keepdims=True))
        shares = shares / self._total(shares)
        return gemm(shares.astype(q.dtype), v, **self.options).swapaxes(1, 2)
