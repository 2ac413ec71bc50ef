"""`group_sums`: sums over groups of contracted elements, with scales of blocks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import explain, group_sums, target
from pallas_gemm.problem import Blocks

M, N, K = 48, 80, 256
SIZES = np.array([70, 0, 100])
E4M3 = jnp.float8_e4m3fn


def _drawn(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).integers(-3, 4, shape).astype(dtype))


def _scales(shape: Any) -> Any:
    if shape is None:
        return None
    return jnp.asarray(
        (2.0 ** np.random.default_rng(sum(shape)).integers(-2, 3, shape)).astype(jnp.float32)
    )


def _whole(scale: Any, shape: tuple[int, int]) -> Any:
    if scale is None:
        return 1
    scale = np.asarray(scale, np.float64)
    for axis in (0, 1):
        scale = np.repeat(scale, shape[axis] // scale.shape[axis], axis)
    return scale


SHAPES = [(None, None), ((M, 2), (2, N)), ((M, 8), (2, 5)), ((3, 2), None), ((M, 1), (1, N))]


@pytest.mark.every_other
@pytest.mark.parametrize(("row", "col"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [E4M3, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("transposed", [False, True])
def test_sums_are_those_of_the_formula(row: Any, col: Any, dtype: Any, transposed: bool) -> None:
    a, b = _drawn(M, K, dtype=dtype), _drawn(K, N, dtype=dtype)
    row, col = _scales(row), _scales(col)
    found = group_sums(
        *(a, b.T if transposed else b, SIZES),
        row_scale=row,
        col_scale=col,
        transpose_b=transposed,
        preferred_element_type="f32",
    )
    left = np.asarray(a, np.float64) * _whole(row, (M, K))
    right = np.asarray(b, np.float64) * _whole(col, (K, N))
    ends = np.cumsum(SIZES)
    spans = zip(ends - SIZES, ends, strict=True)
    np.testing.assert_array_equal(found, [left[:, s:e] @ right[s:e] for s, e in spans])


def test_a_kernel_takes_them_on_hopper_as_they_are_stored() -> None:
    shapes = [((512, 1024), E4M3), ((384, 1024), E4M3), ((4,), jnp.int32)]
    shapes += [((512, 8), jnp.float32), ((8, 384), jnp.float32)]

    def sums(a: Any, b: Any, sizes: Any, row: Any, col: Any) -> jax.Array:
        return group_sums(a, b, sizes, row_scale=row, col_scale=col, transpose_b=True)

    given = [jax.ShapeDtypeStruct(*x) for x in shapes]
    for device, kernel in (("h200", "hopper"), ("b200", "xla")):
        with target(device):
            (entry,) = explain(sums, *given).entries
        assert entry.decision.implementation == kernel
    assert entry.decision.problem.blocks == Blocks(128, 1, 1)
    with target("h200"):
        (entry,) = explain(lambda a, b, sizes: group_sums(a.T, b, sizes), *_rows()).entries
    assert entry.decision.implementation == "hopper"


def _rows() -> list[Any]:
    return [
        jax.ShapeDtypeStruct(*x)
        for x in (((1024, 512), jnp.bfloat16), ((1024, 384), jnp.bfloat16), ((4,), jnp.int32))
    ]


def test_derivatives_are_those_of_the_formula() -> None:
    given = _drawn(M, K) / 8, _drawn(K, N) / 8, _scales((M, 2)), _scales((2, N))

    def ours(a: jax.Array, b: jax.Array, row: jax.Array, col: jax.Array) -> jax.Array:
        return jnp.sum(group_sums(a, b, SIZES, row_scale=row, col_scale=col) ** 2)

    def formula(a: jax.Array, b: jax.Array, row: jax.Array, col: jax.Array) -> jax.Array:
        a, b = a * jnp.repeat(row, 128, 1), b * jnp.repeat(col, 128, 0)
        first, last = a[:, :70] @ b[:70], a[:, 70:170] @ b[70:170]
        return jnp.sum(first**2) + jnp.sum(last**2)

    slopes = (jax.grad(f, (0, 1, 2, 3))(*given) for f in (ours, formula))
    for x, y in zip(*slopes, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_groups_are_mapped_one_after_the_other() -> None:
    a, b = _drawn(2, M, K), _drawn(K, N)
    row, col = _scales((M, 2)), _scales((2, N))

    def sums(a: jax.Array) -> jax.Array:
        return group_sums(a, b, SIZES, row_scale=row, col_scale=col)

    np.testing.assert_array_equal(jax.vmap(sums)(a), jnp.stack([*map(sums, a)]))


@pytest.mark.parametrize("dtype", [E4M3, jnp.bfloat16, jnp.float32], ids=str)
@pytest.mark.parametrize("implementation", [None, "interpret"])
def test_no_columns_are_sums_of_zeros(implementation: Any, dtype: Any) -> None:
    a, b, sizes = jnp.zeros((M, 0), dtype), jnp.zeros((0, N), dtype), jnp.zeros(2, jnp.int32)
    found = group_sums(a, b, sizes, implementation=implementation)
    np.testing.assert_array_equal(found, np.zeros((2, M, N)))


@pytest.mark.parametrize(("row", "col"), [((M, 0), (0, N)), ((M, 1), (0, 5)), ((M, 0), (1, N))])
def test_no_columns_have_no_blocks(row: Any, col: Any) -> None:
    scales = {"row_scale": _scales(row), "col_scale": _scales(col)}
    found = group_sums(jnp.zeros((M, 0)), jnp.zeros((0, N)), jnp.zeros(2, jnp.int32), **scales)
    np.testing.assert_array_equal(found, np.zeros((2, M, N)))


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "rank": (lambda a, b: group_sums(a[0], b, SIZES), TypeError, r"a must be a matrix, got .*256"),
    "k": (
        lambda a, b: group_sums(a, b[1:], SIZES),
        TypeError,
        "got 256 columns of a and 255 rows of b",
    ),
    "sizes": (lambda a, b: group_sums(a, b, SIZES + 90), ValueError, "at most the 256 rows"),
    "vector": (
        lambda a, b: group_sums(a, b, SIZES, row_scale=jnp.ones(M)),
        ValueError,
        "row_scale must have a value for each block of a, of two dimensions",
    ),
    "turned": (
        lambda a, b: group_sums(a, b, SIZES, row_scale=jnp.ones((2, M))),
        ValueError,
        "row_scale must be .* transposed it would fit",
    ),
    "integers": (
        lambda a, b: group_sums(a, b, SIZES, col_scale=jnp.ones((2, N), jnp.int32)),
        TypeError,
        "col_scale must be of a floating-point type",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_has_no_sums_is_refused(name: str) -> None:
    call, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        call(_drawn(M, K), _drawn(K, N))
