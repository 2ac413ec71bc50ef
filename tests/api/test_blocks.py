"""Scales of blocks: what their shapes say, what is computed, and what JAX makes of it."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from pallas_gemm import explain, gated_gemm, gemm, matmul, target
from pallas_gemm.api import blocks
from pallas_gemm.problem import Blocks
from tests import meshes

M, N, K = 32, 48, 128
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def _drawn(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    """Draws integers, of which sums are exact in float32."""
    rng = np.random.default_rng(seed + sum(shape))
    return jnp.asarray(rng.integers(-4, 5, shape).astype(dtype))


def _scales(*shape: int, seed: int = 0) -> jax.Array:
    """Draws powers of two, of both signs: scaled integers are exact, too."""
    rng = np.random.default_rng(seed + sum(shape))
    return jnp.asarray(
        (2.0 ** rng.integers(-2, 3, shape) * rng.choice([-1, 1], shape)).astype(jnp.float32)
    )


def _whole(scale: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the scale of each element of a factor whose blocks are powers of two or all."""
    scale = np.asarray(scale, np.float64)
    for axis in (-2, -1):
        each = -(-shape[axis] // scale.shape[axis])
        each = 1 << (each - 1).bit_length() if scale.shape[axis] > 1 else each
        index = np.arange(shape[axis]) // each
        scale = np.take(scale, index, axis)
    return scale


def _expected(a: Any, b: Any, row: Any = None, col: Any = None) -> np.ndarray:
    """Computes the formula in float64: each element is scaled as its block is."""
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    a = a if row is None else a * _whole(row, a.shape)
    b = b if col is None else b * _whole(col, b.shape)
    return a @ b


TYPES = [(E4M3, E4M3), (E5M2, E4M3), (jnp.bfloat16,) * 2, (jnp.float32,) * 2]
TYPES += [(jnp.bfloat16, jnp.int8), (jnp.bfloat16, jnp.int4), (jnp.int8, jnp.int8)]
SHAPES = [
    ((M, 4), (4, N)),
    ((M, 4), (4, 3)),
    ((8, 4), (4, 3)),
    ((M, 8), (2, N)),
    ((M, 2), (8, 6)),
    ((M, 1), (4, N)),
    ((1, 1), (1, 1)),
    (None, (4, 3)),
    ((M, 4), None),
]


@pytest.mark.parametrize(("row", "col"), SHAPES, ids=str)
@pytest.mark.parametrize(("left", "right"), TYPES)
def test_each_block_is_scaled(left: Any, right: Any, row: Any, col: Any) -> None:
    a, b = _drawn(M, K, dtype=left), _drawn(K, N, dtype=right)
    row, col = (x and _scales(*x) for x in (row, col))
    result = gemm(a, b, row_scale=row, col_scale=col, preferred_element_type="f32")
    np.testing.assert_array_equal(result, _expected(a, b, row, col))


def test_factors_may_be_stored_the_other_way_round() -> None:
    a, b, row, col = (
        _drawn(K, M, dtype=E4M3),
        _drawn(N, K, dtype=E4M3),
        _scales(M, 4),
        _scales(4, 3),
    )
    flags = {"transpose_a": True, "transpose_b": True}
    result = gemm(a, b, row_scale=row, col_scale=col, preferred_element_type="f32", **flags)
    np.testing.assert_array_equal(result, _expected(a.T, b.T, row, col))


def test_the_last_rows_and_columns_may_be_part_of_a_block() -> None:
    a, b = _drawn(M - 4, K), _drawn(K, N - 5)
    row, col = _scales(2, 4), _scales(4, 3)
    result = gemm(a, b, row_scale=row, col_scale=col)
    np.testing.assert_array_equal(result, _expected(a, b, row, col))


def test_everything_else_of_an_epilogue_follows() -> None:
    a, b, row, col = _drawn(M, K), _drawn(K, N), _scales(M, 4), _scales(N)
    bias, residual = _drawn(N), _drawn(M, N)
    result = gemm(
        *(a, b),
        row_scale=row,
        col_scale=col,
        bias=bias,
        residual=residual,
        alpha=0.5,
        beta=2,
        activation="relu",
    )
    expected = np.maximum(_expected(a, b, row) * np.asarray(col) / 2 + np.asarray(bias), 0)
    expected += 2 * np.asarray(residual)
    np.testing.assert_array_equal(result, expected)


def test_gated_products_have_blocks_in_both_factors() -> None:
    a, gate, up = _drawn(M, K), _drawn(K, N), _drawn(K, N, seed=1)
    row, first, second = _scales(M, 4), _scales(4, 3), _scales(4, 3, seed=1)
    scales = {"row_scale": row, "gate_scale": first, "up_scale": second}
    result = gated_gemm(a, gate, up, activation="relu", **scales)
    expected = np.maximum(_expected(a, gate, row, first), 0) * _expected(a, up, row, second)
    np.testing.assert_array_equal(result, expected)
    with pytest.raises(ValueError, match=r"one shape where .*, got \[4, 3\] and None"):
        gated_gemm(a, gate, up, gate_scale=first)
    with pytest.raises(ValueError, match=r"one shape where .*, got \[4, 3\] and \[48\]"):
        gated_gemm(a, gate, up, gate_scale=first, up_scale=_scales(N))


def _biased(s: jax.Array, bias: jax.Array) -> Any:
    z = s + bias[None]
    return z.astype(jnp.float32), jnp.sum(z, -1), jnp.max(z, -2)


VECTORS = [((M,), (N,)), ((M, 4), (N,)), ((M, 1), (4, 3)), ((M,), None)]


@pytest.mark.parametrize(("row", "col"), [*SHAPES, *VECTORS], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_function_is_given_the_scaled_product(row: Any, col: Any, transposed: bool) -> None:
    a, b, bias = _drawn(M, K, dtype=E4M3), _drawn(K, N, dtype=E4M3), _drawn(N)
    row, col = (x and _scales(*x) for x in (row, col))
    found = gemm(
        *(a, b.T if transposed else b),
        row_scale=row,
        col_scale=col,
        transpose_b=transposed,
        epilogue=_biased,
        operands=(bias,),
    )
    shapes = zip((row, col), ((-1, 1), (1, -1)), strict=True)
    as_blocks = [x if x is None or x.ndim == 2 else x.reshape(own) for x, own in shapes]
    z = _expected(a, b, *as_blocks) + np.asarray(bias)
    for own, expected in zip(found, (z, z.sum(-1), z.max(-2)), strict=True):
        np.testing.assert_array_equal(own, expected)


def test_a_function_of_gated_products_is_given_both_of_them_scaled() -> None:
    a, gate, up = _drawn(M, K), _drawn(K, N), _drawn(K, N, seed=1)
    row, first, second = _scales(M, 4), _scales(4, 3), _scales(4, 3, seed=1)
    scales = {"row_scale": row, "gate_scale": first, "up_scale": second}

    def both(s: jax.Array, t: jax.Array) -> jax.Array:
        return jnp.maximum(s, 0) - t

    found = gated_gemm(a, gate, up, epilogue=both, **scales)
    expected = np.maximum(_expected(a, gate, row, first), 0) - _expected(a, up, row, second)
    np.testing.assert_array_equal(found, expected)


def test_functions_are_derived_and_mapped_as_words_are() -> None:
    a, b, row, col = _drawn(M, K), _drawn(K, N), _scales(M, 4), _scales(4, 3)

    def by_function(*x: jax.Array) -> jax.Array:
        return gemm(x[0], x[1], row_scale=x[2], col_scale=x[3], epilogue=jax.nn.tanh)

    def by_words(*x: jax.Array) -> jax.Array:
        return gemm(x[0], x[1], row_scale=x[2], col_scale=x[3], activation="tanh")

    both = by_function, by_words
    slopes = (jax.grad(lambda *x, f=f: f(*x).sum(), (0, 1, 2, 3))(a, b, row, col) for f in both)
    for x, y in zip(*slopes, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-4)
    given = jnp.stack([a, -a]), b, jnp.stack([row, 2 * row]), col
    results = (jax.vmap(f, (0, None, 0, None))(*given) for f in both)
    np.testing.assert_allclose(*results, rtol=1e-6)


def test_a_kernel_computes_functions_of_scaled_products() -> None:
    shapes = [((256, 512), E4M3), ((384, 512), E4M3), ((256, 4), jnp.float32)]
    shapes += [((4, 3), jnp.float32), ((384,), jnp.float32)]

    def product(a: Any, b: Any, row: Any, col: Any, bias: Any) -> Any:
        scales = {"row_scale": row, "col_scale": col, "transpose_b": True}
        return gemm(a, b, **scales, epilogue=_biased, operands=(bias,))

    with target("h200"):
        (entry,) = explain(product, *(jax.ShapeDtypeStruct(*x) for x in shapes)).entries
    assert entry.decision.implementation == "hopper"
    assert entry.decision.problem.blocks == Blocks(128, 1, 128)


LEADS = [((3,), (), (3,), ()), ((3,), (3,), (), (3,)), ((2, 3), (3,), (1, 3), (3,))]
LEADS += [((), (3,), (), (3,))]


@pytest.mark.parametrize(("a", "b", "row", "col"), LEADS, ids=str)
def test_scales_have_in_front_what_their_factor_has(a: Any, b: Any, row: Any, col: Any) -> None:
    a, b = _drawn(*a, M, K), _drawn(*b, K, N)
    row, col = _scales(*row, M, 4), _scales(*col, 4, 3)
    result = gemm(a, b, row_scale=row, col_scale=col)
    np.testing.assert_array_equal(result, _expected(a, b, row, col))


@pytest.mark.parametrize(
    "axes", [(0, 0, 0, 0), (0, None, 0, None), (None, None, 0, None), (None, 0, None, 0)], ids=str
)
def test_any_operand_may_be_mapped(axes: tuple[int | None, ...]) -> None:
    shapes = [(M, K), (K, N), (M, 4), (4, 3)]
    makers = (_drawn, _drawn, _scales, _scales)
    lead = [() if axis is None else (2,) for axis in axes]
    given = [f(*x, *s) for f, x, s in zip(makers, lead, shapes, strict=True)]
    bias = _drawn(N)

    def product(a: Any, b: Any, row: Any, col: Any) -> jax.Array:
        return gemm(a, b, row_scale=row, col_scale=col, bias=bias)

    result = jax.vmap(product, axes)(*given)
    np.testing.assert_array_equal(result, _expected(*given) + np.asarray(bias))


def test_a_residual_alone_may_be_mapped() -> None:
    a, b, row, col = _drawn(M, K), _drawn(K, N), _scales(M, 4), _scales(4, 3)
    residual = _drawn(2, M, N)
    result = jax.vmap(lambda x: gemm(a, b, row_scale=row, col_scale=col, residual=x))(residual)
    np.testing.assert_array_equal(result, _expected(a, b, row, col) + np.asarray(residual))


def _formula(a: Any, b: Any, row: Any, col: Any) -> jax.Array:
    row, col = jnp.repeat(row, 32, 1), jnp.repeat(jnp.repeat(col, 32, 0), 16, 1)
    return jnp.tanh(jnp.matmul(a * row, b * col, precision="highest"))


def test_derivatives_are_those_of_the_formula() -> None:
    keys = jax.random.split(jax.random.key(0), 8)
    shapes = [(M, K), (K, N), (M, 4), (4, 3)]
    given = [jax.random.normal(k, s) / 8 for k, s in zip(keys, shapes, strict=False)]
    moved = [jax.random.normal(k, s) for k, s in zip(keys[4:], shapes, strict=True)]

    def ours(a: Any, b: Any, row: Any, col: Any) -> jax.Array:
        return gemm(a, b, row_scale=row, col_scale=col, activation="tanh")

    def slopes(f: Any, given: Any, _: Any) -> Any:
        return jax.grad(lambda *x: jnp.sum(f(*x) ** 2), (0, 1, 2, 3))(*given)

    for run in (jax.jvp, slopes):
        found, expected = (jax.tree.leaves(run(f, given, moved)) for f in (ours, _formula))
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_what_surrounds_factors_of_8_bits_is_derived() -> None:
    a, b = _drawn(M, K, dtype=E4M3), _drawn(K, N, dtype=E4M3)
    row, col = _scales(M, 4), _scales(4, 3)

    def total(row: jax.Array, bias: jax.Array) -> jax.Array:
        return gemm(
            a, b, row_scale=row, col_scale=col, bias=bias, preferred_element_type="f32"
        ).sum()

    slopes = jax.grad(total, (0, 1))(row, jnp.zeros(N))
    scaled = np.asarray(b, np.float64) * _whole(col, b.shape)
    parts = np.asarray(a, np.float64) * scaled.sum(axis=1)
    np.testing.assert_array_equal(slopes[0], parts.reshape(M, 4, -1).sum(axis=-1))
    np.testing.assert_array_equal(slopes[1], np.full(N, M))


SPLITS = [
    (("x", None), (None, "y"), ("x", None), (None, "y"), {}),
    ((None, "y"), ("y", None), (None, "y"), ("y", None), {"all-reduce": 1}),
    (("x", "y"), ("y", None), ("x", "y"), ("y", None), {"all-reduce": 1}),
]


@pytest.mark.parametrize(("a", "b", "row", "col", "sent"), SPLITS)
@pytest.mark.parametrize("epilogue", [{}, {"bias": jnp.arange(64.0)}], ids=["sums", "bias"])
def test_scales_are_split_as_their_factors_are(
    a: Any, b: Any, row: Any, col: Any, sent: dict[str, int], epilogue: Any
) -> None:
    mesh = meshes.make_mesh()
    shapes = [(M, K), (K, 64), (M, 4), (4, 4)]
    given = [f(*s) for f, s in zip((_drawn, _drawn, _scales, _scales), shapes, strict=True)]
    split = [meshes.place(mesh, x, *own) for x, own in zip(given, (a, b, row, col), strict=True)]

    def product(a: Any, b: Any, row: Any, col: Any) -> jax.Array:
        return gemm(a, b, row_scale=row, col_scale=col, **epilogue)

    result, collectives = meshes.run(product, *split)
    expected = _expected(*given) + np.asarray(epilogue.get("bias", 0))
    np.testing.assert_array_equal(result, expected)
    assert collectives == sent


@pytest.mark.parametrize("row", [(4, 0), (4, 1), None], ids=str)
@pytest.mark.parametrize("col", [(0, 8), (0, 1), None], ids=str)
@pytest.mark.parametrize("epilogue", [{}, {"epilogue": jnp.abs}], ids=["sums", "function"])
def test_nothing_of_k_has_no_blocks(row: Any, col: Any, epilogue: Any) -> None:
    scales = {
        name: jnp.ones(shape)
        for name, shape in (("row_scale", row), ("col_scale", col))
        if shape is not None
    }
    found = gemm(jnp.ones((4, 0)), jnp.ones((0, 8)), **scales, **epilogue)
    np.testing.assert_array_equal(found, np.zeros((4, 8)))


def test_a_program_can_be_exported() -> None:
    a, b, row, col = _drawn(M, K), _drawn(K, N), _scales(M, 4), _scales(4, 3)
    run = jax.jit(lambda *x: gemm(x[0], x[1], row_scale=x[2], col_scale=x[3]))
    again = export.deserialize(export.export(run)(a, b, row, col).serialize())
    np.testing.assert_array_equal(again.call(a, b, row, col), _expected(a, b, row, col))


def test_zeros_negative_and_infinite_scales_follow_the_formula() -> None:
    a, b = _drawn(M, K, dtype=E4M3), jnp.ones((K, N), E4M3)
    row = (
        _scales(M, 4).at[0, 1].set(0).at[1].multiply(-1).at[2, 0].set(jnp.inf).at[3, 0].set(jnp.nan)
    )
    result = np.asarray(gemm(a, b, row_scale=row, preferred_element_type="f32"))
    finite = np.r_[0:2, 4:M]
    expected = _expected(a[finite], b, row[finite])
    np.testing.assert_array_equal(result[finite], expected)
    assert not np.isfinite(result[2:4]).any()


WRONG = {
    "no number of blocks": ({"row_scale": (M, 3)}, "g is 16 at least; .*nearest is [32, 2]"),
    "rows of no block": ({"col_scale": (4, 25)}, "nearest is [4, 24]"),
    "the other way round": ({"row_scale": (4, M)}, "got [4, 32]; transposed it would fit"),
    "of the other factor": ({"col_scale": (M, 4)}, "the nearest is [8, 3]"),
    "short blocks": ({"row_scale": (M, 32)}, "the nearest is [32, 8]"),
    "other products": ({"row_scale": (2, M, 4)}, "what a has there, []"),
}


@pytest.mark.parametrize("case", WRONG)
def test_other_shapes_are_refused(case: str) -> None:
    (scales, message) = WRONG[case]
    given = {name: jnp.ones(shape) for name, shape in scales.items()}
    words = ".*".join(map(re.escape, message.split(".*")))
    with pytest.raises(ValueError, match=words):
        gemm(_drawn(M, K), _drawn(K, N), **given)


def test_k_is_a_multiple_of_blocks() -> None:
    with pytest.raises(
        ValueError, match=r"blocks of 128 along k, of which k=200 is no multiple.*zeros to 256,"
    ):
        gemm(_drawn(M, 200), _drawn(200, N), row_scale=jnp.ones((M, 2)))


def test_scales_are_floats() -> None:
    with pytest.raises(TypeError, match="row_scale must be of a floating-point type"):
        gemm(_drawn(M, K), _drawn(K, N), row_scale=jnp.ones((M, 4), jnp.int32))
    with pytest.raises(TypeError, match="a floating-point result"):
        gemm(*(jnp.ones((16, 16), jnp.int8),) * 2, row_scale=jnp.ones((16, 1)))


@pytest.mark.parametrize("size", range(1, 70))
@pytest.mark.parametrize("length", [1, 2, 16, 32])
def test_a_number_of_blocks_says_how_long_they_are(size: int, length: int) -> None:
    count = -(-size // length)
    assert blocks.block(size, count) == (length if count > 1 else size)


def test_an_einsum_of_products_may_follow() -> None:
    a, b, row = _drawn(M, K), _drawn(K, N), _scales(M, 4)
    both = jax.jit(lambda: matmul(gemm(a, b, row_scale=row).T, _drawn(M, 16)))()
    np.testing.assert_array_equal(both, _expected(a, b, row).T @ np.asarray(_drawn(M, 16)))


@pytest.mark.parametrize("device", ["b200", "b300"])
def test_other_gpus_leave_it_to_xla(device: str) -> None:
    a, b = (jax.ShapeDtypeStruct((256, 256), E4M3) for _ in range(2))
    scale = jax.ShapeDtypeStruct((256, 2), jnp.float32)

    def product(a: Any, b: Any, row: Any) -> jax.Array:
        return gemm(a, b, row_scale=row, transpose_b=True, preferred_element_type="bf16")

    with target(device):
        found = explain(product, a, b, scale)
    assert "scales of blocks of 1 x 128 of a are multiplied in on Hopper alone" in " ".join(
        str(found).split()
    )
