"""Rows in groups whose blocks have scales: by XLA and by the simulated kernel, and derivatives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import explain, grouped_gemm, target
from pallas_gemm.kernels.hopper.config import HopperConfig
from tests import races

M, N, K, GROUPS = 136, 96, 256, 3
SIZES = np.array([50, 0, 70])
E4M3 = jnp.float8_e4m3fn
CONFIG = HopperConfig(
    tile=(64, 96), stages=2, consumers=1, store_columns=32, late_store=False, schedule="swizzle:4"
)


def _drawn(*shape: int, dtype: Any = E4M3) -> jax.Array:
    rng = np.random.default_rng(sum(shape))
    return jnp.asarray(rng.integers(-4, 5, shape).astype(dtype))


def _scales(*shape: int) -> jax.Array:
    return jnp.asarray(
        (2.0 ** np.random.default_rng(sum(shape)).integers(-2, 3, shape)).astype(jnp.float32)
    )


def _whole(scale: Any, rows: int, columns: int) -> np.ndarray:
    scale = np.asarray(scale, np.float64)
    for axis, size in ((-2, rows), (-1, columns)):
        scale = np.repeat(scale, size // scale.shape[axis], scale.ndim + axis)
    return scale


def _expected(a: Any, b: Any, row: Any, col: Any) -> np.ndarray:
    a, b = np.asarray(a, np.float64), np.swapaxes(np.asarray(b, np.float64), 1, 2)
    a = a if row is None else a * _whole(row, M, K)
    b = b * (1 if col is None else _whole(col, K, N))
    group = np.repeat(np.arange(GROUPS), SIZES)
    found = np.zeros((M, N))
    for i in range(GROUPS):
        found[: len(group)][group == i] = a[: len(group)][group == i] @ b[i]
    return found


SHAPES = [
    ((M, 2), (GROUPS, 2, 3)),
    ((M, 2), (GROUPS, 2, N)),
    ((M, 8), (2, 3)),
    ((M, 2), (GROUPS, 8, 3)),
    (None, (GROUPS, 2, 3)),
    ((M, 2), None),
    ((M, 1), (GROUPS, 2, 3)),
]


@pytest.mark.each_value
@pytest.mark.parametrize(("row", "col"), SHAPES, ids=str)
@pytest.mark.parametrize("kernel", [False, True], ids=["xla", "kernel"])
def test_each_block_is_scaled(row: Any, col: Any, kernel: bool) -> None:
    a, b = _drawn(M, K), _drawn(GROUPS, N, K)
    row, col = (x and _scales(*x) for x in (row, col))
    how = {"config": CONFIG, "implementation": "interpret"} if kernel else {}
    scales = {"row_scale": row, "col_scale": col, "transpose_b": True}
    with races.recorded() as raced:
        found = grouped_gemm(a, b, SIZES, preferred_element_type="f32", **scales, **how)
        jax.block_until_ready(found)
        assert not raced()
    np.testing.assert_array_equal(found, _expected(a, b, row, col))


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("row", "col"), [*SHAPES[1::2], ((M,), (N,)), ((M, 2), (GROUPS, N))], ids=str
)
@pytest.mark.parametrize("kernel", [False, True], ids=["xla", "kernel"])
def test_a_function_is_given_the_scaled_product(row: Any, col: Any, kernel: bool) -> None:
    a, b, bias = _drawn(M, K), _drawn(GROUPS, N, K), _drawn(GROUPS, N, dtype=jnp.float32)
    row, col = (x and _scales(*x) for x in (row, col))
    how = {"config": CONFIG, "implementation": "interpret"} if kernel else {}
    scales = {"row_scale": row, "col_scale": col, "transpose_b": True}

    def biased(s: jax.Array, bias: jax.Array) -> Any:
        return s + bias, jnp.max(s, -1)

    with races.recorded() as raced:
        given = {"epilogue": biased, "operands": (bias,)}
        found, largest = grouped_gemm(a, b, SIZES, **given, **scales, **how)
        jax.block_until_ready(found)
        assert not raced()
    row = row[:, None] if row is not None and row.ndim == 1 else row
    if col is not None and col.shape in ((N,), (GROUPS, N)):
        col = jnp.broadcast_to(col, (GROUPS, N))[:, None]
    sums = _expected(a, b, row, col)
    group = np.repeat(np.arange(GROUPS), SIZES)
    expected = sums.copy()
    expected[: len(group)] += np.asarray(bias)[group]
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(largest, sums.max(-1) * (np.arange(M) < len(group)))


def test_derivatives_are_those_of_the_formula() -> None:
    a, b = (_drawn(*shape, dtype=jnp.float32) / 8 for shape in ((M, K), (GROUPS, K, N)))
    row, col = _scales(M, 2), _scales(GROUPS, 2, 3)

    def ours(*x: jax.Array) -> jax.Array:
        y = grouped_gemm(x[0], x[1], SIZES, row_scale=x[2], col_scale=x[3], activation="tanh")
        return jnp.sum(y**2)

    def formula(a: jax.Array, b: jax.Array, row: jax.Array, col: jax.Array) -> jax.Array:
        a = a * jnp.repeat(row, 128, 1)
        b = b * jnp.repeat(jnp.repeat(col, 128, 1), 32, 2)
        return jnp.sum(jnp.tanh(jax.lax.ragged_dot(a, b, SIZES, precision="highest")) ** 2)

    slopes = (jax.grad(f, (0, 1, 2, 3))(a, b, row, col) for f in (ours, formula))
    for x, y in zip(*slopes, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_a_function_is_derived_as_words_are() -> None:
    a, b = (_drawn(*shape, dtype=jnp.float32) / 8 for shape in ((M, K), (GROUPS, K, N)))
    given = a, b, _scales(M, 2), _scales(GROUPS, 2, 3)

    def of(how: Any) -> Any:
        def total(*x: jax.Array) -> jax.Array:
            y = grouped_gemm(x[0], x[1], SIZES, row_scale=x[2], col_scale=x[3], **how)
            return jnp.sum(y**2)

        return jax.grad(total, (0, 1, 2, 3))(*given)

    for x, y in zip(of({"epilogue": jnp.tanh}), of({"activation": "tanh"}), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_a_kernel_takes_them_on_hopper() -> None:
    shapes = [((4096, 7168), E4M3), ((8, 2048, 7168), E4M3), ((8,), jnp.int32)]
    shapes += [((4096, 56), jnp.float32), ((8, 56, 16), jnp.float32)]
    given = [jax.ShapeDtypeStruct(*x) for x in shapes]

    def product(a: Any, b: Any, sizes: Any, row: Any, col: Any) -> jax.Array:
        how = {"transpose_b": True, "preferred_element_type": "bf16"}
        return grouped_gemm(a, b, sizes, row_scale=row, col_scale=col, **how)

    for device, kernel in (("h200", "hopper"), ("b200", "xla")):
        with target(device):
            (entry,) = explain(product, *given).entries
        assert entry.decision.implementation == kernel


def test_gated_groups_have_blocks_in_both_matrices() -> None:
    a, b = _drawn(M, K), _drawn(GROUPS, N, K)
    with pytest.raises(ValueError, match="one shape where one has a dimension along k"):
        grouped_gemm(a, b, SIZES, up=b, col_scale=_scales(GROUPS, 2, 3), transpose_b=True)
    with pytest.raises(ValueError, match=r"row_scale must be .*transposed it would fit"):
        grouped_gemm(a, b, SIZES, row_scale=_scales(2, M), transpose_b=True)


def test_matrices_whose_blocks_have_scales_are_not_padded() -> None:
    a, b, scale = _drawn(M, K), _drawn(GROUPS, 99, K), _scales(GROUPS, 2, 99)
    with pytest.raises(ValueError, match="rows in groups need a result with rows of a multiple"):
        grouped_gemm(
            *(a, b, SIZES),
            col_scale=scale,
            transpose_b=True,
            preferred_element_type="f32",
            implementation="interpret",
        )
