"""8 bits whose right operands are stored [k, n], on a GPU: widened, or transposed first."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import explain, gated_gemm, gemm, grouped_gemm
from tests import reference

pytestmark = pytest.mark.gpu("hopper")

E4M3, E5M2, BF16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16
N, K = 8192, 4112
HOW: Any = {"implementation": "hopper", "preferred_element_type": BF16}


def drawn(*shape: int, seed: int = 0, dtype: Any = E4M3) -> jax.Array:
    return reference.integers(np.random.default_rng(seed), shape, dtype)


def rounded(x: np.ndarray) -> np.ndarray:
    return np.asarray(jnp.asarray(x, jnp.float32).astype(BF16), np.float64)


def assert_widened(product: Any, *operands: Any) -> None:
    assert "WidenedConfig" in str(explain(functools.partial(product, **HOW), *operands))


@pytest.mark.parametrize("rows", [1, 8, 24, 100])
@pytest.mark.parametrize(
    "types", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2), (jnp.int8, jnp.int8)]
)
def test_few_rows(types: tuple[Any, Any], rows: int) -> None:
    a, b = drawn(rows, K, dtype=types[0]), drawn(K, N, seed=1, dtype=types[1])
    assert_widened(gemm, a, b)
    expected = rounded(reference.wide(a) @ reference.wide(b))
    reference.assert_exact(gemm(a, b, **HOW), expected)


def test_two_products_are_gated() -> None:
    a, b, up = drawn(16, K), drawn(K, N, seed=1), drawn(K, N, seed=2)
    product = functools.partial(gated_gemm, activation="relu")
    assert_widened(product, a, b, up)
    gate, other = (reference.wide(a) @ reference.wide(x) for x in (b, up))
    reference.assert_exact(product(a, b, up, **HOW), rounded(np.maximum(gate, 0) * other))


@pytest.mark.parametrize("dtype", [E4M3, jnp.int8])
def test_rows_in_groups(dtype: Any) -> None:
    sizes = np.array([7, 0, 33, 20], np.int32)
    a, b = drawn(64, K, dtype=dtype), drawn(4, K, N, seed=1, dtype=dtype)
    assert_widened(grouped_gemm, a, b, sizes)
    expected, first = np.zeros((64, N)), 0
    for size, matrix in zip(sizes, reference.wide(b), strict=True):
        rows = slice(first, first + size)
        expected[rows], first = reference.wide(a)[rows] @ matrix, first + size
    reference.assert_exact(grouped_gemm(a, b, jnp.asarray(sizes), **HOW), rounded(expected))


@pytest.mark.parametrize("layout", ["NN", "TN", "TT"])
@pytest.mark.parametrize("types", [(E4M3, E4M3), (E5M2, E4M3)])
def test_a_function_takes_factors_in_any_layout(types: tuple[Any, Any], layout: str) -> None:
    m, left, right = 512, layout[0] == "T", layout[1] == "T"
    a = drawn(*((K, m) if left else (m, K)), dtype=types[0])
    b = drawn(*((N, K) if right else (K, N)), seed=1, dtype=types[1])
    found, largest = gemm(
        *(a, b),
        epilogue=lambda s: ((2 * s).astype(BF16), jnp.max(s, -1)),
        transpose_a=left,
        transpose_b=right,
        implementation="hopper",
    )
    exact = reference.Formula(transpose_a=left, transpose_b=right)(a, b)
    reference.assert_exact(found, rounded(2 * exact))
    reference.assert_exact(largest, exact.max(-1))
