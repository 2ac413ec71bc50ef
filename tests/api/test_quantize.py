"""`quantize`: what it computes, in which shapes, and what it refuses."""

import functools
import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import explain, gemm, group_sums, quantize
from pallas_gemm.op import kept_kernels
from tests.quantized import assert_quantized, quantized

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
BLOCKS = ((1, 128), (128, 128), (1, 32), (3, 40))


def drawn(*shape: int, dtype: Any = jnp.bfloat16, seed: int = 0) -> jax.Array:
    """Rows of very different sizes, one of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 6, (*shape[:-1], 1))
    x[..., 5, :] = 0
    return jnp.asarray(x, dtype)


@pytest.mark.every_other
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(
    ("dtype", "power_of_two"), tuple(itertools.product((E4M3, E5M2, jnp.int8), (True, False)))
)
def test_blocks_are_what_numpy_computes(
    block: tuple[int, int], dtype: Any, power_of_two: bool
) -> None:
    x = drawn(137, 200)
    options = {"block": block, "dtype": dtype, "power_of_two": power_of_two}
    both = quantize(x, axis="both", **options)
    for axis, found in zip((-1, -2), both, strict=True):
        assert_quantized(found, x, **options, axis=axis)
        alone = quantize(x, axis=axis, **options)
        assert found.values.shape == ((137, 200) if axis == -1 else (200, 137))
        for one, other in zip(found, alone, strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("blocks", [((1, 128), (128, 128)), [(3, 40), [1, 32]]])
def test_each_axis_may_have_blocks_of_its_own(blocks: Any) -> None:
    x = drawn(137, 200)
    both = quantize(x, block=blocks, axis="both")
    for axis, block, found in zip((-1, -2), blocks, both, strict=True):
        assert_quantized(found, x, tuple(block), E4M3, axis=axis)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_other_types_are_quantized(dtype: Any) -> None:
    x = drawn(40, 300, dtype=dtype)
    assert_quantized(quantize(x), x, (1, 128), E4M3, axis=-1)


def test_a_batch_is_quantized_matrix_by_matrix() -> None:
    x = drawn(2, 3, 40, 130)
    for axis in (-1, -2):
        found = quantize(x, block=(8, 128), axis=axis)
        mapped = jax.vmap(jax.vmap(functools.partial(quantize, block=(8, 128), axis=axis)))(x)
        each = quantize(x[1, 2], block=(8, 128), axis=axis)
        for one, other, own in zip(found, mapped, each, strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
            np.testing.assert_array_equal(np.asarray(one[1, 2]), np.asarray(own))


@pytest.mark.parametrize(("block", "height"), [((1, 128), 128), ((128, 64), 128), ((1, 48), 144)])
# Sizes that leave rows, an empty group, and sizes of more rows than there are.
@pytest.mark.parametrize("sizes", [(100, 0, 30), (7, 200), (137, 90, 1)])
def test_groups_are_filled_up_to_whole_blocks(
    block: tuple[int, int], height: int, sizes: tuple[int, ...]
) -> None:
    x = drawn(137, 200)
    rows, columns = jax.jit(functools.partial(quantize, block=block, axis="both"))(
        x, group_sizes=jnp.asarray(sizes)
    )
    assert_quantized(rows, x, block, E4M3, axis=-1)
    tiles = (137 + (len(sizes) + 1) * (height - 1)) // height
    apart, first, start = np.zeros((tiles * height, 200)), 0, 0
    for size in (*sizes, max(0, 137 - sum(sizes))):
        own = np.asarray(x[first : first + size], np.float64)
        apart[start : start + len(own)] = own
        first, start = first + size, start - (-len(own) // height) * height
    assert_quantized(columns, apart, block, E4M3, axis=-2)


def test_sums_over_groups_take_what_is_filled_up() -> None:
    x, y, sizes = drawn(256, 64), drawn(256, 96, seed=1), np.array([100, 20, 0, 130])
    left, right = (quantize(own, axis=-2, group_sizes=jnp.asarray(sizes)) for own in (x, y))
    found = group_sums(
        *(left.values, right.values, jnp.asarray(-(-sizes // 128) * 128)),
        transpose_b=True,
        row_scale=left.scale.T,
        col_scale=right.scale,
        preferred_element_type=jnp.float32,
    )
    first = 0
    for own, size in zip(found, sizes, strict=True):
        expected = x[first : first + size].T.astype(np.float32) @ y[first : first + size].astype(
            np.float32
        )
        np.testing.assert_allclose(own, expected, atol=0.1 * np.abs(expected).max(initial=1))
        first += size


def test_groups_are_mapped() -> None:
    x, sizes = drawn(2, 137, 200), jnp.array([[100, 30], [37, 50]])
    found = jax.vmap(lambda x, sizes: quantize(x, axis=-2, group_sizes=sizes))(x, sizes)
    for i in (0, 1):
        for one, other in zip(found, quantize(x[i], axis=-2, group_sizes=sizes[i]), strict=True):
            np.testing.assert_array_equal(np.asarray(one[i]), np.asarray(other))


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("dtype", [E4M3, E5M2, jnp.int8])
def test_what_is_no_number_spoils_its_block_alone(dtype: Any, power_of_two: bool) -> None:
    x = np.ones((4, 256), np.float32)
    x[0, 7], x[1, 130], x[2, 128:] = np.inf, np.nan, 0
    values, scale = quantize(jnp.asarray(x), dtype=dtype, power_of_two=power_of_two)
    with np.errstate(invalid="ignore"):
        wide = np.asarray(values).astype(np.float32) * np.repeat(np.asarray(scale), 128, 1)
    assert np.isinf(scale[0, 0])
    assert np.isnan(scale[1, 1])
    assert scale[2, 1] == 1
    spoilt = np.zeros((4, 2), bool)
    spoilt[0, 0] = spoilt[1, 1] = True
    np.testing.assert_array_equal(np.isnan(wide), np.repeat(spoilt, 128, 1))
    assert not wide[2, 128:].any()


def test_the_smallest_numbers_have_a_scale_whose_reciprocal_is_one() -> None:
    x = jnp.full((1, 128), 1e-37, jnp.float32)
    for power_of_two in (True, False):
        values, scale = quantize(x, power_of_two=power_of_two)
        assert scale[0, 0] == 2.0**-126
        np.testing.assert_allclose(np.asarray(values, np.float32) * scale, x, rtol=2**-4)


def test_a_power_of_two_is_the_smallest_that_will_do() -> None:
    # The largest value times powers of two, and the next number.
    for exponent in (-20, 0, 20):
        x = 448.0 * 2.0**exponent
        for largest, own in ((x, exponent), (np.nextafter(np.float32(x), np.inf), exponent + 1)):
            scale = quantize(jnp.full((1, 128), largest, jnp.float32), power_of_two=True).scale
            assert scale[0, 0] == 2.0**own
            assert scale.astype(jnp.float8_e8m0fnu).astype(jnp.float32)[0, 0] == scale[0, 0]


def test_it_has_no_derivative_and_says_what_to_do() -> None:
    x = drawn(8, 128, dtype=jnp.float32)
    with pytest.raises(TypeError, match=r"quantize has no derivative.*stop_gradient\(x\)"):
        jax.grad(lambda x: quantize(x).scale.sum())(x)
    stopped = jax.grad(lambda x: quantize(jax.lax.stop_gradient(x)).scale.sum() + x.sum())(x)
    np.testing.assert_array_equal(stopped, np.ones((8, 128)))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"block": (0, 128)}, ValueError, r"block must be two positive integers.*\(1, 128\)"),
        ({"block": 128}, ValueError, "block must be two positive integers.*got 128"),
        ({"block": (1, 2.5)}, ValueError, "block must be two positive integers"),
        ({"block": ((1, 8), (1, 8))}, ValueError, "block must be two positive integers"),
        (
            {"block": ((1, 8), (8,)), "axis": "both"},
            ValueError,
            r"block must be two positive integers.*got \(8,\)",
        ),
        (
            {"block": ((1, 8),), "axis": "both"},
            ValueError,
            "block must be one block, or one for each axis",
        ),
        ({"axis": 0}, ValueError, "axis must be -1, -2 or 'both'.*got 0"),
        ({"axis": "rows"}, ValueError, "axis must be -1, -2 or 'both'.*got 'rows'"),
        ({"dtype": jnp.float16}, TypeError, "dtype must be one of float8_e4m3fn.*got float16"),
        ({"power_of_two": 2}, TypeError, "power_of_two must be True or False"),
        ({"implementation": "fast"}, ValueError, "implementation='fast' is unknown"),
        ({"implementation": "hopper"}, ValueError, "for no GPU that is known"),
        ({"implementation": "blackwell"}, ValueError, "'blackwell' cannot quantize this"),
    ],
)
def test_errors_say_what_is_legal(options: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        quantize(jnp.ones((2, 8, 128)), **options)


def test_operands_are_matrices_of_floats() -> None:
    with pytest.raises(ValueError, match=r"x must be a matrix.*got shape \[128\]"):
        quantize(jnp.ones(128))
    with pytest.raises(TypeError, match="x must be bfloat16, float16 or float32, got int32"):
        quantize(jnp.ones((8, 128), jnp.int32))


def test_groups_are_of_the_rows_of_a_matrix() -> None:
    x = jnp.ones((8, 128))
    for given, sizes in ((x[None], [8]), (x, [[8]]), (x, [1.5])):
        with pytest.raises(ValueError, match="group_sizes must be integers, how many rows"):
            quantize(given, axis=-2, group_sizes=jnp.asarray(sizes))
    for sizes, words in (([9], "at most the 8 rows"), ([-1], "must not be negative")):
        with pytest.raises(ValueError, match=words):
            quantize(x, axis=-2, group_sizes=jnp.asarray(sizes))


def test_positive_axes_count_from_the_front() -> None:
    x = drawn(3, 16, 128)
    for axis in (1, 2):
        for one, other in zip(quantize(x, axis=axis), quantize(x, axis=axis - 3), strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_nothing_is_quantized_to_nothing() -> None:
    values, scale = quantize(jnp.ones((0, 128), jnp.bfloat16))
    assert (values.shape, scale.shape) == ((0, 128), (0, 1))


def _kernels(
    shape: tuple[int, ...], dtype: Any = jnp.bfloat16, groups: Any = None, **options: Any
) -> int:
    sizes = None if groups is None else jax.ShapeDtypeStruct((groups,), jnp.int32)
    with pallas_gemm.target(options.pop("target", "h200")):
        f = jax.jit(lambda x, sizes: quantize(x, group_sizes=sizes, **options))
        traced = f.trace(jax.ShapeDtypeStruct(shape, dtype), sizes)
        lowered = traced.lower(lowering_platforms=("cuda",))
    return lowered.as_text().count("mosaic_gpu_v2")


@pytest.mark.usefixtures("empty_kernels")
def test_a_kernel_takes_what_it_can() -> None:
    assert _kernels((256, 512), axis="both") == 1
    assert _kernels((3, 100, 512)) == 1
    # Rows of 16 bytes are needed of what is stored.
    assert _kernels((100, 512), axis=-2) == 0
    assert _kernels((256, 512), block=(1, 48)) == 0
    assert _kernels((256, 512), dtype=jnp.float32) == 0
    assert _kernels((256, 512), target="b200") == 0
    assert _kernels((256, 512), implementation="xla") == 0
    # Each group takes whole tiles.
    assert _kernels((100, 512), axis="both", groups=4) == 1
    assert _kernels((256, 512), axis="both", block=(128, 128), groups=4) == 0
    with pytest.raises(ValueError, match=r"cannot quantize this.*multiple of 16.*got 100"):
        _kernels((100, 512), axis=-2, implementation="hopper")


def test_squares_with_scales_of_powers_of_two_are_lowered_in_both_ways() -> None:
    assert _kernels((256, 512), axis="both", block=(128, 128), power_of_two=True) == 1


def test_a_kernel_is_filed_under_what_makes_it() -> None:
    found = []
    for options in ({}, {"axis": "both"}, {"block": (1, 32)}, {"power_of_two": True}):
        with pallas_gemm.target("h200"), pytest.MonkeyPatch.context() as patch:
            patch.setattr(kept_kernels, "lower", lambda _, __, *own: found.append(own) or 1 / 0)
            with pytest.raises(ZeroDivisionError):
                _kernels((256, 512), **options)
    paths = {kept_kernels._path(own[0], own[1], "settings") for own in found}
    assert None not in paths
    assert len(paths) == 4


def test_quantized_operands_are_multiplied() -> None:
    a, b = drawn(32, 256), drawn(256, 48, seed=1)
    left, right = quantize(a), quantize(b, axis=-2)
    wide = quantized(a, (1, 128), E4M3, axis=-1), quantized(b, (1, 128), E4M3, axis=-2)
    expected = (wide[0].values * np.repeat(wide[0].scale, 128, 1)) @ (
        wide[1].values * np.repeat(wide[1].scale, 128, 0)
    )
    result = gemm(
        left.values,
        right.values,
        transpose_b=True,
        row_scale=left.scale,
        col_scale=right.scale,
        preferred_element_type=jnp.float32,
    )
    error = np.linalg.norm(result - expected) / np.linalg.norm(expected)
    assert error < 5e-3


def test_explain_says_what_quantizes_an_array_and_why() -> None:
    def step(x: Any, w: Any) -> Any:
        return quantize(x, axis="both"), quantize(x, axis="both"), quantize(w, dtype=E5M2)

    x, w = (jax.ShapeDtypeStruct((256, n), jnp.bfloat16) for n in (512, 300))
    with pallas_gemm.target("h200"):
        found = explain(step, x, w)
    assert found.quantized == (
        "2 x [256, 512] to float8_e4m3fn in blocks of 1 x 128 along rows and columns, by a kernel"
        " for NVIDIA H200: it reads the array once",
        "[256, 300] to float8_e5m2 in blocks of 1 x 128 along rows, by XLA: the number of columns"
        " must be a multiple of 8 for bfloat16, got 300",
    )
    assert "quantized     2 x [256, 512] to float8_e4m3fn" in str(found)
    assert found.quantized[0] in json.loads(found.json())["quantized"]
    assert "by XLA: the program is for no GPU" in explain(step, x, w).quantized[0]
