"""On a GPU: scales of blocks, weights that go through registers, and `quantize`, beside float64.

The elements are integers and the scales powers of two, so that float32 results are exact.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import gated_gemm, gemm, grouped_gemm, quantize
from pallas_gemm.kernels.hopper.widened.config import WidenedConfig
from tests.quantized import assert_quantized

E4M3, E5M2, F32, BF16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32, jnp.bfloat16
SIZES = [(128, 256, 256), (300, 528, 1152), (5, 640, 1024), (1, 1024, 4096)]
IN_CLUSTERS: list[tuple[int, int, dict[str, Any]]] = [
    (5, 40, {"ctas_along_k": 8, "along_k": 2, "stages": 4}),
    (9, 40, {"ctas_along_k": 4, "step": 64}),
    (1, 148, {"ctas_along_k": 4, "stages": 8, "step": 64}),
    (40, 86, {"ctas_along_k": 4, "along_k": 2, "stages": 4}),
    (64, 80, {"ctas_along_k": 3, "along_k": 1, "stages": 2}),
    (16, 70, {"ctas_along_k": 2, "along_k": 3, "stages": 6}),
    (128, 40, {"ctas_along_k": 4, "along_k": 1, "stages": 3, "tile": (128, 64)}),
    (200, 35, {"ctas_along_k": 3, "along_k": 1, "stages": 2, "tile": (128, 96), "step": 64}),
]
"""Rows, tiles of columns, and how CTAs of a cluster share them, of int4 and of int8."""
IN_GROUPS: list[dict[str, Any]] = [
    {"tile": (128, 16), "stages": 8, "along_k": 4, "ctas_along_k": 2, "persistence": "none"},
    {"tile": (128, 8), "stages": 8, "along_k": 2, "ctas_along_k": 2},
    {"tile": (256, 24), "stages": 6, "consumers": 2, "along_k": 2, "ctas_along_k": 2},
    {"tile": (128, 8), "stages": 4, "along_k": 1, "ctas_along_k": 3},
    {"tile": (512, 16), "stages": 4, "consumers": 4, "along_k": 1},
]
"""How CTAs take tiles of rows in groups, of int4: of a cluster, or alone."""
SINGLES: list[tuple[int, int, dict[str, Any]]] = [
    (16, 640, {"tile": (64, 16), "stages": 10, "step": 64, "ctas_along_k": 2}),
    (24, 64, {"tile": (64, 24), "stages": 8, "ctas_along_k": 5}),
    (45, 2880, {"tile": (64, 48), "stages": 8, "along_k": 2}),
    (128, 1000, {"tile": (128, 128), "stages": 6, "consumers": 2}),
    (700, 512, {"tile": (128, 256), "stages": 4, "consumers": 2, "persistence": "static"}),
    (700, 516, {"tile": (256, 128), "stages": 4, "consumers": 2, "persistence": "static"}),
    (9000, 4100, {"tile": (256, 128), "stages": 4, "consumers": 2, "persistence": "static"}),
    (300, 1536, {"tile": (128, 64), "stages": 4, "consumers": 2, "ctas_along_k": 3}),
]
"""Rows, columns, and how float32 stored [k, n] is turned."""
BY_ALL: list[tuple[int, int, dict[str, Any]]] = [
    (1, 64, {}),
    (9, 3, {"along_k": 2, "stages": 8}),
    (16, 200, {"along_k": 3, "stages": 9}),
    (40, 86, {"along_k": 2, "stages": 4}),
    (64, 22, {"tile": (256, 64), "consumers": 2, "step": 64}),
    (100, 20, {}),
    (128, 40, {"stages": 3}),
    (200, 35, {"along_k": 1, "tile": (128, 96), "step": 64}),
    (128, 40, {"stages": 3, "ctas": 7}),
]
"""Likewise where all CTAs share all tiles, of int4."""
pytestmark = pytest.mark.gpu("hopper")


def in_clusters(m: int, config: dict[str, Any]) -> WidenedConfig:
    """Returns a config by which CTAs of a cluster share tiles."""
    tile = (128, -(-m // 8) * 8)
    return WidenedConfig(**({"tile": tile, "persistence": "static"} | config))


def turned(config: dict[str, Any]) -> WidenedConfig:
    """Returns a config by which float32 is turned."""
    return WidenedConfig(**({"step": 32, "along_k": 1, "store_columns": 16} | config))


def in_groups(config: dict[str, Any]) -> WidenedConfig:
    """Returns a config by which CTAs take tiles of rows in groups."""
    return WidenedConfig(**({"store_columns": 16, "persistence": "static"} | config))


def by_all(m: int, config: dict[str, Any]) -> WidenedConfig:
    """Returns a config by which all CTAs share all tiles."""
    given = {"tile": (128, -(-m // 8) * 8), "stages": 4, "along_k": 1} | config
    return WidenedConfig(persistence="static", shares_all=True, **given)


def _integers(*shape: int, seed: int, dtype: Any = F32) -> jax.Array:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(-4, 5, shape).astype(np.float32)).astype(dtype)


def _powers(*shape: int, seed: int) -> jax.Array:
    rng = np.random.default_rng(seed)
    return jnp.asarray(2.0 ** rng.integers(-2, 3, shape) * rng.choice([-1, 1], shape), F32)


def _each(scale: Any, shape: tuple[int, int]) -> np.ndarray:
    """The scale of each element; a block is of 128 elements, or of one."""
    scale = np.asarray(scale, np.float64)
    for axis in (0, 1):
        if scale.shape[axis] != shape[axis]:
            scale = np.repeat(scale, 128, axis).take(range(shape[axis]), axis)
    return scale


def _by_a_kernel(f: Any, *args: Any) -> Any:
    """Runs a function, which has to be computed by a kernel of ours."""
    lowered = jax.jit(f).lower(*args)
    assert "mosaic_gpu" in lowered.as_text()
    return lowered.compile()(*args)


@pytest.mark.parametrize("columns", [1, 128])
@pytest.mark.parametrize("types", [(E4M3, E4M3), (E5M2, E4M3)])
@pytest.mark.parametrize("size", SIZES[:3])
def test_each_block_has_its_scale(size, types, columns):
    m, n, k = size
    a, b = _integers(m, k, seed=0, dtype=types[0]), _integers(n, k, seed=1, dtype=types[1])
    row, col = _powers(m, k // 128, seed=2), _powers(k // 128, -(-n // columns), seed=3)
    bias = _integers(n, seed=4)

    def multiply(a: Any, b: Any, row: Any, col: Any, bias: Any) -> Any:
        return gemm(
            a, b, bias=bias, transpose_b=True, row_scale=row, col_scale=col,
            preferred_element_type=F32,
        )  # fmt: skip

    wide = np.asarray(a, np.float64) * _each(row, (m, k))
    other = np.asarray(b, np.float64).T * _each(col, (k, n))
    found = _by_a_kernel(multiply, a, b, row, col, bias)
    np.testing.assert_array_equal(found, wide @ other + np.asarray(bias))


def test_rows_in_groups_have_blocks_with_scales():
    m, n, k, sizes = 700, 384, 512, (257, 0, 63, 1, 300)
    a, b = _integers(m, k, seed=0, dtype=E4M3), _integers(5, n, k, seed=1, dtype=E4M3)
    row, col = _powers(m, k // 128, seed=2), _powers(5, k // 128, n // 128, seed=3)

    def multiply(a: Any, b: Any, row: Any, col: Any) -> Any:
        return grouped_gemm(
            a, b, jnp.array(sizes), transpose_b=True, row_scale=row, col_scale=col,
            preferred_element_type=F32,
        )  # fmt: skip

    expected, start = np.zeros((m, n)), 0
    wide = np.asarray(a, np.float64) * _each(row, (m, k))
    for group, size in enumerate(sizes):
        own = np.asarray(b[group], np.float64).T * _each(col[group], (k, n))
        expected[start : start + size] = wide[start : start + size] @ own
        start += size
    np.testing.assert_array_equal(_by_a_kernel(multiply, a, b, row, col), expected)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", ["int4", "int8", "uint4", "float8_e4m3fn"])
@pytest.mark.parametrize("size", SIZES)
def test_weights_of_few_bits_are_widened(size, dtype, last):
    m, n, k = size
    x, w = _integers(m, k, seed=0, dtype=BF16), _integers(k, n, seed=1)
    w = abs(w) if dtype == "uint4" else w
    scale = _powers(k // 128, n, seed=2)

    def multiply(x: Any, w: Any, scale: Any) -> Any:
        return gemm(x, w, transpose_b=last, col_scale=scale, preferred_element_type=F32)

    wide = np.asarray(w, np.float64) * _each(scale, (k, n))
    stored = (w.T if last else w).astype(dtype)
    found = _by_a_kernel(multiply, x, stored, scale)
    np.testing.assert_array_equal(found, np.asarray(x, np.float64) @ wide)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", ["int4", "int8", "uint4"])
@pytest.mark.parametrize("m", [1, 40, 100, 300])
def test_weights_and_their_scales_may_have_one_type(m, dtype, last):
    n, k = 640, 2048
    x, w = _integers(m, k, seed=0, dtype=BF16), _integers(k, n, seed=1)
    w = abs(w) if dtype == "uint4" else w
    scale = _powers(k // 128, n, seed=2)

    def multiply(x: Any, w: Any, scale: Any) -> Any:
        return gemm(x, w, transpose_b=last, col_scale=scale, preferred_element_type=F32)

    found = _by_a_kernel(multiply, x, (w.T if last else w).astype(dtype), scale.astype(BF16))
    wide = np.asarray(w, np.float64) * _each(scale, (k, n))
    np.testing.assert_array_equal(found, np.asarray(x, np.float64) @ wide)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", ["int4", "int8"])
@pytest.mark.parametrize(("m", "tiles", "config"), IN_CLUSTERS, ids=str)
def test_ctas_of_a_cluster_share_its_tiles(m, tiles, config, dtype, last):
    n, k = 128 * tiles, 4096
    x, w = _integers(m, k, seed=0, dtype=BF16), _integers(k, n, seed=1)
    scale, residual = _powers(k // 128, n, seed=2), _integers(m, n, seed=3)
    named = in_clusters(m, config)

    def multiply(x: Any, w: Any, scale: Any, residual: Any) -> Any:
        return gemm(
            x, w, transpose_b=last, col_scale=scale, residual=residual, config=named,
            preferred_element_type=F32,
        )  # fmt: skip

    wide = np.asarray(w, np.float64) * _each(scale, (k, n))
    stored = (w.T if last else w).astype(dtype)
    exact = np.asarray(x, np.float64) @ wide + np.asarray(residual)
    found = _by_a_kernel(multiply, x, stored, scale, residual)
    np.testing.assert_array_equal(found, exact)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("m", "n", "config"), SINGLES, ids=str)
def test_float32_is_turned_in_registers(m, n, config, dtype):
    k = 1020
    x, w, residual = _integers(m, k, seed=0), _integers(k, n, seed=1), _integers(m, n, seed=3)
    named = turned(config)

    def multiply(x: Any, w: Any, residual: Any) -> Any:
        return gemm(x, w, residual=residual, config=named, preferred_element_type=dtype)

    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64) + np.asarray(residual)
    # Slots of a ring are used again while WGMMAs of the step before may still read them.
    run = jax.jit(multiply).lower(x, w, residual).compile()
    for _ in range(10):
        np.testing.assert_array_equal(run(x, w, residual), exact.astype(dtype))


def test_float32_of_experts_is_turned_in_registers():
    m, n, k, sizes = 200, 516, 1024, (9, 0, 17, 1, 64)
    x, w = _integers(m, k, seed=0), _integers(5, k, n, seed=1)
    found = _by_a_kernel(grouped_gemm, x, w, jnp.array(sizes, jnp.int32))
    expected, start = np.zeros((m, n)), 0
    for own, size in zip(np.asarray(w, np.float64), sizes, strict=True):
        rows = slice(start, start + size)
        expected[rows] = np.asarray(x, np.float64)[rows] @ own
        start += size
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("config", IN_GROUPS, ids=str)
def test_ctas_end_whatever_rows_are_in_no_group(config):
    m, n, k = 200, 2816, 2048
    x, w = _integers(m, k, seed=0, dtype=BF16), _integers(5, k, n, seed=1)
    scale, named = _powers(5, k // 128, n, seed=2), in_groups(config)

    def multiply(x: Any, w: Any, scale: Any, sizes: Any) -> Any:
        return grouped_gemm(x, w, sizes, col_scale=scale, preferred_element_type=F32, config=named)

    wide = np.asarray(w, np.float64) * np.asarray(scale, np.float64).repeat(128, 1)
    given = x, w.astype("int4"), scale
    run = jax.jit(multiply).lower(*given, jnp.zeros(5, jnp.int32)).compile()
    for sizes in [
        (9, 0, 17, 1, 64),
        (0, 0, 0, 0, 0),
        (1, 1, 1, 1, 1),
        (40,) * 5,
        (200, 0, 0, 0, 0),
    ]:
        expected, start = np.zeros((m, n)), 0
        for own, size in zip(wide, sizes, strict=True):
            rows = slice(start, start + size)
            expected[rows] = np.asarray(x, np.float64)[rows] @ own
            start += size
        np.testing.assert_array_equal(run(*given, jnp.array(sizes, jnp.int32)), expected)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("m", "tiles", "config"), BY_ALL, ids=str)
def test_all_ctas_share_all_tiles(m, tiles, config, last):
    n, k = 128 * tiles, 4096
    x, w = _integers(m, k, seed=0, dtype=BF16), _integers(k, n, seed=1)
    scale, residual = _powers(k // 128, n, seed=2).astype(BF16), _integers(m, n, seed=3)
    named = by_all(m, config)

    def multiply(x: Any, w: Any, scale: Any, residual: Any) -> Any:
        return gemm(
            x, w, transpose_b=last, col_scale=scale, residual=residual, config=named,
            preferred_element_type=F32,
        )  # fmt: skip

    exact = np.asarray(x, np.float64) @ (np.asarray(w, np.float64) * _each(scale, (k, n)))
    exact += np.asarray(residual)
    stored = (w.T if last else w).astype("int4")
    run = jax.jit(multiply).lower(x, stored, scale, residual).compile()
    for _ in range(20):
        np.testing.assert_array_equal(run(x, stored, scale, residual), exact)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("scaled", ["groups", "columns"])
@pytest.mark.parametrize(
    ("dtype", "sizes", "m"),
    [
        ("int4", (1, 0, 1), 2),
        ("int4", (9, 0, 17, 1, 64), 100),
        ("int8", (300, 5, 0, 128), 600),
        ("float8_e4m3fn", (0, 0, 3), 40),
    ],
)
def test_experts_of_few_bits_are_widened(dtype, sizes, m, scaled, last):
    n, k, count = 640, 1024, len(sizes)
    x, w = _integers(m, k, seed=0, dtype=BF16), _integers(count, k, n, seed=1)
    deep = k // 128 if scaled == "groups" else 1
    scale, bias = _powers(count, deep, n, seed=2), _integers(count, n, seed=3)

    def multiply(x: Any, w: Any, scale: Any, bias: Any, sizes: Any) -> Any:
        return grouped_gemm(
            x, w, sizes, transpose_b=last, col_scale=scale, bias=bias, preferred_element_type=F32
        )

    wide = np.asarray(w, np.float64) * np.asarray(scale, np.float64).repeat(k // deep, 1)
    expected, start = np.zeros((m, n)), 0
    for own, added, size in zip(wide, np.asarray(bias, np.float64), sizes, strict=True):
        rows = slice(start, start + size)
        expected[rows] = np.asarray(x, np.float64)[rows] @ own + added
        start += size
    stored = (jnp.swapaxes(w, 1, 2) if last else w).astype(dtype)
    found = _by_a_kernel(multiply, x, stored, scale, bias, jnp.array(sizes))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", ["int4", "int8"])
@pytest.mark.parametrize("size", SIZES)
def test_gates_residuals_and_functions_follow_in_the_kernel(size, dtype, last):
    m, n, k = size
    # Small ones: products of sums are exact, too.
    x = jnp.sign(_integers(m, k, seed=0, dtype=BF16))
    gate, up = (_integers(k, n, seed=i) for i in (1, 2))
    scale, other = (jnp.clip(jnp.abs(_powers(k // 128, n, seed=i)), 1, 2) for i in (3, 4))
    residual, bias = _integers(m, n, seed=5), _integers(n, seed=6)
    stored = [(w.T if last else w).astype(dtype) for w in (gate, up)]
    sums = [
        np.asarray(x, np.float64) @ (np.asarray(w, np.float64) * _each(s, (k, n)))
        for w, s in ((gate, scale), (up, other))
    ]

    def gated(x: Any, gate: Any, up: Any, scale: Any, other: Any, residual: Any) -> Any:
        return gated_gemm(
            x, gate, up, gate_scale=scale, up_scale=other, transpose_b=last, residual=residual,
            activation="relu", preferred_element_type=F32,
        )  # fmt: skip

    expected = np.maximum(sums[0], 0) * sums[1] + np.asarray(residual)
    found = _by_a_kernel(gated, x, *stored, scale, other, residual)
    np.testing.assert_array_equal(found, expected)

    def f(s: Any, residual: Any, bias: Any) -> Any:
        z = s + residual + bias[None]
        return z, jax.nn.relu(z).astype(BF16)

    def fused(x: Any, w: Any, scale: Any, *given: Any) -> Any:
        return gemm(x, w, col_scale=scale, transpose_b=last, epilogue=f, operands=given)

    z = sums[0] + np.asarray(residual) + np.asarray(bias)
    results = _by_a_kernel(fused, x, stored[0], scale, residual, bias)
    np.testing.assert_array_equal(results[0], z)
    np.testing.assert_array_equal(results[1], jnp.asarray(np.maximum(z, 0), F32).astype(BF16))


@pytest.mark.parametrize("shared", [False, True])
def test_batches_and_gated_experts_of_few_bits(shared):
    m, n, k, sizes = 40, 640, 1024, (9, 0, 17, 1)
    x, w = jnp.sign(_integers(m, k, seed=0, dtype=BF16)), _integers(2, 4, k, n, seed=1)
    scale = jnp.clip(jnp.abs(_powers(2, 4, k // 128, n, seed=2)), 1, 2)
    wide = np.asarray(w, np.float64) * np.asarray(scale, np.float64).repeat(128, 2)
    stored = w.astype("int4")
    left = x if shared else jnp.stack([x, -x, 2 * x, x])

    def batch(x: Any, w: Any, scale: Any) -> Any:
        return jax.vmap(
            lambda x, w, scale: gemm(x, w, col_scale=scale, preferred_element_type=F32),
            (None if shared else 0, 0, 0),
        )(x, w, scale)

    found = _by_a_kernel(batch, left, stored[0], scale[0])
    np.testing.assert_array_equal(found, np.asarray(left, np.float64) @ wide[0])

    def experts(x: Any, w: Any, scale: Any, sizes: Any) -> Any:
        return grouped_gemm(
            x, w[0], sizes, up=w[1], col_scale=scale[0], up_scale=scale[1], activation="relu",
            preferred_element_type=F32,
        )  # fmt: skip

    rows = np.repeat(range(4), sizes)
    sums = [np.einsum("mk,mkn->mn", np.asarray(x, np.float64)[: len(rows)], y[rows]) for y in wide]
    expected = np.zeros((m, n))
    expected[: len(rows)] = np.maximum(sums[0], 0) * sums[1]
    found = _by_a_kernel(experts, x, stored, scale, jnp.array(sizes))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("group", [64, 128, 1024])
@pytest.mark.parametrize(
    ("dtype", "kind"), [("uint4", "uint4"), ("int8", "int8"), ("uint4", "float32")]
)
@pytest.mark.parametrize("m", [3, 40, 300])
def test_groups_of_few_bits_have_zero_points(m, dtype, kind, group, last):
    n, k = 640, 1024
    x, w = _integers(m, k, seed=0, dtype=BF16), jnp.abs(_integers(k, n, seed=1))
    scale, zero = _powers(k // group, n, seed=2), jnp.abs(_integers(k // group, n, seed=3))
    zero = zero + 0.25 if kind == "float32" else zero

    def multiply(x: Any, w: Any, scale: Any, zero: Any) -> Any:
        return gemm(
            x, w, col_scale=scale, col_zero=zero, transpose_b=last, preferred_element_type=F32
        )

    each = (np.asarray(y, np.float64).repeat(group, 0) for y in (zero, scale))
    less, by = each
    stored = (w.T if last else w).astype(dtype)
    found = _by_a_kernel(multiply, x, stored, scale, zero.astype(kind))
    exact = np.asarray(x, np.float64) @ ((np.asarray(w, np.float64) - less) * by)
    np.testing.assert_array_equal(found, exact)


@pytest.mark.parametrize("columns", [32, 64, 96, 128])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_nothing_beyond_the_edge_is_stored(columns, dtype):
    x, w = _integers(256, 128, seed=0, dtype=BF16), _integers(columns, 128, seed=1)
    scale = _powers(1, columns, seed=2)
    found = gemm(
        x, w.astype("int8"), transpose_b=True, col_scale=scale, preferred_element_type=dtype
    )
    exact = np.asarray(x, np.float64) @ (np.asarray(w, np.float64).T * np.asarray(scale))
    np.testing.assert_array_equal(found, jnp.asarray(exact, F32).astype(dtype))


@pytest.mark.parametrize("columns", [32, 64, 96, 128, 192])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_nothing_beyond_a_group_or_the_edge_is_stored(columns, dtype):
    sizes = (1, 0, 5, 64, 67, 19)
    x, w = _integers(160, 128, seed=0, dtype=BF16), _integers(6, columns, 128, seed=1)
    scale = _powers(6, 1, columns, seed=2)
    found = grouped_gemm(
        x, w.astype("int8"), jnp.array(sizes), transpose_b=True, col_scale=scale,
        preferred_element_type=dtype,
    )  # fmt: skip
    owner = np.repeat(range(6), sizes)
    exact = np.zeros((160, columns))
    for row, group in enumerate(owner):
        own = np.asarray(w[group], np.float64).T * np.asarray(scale[group])
        exact[row] = np.asarray(x[row], np.float64) @ own
    np.testing.assert_array_equal(found, jnp.asarray(exact, F32).astype(dtype))


@pytest.mark.parametrize("block", [(1, 128), (128, 128), (1, 32)])
def test_quantize_reads_once_for_both_axes(block):
    x = jax.random.normal(jax.random.key(0), (384, 512), BF16)
    both = _by_a_kernel(lambda x: quantize(x, block=block, axis="both"), x)
    for found, axis in zip(both, (-1, -2), strict=True):
        assert found.values.dtype == E4M3
        assert_quantized(found, x, block, E4M3, axis=axis)


@pytest.mark.parametrize("sizes", [(1000, 0, 25, 300), (128, 128), (37,) * 40])
def test_groups_are_told_apart_as_they_are_quantized(sizes):
    x = jax.random.normal(jax.random.key(0), (1500, 528), BF16)

    def both(x: Any, sizes: Any) -> Any:
        return quantize(x, block=((1, 128), (128, 128)), axis="both", group_sizes=sizes)

    found = _by_a_kernel(both, x, jnp.asarray(sizes))
    assert_quantized(found[0], x, (1, 128), E4M3, axis=-1)
    apart, first, start = np.zeros((found[1].values.shape[1], 528)), 0, 0
    for size in (*sizes, max(0, 1500 - sum(sizes))):
        own = np.asarray(x[first : first + size], np.float64)
        apart[start : start + len(own)] = own
        first, start = first + size, start - (-len(own) // 128) * 128
    assert_quantized(found[1], apart, (128, 128), E4M3, axis=-2)
