"""Activations by name, and which functions can be one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_gemm.device import H200
from pallas_gemm.kernels.functions import activations
from pallas_gemm.kernels.functions.activations import ACTIVATIONS, KERNEL_PRIMITIVES
from pallas_gemm.kernels.hopper import kernel as hopper
from pallas_gemm.kernels.hopper import plan
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.problem import Epilogue, Problem
from tests import reference

JAXS = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "gelu_tanh": jax.nn.gelu,
    "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
    "swish": jax.nn.swish,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_names_mean_what_jax_calls_so(name: str) -> None:
    x = jnp.linspace(-8, 8, 257)
    function = activations.resolve(name)
    assert function is ACTIVATIONS[name]
    np.testing.assert_array_equal(function(x), JAXS[name](x))
    exact = reference.ACTIVATIONS[name](reference.wide(x))
    reference.assert_as_good_as_xla(function(x), JAXS[name](x), exact)


def _boolean(x: Any) -> Any:
    both = ~((x > 0) & (x < 1)) | (x >= -1) ^ (x <= -2) | (x == 3) | (x != 4)
    return jnp.where(both, x, -x)


@jax.custom_vjp
def _named(x: Any) -> Any:
    return checkpoint_name(x, "named")


_named.defvjp(lambda x: (x, None), lambda _, g: (g,))


def _slope(x: Any) -> Any:
    """The derivative of a function that is used twice."""
    return jax.vjp(lambda x: jnp.tanh(x) * x, x)[1](jnp.ones_like(x))[0]


EVERY_PRIMITIVE = (
    lambda x: jnp.abs(x) + jnp.exp(x) - jnp.exp2(x) * jnp.log(x) / jnp.log1p(x),
    lambda x: jnp.maximum(x, 1.0) + jnp.minimum(x, -1.0) + lax.clamp(0.0, x, 1.0),
    lambda x: jnp.sin(x) + jnp.cos(x) + jnp.tanh(x) + lax.logistic(x) + lax.erf(x) + lax.erfc(x),
    lambda x: jnp.round(x) + jnp.floor(x) + jnp.ceil(x) + jnp.expm1(x) + jnp.log2(x),
    lambda x: lax.stop_gradient(_named(x)),
    lambda x: jnp.sqrt(x) + lax.rsqrt(x) + x**3 + jnp.square(x) + jnp.sign(x),
    lambda x: x**-1 + x**-3 + lax.integer_pow(x, 1) * lax.integer_pow(x, 0),
    lambda x: x.astype(jnp.bfloat16).astype(jnp.float32) + jnp.array(x, copy=True),
    lambda x: jnp.where(jnp.isfinite(x), x, 0.0),
    _slope,
    jax.nn.relu,
    _boolean,
)
"""Functions that between them use everything that a kernel is said to have."""


def test_the_functions_use_everything_that_a_kernel_is_said_to_have() -> None:
    used = frozenset().union(*map(activations._primitives, EVERY_PRIMITIVE))
    assert used == KERNEL_PRIMITIVES


@pytest.mark.parametrize("function", [*EVERY_PRIMITIVE, *ACTIVATIONS.values()])
def test_a_kernel_has_it(function: Callable[[Any], Any]) -> None:
    assert activations.kernel_refusal(function) is None
    problem = Problem(256, 256, 256, transpose_b=True, epilogue=Epilogue(activation=function))
    # Few registers: each of them is lowered on its own.
    config = HopperConfig(tile=(64, 16), consumers=1, late_store=False)
    kernel = hopper.build(plan.HopperPlan(problem, config, H200))
    a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 256),) * 2)
    # Lowering alone finds out what Mosaic has no rule for; it needs no GPU and no compiler.
    check = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    jax.export.export(jax.jit(kernel), platforms=["cuda"], disabled_checks=[check])(a, b)


@pytest.mark.parametrize(
    ("function", "foreign"),
    [
        (lambda x: jnp.power(jnp.abs(x), 1.5), "pow"),
        (lambda x: x % 2, "rem"),
        (jnp.arctan, "atan"),
    ],
    ids=["pow", "rem", "atan"],
)
def test_what_a_kernel_lacks_is_named(function: Callable[[Any], Any], foreign: str) -> None:
    assert foreign in str(activations.kernel_refusal(activations.resolve(function)))


@pytest.mark.parametrize(
    "function",
    [
        jax.nn.softmax,
        lambda x: x - x.mean(),
        jnp.sort,
        lambda x: jnp.cumsum(x, axis=0),
        lambda x: x[::-1],
        lambda x: x * jnp.arange(3.0)[None],
        jnp.sum,
        lambda x: (x, x),
    ],
)
def test_what_does_not_treat_each_element_by_itself_is_refused(
    function: Callable[[Any], Any],
) -> None:
    with pytest.raises(TypeError, match=r"elementwise|of the same shape"):
        activations.resolve(function)


def test_nothing_is_no_activation() -> None:
    assert activations.resolve(None) is None
    assert activations.kernel_refusal(None) is None
