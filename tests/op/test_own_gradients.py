"""Second derivatives of functions with a gradient of the user's own (`jax.custom_vjp`)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import accelerate, gemm, grouped_gemm, numerics, target
from tests.reference import normal

SIZES = np.array([3, 5], np.int32)


@jax.custom_vjp
def _twice(x: Any) -> Any:
    """Twice a number, with a gradient that says otherwise."""
    return x * 2


_twice.defvjp(lambda x: (x * 2, x), lambda x, g: (jnp.clip(g, -1, 1) * jnp.cos(x),))


def _after(x: Any) -> Any:
    return jnp.tanh(_twice(x))


BY_PRODUCT = {
    "a function": lambda x, w: gemm(x, w[0], epilogue=_after),
    "an activation": lambda x, w: gemm(x, w[0], activation=jax.jit(_after)),
    "groups": lambda x, w: grouped_gemm(x, w, SIZES, epilogue=_after),
}
BY_JAX = {
    "a function": lambda x, w: _after(x @ w[0]),
    "an activation": lambda x, w: _after(x @ w[0]),
    "groups": lambda x, w: _after(jnp.concatenate([x[:3] @ w[0], x[3:] @ w[1]])),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, "forward") for name in BY_PRODUCT),
        # JAX has no second gradient of a sum over groups.
        *((name, "reverse") for name in BY_PRODUCT if name != "groups"),
    ],
)
def test_a_derivative_is_derived_by_the_forward_rule(name: str, mode: str, rng: Any) -> None:
    x, w = (0.3 * normal(rng, shape, jnp.float32) for shape in ((8, 16), (2, 16, 8)))

    def derivatives(product: Any) -> Any:
        gradients = jax.grad(lambda x, w: jnp.sum(jnp.square(product(x, w))), (0, 1))

        def of_gradients(x: Any, w: Any) -> Any:
            return sum(jnp.sum(jnp.square(own)) for own in gradients(x, w))

        if mode == "forward":
            return jax.jvp(gradients, (x, w), (jnp.cos(x), jnp.sin(w)))
        return gradients(x, w), jax.grad(of_gradients, (0, 1))(x, w)

    found, expected = (jax.tree.leaves(derivatives(by[name])) for by in (BY_PRODUCT, BY_JAX))
    for own, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("product", [gemm, grouped_gemm])
def test_a_promised_product_is_derived_so_too(product: Any) -> None:
    x = jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((64, 64) if product is gemm else (2, 64, 64), jnp.bfloat16)
    sizes = () if product is gemm else (SIZES,)

    def loss(x: Any, w: Any) -> Any:
        found = product(x, w, *sizes, activation=_twice, numerics=numerics("rows"))
        return jnp.sum(jnp.square(found.astype(jnp.float32)))

    program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w)
    calls = [own.params["call"] for own in program.eqns if "call" in own.params]
    (applied,) = [own for call in calls if (own := call.epilogue.activation) is not None]
    # What JAX derives next is the forward rule, in either mode.
    assert "custom_vjp" not in str(jax.make_jaxpr(applied)(1.0))
    assert applied.__name__ == "_twice"


def test_what_accelerate_folds_is_derived_so_too() -> None:
    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(jnp.square(_after(x @ w)))

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 1024), (1024, 4096))]
    with target("h200"):
        gradients = jax.grad(accelerate(loss), (0, 1))
        second = jax.jit(lambda x, w: jax.jvp(gradients, (x, w), (x, w))).trace(*shapes)
        assert "pallas_gemm" in second.lower(lowering_platforms=("cuda",)).as_text()
