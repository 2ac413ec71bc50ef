"""On a GPU: products of more precision, and few rows of 8 bits, err no more than they should."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gemm import gemm, grouped_gemm
from pallas_gemm.tuning import accuracy

pytestmark = pytest.mark.gpu("hopper")

X3 = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
SIZES = [
    *((37, 192, 192), (128, 128, 128), (100, 512, 320), (512, 512, 512), (64, 1024, 768)),
    *((1024, 1024, 1024), (2048, 2048, 512), (333, 777, 1536), (128, 4096, 1920)),
    *((2048, 2048, 2048), (512, 2048, 8192)),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_what_stands_for_three_products_of_tf32_errs_no_more_than_xlas(
    size: tuple[int, int, int],
) -> None:
    m, n, k = size
    rng = np.random.default_rng(k)
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((m, k), (k, n)))
    exact = a[:128].astype(np.float64) @ b.astype(np.float64)

    def error(multiply) -> float:
        found = np.asarray(jax.jit(multiply)(a, b), np.float64)[:128]
        return float(np.sqrt(((found - exact) ** 2).mean()))

    ours = error(lambda a, b: gemm(a, b, precision=X3, implementation="hopper"))
    assert 0 < ours <= error(lambda a, b: jnp.matmul(a, b, precision=X3))


OPERANDS = {
    "even": (np.ones(4096), np.ones(2048)),
    "rows of all sizes": (10.0 ** np.linspace(-15, 15, 4096), np.ones(2048)),
    "sizes that make up for each other": (np.ones(4096), 2.0 ** np.linspace(-50, 50, 2048)),
}
"""What rows, and elements along k, are multiplied by; the latter divide those of the other side."""


@pytest.mark.parametrize("kind", OPERANDS)
@pytest.mark.parametrize(
    ("precision", "share"),
    [
        *((None, 2.0**-9), ("TF32_TF32_F32_X3", 2.0**-21)),
        *(("highest", 2.0**-22), ("BF16_BF16_F32_X6", 2.0**-22)),
    ],
)
def test_elements_may_differ_in_size(precision: str | None, share: float, kind: str) -> None:
    rng = np.random.default_rng(3)
    rows, deep = OPERANDS[kind]
    a = (rng.standard_normal((4096, 2048)) * rows[:, None] * deep).astype(np.float32)
    b = (rng.standard_normal((2048, 2048)) / deep[:, None]).astype(np.float32)
    found = jax.jit(lambda a, b: gemm(a, b, precision=precision, implementation="hopper"))(a, b)
    left, right = a.astype(np.float64), b.astype(np.float64)
    error = np.abs(np.asarray(found, np.float64) - left @ right)
    assert np.all(error <= share * (np.abs(left) @ np.abs(right)))


@pytest.mark.parametrize("precision", [None, "highest"])
def test_what_is_infinite_stays_so(precision: str | None) -> None:
    a = np.random.default_rng(4).standard_normal((4096, 2048), np.float32)
    a[3, 5], a[7, 1] = np.inf, np.nan
    found = np.asarray(gemm(a, np.eye(2048, dtype=np.float32) + 1, precision=precision))
    assert np.all(np.isposinf(found[3]))
    assert np.all(np.isnan(found[7]))
    assert np.all(np.isfinite(np.delete(found, (3, 7), 0)))


@pytest.mark.parametrize(
    ("name", "share"),
    [("X3", 1e-5), ("X6", 4e-7), ("X9", 4e-7)],
)
@pytest.mark.parametrize("size", [(1, 504, 2992), (504, 1, 2992), (1, 1, 2992)], ids=str)
def test_a_row_or_column_has_the_precision_that_is_asked_for(
    size: tuple[int, int, int], name: str, share: float
) -> None:
    m, n, k = size
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((m, k), (k, n)))
    left, right = a.astype(np.float64), b.astype(np.float64)
    found = jax.jit(lambda a, b: gemm(a, b, precision=f"BF16_BF16_F32_{name}"))(a, b)
    error = np.abs(np.asarray(found, np.float64) - left @ right)
    assert np.all(error <= share * (np.abs(left) @ np.abs(right)))


EIGHT = {"transpose_b": True, "implementation": "hopper"}


@pytest.mark.parametrize("out", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("rows", [1, 24, 128])
def test_few_rows_of_8_bits_show_no_long_sums(rows: int, dtype, out) -> None:
    a = accuracy.normal(jax.random.key(0), (rows, 16384), dtype)
    b = accuracy.normal(jax.random.key(1), (8192, 16384), dtype)
    found = gemm(a, b, preferred_element_type=out, **EIGHT)
    exact = accuracy.compiled_reference(lambda a, b: jnp.matmul(a, b.T, precision="highest"), a, b)
    assert _relative(found, exact(a, b)) < 2.1e-3


def test_few_rows_of_8_bits_in_groups_show_no_long_sums() -> None:
    sizes = np.array([5, 0, 40, 19], np.int32)
    a = accuracy.normal(jax.random.key(0), (64, 16384), jnp.float8_e4m3fn)
    b = accuracy.normal(jax.random.key(1), (4, 4096, 16384), jnp.float8_e4m3fn)
    found = grouped_gemm(a, b, sizes, preferred_element_type=jnp.bfloat16, **EIGHT)
    each = np.repeat(np.arange(4), sizes)

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        all_of_all = jnp.einsum("mk,gnk->gmn", a, b, precision="highest")
        return all_of_all[each, np.arange(64)]

    exact = accuracy.compiled_reference(product, a, b)
    assert _relative(found, exact(a, b)) < 2.1e-3


@pytest.mark.parametrize("out", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("precision", ["highest", "ANY_F8_ANY_F8_F32"])
@pytest.mark.parametrize("size", [(1, 512), (64, 1024), (2048, 2048), (1000, 1040)], ids=str)
def test_sums_of_8_bits_are_short_where_a_precision_asks_for_it(
    size: tuple[int, int], precision: str, out
) -> None:
    (m, n), k = size, 16384
    a = accuracy.normal(jax.random.key(0), (m, k), jnp.float8_e5m2)
    b = jnp.abs(accuracy.normal(jax.random.key(1), (n, k), jnp.float8_e4m3fn).astype(jnp.float32))
    b = b.astype(jnp.float8_e4m3fn)
    exact = accuracy.compiled_reference(lambda a, b: jnp.matmul(a, b.T, precision="highest"), a, b)
    multiply = functools.partial(gemm, preferred_element_type=out, precision=precision, **EIGHT)
    assert _relative(multiply(a, b), exact(a, b)) < (2e-3 if out == jnp.bfloat16 else 1e-3)
    # A long sum of positive elements loses some per cent.
    exact = accuracy.compiled_reference(lambda b: jnp.matmul(b, b.T, precision="highest"), b)
    assert _relative(multiply(b, b), exact(b)) < 2e-3
    assert _relative(gemm(b, b, preferred_element_type=out, **EIGHT), exact(b)) >= 2e-3


def _relative(found: jax.Array, exact: jax.Array) -> float:
    """Returns the root mean square of errors, as a share of that of what is exact.

    Rounding to bfloat16 makes 1.7e-3 of it. One sum of 16384 elements errs 3.5e-3 in all.
    """
    error = found.astype(jnp.float32) - exact
    return float(jnp.sqrt(jnp.mean(error**2) / jnp.mean(exact**2)))
