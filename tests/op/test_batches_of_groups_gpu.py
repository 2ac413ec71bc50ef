"""Batches of products of groups on a GPU: groups of groups, in one kernel."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gemm import ragged_dot, ragged_dot_general

pytestmark = pytest.mark.gpu("hopper")

BATCH, ROWS, N, K = 3, 704, 320, 256
SIZES = np.array([[257, 0, 67, 380], [0, 704, 0, 0], [1, 64, 100, 200]], np.int32)
"""The rows of the last product do not fill its groups."""
OVER_ROWS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


def _integers(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float64)


def _spans(sizes: np.ndarray) -> list[slice]:
    ends = np.cumsum(sizes)
    return [slice(*span) for span in zip(ends - sizes, ends, strict=True)]


def _by_one_kernel(f: Any, *args: Any) -> Any:
    lowered = jax.jit(f).lower(*args)
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 1
    return lowered.compile()(*args)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.int8])
def test_rows_of_a_batch(dtype: Any) -> None:
    a, b = _integers(BATCH, ROWS, K, seed=0), _integers(BATCH, SIZES.shape[1], K, N, seed=1)
    expected = np.zeros((BATCH, ROWS, N))
    for i, sizes in enumerate(SIZES):
        for group, span in enumerate(_spans(sizes)):
            expected[i, span] = a[i, span] @ b[i, group]
    out = jnp.int32 if dtype == jnp.int8 else jnp.float32

    def multiply(a: Any, b: Any, sizes: Any) -> Any:
        return jax.vmap(lambda *x: ragged_dot(*x, preferred_element_type=out))(a, b, sizes)

    found = _by_one_kernel(multiply, jnp.asarray(a, dtype), jnp.asarray(b, dtype), SIZES)
    np.testing.assert_array_equal(found, expected)


def test_sums_over_the_rows_of_a_batch() -> None:
    a, g = _integers(BATCH, ROWS, K, seed=2), _integers(BATCH, ROWS, N, seed=3)
    spans = [_spans(sizes) for sizes in SIZES]
    expected = [
        [x[span].T @ y[span] for span in own] for x, y, own in zip(a, g, spans, strict=True)
    ]
    # Rows in no group count nowhere.
    a[2, SIZES[2].sum() :] = np.nan

    def multiply(a: Any, g: Any, sizes: Any) -> Any:
        f = lambda x, y, own: ragged_dot_general(  # noqa: E731
            x, y, own, OVER_ROWS, preferred_element_type=jnp.float32
        )
        return jax.vmap(f)(a, g, sizes)

    given = (jnp.asarray(x, jnp.bfloat16) for x in (a, g))
    found = _by_one_kernel(multiply, *given, SIZES)
    np.testing.assert_array_equal(found, np.array(expected))
