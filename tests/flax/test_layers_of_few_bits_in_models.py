"""Layers of few bits where models have unusual ones: stacked, boxed, tiny, adapted, none at all."""

from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx as stock_nnx

from pallas_gemm.flax import linen, nnx
from pallas_gemm.layers import per_channel
from tests import layers

KEY = jax.random.key(0)
SIZE, COUNT = 32, 3


def _stacked(layer: Any, **options: Any) -> Any:
    """Returns a model of several layers, one after the other, whose weights are stacked."""

    class Step(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return jnp.tanh(layer(SIZE, name="dense", **options)(x)), None

    axes = {"params": 0, "quantized": 0}
    return nn.scan(Step, axes, split_rngs={"params": True}, length=COUNT)()


@pytest.mark.parametrize("bits", [None, 8])
def test_stacked_layers_of_linen(bits: Any) -> None:
    x, stock, ours = (
        layers.normal(4, SIZE),
        _stacked(nn.Dense),
        _stacked(linen.QuantizedDense, bits=bits),
    )
    trained = stock.init(KEY, x)
    expected, _ = stock.apply(trained, x)
    found, _ = ours.apply(linen.quantized(jax.eval_shape(ours.init, KEY, x), trained), x)
    assert np.linalg.norm(found - expected) < 0.03 * np.linalg.norm(expected)


@pytest.mark.parametrize("bits", [None, 8])
def test_stacked_layers_of_nnx(bits: Any) -> None:
    @stock_nnx.vmap
    def make(key: Any) -> Any:
        return stock_nnx.Linear(SIZE, SIZE, rngs=stock_nnx.Rngs(key))

    stack = make(jax.random.split(KEY, COUNT))
    ours = nnx.QuantizedLinear.of(stack, bits=bits)
    x = layers.normal(COUNT, 4, SIZE)

    def each(layer: Any) -> Any:
        return stock_nnx.vmap(lambda own, x: own(x))(layer, x)

    expected = each(stack)
    assert np.linalg.norm(each(ours) - expected) < 0.03 * np.linalg.norm(expected)


@pytest.mark.parametrize("bits", [None, 8])
def test_a_kernel_with_a_partitioning_is_quantized(bits: Any) -> None:
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    layer, x = linen.QuantizedDense(24, bits=bits, kernel_init=init), layers.normal(4, SIZE)
    stock = nn.Dense(24, kernel_init=init)
    expected: Any = stock.apply(flax.core.meta.unbox(stock.init(KEY, x)), x)
    found: Any = layer.apply(layer.init(KEY, x), x)
    assert found.shape == expected.shape
    assert jnp.isfinite(found).all()


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_tiny_rows_are_no_nan(dtype: Any) -> None:
    x = jnp.zeros((2, SIZE)).at[0, 0].set(1e-36)
    values, scale = per_channel.quantize(x, dtype)
    assert (scale > 0).all()
    assert jnp.isfinite(values.astype(jnp.float32) * scale[:, None]).all()
    layer = nnx.QuantizedLinear.of(stock_nnx.Linear(SIZE, 8, rngs=stock_nnx.Rngs(0)), dtype)
    assert jnp.isfinite(layer(x)).all()


def test_tiny_gradients_are_no_nan() -> None:
    layer = nnx.Fp8Linear(SIZE, 8, rngs=stock_nnx.Rngs(0))
    x = layers.normal(2, SIZE)
    found = stock_nnx.grad(lambda own: own(x)[0, 0] * 1e-35)(layer)
    assert all(jnp.isfinite(own).all() for own in jax.tree.leaves(found))


@pytest.mark.parametrize("make", [linen.Fp8Dense, linen.QuantizedDense])
def test_no_rows_and_a_residual_that_broadcasts(make: Any) -> None:
    layer, none = make(8), jnp.zeros((0, SIZE))
    empty: Any = layer.apply(layer.init(KEY, none), none)
    assert empty.shape == (0, 8)
    x = layers.normal(2, 5, SIZE)
    blocks = linen.Fp8Dense(8, recipe="blocks")
    trained = blocks.init(KEY, x)
    added = jnp.arange(8.0)
    found: Any = blocks.apply(trained, x, residual=added)
    expected: Any = blocks.apply(trained, x)
    np.testing.assert_allclose(found, np.asarray(expected) + np.arange(8.0), rtol=1e-6, atol=1e-6)


def test_what_an_adapter_adds_is_not_forgotten() -> None:
    rngs = stock_nnx.Rngs(0)
    adapted = stock_nnx.LoRALinear(SIZE, 8, lora_rank=2, rngs=rngs)
    with pytest.raises(TypeError, match="or one of ours, got LoRALinear"):
        nnx.QuantizedLinear.of(adapted)
    gated, x = nnx.GatedDense(SIZE, 8, rngs=rngs), layers.normal(2, SIZE)
    gated.gate = adapted
    with pytest.raises(ValueError, match=r"gate must be a flax.nnx.Linear.*LoRALinear, which"):
        gated(x)
    gated.gate = nnx.Linear(SIZE, 8, activation="gelu", rngs=rngs)
    with pytest.raises(ValueError, match="gate must have no activation, got "):
        gated(x)
