"""`accelerate` in what programs do with functions: values around them, transposition."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import accelerate, target
from pallas_gemm.rewriting import folds
from tests.reference import normal

BF16 = jnp.bfloat16


@pytest.fixture(autouse=True)
def _for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)
    with target("h200"), jax.numpy_dtype_promotion("standard"):
        yield


def _drawn(*shapes: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(0)
    return [normal(rng, shape, BF16) / 4 for shape in shapes]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_reference_around_a_function_is_written(compiled: bool) -> None:
    x, w = _drawn((512, 256), (256, 384))
    total = jax.new_ref(jnp.zeros((512, 384), BF16))

    def add(x: Any, w: Any) -> Any:
        total[...] += jnp.tanh(x @ w)
        return x

    run = jax.jit(accelerate(add)) if compiled else accelerate(add)
    np.testing.assert_array_equal(run(x, w), x)
    np.testing.assert_allclose(total[...], jnp.tanh(x @ w), atol=2.0**-7)


def test_constants_and_values_of_traces_around_are_read() -> None:
    x, w, v = _drawn((512, 256), (256, 384), (256, 384))

    @jax.jit
    def run(x: Any, v: Any) -> Any:
        return accelerate(lambda x: jnp.tanh(x @ w) + jnp.tanh(x @ v))(x)

    expected = jnp.tanh(x @ w) + jnp.tanh(x @ v)
    np.testing.assert_allclose(run(x, v), expected, atol=2.0**-6)


def test_a_linear_function_is_transposed() -> None:
    x, w, v, g = _drawn((512, 256), (256, 384), (384, 256), (512, 256))

    def linear(x: Any) -> Any:
        return x + 2 * (x @ w @ v)

    (found,) = jax.linear_transpose(accelerate(linear), x)(g)
    (expected,) = jax.linear_transpose(linear, x)(g)
    np.testing.assert_allclose(
        np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=0.02, atol=0.02
    )


def test_a_solver_transposes_it() -> None:
    (a,) = _drawn((256, 256))
    b = jnp.asarray(np.random.default_rng(1).normal(size=(256, 256)).astype(jnp.float32))

    def multiply(x: Any) -> Any:
        return x + (x.astype(BF16) @ (a / 16)).astype(jnp.float32)

    found, _ = jax.scipy.sparse.linalg.bicgstab(accelerate(multiply), b, tol=1e-3)
    np.testing.assert_allclose(multiply(found), b, atol=0.05)
