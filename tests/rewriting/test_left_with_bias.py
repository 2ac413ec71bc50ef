"""What XLA computes with a product stays with it, where XLA was measured to be faster at that."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from pallas_gemm import accelerate, explain, target

TALL, SHORT, MISALIGNED = (262144, 256, 256), (65536, 128, 128), (59408, 768, 72)


def relu(z: jax.Array, bias: jax.Array) -> jax.Array:
    return jax.nn.relu(z + bias[None])


def gelu(z: jax.Array, bias: jax.Array) -> jax.Array:
    return jax.nn.gelu(z + bias[None])


def squared_relu(z: jax.Array, bias: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(z + bias[None]))


@pytest.mark.parametrize(
    ("sizes", "follows", "is_folded"),
    [
        (TALL, relu, False),
        (MISALIGNED, relu, False),
        # XLA makes a pass for these.
        (TALL, gelu, True),
        (MISALIGNED, gelu, True),
        (TALL, squared_relu, True),
        # A kernel is predicted to be as fast alone, which is no measurement.
        (SHORT, relu, True),
    ],
)
def test_bias_and_relu_are_left_with_a_product(
    sizes: tuple[int, int, int], follows: Callable[..., jax.Array], is_folded: bool
) -> None:
    m, n, k = sizes
    given = [jax.ShapeDtypeStruct(own, jnp.bfloat16) for own in ((m, k), (k, n), (n,))]
    with target("h200"):
        found = explain(accelerate(lambda x, w, bias: follows(x @ w, bias)), *given)
    folded = [own for own in found.products if own.problem.epilogue.program is not None]
    assert bool(folded) == is_folded
