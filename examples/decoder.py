"""A decoder with a cache, as functions of its parameters: for the example that serves.

    tokens ──▶ embedding ──▶ blocks ──▶ norm ──▶ logits
                              │  ▲
        projections, rotary positions, attention over the cache, gated feed-forward network

The parameters are a tree of arrays, or of records of few bits in place of the matrices. Products
are those of `pallas_gemm` or of `jax.numpy`; all else is the same.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_gemm import gated_gemm, gemm, projections

EPSILON = 1e-5
ROTARY_BASE = 500_000.0


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder.

    Attributes:
        blocks: How many there are.
        width: Size of what runs from block to block.
        heads: Heads of the queries.
        kv_heads: Heads of the keys and values, each for several of the queries.
        head: Size of a head.
        hidden: Size inside the feed-forward network.
        vocabulary: How many tokens there are.
    """

    blocks: int
    width: int
    heads: int
    kv_heads: int
    head: int
    hidden: int
    vocabulary: int


PRESETS: Mapping[str, Sizes] = MappingProxyType(
    {
        "tiny": Sizes(2, 128, 4, 2, 32, 256, 256),
        "8b-blocks": Sizes(2, 4096, 32, 8, 128, 14336, 32768),
        "8b": Sizes(32, 4096, 32, 8, 128, 14336, 128256),
    }
)


class Products(NamedTuple):
    """The products of one party.

    Attributes:
        dense: Takes rows, a matrix and a residual or None.
        gated: Takes rows and both matrices of a gated network.
        several: Takes rows and several matrices.
    """

    dense: Callable[..., jax.Array]
    gated: Callable[..., jax.Array]
    several: Callable[..., Any]


def _stock_dense(x: jax.Array, w: Any, residual: Any = None, dtype: Any = None) -> jax.Array:
    wide = jnp.matmul(x, jnp.asarray(w).astype(x.dtype), preferred_element_type=dtype)
    return wide if residual is None else wide + residual


STOCK = Products(
    _stock_dense,
    lambda x, gate, up: jax.nn.silu(_stock_dense(x, gate)) * _stock_dense(x, up),
    lambda x, weights: [_stock_dense(x, w) for w in weights],
)
OURS = Products(
    lambda x, w, residual=None, dtype=None: gemm(
        x, w, residual=residual, preferred_element_type=x.dtype if dtype is None else dtype
    ),
    functools.partial(gated_gemm, activation="silu"),
    projections,
)


class Cache(NamedTuple):
    """The keys and values of a block, `[examples, positions, kv_heads, head]`."""

    keys: jax.Array
    values: jax.Array


def parameters(sizes: Sizes, key: jax.Array, dtype: Any = jnp.bfloat16) -> Any:
    """Returns parameters that are drawn; a matrix is named "kernel" and is `[inputs, outputs]`."""
    keys = iter(jax.random.split(key, 2 + 7 * sizes.blocks))

    def matrix(rows: int, columns: int) -> dict[str, jax.Array]:
        drawn = jax.random.normal(next(keys), (rows, columns), jnp.float32)
        return {"kernel": (drawn * rows**-0.5).astype(dtype)}

    def block() -> dict[str, Any]:
        own, shared = sizes.heads * sizes.head, sizes.kv_heads * sizes.head
        return {
            "query": matrix(sizes.width, own),
            "key": matrix(sizes.width, shared),
            "value": matrix(sizes.width, shared),
            "out": matrix(own, sizes.width),
            "gate": matrix(sizes.width, sizes.hidden),
            "up": matrix(sizes.width, sizes.hidden),
            "down": matrix(sizes.hidden, sizes.width),
        }

    embedding = jax.random.normal(next(keys), (sizes.vocabulary, sizes.width)).astype(dtype)
    blocks = [block() for _ in range(sizes.blocks)]
    logits = matrix(sizes.width, sizes.vocabulary)
    return {"embedding": embedding, "blocks": blocks, "logits": logits}


def empty_cache(sizes: Sizes, examples: int, positions: int, dtype: Any) -> list[Cache]:
    """Returns a cache for every block, with nothing in it."""
    shape = (examples, positions, sizes.kv_heads, sizes.head)
    return [Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(sizes.blocks)]


def logits_of(
    products: Products, sizes: Sizes, params: Any, tokens: jax.Array, cache: Any, start: Any
) -> tuple[jax.Array, list[Cache]]:
    """Returns the logits that follow the last of some tokens, in float32, and the cache with these.

    Args:
        products: The products of one party.
        sizes: The decoder's.
        params: Its parameters.
        tokens: `[examples, tokens]`, which follow what is in the cache.
        cache: The cache of every block.
        start: The position of the first of the tokens.
    """
    x = params["embedding"][tokens]
    positions = start + lax.iota(jnp.int32, tokens.shape[1])
    found = []
    for own, held in zip(params["blocks"], cache, strict=True):
        x, after = _block(products, sizes, own, x, held, positions)
        found.append(after)
    last = _norm(x[:, -1])
    return products.dense(last, params["logits"]["kernel"], dtype=jnp.float32), found


def read(
    products: Products, sizes: Sizes, positions: int, params: Any, prompt: jax.Array
) -> tuple[jax.Array, list[Cache]]:
    """Returns the logits that follow a prompt, and the cache with it.

    Args:
        products: The products of one party.
        sizes: The decoder's.
        positions: How many tokens the cache is for.
        params: Its parameters.
        prompt: `[examples, tokens]`.
    """
    cache = empty_cache(sizes, prompt.shape[0], positions, params["embedding"].dtype)
    return logits_of(products, sizes, params, prompt, cache, 0)


def decode(
    products: Products, sizes: Sizes, steps: int, params: Any, logits: jax.Array, cache: list[Cache]
) -> jax.Array:
    """Returns the tokens that follow, the likeliest each time, `[examples, steps]`.

    Args:
        products: The products of one party.
        sizes: The decoder's.
        steps: How many tokens follow; the end of the cache is free for them.
        params: Its parameters.
        logits: The logits of the first of them.
        cache: The cache with all that comes before.
    """

    def step(carry: Any, position: jax.Array) -> tuple[Any, jax.Array]:
        logits, cache = carry
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        after = logits_of(products, sizes, params, tokens[:, None], cache, position)
        return after, tokens

    first = cache[0].keys.shape[1] - steps
    _, tokens = lax.scan(step, (logits, cache), first + lax.iota(jnp.int32, steps))
    return tokens.T


def _block(
    products: Products, sizes: Sizes, params: Any, x: jax.Array, cache: Cache, positions: jax.Array
) -> tuple[jax.Array, Cache]:
    kernels = {name: layer["kernel"] for name, layer in params.items()}
    examples, tokens = x.shape[:2]
    rows = x.reshape(-1, sizes.width)
    query, *new = products.several(_norm(rows), [kernels[x] for x in ("query", "key", "value")])
    query = query.reshape(examples, tokens, sizes.heads, sizes.head)
    keys, values = (y.reshape(examples, tokens, sizes.kv_heads, sizes.head) for y in new)
    cache = Cache(
        *(
            lax.dynamic_update_slice_in_dim(held, own.astype(held.dtype), positions[0], 1)
            for held, own in zip(cache, (_rotated(keys, positions), values), strict=True)
        )
    )
    seen = lax.iota(jnp.int32, cache.keys.shape[1])[None] <= positions[:, None]
    attended = jax.nn.dot_product_attention(
        _rotated(query, positions).astype(x.dtype), *cache, mask=seen[None, None]
    )
    rows = products.dense(attended.reshape(-1, sizes.heads * sizes.head), kernels["out"], rows)
    hidden = products.gated(_norm(rows), kernels["gate"], kernels["up"])
    rows = products.dense(hidden, kernels["down"], rows)
    return rows.reshape(x.shape), cache


def _norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    size = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPSILON)
    return (wide * size).astype(x.dtype)


def _rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Turns pairs of a head's elements by angles that grow with the position."""
    half = x.shape[-1] // 2
    rates = ROTARY_BASE ** -(lax.iota(jnp.float32, half) / half)
    angles = positions.astype(jnp.float32)[:, None] * rates[None]
    cos, sin = (f(angles)[None, :, None] for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
