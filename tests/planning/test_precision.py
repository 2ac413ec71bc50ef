"""What `precision=` asks for."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gemm import gemm
from pallas_gemm.planning import precision

DEFAULT, HIGH, HIGHEST = lax.Precision.DEFAULT, lax.Precision.HIGH, lax.Precision.HIGHEST
PRESET = lax.DotAlgorithmPreset
BF16, F16, F32, E4M3, I8 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn, jnp.int8


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (None, (DEFAULT, DEFAULT)),
        ("high", (HIGH, HIGH)),
        (HIGHEST, (HIGHEST, HIGHEST)),
        ((DEFAULT, HIGHEST), (DEFAULT, HIGHEST)),
        (["default", "high"], (DEFAULT, HIGH)),
        ("TF32_TF32_F32", PRESET.TF32_TF32_F32),
        (PRESET.BF16_BF16_F32, PRESET.BF16_BF16_F32),
    ],
    ids=str,
)
def test_it_is_read_as_jax_reads_it(given: Any, read: Any) -> None:
    assert precision.resolve(given) == read


def test_none_is_the_default_of_the_moment() -> None:
    with jax.default_matmul_precision("float32"):
        assert precision.resolve(None) == (HIGHEST, HIGHEST)
    assert precision.resolve(None) == (DEFAULT, DEFAULT)


@pytest.mark.parametrize("given", ["exact", 3, ("high",), {}], ids=repr)
def test_anything_else_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="precision="):
        precision.resolve(given)


@pytest.mark.parametrize(
    ("asked", "dtype", "exact"),
    [
        ((DEFAULT, DEFAULT), F32, True),
        ((HIGH, HIGH), F32, True),
        ((DEFAULT, HIGHEST), F32, False),
        ((HIGHEST, HIGHEST), BF16, True),
        ((HIGHEST, HIGHEST), I8, True),
        ((HIGHEST, HIGHEST), E4M3, False),
        (PRESET.DEFAULT, F32, True),
        (PRESET.BF16_BF16_F32, BF16, True),
        (PRESET.BF16_BF16_F32, F32, False),
        (PRESET.F16_F16_F32, F16, True),
        (PRESET.F16_F16_F16, F16, False),
        (PRESET.TF32_TF32_F32, F32, True),
        (PRESET.TF32_TF32_F32_X3, F32, False),
        (PRESET.BF16_BF16_F32_X3, F32, False),
        (PRESET.ANY_F8_ANY_F8_F32_FAST_ACCUM, E4M3, True),
        (PRESET.ANY_F8_ANY_F8_F32, E4M3, False),
    ],
    ids=str,
)
def test_kernels_compute_exactly_what_is_asked_for_or_nothing(
    asked: Any, dtype: Any, exact: bool
) -> None:
    reason = precision.kernel_refusal(asked, (dtype, dtype))
    assert (reason is None) == exact
    assert exact or str(np.dtype(dtype)) in str(reason)


def test_it_reaches_xla() -> None:
    a = jnp.ones((8, 8))

    def f(a: jax.Array) -> jax.Array:
        return gemm(a, a, precision="highest")

    text = jax.jit(f).lower(a).as_text()
    assert "precision = [HIGHEST, HIGHEST]" in text
    with jax.default_matmul_precision("high"):
        text = jax.jit(lambda a: gemm(a, a)).lower(a).as_text()
    assert "precision = [HIGH, HIGH]" in text
