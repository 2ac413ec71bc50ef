"""Tangents beside one: by a logistic function, and only where nothing else is asked of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.kernels.split import Names, Split, split
from pallas_gemm.program import Program
from tests import epilogues

X = np.concatenate([np.linspace(-12, 12, 4001), [-np.inf, np.inf, np.nan, 90, -90]])


def _program(function: Callable[..., Any]) -> Program:
    shape = jax.ShapeDtypeStruct((1, X.size), jnp.float32)
    parts = split(jax.make_jaxpr(function)(shape), Names("mn", "m", "n"))
    assert isinstance(parts, Split)
    return parts.program


def _gelu_slope(s: jax.Array) -> jax.Array:
    return jax.jvp(jax.nn.gelu, (s,), (jnp.ones_like(s),))[1]


@pytest.mark.parametrize(
    "function",
    [
        jax.nn.gelu,
        _gelu_slope,
        lambda s: jnp.tanh(s) + 1.0,
        lambda s: 1.0 - jnp.tanh(s) * jnp.tanh(s),
        lambda s: (1.0 + jnp.tanh(s)) * s + (1.0 - jnp.tanh(s) * jnp.tanh(s)),
    ],
)
def test_it_is_a_logistic_function_that_errs_no_more(function: Callable[..., Any]) -> None:
    program = _program(function)
    assert "tanh" not in program.primitives
    assert "logistic" in program.primitives
    finite = X[np.isfinite(X)]
    with jax.enable_x64(True):
        exact = np.asarray(function(jnp.asarray(finite)))
    ours, stock = (
        np.asarray(f(jnp.asarray(finite, jnp.float32)[None]))[0].astype(np.float64)
        for f in (epilogues.jitted(program), function)
    )
    assert np.abs(ours - exact).max() <= 2 * np.abs(stock - exact).max()


@pytest.mark.filterwarnings("ignore:invalid value")
def test_infinity_and_nan_are_as_they_were() -> None:
    x = jnp.asarray(X, jnp.float32)[None]
    for function in (jax.nn.gelu, _gelu_slope):
        ours, stock = epilogues.jitted(_program(function))(x), function(x)
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(stock))


@pytest.mark.parametrize(
    "function",
    [
        jnp.tanh,
        lambda s: (1.0 + jnp.tanh(s), jnp.tanh(s)),
        lambda s: 1.0 - jnp.tanh(s),
        lambda s: 2.0 + jnp.tanh(s),
        lambda s: s + jnp.tanh(s),
        lambda s: jnp.tanh(s) * jnp.tanh(s),
        lambda s: 1.0 - jnp.tanh(s) * s,
        lambda s: jnp.tanh(s) * jnp.tanh(s) - 1.0,
        lambda s: (1.0 + jnp.tanh(s)).astype(jnp.bfloat16),
    ],
)
def test_others_are_left_alone(function: Callable[..., Any]) -> None:
    assert "tanh" in _program(function).primitives
