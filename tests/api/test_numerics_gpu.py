"""Rows keep their bits on a real GPU: hundreds of random pairs of a batch and some of its rows."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import gated_gemm, gemm, grouped_gemm, numerics
from tests.small_transformer import Transformer

pytestmark = pytest.mark.gpu("hopper")

ROWS: dict[str, Any] = {"numerics": numerics(invariant="rows")}
M = 2048
PAIRS = 20
"""Choices of as many rows: a choice takes no time beside a program."""
Product = Callable[..., jax.Array]

PRODUCTS: dict[str, Product] = {
    "plain": lambda x, w, *_: gemm(x, w, **ROWS),
    "gelu": lambda x, w, up, _: gemm(x, w, bias=up[0], activation="gelu", **ROWS),
    "residual": lambda x, w, _, y: gemm(x, w, residual=y, beta=0.5, **ROWS),
    "gated": lambda x, w, up, _: gated_gemm(x, w, up, **ROWS),
}
CASES = [
    ("plain", 1152, 6912, jnp.bfloat16),
    ("gelu", 1536, 8960, jnp.float16),
    ("residual", 4096, 4096, jnp.bfloat16),
    ("gated", 768, 3072, jnp.bfloat16),
    ("plain", 1024, 4096, jnp.float32),
    ("plain", 2048, 8192, jnp.float8_e4m3fn),
]


def _bits(x: jax.Array) -> np.ndarray:
    found = np.asarray(x)
    return found.view(f"u{found.dtype.itemsize}")


def _choices(rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yields rows: parts and permutations, of few sizes, for each is a program."""
    for count in (1, int(rng.integers(2, 64)), int(rng.integers(64, 512))):
        for i in range(PAIRS):
            first = int(rng.integers(0, M - count + 1))
            yield np.arange(first, first + count) if i % 2 else rng.permutation(M)[:count]


@pytest.mark.parametrize(("name", "n", "k", "dtype"), CASES)
def test_rows_keep_their_bits_among_others(name: str, n: int, k: int, dtype: Any) -> None:
    rng = np.random.default_rng(n + k)
    out = jnp.bfloat16 if jnp.dtype(dtype).itemsize == 1 else dtype
    keys = jax.random.split(jax.random.key(n), 4)
    x = jax.random.normal(keys[0], (M, k)).astype(dtype)
    w, up = ((jax.random.normal(key, (k, n)) * k**-0.5).astype(dtype) for key in keys[1:3])
    y = jax.random.normal(keys[3], (M, n)).astype(out)
    f = jax.jit(lambda x, y: PRODUCTS[name](x, w, up, y))
    whole, pairs = _bits(f(x, y)), 0
    for rows in _choices(rng):
        np.testing.assert_array_equal(_bits(f(x[rows], y[rows])), whole[rows])
        pairs += 1
    mapped = jax.jit(jax.vmap(lambda x, y: PRODUCTS[name](x, w, up, y)))
    rows = rng.permutation(M)[:222]
    found = mapped(x[rows].reshape(6, 37, k), y[rows].reshape(6, 37, n))
    np.testing.assert_array_equal(_bits(found).reshape(222, n), whole[rows])
    assert pairs == 3 * PAIRS


def test_rows_keep_their_bits_in_groups_of_any_sizes() -> None:
    n, k, rng = 768, 4096, np.random.default_rng(0)
    x = jax.random.normal(jax.random.key(0), (M, k), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (k, n), jnp.bfloat16)
    whole = _bits(jax.jit(lambda x: gemm(x, w, **ROWS))(x))
    grouped = jax.jit(lambda x, sizes: grouped_gemm(x, jnp.stack([w] * 4), sizes, **ROWS))
    for _ in range(PAIRS):
        cuts = np.sort(rng.integers(0, M + 1, 3))
        sizes = jnp.asarray(np.diff([0, *cuts, M]), jnp.int32)
        rows = rng.permutation(M)
        np.testing.assert_array_equal(_bits(grouped(x[rows], sizes)), whole[rows])


def _summed(s: jax.Array) -> tuple[jax.Array, ...]:
    return s.astype(jnp.bfloat16), jnp.sum(s * s, -1), jax.nn.logsumexp(s, -1)


@pytest.mark.parametrize(("n", "k"), [(1152, 6912), (4096, 512)])
def test_what_a_function_adds_up_along_rows_keeps_its_bits(n: int, k: int) -> None:
    rng = np.random.default_rng(n)
    x = jax.random.normal(jax.random.key(0), (M, k), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (k, n), jnp.bfloat16) * jnp.bfloat16(k**-0.5)
    f = jax.jit(lambda x: gemm(x, w, epilogue=_summed, **ROWS))
    whole = f(x)
    exact = jnp.matmul(x[:64], w, preferred_element_type=jnp.float32)
    np.testing.assert_allclose(whole[1][:64], _summed(exact)[1], rtol=1e-4)
    np.testing.assert_allclose(whole[2][:64], _summed(exact)[2], rtol=1e-4)
    for rows in _choices(rng):
        for part, own in zip(f(x[rows]), whole, strict=True):
            np.testing.assert_array_equal(_bits(part), _bits(own)[rows])
    grouped = jax.jit(lambda x, s: grouped_gemm(x, jnp.stack([w] * 4), s, epilogue=_summed, **ROWS))
    sizes = jnp.array([100, 0, 1000, M - 1100], jnp.int32)
    rows = rng.permutation(M)
    for part, own in zip(grouped(x[rows], sizes), whole, strict=True):
        np.testing.assert_array_equal(_bits(part), _bits(own)[rows])


@pytest.mark.parametrize(("n", "k"), [(1024, 8192), (4096, 4096)])
def test_rows_with_scales_of_blocks_keep_their_bits(n: int, k: int) -> None:
    rng, dtype = np.random.default_rng(n), jnp.float8_e4m3fn
    x = jax.random.normal(jax.random.key(0), (M, k)).astype(dtype)
    w = jax.random.normal(jax.random.key(1), (n, k)).astype(dtype)
    row, col = (
        jax.random.uniform(jax.random.key(i), shape) + 0.5
        for i, shape in enumerate(((M, k // 128), (k // 128, n // 128)))
    )
    how: dict[str, Any] = {"transpose_b": True, "preferred_element_type": jnp.bfloat16, **ROWS}
    f = jax.jit(lambda x, row: gemm(x, w, row_scale=row, col_scale=col, **how))
    whole = _bits(f(x, row))
    for rows in _choices(rng):
        np.testing.assert_array_equal(_bits(f(x[rows], row[rows])), whole[rows])


@pytest.mark.parametrize("recipe", ["products", "blocks"])
def test_a_transformer_keeps_its_rows_by_a_recipe(recipe: str) -> None:
    by_products = recipe == "products"
    net = Transformer(width=512, heads=8, hidden=2048, options=ROWS, by_products=by_products)
    weights = net.weights()
    x = jax.random.normal(jax.random.key(0), (24, 128, 512), jnp.bfloat16)

    def in_blocks(x: jax.Array) -> jax.Array:
        count, size = x.shape[0], 8
        padded = jnp.pad(x, ((0, -count % size), (0, 0), (0, 0)))
        blocks = padded.reshape(-1, size, *x.shape[1:])
        return jax.lax.map(lambda x: net(x, weights), blocks).reshape(padded.shape)[:count]

    found = numerics.check((lambda x: net(x, weights)) if by_products else in_blocks, x, variants=4)
    assert found, found
