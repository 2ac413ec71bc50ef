"""Layers for Equinox beside stock ones: the same arrays, results and gradients."""

import io
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import HopperConfig, explain, target
from pallas_gemm.equinox import GatedLinear, Linear, replaced
from tests import layers

INPUTS, OUTPUTS, ROWS = 64, 128, 48
KEY = jax.random.key(3)
Apply = Callable[..., jax.Array]


def _of_arrays(model: Any, apply: Apply) -> tuple[Apply, Any]:
    """Returns a model of many examples as a function of its arrays, and the arrays."""
    arrays, static = eqx.partition(model, eqx.is_array)

    def applied(arrays: Any, *x: jax.Array) -> jax.Array:
        return jax.vmap(lambda *x: apply(eqx.combine(arrays, static), *x))(*x)

    return applied, arrays


@pytest.mark.parametrize("use_bias", [True, False])
def test_a_layer_has_the_arrays_of_the_stock_layer(use_bias: bool) -> None:
    ours, stock = (
        cls(INPUTS, OUTPUTS, use_bias, jnp.bfloat16, key=KEY) for cls in (Linear, eqx.nn.Linear)
    )
    for name in ("weight", "bias"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(stock, name))
    # A checkpoint of the one is one of the other.
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, stock)
    file.seek(0)
    loaded = eqx.tree_deserialise_leaves(
        file, Linear(INPUTS, OUTPUTS, use_bias, jnp.bfloat16, key=KEY)
    )
    np.testing.assert_array_equal(loaded.weight, stock.weight)


@pytest.mark.parametrize("activation", [None, "gelu", jax.nn.silu])
@pytest.mark.parametrize("use_bias", [True, False])
def test_a_layer_is_trained_as_the_stock_layer(use_bias: bool, activation: Any) -> None:
    act = {None: lambda y: y, "gelu": jax.nn.gelu, jax.nn.silu: jax.nn.silu}[activation]
    ours = Linear(INPUTS, OUTPUTS, use_bias, activation=activation, key=KEY)
    stock = eqx.nn.Linear(INPUTS, OUTPUTS, use_bias, key=KEY)
    f, arrays = _of_arrays(ours, lambda layer, x, r: layer(x, residual=r))
    g, others = _of_arrays(stock, lambda layer, x, r: act(layer(x)) + r)
    x, residual = layers.normal(ROWS, INPUTS), layers.normal(ROWS, OUTPUTS, seed=1)
    layers.assert_trained_as_well(
        lambda weights, x, r: f(jax.tree.unflatten(jax.tree.structure(arrays), weights), x, r),
        lambda weights, x, r: g(jax.tree.unflatten(jax.tree.structure(others), weights), x, r),
        jax.tree.leaves(arrays),
        x,
        residual,
    )


@pytest.mark.parametrize("use_bias", [True, False])
def test_a_gated_layer_is_trained_as_two_stock_layers(use_bias: bool) -> None:
    layer = GatedLinear(INPUTS, OUTPUTS, use_bias, key=KEY)
    keys = jax.random.split(KEY)
    for own, key in zip((layer.gate, layer.up), keys, strict=True):
        stock = eqx.nn.Linear(INPUTS, OUTPUTS, use_bias, key=key)
        np.testing.assert_array_equal(own.weight, stock.weight)
    f, arrays = _of_arrays(layer, lambda layer, x: layer(x))
    g, _ = _of_arrays(layer, lambda layer, x: jax.nn.silu(layer.gate(x)) * layer.up(x))
    layers.assert_trained_as_well(f, g, arrays, layers.normal(ROWS, INPUTS))


def test_examples_are_the_rows_of_one_product_and_all_is_in_the_kernel() -> None:
    layer = Linear(1024, 4096, activation="gelu", dtype=jnp.bfloat16, key=KEY)
    rows = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)
    residual = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    with target("h200"):
        (found,) = explain(jax.vmap(lambda x, r: layer(x, residual=r)), rows, residual).products
        gated = GatedLinear(1024, 4096, dtype=jnp.bfloat16, key=KEY)
        (pair,) = explain(jax.vmap(gated), rows).products
    problem = found.problem
    assert (problem.batch, problem.m, problem.layout) == (1, 4096, "NT")
    assert found.implementation == pair.implementation == "hopper"
    assert problem.epilogue.bias
    assert problem.epilogue.residual
    assert problem.epilogue.activation is not None
    assert pair.problem.epilogue.gated


def test_a_layer_says_how_it_is_computed() -> None:
    config = HopperConfig(stages=3)
    layer = Linear(1024, 4096, dtype=jnp.bfloat16, config=config, key=KEY)
    rows = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)
    with target("h200"):
        (found,) = explain(jax.vmap(layer), rows).products
    assert found.plan is not None
    assert found.plan.config.stages == 3


def test_every_stock_layer_of_a_model_is_replaced_and_every_array_kept() -> None:
    stock = eqx.nn.MLP(INPUTS, "scalar", 32, depth=2, key=KEY)
    model = replaced(stock, implementation="xla")
    assert [type(layer) for layer in model.layers] == [Linear, Linear, eqx.nn.Linear]
    assert [layer.implementation for layer in model.layers[:2]] == ["xla"] * 2
    for ours, own in zip(*map(jax.tree.leaves, (model, stock)), strict=True):
        assert ours is own
    f, arrays = _of_arrays(model, lambda model, x: model(x))
    g, _ = _of_arrays(stock, lambda model, x: model(x))
    leaves, tree = jax.tree.flatten(arrays)
    others = jax.tree.structure(eqx.filter(stock, eqx.is_array))
    layers.assert_trained_as_well(
        lambda leaves, x: f(jax.tree.unflatten(tree, leaves), x),
        lambda leaves, x: g(jax.tree.unflatten(others, leaves), x),
        leaves,
        layers.normal(ROWS, INPUTS),
    )


def test_leading_dimensions_are_those_of_several_examples() -> None:
    layer = Linear(INPUTS, OUTPUTS, key=KEY)
    x = layers.normal(2, 5, INPUTS)
    assert layer(x).shape == (2, 5, OUTPUTS)
    assert eqx.filter_jit(layer)(x[0, 0], key=KEY).shape == (OUTPUTS,)


def test_a_bias_of_a_wider_type_makes_the_result_wider() -> None:
    """As where the weights alone were narrowed."""
    layer = eqx.nn.Linear(8, 4, dtype=jnp.bfloat16, key=KEY)
    layer = eqx.tree_at(lambda x: x.bias, layer, replace_fn=lambda x: x.astype(jnp.float32))
    gated = GatedLinear(8, 4, use_bias=True, dtype=jnp.bfloat16, key=KEY)
    gated = eqx.tree_at(lambda x: (x.gate, x.up), gated, (layer, layer))
    x = jnp.ones(8, jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        stock = layer(x)
        for own, expected in ((replaced(layer), stock), (gated, jax.nn.silu(stock) * stock)):
            found = own(x)
            assert found.dtype == expected.dtype == jnp.float32
            # The product of the stock layer is rounded before the bias is added.
            np.testing.assert_allclose(found, expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("cls", [Linear, GatedLinear])
@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        ((INPUTS, "scalar"), {}, "out_features must be an integer .* got 'scalar'; equinox.nn"),
        ((-1, OUTPUTS), {}, "in_features must be an integer of at least 0, got -1"),
        ((INPUTS, OUTPUTS), {"activation": "geluu"}, "did you mean 'gelu'"),
    ],
)
def test_errors_say_what_would_be_legal(
    cls: Any, sizes: tuple[Any, ...], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        cls(*sizes, key=KEY, **options)
