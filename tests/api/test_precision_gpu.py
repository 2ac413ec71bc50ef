"""On a GPU: three products of TF32 err no more than XLA's, beside float64."""

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
def test_three_products_of_tf32_err_no_more_than_xlas(size: tuple[int, int, int]) -> None:
    m, n, k = size
    rng = np.random.default_rng(k)
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((m, k), (k, n)))
    exact = a[:128].astype(np.float64) @ b.astype(np.float64)

    def error(multiply) -> float:
        found = np.asarray(jax.jit(multiply)(a, b), np.float64)[:128]
        return float(np.sqrt(((found - exact) ** 2).mean()))

    ours = error(lambda a, b: gemm(a, b, precision=X3, implementation="hopper"))
    assert 0 < ours <= error(lambda a, b: jnp.matmul(a, b, precision=X3))
