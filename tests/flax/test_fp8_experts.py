"""Experts of 8 bits: each does what a layer of the same recipe does with its rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as stock_nnx

from pallas_gemm import Cast, Recipe
from pallas_gemm.api.gated_recipe import experts
from pallas_gemm.flax import linen, nnx
from tests import layers

KEY = jax.random.key(0)
LAST = (((1,), (0,)), ((), ()))
SIZES = (40, 0, 50, 40)
"""Of the experts: what a layer does is compiled for each number of rows."""


@pytest.mark.parametrize(
    ("recipe", "k", "n"),
    [
        # No multiple of a block.
        (Recipe(), 200, 140),
        (Recipe(output_grad=Cast(jnp.float8_e5m2), power_of_two=True), 256, 128),
    ],
)
def test_an_expert_does_what_layers_do_with_its_rows(recipe: Recipe, k: int, n: int) -> None:
    x, g = layers.normal(136, k), layers.normal(136, k, seed=2)
    kernels = [
        layers.normal(4, *shape, seed=seed) / 16
        for seed, shape in enumerate([(k, n), (k, n), (n, k)], start=3)
    ]
    sizes = jnp.asarray(SIZES)

    def derived(f: Any) -> Any:
        @jax.jit
        def both(g: jax.Array, *given: jax.Array) -> Any:
            y, pull = jax.vjp(f, *given)
            return y, *pull(g)

        return both

    ours = derived(lambda x, *own: experts(recipe, x, own, sizes, jax.nn.silu))
    y, of_x, *of_kernels = ours(g, x, *kernels)
    alone = experts(recipe, x, kernels, sizes, jax.nn.silu)
    np.testing.assert_allclose(alone, y, rtol=1e-5, atol=1e-5)

    def gated(x: jax.Array, *kernels: jax.Array) -> jax.Array:
        def dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
            return recipe.dot_general(x, kernel, LAST)

        gate, up, down = kernels
        return dot(jax.nn.silu(dot(x, gate)) * dot(x, up), down)

    stock, first = derived(gated), 0
    for group, size in enumerate(SIZES):
        rows = slice(first, first + size)
        first += size
        if not size:
            for own in of_kernels:
                np.testing.assert_array_equal(own[group], 0)
            continue
        expected = stock(g[rows], x[rows], *(own[group] for own in kernels))
        found = y[rows], of_x[rows], *(own[group] for own in of_kernels)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(y[first:], 0)


def test_layers_have_the_parameters_of_stock_ones_and_learn_as_they_do() -> None:
    options: dict[str, Any] = {"num_experts": 4, "hidden_features": 384, "dtype": jnp.bfloat16}
    x, g = layers.normal(2, 60, 256), layers.normal(2, 60, 256, seed=1)
    stock, ours = linen.Experts(**options), linen.Fp8Experts(**options)
    variables = stock.init(KEY, x)
    layers.assert_same_tree(ours.init(KEY, x), variables)

    def trained(layer: Any) -> Any:
        def loss(variables: Any, x: Any) -> Any:
            return (layer.apply(variables, x).astype(jnp.float32) * g).sum()

        return layer.apply(variables, x), jax.jit(jax.grad(loss, (0, 1)))(variables, x)

    for own, other in zip(*map(jax.tree.leaves, map(trained, (ours, stock))), strict=True):
        error = jnp.linalg.norm((own - other).astype(jnp.float32))
        assert 0 < error < 0.1 * jnp.linalg.norm(other.astype(jnp.float32))
    of_nnx = nnx.Fp8Experts(256, **options, rngs=stock_nnx.Rngs(0))
    held = stock_nnx.to_pure_dict(stock_nnx.state(of_nnx, stock_nnx.Param))
    layers.assert_same_structure(variables["params"], held)
    stock_nnx.update(of_nnx, jax.tree.map(stock_nnx.Param, variables["params"]))
    np.testing.assert_array_equal(of_nnx(x), ours.apply(variables, x))


def test_what_has_no_meaning_is_refused() -> None:
    options: dict[str, Any] = {"num_experts": 2, "hidden_features": 16}
    with pytest.raises(ValueError, match="recipe='block' is unknown"):
        nnx.Fp8Experts(8, **options, recipe="block", rngs=stock_nnx.Rngs(0))
    layer = linen.Fp8Experts(**options, precision="highest")
    with pytest.raises(ValueError, match="precision has no meaning for products of 8 bits"):
        jax.eval_shape(layer.init, KEY, jnp.ones((4, 8)))


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_experts_may_have_nothing_hidden(library: str) -> None:
    sizes: dict[str, Any] = {"num_experts": 4, "hidden_features": 0}
    x = layers.normal(8, 128)
    if library == "nnx":
        apply: Any = nnx.Fp8Experts(128, **sizes, rngs=stock_nnx.Rngs(0))
    else:
        layer = linen.Fp8Experts(**sizes)
        apply = layer.bind(layer.init(KEY, x))
    result, pull = jax.vjp(apply, x)
    for found in (result, *pull(result + 1)):
        np.testing.assert_array_equal(found, np.zeros((8, 128)))
