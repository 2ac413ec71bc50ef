"""Activations without their derivative rules."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.kernels.functions import elementwise
from tests import epilogues


@jax.custom_vjp
def _cubed(x):
    return x * x * x


_cubed.defvjp(lambda x: (_cubed(x), x), lambda x, g: (3 * x * x * g,))

FUNCTIONS = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "exact gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "custom_vjp": _cubed,
    "constant": lambda x: x * np.float32(2) + jnp.float32(1),
    "identity": lambda x: x,
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_same_values_and_no_rules(function):
    x = jnp.linspace(-4, 4, 96).astype(jnp.float32).reshape(8, 12)
    program = epilogues.of_activation(function)
    # Rewritten functions may differ in the last bits of float32.
    np.testing.assert_allclose(epilogues.jitted(program)(x), function(x), rtol=0, atol=1e-6)
    assert not program.primitives & {"custom_jvp_call", "custom_vjp_call", "jit"}
    assert not program.primitives & elementwise.REWRITTEN.keys()


@pytest.mark.parametrize(
    ("function", "exact"), [(jax.lax.erf, math.erf), (jax.lax.erfc, math.erfc)]
)
def test_erf_is_as_exact_as_float32_allows(function, exact):
    x = np.concatenate([np.linspace(-6, 6, 4001), [0, -np.inf, np.inf]]).astype(np.float32)
    ours = np.asarray(epilogues.jitted(epilogues.of_activation(function))(jnp.asarray(x[None])))[
        0
    ].astype(np.float64)
    expected = np.array([exact(value) for value in x.astype(np.float64)])
    np.testing.assert_allclose(ours, expected, rtol=5e-6, atol=1e-7)


def test_log1p_keeps_the_digits_of_small_numbers():
    small = np.concatenate(
        [2.0 ** np.arange(-40, 6), -(2.0 ** np.arange(-40, 0)), [0.0078, -0.0078]]
    )
    x = np.concatenate([small, [0, -1, np.inf, np.nan, -2]]).astype(np.float32)
    program = epilogues.of_activation(jax.lax.log1p)
    ours = np.asarray(epilogues.jitted(program)(jnp.asarray(x[None])))[0]
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(ours, np.log1p(x.astype(np.float64)), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("name", "most"), [("relu", 1), ("gelu", 2), ("silu", 2), ("identity", 1)])
def test_arrays_in_use_are_counted(name, most):
    assert epilogues.of_activation(FUNCTIONS[name]).live == most


def test_a_polynomial_keeps_its_argument_and_its_parts():
    # What is used again stays: the argument, and what has been computed of it.
    function = lambda x: jnp.exp(x) * (x + jnp.sin(x) * x)  # noqa: E731
    assert epilogues.of_activation(function).live == 3
