"""Stock models of Flax, which know nothing of us, accelerated as they are."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.extend import core

from pallas_gemm import accelerate, explain, target
from tests.reference import assert_as_good_as_xla, normal

pytestmark = pytest.mark.usefixtures("as_users_write")

WIDTH, HIDDEN = 256, 512
BF16 = jnp.bfloat16


class Block(linen.Module):
    """A block of a transformer with stock layers."""

    dtype: Any = BF16

    @linen.compact
    def __call__(self, x: Any) -> Any:
        """Returns what the next block takes."""
        types: Any = {"dtype": self.dtype, "param_dtype": self.dtype}
        y = linen.RMSNorm(**types)(x)
        x = x + linen.MultiHeadDotProductAttention(2, **types)(y)
        y = linen.LayerNorm(**types)(x)
        y = linen.gelu(linen.Dense(HIDDEN, **types)(y))
        return x + linen.Dense(WIDTH, **types)(y)


def _linen(dtype: Any) -> tuple[Any, Any]:
    model = Block(dtype)
    x = jnp.zeros((2, 128, WIDTH), dtype)
    params = jax.jit(model.init)(jax.random.key(0), x)
    return params, model.apply


class Stock(nnx.Module):
    """A feed-forward network with stock layers."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs) -> None:
        types: Any = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.norm = nnx.LayerNorm(WIDTH, **types)
        self.gate, self.up = (nnx.Linear(WIDTH, HIDDEN, **types) for _ in range(2))
        self.down = nnx.Linear(HIDDEN, WIDTH, **types)

    def __call__(self, x: Any) -> Any:
        """Returns what the next block takes."""
        y = self.norm(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


def _nnx(dtype: Any) -> tuple[Any, Any]:
    graph, params = nnx.split(Stock(dtype, nnx.Rngs(0)))
    return params, lambda params, x: nnx.merge(graph, params)(x)


MODELS = {"linen": _linen, "nnx": _nnx}


def _gradients(apply: Any) -> Any:
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jnp.square(apply(params, x).astype(jnp.float32)))

    return jax.grad(loss, argnums=(0, 1))


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_as_good_as_the_models(name: str) -> None:
    params, apply = MODELS[name](BF16)
    _, precise = MODELS[name](jnp.float32)
    x = normal(np.random.default_rng(0), (2, 128, WIDTH), BF16)
    wide = jax.tree.map(lambda y: y.astype(jnp.float32), (params, x))
    for f, exact in ((apply, precise), (_gradients(apply), _gradients(precise))):
        with target("h200"):
            program = jax.make_jaxpr(accelerate(f))(params, x)
            core.check_jaxpr(program)
            found = jax.jit(accelerate(f))(params, x)
        values = jax.jit(exact)(*wide)
        expected = jax.jit(f)(params, x)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        assert "pallas_gemm" in str(program)
        for ours, stock, value in zip(
            *map(jax.tree.leaves, (found, expected, values)), strict=True
        ):
            assert_as_good_as_xla(ours, stock, np.asarray(value, np.float64))


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_goes_the_same_way(name: str) -> None:
    params, apply = MODELS[name](BF16)
    optimizer = optax.adamw(1e-3)
    x = normal(np.random.default_rng(0), (2, 128, WIDTH), BF16)

    def step(state: Any, x: Any) -> Any:
        params, moments = state

        def loss(params: Any) -> Any:
            return jnp.mean(jnp.square((apply(params, x) - 1).astype(jnp.float32)))

        value, gradients = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    losses = {}
    for kind, own in (("stock", step), ("accelerated", accelerate(step))):
        state = (params, optimizer.init(params))
        with target("h200"):
            compiled = jax.jit(own)
            losses[kind] = []
            for _ in range(4):
                state, value = compiled(state, x)
                losses[kind].append(float(value))
    np.testing.assert_allclose(losses["accelerated"], losses["stock"], rtol=0.01)
    assert losses["stock"][-1] < losses["stock"][0]


LARGE = (1, 4096, 2048)


class Wide(linen.Module):
    """A feed-forward network of large layers."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        """Returns what the next block takes."""
        types: Any = {"dtype": BF16, "param_dtype": BF16}
        y = linen.RMSNorm(**types)(x)
        y = linen.gelu(linen.Dense(8192, **types)(y))
        return x + linen.Dense(LARGE[-1], **types)(y)


def test_what_is_folded_in_a_block_of_large_layers() -> None:
    model, x = Wide(), jax.ShapeDtypeStruct(LARGE, BF16)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    gradients = _gradients(model.apply)
    with target("h200"):
        found, stock = explain(accelerate(gradients), params, x), explain(gradients, params, x)
    assert found.rewritten is not None
    assert not [one for one in found.rewritten if one.why]
    # The activation, and its derivative with the gradient of the bias.
    folded = {x for one in found.rewritten for x in one.folded}
    assert {"tanh", "one_minus_square", "reduce_sum"} <= folded
    assert found.seconds < 0.95 * stock.seconds
