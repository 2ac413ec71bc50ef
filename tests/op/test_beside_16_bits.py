"""8 bits, the right ones stored [k, n], by the kernel for weights of few bits."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import explain, gated_gemm, gemm, grouped_gemm, numerics, target
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.planning import prediction
from tests import reference
from tests.reference import Formula

E4M3, E5M2, F32, BF16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32, jnp.bfloat16
M, N, K = 24, 192, 272
SIMULATED: Any = {"implementation": "interpret", "preferred_element_type": F32}


def drawn(*shape: int, seed: int = 0, dtype: Any = E4M3) -> jax.Array:
    return reference.integers(np.random.default_rng(seed), shape, dtype)


@pytest.fixture(autouse=True)
def _transposing_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is small enough to be simulated would be transposed otherwise."""
    real = prediction.passes_seconds

    def slow(realigned: Any, device: Any) -> float:
        turned = any(own.operand == "b" and own.bytes for own in realigned.passes)
        return real(realigned, device) + turned

    monkeypatch.setattr(prediction, "passes_seconds", slow)


def assert_widened(product: Any, *operands: Any, **named: Any) -> None:
    """Asserts that a product is computed so."""
    planned = explain(functools.partial(product, **{**SIMULATED, **named}), *operands)
    text = " ".join(str(planned).split())
    assert "WidenedConfig" in text
    assert "the left operand in float16, the right one widened in registers" in text
    assert "transpose b" not in text


@pytest.mark.every_other
@pytest.mark.parametrize("types", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)])
@pytest.mark.parametrize("transpose_a", [False, True])
def test_all_types(types: tuple[Any, Any], transpose_a: bool) -> None:
    a = drawn(*((K, M) if transpose_a else (M, K)), dtype=types[0])
    b = drawn(K, N, seed=1, dtype=types[1])
    assert_widened(functools.partial(gemm, transpose_a=transpose_a), a, b)
    result = gemm(a, b, transpose_a=transpose_a, **SIMULATED)
    reference.assert_exact(result, Formula(transpose_a=transpose_a)(a, b))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_float16_holds_all_numbers(dtype: Any) -> None:
    every = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), dtype)
    finite = every[np.isfinite(np.asarray(every, np.float32))]
    assert np.array_equal(finite.astype(jnp.float16).astype(F32), finite.astype(F32))
    # Each number meets a 1 alone.
    b = jnp.zeros((finite.size, 32), E4M3).at[:, 0].set(1)
    a = jnp.diag(finite.astype(F32)).astype(dtype)
    size = (-finite.size) % 16
    a, b = jnp.pad(a, ((0, 0), (0, size))), jnp.pad(b, ((0, size), (0, 0)))
    assert_widened(gemm, a, b)
    assert np.array_equal(gemm(a, b, **SIMULATED)[:, 0], finite.astype(F32))


@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
def test_int8_where_the_result_has_16_bits(dtype: Any) -> None:
    a, b = drawn(M, K, dtype=jnp.int8), drawn(K, N, seed=1, dtype=jnp.int8)
    assert_widened(gemm, a, b, preferred_element_type=dtype)
    result = gemm(a, b, **{**SIMULATED, "preferred_element_type": dtype})
    exact = reference.wide(a) @ reference.wide(b)
    reference.assert_exact(result, np.asarray(jnp.asarray(exact, F32).astype(dtype), np.float64))


def test_sums_of_int8_that_float32_does_not_hold() -> None:
    k = 2064
    a = jnp.full((8, k), -128, jnp.int8).at[:, ::2].set(127)
    b = jnp.full((k, 32), -127, jnp.int8).at[::2].set(126)
    result = gemm(a, b, **{**SIMULATED, "preferred_element_type": BF16})
    assert_widened(gemm, a, b, preferred_element_type=BF16)
    exact = reference.wide(a) @ reference.wide(b)
    assert exact.min() > 2**24
    assert np.array_equal(result, jnp.asarray(exact, F32).astype(BF16))


def test_an_epilogue_follows() -> None:
    a, b = drawn(M, K), drawn(K, N, seed=1)
    extras: Any = {"bias": drawn(N, seed=2, dtype=F32), "residual": drawn(M, N, seed=3, dtype=F32)}
    extras["col_scale"] = jnp.full(N, 2, F32)
    product = functools.partial(gemm, activation="relu")
    assert_widened(functools.partial(product, **extras), a, b)
    exact = reference.wide(a) @ reference.wide(b) * 2 + np.asarray(extras["bias"])
    expected = np.maximum(exact, 0) + reference.wide(extras["residual"])
    reference.assert_exact(product(a, b, **extras, **SIMULATED), expected)


def test_xla_applies_what_no_kernel_can() -> None:
    a, b, up = drawn(M, K), drawn(K, N, seed=1), drawn(K, N, seed=2)
    for product, given in ((gemm, (a, b)), (gated_gemm, (a, b, up))):
        own = functools.partial(product, activation=_rounded)
        assert_widened(own, *given)
        sums = [reference.wide(a) @ reference.wide(right) for right in given[1:]]
        expected = np.round(sums[0] / 4) * math.prod(sums[1:])
        reference.assert_exact(own(*given, **SIMULATED), expected)


def _rounded(x: jax.Array) -> jax.Array:
    return jnp.round(x / 4)


def test_a_function_follows() -> None:
    a, b = drawn(M, K), drawn(K, N, seed=1)
    product = functools.partial(gemm, epilogue=lambda s: (s, 2 * s), implementation="interpret")
    assert "WidenedConfig" in str(explain(product, a, b))
    found, doubled = product(a, b)
    exact = reference.wide(a) @ reference.wide(b)
    reference.assert_exact(found, exact)
    reference.assert_exact(doubled, 2 * exact)


def test_two_products_are_gated() -> None:
    a, b, up = drawn(M, K), drawn(K, N, seed=1), drawn(K, N, seed=2)
    product = functools.partial(gated_gemm, activation="relu")
    assert_widened(product, a, b, up)
    expected = np.maximum(reference.wide(a) @ reference.wide(b), 0)
    expected = expected * (reference.wide(a) @ reference.wide(up))
    reference.assert_exact(product(a, b, up, **SIMULATED), expected)


def test_each_product_of_a_batch() -> None:
    a, b = drawn(3, M, K), drawn(3, K, N, seed=1)
    assert_widened(gemm, a, b)
    reference.assert_exact(gemm(a, b, **SIMULATED), reference.wide(a) @ reference.wide(b))


@pytest.mark.parametrize("sizes", [(5, 0, 19), (24, 0, 0), (3, 4, 2)])
def test_rows_in_groups(sizes: tuple[int, ...]) -> None:
    a, b, given = drawn(M, K), drawn(len(sizes), K, N, seed=1), jnp.array(sizes, jnp.int32)
    assert_widened(grouped_gemm, a, b, given)
    expected, first = np.zeros((M, N)), 0
    for size, matrix in zip(sizes, reference.wide(b), strict=True):
        rows = slice(first, first + size)
        expected[rows], first = reference.wide(a)[rows] @ matrix, first + size
    reference.assert_exact(grouped_gemm(a, b, given, **SIMULATED), expected)


def test_a_function_of_rows_in_groups_follows() -> None:
    a, b, sizes = drawn(M, K), drawn(2, K, N, seed=1), jnp.array((5, 19), jnp.int32)
    product = functools.partial(grouped_gemm, epilogue=lambda s: (s, 2 * s))
    with target("h200"):
        text = str(explain(functools.partial(product, implementation="hopper"), a, b, sizes))
    assert "WidenedConfig" in text
    found, doubled = product(a, b, sizes, implementation="interpret")
    wide = reference.wide(a), reference.wide(b)
    exact = np.concatenate([wide[0][:5] @ wide[1][0], wide[0][5:] @ wide[1][1]])
    reference.assert_exact(found, exact)
    reference.assert_exact(doubled, 2 * exact)


def test_groups_of_k_may_have_scales_on_the_right() -> None:
    a, b = drawn(M, 256), drawn(256, N, seed=1)
    scales = jnp.asarray((2.0 ** np.random.default_rng(2).integers(-2, 3, (2, N))).astype(F32))
    product = functools.partial(gemm, col_scale=scales)
    assert_widened(product, a, b)
    wide = reference.wide(b) * np.repeat(np.asarray(scales), 128, axis=0)
    reference.assert_exact(product(a, b, **SIMULATED), reference.wide(a) @ wide)


def test_short_sums_are_those_of_float16() -> None:
    a, b = drawn(M, K), drawn(K, N, seed=1)
    product = functools.partial(gemm, precision="highest")
    assert_widened(product, a, b)
    reference.assert_exact(product(a, b, **SIMULATED), reference.wide(a) @ reference.wide(b))


@pytest.mark.parametrize(
    ("named", "types"),
    [
        ({"config": HopperConfig(tile=(64, 64), stages=2, consumers=1)}, (E4M3, E4M3)),
        ({"schedule": "raster"}, (E4M3, E4M3)),
        ({"numerics": numerics()}, (E4M3, E4M3)),
        ({}, (jnp.int8, jnp.int8)),
        ({"preferred_element_type": F32}, (jnp.int8, jnp.int8)),
        ({"epilogue": lambda s: (s.astype(BF16), s)}, (jnp.int8, jnp.int8)),
    ],
    ids=["config", "schedule", "numerics", "int8", "int8 to float32", "a function of int8"],
)
def test_others_are_transposed(named: Any, types: tuple[Any, Any]) -> None:
    a = jax.ShapeDtypeStruct((M, K), types[0])
    b = jax.ShapeDtypeStruct((K, N), types[1])
    with target("h200"):
        text = str(explain(functools.partial(gemm, implementation="hopper", **named), a, b))
    assert "transpose b" in text
    assert "HopperConfig" in text


def test_a_right_operand_stored_with_k_last_is_multiplied_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = prediction.seconds

    def slow(problem: Any, config: Any, *rest: Any) -> float:
        return real(problem, config, *rest) + isinstance(config, HopperConfig)

    # Even if widening were faster.
    monkeypatch.setattr(prediction, "seconds", slow)
    a, b = (jax.ShapeDtypeStruct(own, E4M3) for own in ((M, K), (N, K)))
    with target("h200"):
        text = str(
            explain(functools.partial(gemm, implementation="hopper", transpose_b=True), a, b)
        )
    assert "HopperConfig" in text
