"""Products of float32 by arrays of float16, simulated: both ways of the program that has two."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import explain, gated_gemm, gemm
from pallas_gemm.planning import halves
from tests import reference
from tests.planning.test_halves import CLOSELY, MEASURE
from tests.reference import Formula

M, N, K = 40, 88, 200
SIMULATED = functools.partial(gemm, implementation="interpret")
TERMS = {"TF32_TF32_F32_X3": 3, "highest": 4}
SHARE = 2.0**-21
"""Of an element's error at most, in shares of `|a| @ |b|`."""


@pytest.fixture(autouse=True)
def _small_products_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "DECIDING_SECONDS", -1)


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(jnp.float32))


def uneven(axis: int, *shape: int, seed: int = 0) -> jax.Array:
    """Elements of which each row, or column, has another size: from 1e-15 to 1e15."""
    sizes = 10.0 ** np.linspace(-15, 15, shape[axis])
    return normal(*shape, seed=seed) * jnp.asarray(np.expand_dims(sizes, 1 - axis), jnp.float32)


def assert_close(result: Any, a: Any, b: Any) -> None:
    left, right = reference.wide(a), reference.wide(b)
    assert result.dtype == jnp.float32
    error = np.abs(reference.wide(result) - left @ right)
    assert np.all(error <= SHARE * (np.abs(left) @ np.abs(right)))


def terms(product: Any, *operands: Any) -> tuple[int, bool]:
    """Returns how many terms the kernel has, and whether operands fit in its arrays."""
    plan: Any = explain(product, *operands).products[0].plan
    a, b = operands[:2]
    count = len(plan.realigned.problem.terms)
    known = MEASURE(a, -1, alone=not count), MEASURE(b, -2, alone=not count)
    fits = halves.fit(*known, alone=not count) | CLOSELY((a, b), (-1, -2), known)
    return count, bool(fits) and plan.otherwise is not None


@pytest.mark.parametrize("precision", TERMS)
def test_rows_and_columns_of_any_size(precision: str) -> None:
    a, b = uneven(0, M, K), uneven(1, K, N, seed=1)
    product = functools.partial(SIMULATED, precision=precision)
    assert terms(product, a, b) == (TERMS[precision], True)
    assert_close(product(a, b), a, b)


def test_elements_that_differ_too_much_are_multiplied_as_bfloat16() -> None:
    sizes = jnp.asarray(2.0 ** np.linspace(-60, 60, K), jnp.float32)
    a, b = normal(M, K) * sizes[None], normal(K, N, seed=1) / sizes[:, None]
    # The kernel is that of the highest precision.
    product = functools.partial(SIMULATED, precision="BF16_BF16_F32_X6")
    assert terms(product, a, b) == (4, False)
    assert_close(product(a, b), a, b)


def test_one_product_rounds_as_tf32_does() -> None:
    a, b = uneven(0, M, K), uneven(1, K, N, seed=1)
    assert terms(SIMULATED, a, b) == (0, True)
    left, right = reference.wide(a), reference.wide(b)
    error, sizes = (
        np.abs(reference.wide(SIMULATED(a, b)) - left @ right),
        np.abs(left) @ np.abs(right),
    )
    assert np.all(error <= 2.0**-10 * sizes)
    assert np.any(error > 2.0**-15 * sizes)


def test_both_factors_of_a_gate_are_scaled() -> None:
    a, b, up = uneven(0, M, K), uneven(1, K, N, seed=1), uneven(1, K, N, seed=2)[:, ::-1]
    # float32 holds products of two sums if rows are from 1 to 1e15.
    scale = 1 / jnp.sqrt(jnp.max(jnp.abs(a), 1) / jnp.max(jnp.abs(a)))
    product = functools.partial(gated_gemm, activation="relu", implementation="interpret")
    assert terms(lambda a, b: product(a, b, up), a, b) == (0, True)
    left, *right = map(reference.wide, (a * scale[:, None], b, up))
    gate, other = (left @ own for own in right)
    error = np.abs(reference.wide(product(a * scale[:, None], b, up)) - np.maximum(gate, 0) * other)
    sizes = [np.abs(left) @ np.abs(own) for own in right]
    assert np.all(error <= 2.0**-8 * sizes[0] * sizes[1])


def test_operands_of_which_half_is_0() -> None:
    a, b = jnp.maximum(normal(M, K), 0), jnp.maximum(normal(K, N, seed=1), 0)
    assert terms(SIMULATED, a, b) == (0, True)
    np.testing.assert_allclose(SIMULATED(a, b), reference.wide(a) @ reference.wide(b), rtol=2**-10)


def test_ones_choose_elements_as_they_are() -> None:
    a, b = normal(M, K), jnp.eye(K, N, dtype=jnp.float32)
    result = SIMULATED(a, b, precision="highest")
    np.testing.assert_array_equal(result, a[:, :N])


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
def test_infinite_elements_are_where_float32_has_them() -> None:
    a, b = normal(M, K), jnp.where(normal(K, N, seed=1) > 0, 1.0, 0.5)
    a = a.at[3, 5].set(jnp.inf).at[7, 1].set(jnp.nan)
    result = SIMULATED(a, b, precision="highest")
    exact = reference.wide(a) @ reference.wide(b)
    np.testing.assert_array_equal(np.isnan(result), np.isnan(exact))
    np.testing.assert_array_equal(np.isposinf(result), np.isposinf(exact))


@pytest.mark.parametrize("layout", ["NT", "TN", "TT"])
def test_operands_are_stored_in_any_way(layout: str) -> None:
    a, b = uneven(0, M, K), uneven(1, K, N, seed=1)
    left, right = (side == "T" for side in layout)
    result = SIMULATED(
        *(a.T if left else a, b.T if right else b),
        transpose_a=left,
        transpose_b=right,
        precision="TF32_TF32_F32_X3",
    )
    assert_close(result, a, b)


def test_odd_sizes_and_one_row_of_0() -> None:
    a, b = normal(37, 101).at[5].set(0), uneven(1, 101, 67, seed=1)
    assert_close(SIMULATED(a, b, precision="TF32_TF32_F32_X3"), a, b)


def test_an_epilogue_has_scales_of_its_own() -> None:
    a, b = normal(M, K), normal(K, N, seed=1)
    rows, columns = (jnp.linspace(*ends, dtype=jnp.float32) for ends in ((0.5, 2, M), (-1, 1, N)))
    extras: Any = {"bias": normal(N, seed=2), "residual": normal(M, N, seed=3)}
    product = functools.partial(SIMULATED, precision="highest", alpha=0.5, activation="gelu")
    # Each row is scaled back by another power of two.
    own = jnp.asarray(2.0 ** np.arange(M), jnp.float32)
    scales = {"row_scale": rows / own, "col_scale": columns.astype(jnp.bfloat16)}
    result = product(a * own[:, None], b, **scales, **extras)
    scaled = b * scales["col_scale"].astype(jnp.float32)[None]
    exact = Formula(alpha=0.5, activation="gelu")(a * rows[:, None], scaled, **extras)
    np.testing.assert_allclose(result, exact, rtol=1e-5, atol=1e-4)


def test_each_product_of_a_batch_and_one_operand_shared() -> None:
    a = jnp.stack([uneven(0, 24, 136, seed=seed) for seed in range(3)])
    b = normal(3, 136, 64, seed=3)
    product = functools.partial(SIMULATED, precision="TF32_TF32_F32_X3")
    assert_close(product(a, b), a, b)
    shared = jax.vmap(lambda x: product(x, b[0]))(a)
    assert_close(shared, a, b[0])
    scale = jnp.linspace(1, 2, 24, dtype=jnp.float32)
    assert_close(product(a, b, row_scale=scale), a * scale[None, :, None], b)


def test_derivatives_are_as_precise() -> None:
    a, b, g = normal(M, K), normal(K, 64, seed=1), normal(M, 64, seed=2)

    def pulled(a: jax.Array, b: jax.Array, g: jax.Array) -> Any:
        _, pull = jax.vjp(functools.partial(SIMULATED, precision="highest"), a, b)
        return pull(g)

    da, db = jax.jit(pulled)(a, b, g)
    assert_close(da, g, b.T)
    assert_close(db, a.T, g)
