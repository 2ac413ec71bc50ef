"""On a GPU: functions with reductions, where threads and warps each reduce values of their own.

The elements are integers, so that float32 results are exact. The simulator knows no threads.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gemm import HopperConfig, gemm

F32, BF16 = jnp.float32, jnp.bfloat16
pytestmark = [pytest.mark.gpu("hopper"), pytest.mark.usefixtures("as_users_write")]

EARLY = functools.partial(HopperConfig, late_store=False)
CONFIGS = {
    "chosen": None,
    "late": HopperConfig(tile=(128, 256), late_store=True),
    "early": EARLY(tile=(128, 256), stages=3, store_slots=4),
    "narrow": EARLY(tile=(128, 192), stages=4),
    "tall": EARLY(tile=(256, 128), stages=3),
    "by columns": EARLY(tile=(64, 256), stages=4, consumers=2),
    "one": EARLY(tile=(64, 128), stages=4, consumers=1),
    "in turns": EARLY(tile=(128, 128), stages=4, pingpong=True, store_slots=1, store_columns=32),
    "cluster": EARLY(tile=(128, 128), stages=4, cluster=(2, 1)),
}
WIDE = {
    "chosen": None,
    "early": EARLY(tile=(128, 256), stages=3, store_slots=2, store_columns=32),
    "in turns": CONFIGS["in turns"],
    "one": EARLY(tile=(64, 128), stages=4, consumers=1, store_columns=32),
}
"""Configs with room for a float32 result and for a mask that is loaded."""
SIZES = [(256, 512, 128), (392, 1048, 192), (64, 80, 64)]


def _rows(s: Any, x: Any) -> Any:
    z = s + x.astype(F32)
    return z.astype(BF16), jnp.sum(z, -1), jnp.max(jnp.abs(z), -1), jnp.min(z, -1)


def _columns(s: Any, x: Any) -> Any:
    z = s - x.astype(F32)
    return z.astype(BF16), jnp.sum(z, 0), jnp.min(z, 0)


def _both(s: Any, x: Any) -> Any:
    del x
    return s.astype(BF16), jnp.max(s, -1), jnp.sum(s, 0)


def _left(s: Any, x: Any) -> Any:
    return jnp.sum(s, -1), jnp.max(s, 0), jnp.sum(s + x.astype(F32), 0)


def _ints(rng: Any, *shape: int) -> jax.Array:
    return jnp.asarray(rng.integers(-3, 4, shape), BF16)


def _in_a_kernel(f: Any, *operands: Any) -> Any:
    """Runs a function, which a kernel of ours has to compute; None if the config cannot."""
    try:
        lowered = jax.jit(f).lower(*operands)
    except ValueError as error:
        if "cannot compute this product" not in str(error):
            raise
        return None
    assert "mosaic_gpu" in lowered.as_text()
    return lowered.compile()(*operands)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("function", [_rows, _columns, _both, _left])
def test_exact(function: Any, name: str, size: tuple[int, int, int]) -> None:
    m, n, k = size
    rng = np.random.default_rng(0)
    a, b, x = _ints(rng, m, k), _ints(rng, n, k), _ints(rng, m, n)

    def of(config: Any) -> Any:
        def run(a: Any, b: Any, x: Any) -> Any:
            # XLA is faster at the smallest of them.
            named = "hopper" if config is None else None
            return gemm(
                a, b, transpose_b=True, epilogue=function, operands=(x,), config=config,
                implementation=named,
            )  # fmt: skip

        return run

    found = _in_a_kernel(of(CONFIGS[name]), a, b, x)
    if found is None:
        pytest.skip("this config has no room for it")
    sums = np.asarray(a, np.float32) @ np.asarray(b, np.float32).T
    for own, expected in zip(found, function(jnp.asarray(sums), x), strict=True):
        np.testing.assert_array_equal(np.asarray(own, np.float32), np.asarray(expected, np.float32))


def _placed(s: Any, x: Any) -> Any:
    z = s + x.astype(F32)
    return jnp.argmax(z, -1), jnp.argmin(z, -1), jnp.max(z, -1)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_first_of_the_largest_values_is_found(name: str, size: tuple[int, int, int]) -> None:
    m, n, k = size
    rng = np.random.default_rng(0)
    a, b = _ints(rng, m, k), _ints(rng, n, k)
    x = np.asarray(rng.integers(-9, 9, (m, n)), np.float32)
    # In rows of their own, and each in two columns: what no number is larger than, or smaller.
    for row, odd in enumerate((np.inf, -np.inf, np.nan)):
        x[[row, row + 8, row + 8], [n - 1, n // 3, n // 2]] = odd
        x[row + 16] = odd
    # Zeros of either sign are as large.
    a, x[20:30] = a.at[20:30].set(0), np.where(rng.integers(0, 2, (10, n)), 0.0, -0.0)

    def run(a: Any, b: Any, x: Any) -> Any:
        how: Any = {"operands": (x,), "config": CONFIGS[name]}
        named = "hopper" if CONFIGS[name] is None else None
        return gemm(a, b, transpose_b=True, epilogue=_placed, implementation=named, **how)

    found = _in_a_kernel(run, a, b, jnp.asarray(x, BF16))
    if found is None:
        pytest.skip("this config has no room for it")
    z = np.asarray(a, np.float32) @ np.asarray(b, np.float32).T + x
    expected = np.argmax(z, -1), np.argmin(z, -1), np.max(z, -1)
    for own, value in zip(found, expected, strict=False):
        np.testing.assert_array_equal(own, value)


def _statistics(s: Any, labels: Any) -> Any:
    hit = lax.broadcasted_iota(jnp.int32, s.shape, 1) == labels[:, None]
    return jax.nn.logsumexp(s, -1), jnp.sum(jnp.where(hit, s, 0), -1), jnp.max(s, -1)


def _kept(s: Any, labels: Any) -> Any:
    return *_statistics(s, labels), s.astype(BF16)


@pytest.mark.parametrize("size", [(256, 1536, 128), (392, 1048, 192)], ids=str)
@pytest.mark.parametrize("function", [_statistics, _kept])
@pytest.mark.parametrize("name", ["chosen", "late", "early", "tall", "in turns", "one"])
def test_sums_of_exp_and_picked_values(
    name: str, function: Any, size: tuple[int, int, int]
) -> None:
    m, n, k = size
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k)), rng.standard_normal((n, k)) / 8
    # Rows far from 0, all alike, and of no numbers.
    a[3] *= 100
    a[5] = 0
    a[7] = np.nan
    a, b = jnp.asarray(a, BF16), jnp.asarray(b, BF16)
    labels = np.asarray(rng.integers(0, n, m), np.int32)
    # Labels in the first and last column, and in none.
    labels[:4] = (0, n - 1, n, -1)

    def run(a: Any, b: Any, labels: Any) -> Any:
        own = CONFIGS[name]
        return gemm(a, b, transpose_b=True, epilogue=function, operands=(labels,), config=own)

    found = _in_a_kernel(run, a, b, jnp.asarray(labels))
    if found is None:
        pytest.skip("this config has no room for it")
    sums = np.asarray(a, np.float32) @ np.asarray(b, np.float32).T
    expected = _statistics(jnp.asarray(sums), jnp.asarray(labels))
    for own, value in zip(found, expected, strict=False):
        np.testing.assert_allclose(own, value, rtol=1e-5, atol=2e-5)
    again = _in_a_kernel(run, a, b, jnp.asarray(labels))
    for one, other in zip(found, again, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize("mask", [-1e9, -1e30, float(np.finfo(np.float32).min), -np.inf])
@pytest.mark.parametrize("name", WIDE)
def test_rows_and_tiles_that_are_masked_as_a_whole(name: str, mask: float) -> None:
    m, n, k = 392, 1048, 192
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal((size, k)) / 4, BF16) for size in (m, n))
    # A causal mask leaves few tiles, and this one nothing of row 5.
    keep = jnp.asarray(np.tril(np.ones((m, n), bool), 0)).at[5].set(False)

    def softmax(s: Any, keep: Any) -> Any:
        z = jnp.where(keep, s, mask)
        largest = jnp.max(z, -1)
        return z, largest, jnp.sum(jnp.exp(z - largest[:, None]), -1)

    def run(a: Any, b: Any, keep: Any) -> Any:
        how: Any = {"operands": (keep,), "config": WIDE[name]}
        return gemm(a, b, transpose_b=True, epilogue=softmax, **how)

    found = _in_a_kernel(run, a, b, keep)
    assert found is not None
    sums = np.asarray(a, np.float32) @ np.asarray(b, np.float32).T
    _, largest, total = softmax(jnp.asarray(sums), keep)
    np.testing.assert_allclose(found[1], largest, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[2], total, rtol=2e-5)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 1e30, -1e30, -100.0])
@pytest.mark.parametrize("column", [0, 1])
def test_a_tangent_leaves_its_neighbour_alone(column: int, odd: float) -> None:
    a = np.zeros((128, 64))
    a[:, 0] = 1
    b = np.full((256, 64), 0.5)
    b[column::2, 0] = odd
    a, b = jnp.asarray(a, BF16), jnp.asarray(b, BF16)

    def f(s: Any) -> Any:
        z = jax.nn.gelu(s)
        return z, jnp.max(z, -1)

    found = _in_a_kernel(lambda a, b: gemm(a, b, transpose_b=True, epilogue=f)[0], a, b)
    sums = np.tile(np.asarray(b[:, 0], np.float32), (128, 1))
    np.testing.assert_allclose(found, jax.nn.gelu(jnp.asarray(sums)), rtol=1e-5, atol=1e-6)
