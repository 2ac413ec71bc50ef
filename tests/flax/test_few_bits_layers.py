"""Layers of weights of few bits: stock layers of what these stand for, where nothing is rounded."""

from typing import Any

import equinox as eqx
import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx as stock_nnx

from pallas_gemm import QuantizedWeight, quantize_weights
from pallas_gemm.equinox import replaced
from pallas_gemm.flax import linen, nnx
from pallas_gemm.layers import few_bits
from tests import layers, reference

INPUTS, FEATURES, GROUP, ROWS = 16, 24, 8, (2, 5)
KEY = jax.random.key(0)
HOW: list[Any] = [
    {"bits": 8},
    {"bits": 4},
    {"bits": 4, "group": GROUP},
    {"bits": 4, "group": GROUP, "zero_points": True},
]
NNX_KINDS = {"linear": nnx.Linear, "gated": nnx.GatedDense}


def _integers(*shape: int, seed: int = 0) -> jax.Array:
    return reference.integers(np.random.default_rng(seed), shape, jnp.float32)


def _kernel(*shape: int, seed: int = 0, **how: Any) -> jax.Array:
    """Integers that few bits hold, with another power of two for every group."""
    rng = np.random.default_rng(seed)
    *front, k, n = shape
    group = how.get("group") or k
    if how.get("zero_points"):
        values = rng.integers(0, 16, (*front, k // group, group, n))
        values[..., 0, :], values[..., 1, :] = 0, 15
        values = values - rng.integers(0, 16, (*front, k // group, 1, n))
    else:
        most = 127 if how["bits"] == 8 else 7
        values = rng.integers(-most, most + 1, (*front, k // group, group, n))
        values[..., 0, :] = most
    scale = rng.choice([0.5, 1, 2], (*front, k // group, 1, n))
    return jnp.asarray((values * scale).reshape(shape), jnp.float32)


def _with_kernels(params: Any, **how: Any) -> Any:
    """Returns parameters with such kernels."""

    def made(path: Any, x: Any) -> Any:
        if "kernel" in jax.tree_util.keystr(path) and "router" not in jax.tree_util.keystr(path):
            return _kernel(*x.shape, seed=len(path), **how)
        return _integers(*x.shape, seed=1)

    return jax.tree_util.tree_map_with_path(made, params)


class OfLinen(nn.Module):
    """Each of our layers that has a kernel."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.Dense(INPUTS, activation="relu", name="first")(x)
        one, two = linen.projections(x, {"one": FEATURES, "two": FEATURES})
        gated = linen.GatedDense(FEATURES, activation="relu", name="gated")(x, residual=one)
        return gated + two


@pytest.mark.parametrize("how", HOW, ids=str)
def test_layers_for_linen_take_records_in_place_of_kernels(how: Any) -> None:
    x = _integers(*ROWS, INPUTS)
    params = _with_kernels(OfLinen().init(KEY, x), **how)
    made = quantize_weights(params, **how)
    kernels = made["params"]["first"], made["params"]["gated"]["up"], made["params"]["two"]
    assert all(isinstance(own["kernel"], QuantizedWeight) for own in kernels)
    results: list[Any] = [OfLinen().apply(own, x) for own in (made, params)]
    # These numbers are beyond what float32 holds of integers.
    np.testing.assert_allclose(*results, rtol=1e-6)


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_a_record_counts_with_the_type_of_what_it_stands_for(dtype: Any) -> None:
    x = _integers(*ROWS, INPUTS)
    layer = linen.Dense(FEATURES, dtype=dtype)
    params = layer.init(KEY, x)
    results = [layer.apply(own, x) for own in (params, quantize_weights(params, bits=4, group=8))]
    types = {jnp.asarray(y).dtype for y in results}
    assert types == {jnp.dtype(jnp.float32 if dtype is None else jnp.bfloat16)}


@pytest.mark.parametrize("how", HOW, ids=str)
def test_experts_take_records_in_place_of_kernels(how: Any) -> None:
    x = _integers(*ROWS, INPUTS)
    layer = linen.Experts(num_experts=4, hidden_features=FEATURES, activation="relu")
    params = _with_kernels(layer.init(KEY, x), **how)
    made = quantize_weights(params, where=lambda path, _: "router" not in path, **how)
    assert isinstance(made["params"]["down"]["kernel"], QuantizedWeight)
    np.testing.assert_array_equal(layer.apply(made, x), layer.apply(params, x))
    of_nnx = nnx.Experts(
        INPUTS,
        num_experts=4,
        hidden_features=FEATURES,
        activation="relu",
        rngs=stock_nnx.Rngs(0),
    )
    for name in ("gate", "up", "down"):
        getattr(of_nnx, name).kernel.set_value(made["params"][name]["kernel"])
    of_nnx.router.kernel.set_value(params["params"]["router"]["kernel"])
    np.testing.assert_array_equal(of_nnx(x), layer.apply(params, x))


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("kind", NNX_KINDS)
def test_layers_for_nnx_take_records_in_place_of_kernels(kind: str, how: Any) -> None:
    layer = NNX_KINDS[kind](INPUTS, FEATURES, rngs=stock_nnx.Rngs(0))
    graph, state = stock_nnx.split(layer)
    state = _with_kernels(state, **how)
    x = _integers(*ROWS, INPUTS)
    made = stock_nnx.merge(graph, quantize_weights(state, **how))
    stock = stock_nnx.merge(graph, state)
    # The logistic function of the one is that of the other.
    np.testing.assert_array_equal(made(x), stock(x))
    if kind == "linear":
        both = zip(nnx.projections(x, [made, made]), nnx.projections(x, [stock] * 2), strict=True)
        for own, other in both:
            np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("how", HOW, ids=str)
def test_layers_for_equinox_take_records_in_place_of_weights(how: Any) -> None:
    model: Any = replaced(eqx.nn.MLP(INPUTS, FEATURES, 32, depth=0, key=KEY))
    own = _kernel(INPUTS, FEATURES, **how).T, _integers(FEATURES, seed=2)
    model = eqx.tree_at(lambda m: (m.layers[0].weight, m.layers[0].bias), model, own)
    made = quantize_weights(model, **how)
    assert made.layers[0].weight.axis == -1
    x = _integers(INPUTS)
    np.testing.assert_array_equal(made(x), model(x))
    rows = jax.vmap(made)(_integers(7, INPUTS, seed=3))
    np.testing.assert_array_equal(rows, jax.vmap(model)(_integers(7, INPUTS, seed=3)))


@pytest.mark.parametrize("activation", ["relu", None])
@pytest.mark.parametrize("how", HOW, ids=str)
def test_a_quantized_dense_of_weights_alone_is_the_stock_layer(how: Any, activation: Any) -> None:
    stock = nn.Dense(FEATURES)
    ours = linen.QuantizedDense(FEATURES, activation=activation, **how)
    x, rest = _integers(*ROWS, INPUTS), _integers(*ROWS, FEATURES, seed=1)
    trained = _with_kernels(stock.init(KEY, x), **how)
    abstract = jax.eval_shape(ours.init, KEY, x)
    variables = linen.quantized(abstract, trained)
    layers.assert_same_structure(abstract, variables)
    stored = variables["quantized"]["kernel"]
    assert stored["values"].shape == (INPUTS, FEATURES)
    assert stored["scale"].shape == (INPUTS // (how.get("group") or INPUTS), FEATURES)
    function = jax.nn.relu if activation else jnp.positive

    def both(f: Any) -> Any:
        result, pull = jax.vjp(f, x, rest)
        return result, *pull(_integers(*ROWS, FEATURES, seed=2))

    found = both(lambda x, rest: ours.apply(variables, x, residual=rest))
    expected = both(lambda x, rest: function(stock.apply(trained, x)) + rest)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    own: Any = ours.init(KEY, x)
    of_nnx = nnx.QuantizedLinear.of(_nnx_of(trained), activation=activation, **how)
    np.testing.assert_array_equal(of_nnx(x, residual=rest), found[0])
    again = nnx.QuantizedLinear(INPUTS, FEATURES, rngs=stock_nnx.Rngs(0), **how)
    assert jax.tree.map(jnp.shape, stock_nnx.to_pure_dict(stock_nnx.state(again)))["bias"] == (24,)
    assert not jnp.array_equal(own["quantized"]["kernel"]["values"], stored["values"])


def _nnx_of(variables: Any) -> Any:
    layer: Any = stock_nnx.Linear(INPUTS, FEATURES, rngs=stock_nnx.Rngs(0))
    layer.kernel.set_value(variables["params"]["kernel"])
    layer.bias.set_value(variables["params"]["bias"])
    return layer


def test_other_types_of_the_same_bits_may_be_stored() -> None:
    x = layers.normal(4, INPUTS)
    fields: Any = {"bits": 8, "quantized_dtype": "e4m3"}
    variables: Any = linen.QuantizedDense(FEATURES, **fields).init(KEY, x)
    assert variables["quantized"]["kernel"]["values"].dtype == jnp.float8_e4m3fn
    layer = nnx.QuantizedLinear(
        INPUTS, FEATURES, bits=4, quantized_dtype=jnp.float4_e2m1fn, rngs=stock_nnx.Rngs(0)
    )
    assert layer.kernel_values[...].dtype == jnp.float4_e2m1fn
    with pytest.raises(ValueError, match="a type of bits=4, or be left out, got float8_e4m3fn"):
        linen.QuantizedDense(FEATURES, bits=4, quantized_dtype="e4m3").init(KEY, x)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn], ids=str)
def test_a_kernel_is_stored_in_the_types_of_what_was_stored(dtype: Any) -> None:
    first, second = (layers.normal(INPUTS, FEATURES, seed=seed) for seed in range(2))
    made = QuantizedWeight.of(first, bits=8, dtype=dtype, scale_dtype=jnp.bfloat16)
    before = {"values": made.values, "scale": made.scale}
    after = few_bits.stored_as(before, second)
    assert jax.tree.map(jnp.result_type, after) == jax.tree.map(jnp.result_type, before)
    wide = after["values"].astype(jnp.float32) * after["scale"].astype(jnp.float32)
    assert jnp.abs(wide - second).max() < 0.15


def test_records_are_kept_by_checkpoints_of_flax() -> None:
    x = _integers(*ROWS, INPUTS)
    params = linen.Dense(FEATURES).init(KEY, x)
    made = quantize_weights(params, bits=4, group=GROUP, zero_points=True)
    empty = jax.tree.map(jnp.zeros_like, made)
    read = flax.serialization.from_bytes(empty, flax.serialization.to_bytes(made))
    assert isinstance(read["params"]["kernel"], QuantizedWeight)
    jax.tree.map(np.testing.assert_array_equal, read, made)


def test_groups_without_bits_are_refused() -> None:
    x = layers.normal(4, INPUTS)
    message = "need bits=4 or bits=8, got group=8, zero_points=False, bits=None"
    with pytest.raises(ValueError, match=message):
        linen.QuantizedDense(FEATURES, group=8).init(KEY, x)
    with pytest.raises(ValueError, match=message):
        nnx.QuantizedLinear(INPUTS, FEATURES, group=8, rngs=stock_nnx.Rngs(0))
    model = jax.eval_shape(linen.QuantizedDense(FEATURES, bits=4).init, KEY, x)
    with pytest.raises(ValueError, match=r"must be a kernel of shape \[16, 24\] .*, got None"):
        linen.quantized(flax.core.unfreeze(model), {"params": {}})
