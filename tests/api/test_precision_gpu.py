"""On a GPU: products of more precision err no more than XLA's, beside float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gemm import gemm

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
