"""Gradients of float16 with scaled cotangents: float16 holds none as small, or as large."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import QuantizedWeight, gemm, grouped_gemm, projections

F16 = jnp.float16
SIZE = {"small": 1e-4, "usual": 1e-1, "large": 500.0}
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(16, 256)), F16)
W = RNG.normal(size=(256, 512)) * 0.02


def _gradient(f: Callable[[Any], Any], g: Any) -> np.ndarray:
    return np.asarray(jax.vjp(f, X)[1](g)[0], np.float64)


def _record(*shape: int, **options: Any) -> Any:
    return QuantizedWeight.of(
        jnp.asarray(np.broadcast_to(W, (*shape, *W.shape)), jnp.float32), **options
    )


WEIGHTS: dict[str, tuple[Callable[[Any], Any], float]] = {
    "int8": (lambda x: gemm(x, _record(bits=8)), 0.01),
    "e4m3": (lambda x: gemm(x, _record(dtype="e4m3")), 0.04),
    "groups": (lambda x: grouped_gemm(x, _record(2, bits=8), jnp.array([10, 6])), 0.01),
    "projections": (lambda x: projections(x, [_record(bits=8)])[0], 0.01),
}


@pytest.mark.parametrize("size", SIZE)
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_8_bits(name: str, size: str) -> None:
    f, error = WEIGHTS[name]
    g = jnp.asarray(SIZE[size] * RNG.normal(size=(16, 512)), F16)
    exact = np.asarray(g, np.float64) @ W.T
    found = _gradient(f, g)
    assert np.linalg.norm(found - exact) < error * np.linalg.norm(exact)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3])
def test_scales_of_columns(scale: float) -> None:
    scales = scale * RNG.uniform(0.5, 1, 512)
    # A gradient that float16 holds.
    g, w = np.asarray(RNG.normal(size=(16, 512)) / scale / 16), jnp.asarray(W * 50, F16)
    cotangent, scaled = jnp.asarray(g, jnp.float32), jnp.asarray(scales, jnp.float32)

    def f(x: Any, w: Any) -> Any:
        return gemm(x, w, col_scale=scaled, preferred_element_type=jnp.float32)

    of_x, of_w = (np.asarray(own, np.float64) for own in jax.vjp(f, X, w)[1](cotangent))
    wide = np.asarray(w, np.float64), np.asarray(X, np.float64)
    for found, exact in ((of_x, (g * scales) @ wide[0].T), (of_w, wide[1].T @ (g * scales))):
        assert np.linalg.norm(found - exact) < 2e-3 * np.linalg.norm(exact)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_cotangents_of_no_size(value: float) -> None:
    g = jnp.full((16, 512), value, F16)
    found = _gradient(lambda x: gemm(x, _record(bits=8)), g)
    assert (found == 0).all() if value == 0 else not np.isfinite(found).any()


def test_second_derivatives_see_a_number() -> None:
    record = _record(bits=8)

    def loss(x: Any) -> Any:
        return jnp.sum(jnp.square(gemm(x, record, preferred_element_type=jnp.float32)))

    change = jnp.asarray(RNG.normal(size=X.shape), F16)
    found = np.asarray(jax.jvp(jax.grad(loss), (X,), (change,))[1], np.float64)
    exact = 2 * np.asarray(change, np.float64) @ W @ W.T
    assert np.linalg.norm(found - exact) < 0.02 * np.linalg.norm(exact)
