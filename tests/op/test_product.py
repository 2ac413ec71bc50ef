"""The primitives outside of compiled programs, as JAX runs its own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import gated_gemm, gemm, numerics, projections
from pallas_gemm.kernels.hopper import kernel

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "product": gemm,
    "activation": lambda a, b: gemm(a, b, activation="gelu"),
    "projections": lambda a, b: projections(a, [b, b])[0],
    "gated": lambda a, b: gated_gemm(a, b, b),
    "sum of products": jax.grad(
        lambda a, b: sum(jnp.sum(jnp.square(y)) for y in projections(a, [b, b]))  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_without_jit(name: str) -> None:
    f, x = FUNCTIONS[name], jnp.full((4, 4), 0.5)
    with jax.disable_jit():
        found = f(x, x)
    np.testing.assert_allclose(found, f(x, x), rtol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_nan_ends_in_jaxs_error(name: str, compiled: bool) -> None:
    f, x = FUNCTIONS[name], jnp.full((4, 4), 0.5)
    f = jax.jit(f) if compiled else f
    with jax.debug_nans(True):
        f(x, x)
        with pytest.raises(FloatingPointError, match="nan"):
            f(x.at[0, 0].set(jnp.nan), x)


@pytest.mark.parametrize("name", ["product", "function", "batch", "promise"])
def test_what_is_simulated_is_traced_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traced, body = [], kernel._body
    monkeypatch.setattr(kernel, "_body", lambda *x: traced.append(x) or body(*x))

    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        # No other test has this factor.
        f = (lambda s: s * 41) if name == "function" else None
        how: Any = {"numerics": numerics(invariant="rows")} if name == "promise" else {}
        return gemm(a, b, alpha=None if f else 41, epilogue=f, implementation="interpret", **how)

    x = jnp.ones((3, 64, 64) if name == "batch" else (64, 64), jnp.bfloat16)
    np.testing.assert_array_equal(jax.jit(run)(x, x), jnp.full(x.shape, 64 * 41))
    assert len(traced) == 1
