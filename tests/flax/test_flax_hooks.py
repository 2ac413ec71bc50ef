"""`dot_general` and `einsum` in the places that Flax has for them: what it asks for and gets."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import pallas_gemm
from pallas_gemm import explain
from tests import layers, reference, traced

BATCH, SEQUENCE, WIDTH, HEADS = 2, 6, 16, 4


class Recorder:
    """A hook that computes what it wraps, and keeps the arguments of each call."""

    def __init__(self, wrapped: Callable[..., jax.Array]) -> None:
        self.wrapped = wrapped
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        self.calls.append((args, kwargs))
        return self.wrapped(*args, **kwargs)

    @property
    def numbers(self) -> list[Any]:
        """The dimension numbers of each call, as tuples of ints."""
        return [
            tuple(tuple(tuple(map(int, dims)) for dims in pair) for pair in args[2])
            for args, _ in self.calls
        ]


def _heads_last(hook: Any) -> nn.Module:
    return nn.DenseGeneral(WIDTH, axis=(-2, -1), dot_general=hook)


def _linen_attention(hook: Any) -> nn.Module:
    return nn.MultiHeadDotProductAttention(
        num_heads=HEADS,
        qkv_dot_general=hook,
        out_dot_general=hook,
        attention_fn=functools.partial(nn.dot_product_attention, einsum_dot_general=hook),
    )


def _contracting(lhs: tuple[int, ...], rhs: tuple[int, ...]) -> Any:
    return ((lhs, rhs), ((), ()))


QKV = [_contracting((2,), (0,))] * 3
OUT = _contracting((2, 3), (0, 1))
SEQUENCES = (BATCH, SEQUENCE, WIDTH)
# The layer, the shape of its input, and the dimension numbers that arrive.
LINEN: dict[str, tuple[Callable[[Any], nn.Module], tuple[int, ...], list[Any]]] = {
    "dense of a vector": (
        lambda hook: nn.Dense(8, dot_general=hook),
        (WIDTH,),
        [_contracting((0,), (0,))],
    ),
    "dense of a matrix": (
        lambda hook: nn.Dense(8, dot_general=hook),
        (SEQUENCE, WIDTH),
        [_contracting((1,), (0,))],
    ),
    "dense of sequences": (
        lambda hook: nn.Dense(8, dot_general=hook),
        SEQUENCES,
        [_contracting((2,), (0,))],
    ),
    "dense of a class": (
        lambda hook: nn.Dense(8, dot_general_cls=lambda: hook),
        SEQUENCES,
        [_contracting((2,), (0,))],
    ),
    "features of two dimensions": (
        lambda hook: nn.DenseGeneral((4, 8), dot_general=hook),
        SEQUENCES,
        [_contracting((2,), (0,))],
    ),
    "contracted heads": (_heads_last, (BATCH, SEQUENCE, HEADS, 4), [OUT]),
    "batch dimensions": (
        lambda hook: nn.DenseGeneral(8, batch_dims=(0,), dot_general=hook),
        SEQUENCES,
        [(((2,), (1,)), ((0,), (0,)))],
    ),
    # Scores and values are einsums, with the batch and the heads as batch dimensions.
    "attention": (
        _linen_attention,
        SEQUENCES,
        [
            *QKV,
            (((3,), (3,)), ((0, 2), (0, 2))),
            (((1,), (3,)), ((0, 2), (0, 1))),
            OUT,
        ],
    ),
}


@pytest.mark.parametrize("name", LINEN)
def test_a_linen_layer_with_the_hook_is_the_stock_layer(name: str) -> None:
    make, shape, numbers = LINEN[name]
    hook = Recorder(pallas_gemm.dot_general)
    ours, stock = make(hook), make(jax.lax.dot_general)
    x = layers.normal(*shape)
    params = jax.jit(stock.init)(jax.random.key(0), x)
    layers.assert_same_structure(jax.eval_shape(ours.init, jax.random.key(0), x), params)
    assert hook.numbers == numbers
    layers.assert_trained_as_well(ours.apply, stock.apply, params, x)


NNX: dict[str, tuple[Callable[..., nnx.Module], tuple[int, ...], list[Any]]] = {
    "linear": (
        lambda hook, rngs: nnx.Linear(WIDTH, 8, dot_general=hook, rngs=rngs),
        SEQUENCES,
        [_contracting((2,), (0,))],
    ),
    "linear that prefers a type": (
        lambda hook, rngs: nnx.Linear(
            WIDTH, 8, dot_general=hook, preferred_element_type=jnp.float32, rngs=rngs
        ),
        SEQUENCES,
        [_contracting((2,), (0,))],
    ),
    "features of two dimensions": (
        lambda hook, rngs: nnx.LinearGeneral(WIDTH, (4, 8), dot_general=hook, rngs=rngs),
        SEQUENCES,
        [_contracting((2,), (0,))],
    ),
    "contracted heads": (
        lambda hook, rngs: nnx.LinearGeneral(
            (HEADS, 4), WIDTH, axis=(-2, -1), dot_general=hook, rngs=rngs
        ),
        (BATCH, SEQUENCE, HEADS, 4),
        [OUT],
    ),
    "attention": (
        lambda hook, rngs: nnx.MultiHeadAttention(
            HEADS, WIDTH, qkv_dot_general=hook, out_dot_general=hook, decode=False, rngs=rngs
        ),
        SEQUENCES,
        [*QKV, OUT],
    ),
}


def test_a_class_of_hooks_is_made_for_each_call() -> None:
    hook = Recorder(pallas_gemm.dot_general)
    classes: dict[str, Any] = {
        "qkv_dot_general_cls": lambda: hook,
        "out_dot_general_cls": lambda: hook,
    }
    x = jax.ShapeDtypeStruct(SEQUENCES, jnp.float32)
    linen = nn.MultiHeadDotProductAttention(num_heads=HEADS, **classes)
    jax.eval_shape(linen.init, jax.random.key(0), x)
    jax.eval_shape(
        nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=nnx.Rngs(0), **classes), x
    )
    assert hook.numbers == [*QKV, OUT] * 2


def _nnx_pair(make: Any, ours: Any, stock: Any) -> tuple[Any, Any, Any]:
    """Returns what applies the layer with each hook, and the parameters of both."""
    (our_graph, our_state), (graph, state) = (
        nnx.split(make(hook, nnx.Rngs(0)), nnx.Param) for hook in (ours, stock)
    )
    layers.assert_same_tree(nnx.to_pure_dict(our_state), nnx.to_pure_dict(state))

    def applied(definition: Any) -> Callable[..., jax.Array]:
        return lambda params, x: nnx.merge(definition, params)(x)

    return applied(our_graph), applied(graph), state


@pytest.mark.parametrize("name", NNX)
def test_an_nnx_layer_with_the_hook_is_the_stock_layer(name: str) -> None:
    make, shape, numbers = NNX[name]
    hook = Recorder(pallas_gemm.dot_general)
    ours, stock, params = _nnx_pair(make, hook, jax.lax.dot_general)
    x = layers.normal(*shape)
    hook.calls.clear()
    jax.eval_shape(ours, params, x)
    assert hook.numbers == numbers
    # Flax sends it to every layer, and would drop a hook that does not take it.
    assert all("out_sharding" in kwargs for _, kwargs in hook.calls)
    if name == "linear that prefers a type":
        # In float64 the stock layer would not be exact either: it rounds to what is preferred.
        reference.assert_as_good_as_xla(
            ours(params, x),
            stock(params, x),
            np.asarray(x, np.float64) @ np.asarray(params["kernel"][...], np.float64),
        )
        return
    # JAX's own attention mixes types.
    with jax.numpy_dtype_promotion("standard"):
        layers.assert_trained_as_well(ours, stock, params, x)


EINSUMS = {
    "dense": ("bsd,df->bsf", (WIDTH, 8), (8,)),
    # `jnp.einsum` swaps the operands here; we do not have to.
    "heads before the sequence": ("bsd,dhk->bhsk", (WIDTH, HEADS, 4), None),
    "tied embedding": ("bsd,vd->bsv", (12, WIDTH), None),
    "experts": ("bsd,bdf->bsf", (BATCH, WIDTH, 8), None),
    "dots": ("...d,df->...f", (WIDTH, 8), (8,)),
}


@pytest.mark.parametrize("name", EINSUMS)
def test_an_nnx_einsum_with_ours_is_the_stock_layer(name: str) -> None:
    equation, kernel, bias = EINSUMS[name]
    hook = Recorder(pallas_gemm.einsum)

    def make(op: Any, rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Einsum(equation, kernel, bias, einsum_op=op, rngs=rngs)

    ours, stock, params = _nnx_pair(make, hook, jnp.einsum)
    x = layers.normal(*SEQUENCES)
    jax.eval_shape(ours, params, x)
    [(args, kwargs)] = hook.calls
    assert (args[0], kwargs) == (equation, {"precision": None, "out_sharding": None})
    layers.assert_trained_as_well(ours, stock, params, x)


@pytest.mark.parametrize(
    ("name", "copies"), [("tied embedding", 0), ("heads before the sequence", 0), ("experts", 0)]
)
def test_the_operands_of_an_einsum_are_not_copied(name: str, copies: int) -> None:
    equation, kernel, _ = EINSUMS[name]
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (SEQUENCES, kernel))
    (found,) = traced.products(functools.partial(pallas_gemm.einsum, equation), x, w)
    assert (not found.form.a.is_free) + (not found.form.b.is_free) == copies
    assert found.form.permutation is None


def test_a_mapped_product_is_the_stock_product() -> None:
    x, w = layers.normal(SEQUENCE, WIDTH), layers.normal(BATCH, WIDTH, 8, seed=1)

    def mapped(dot: Any) -> Callable[..., jax.Array]:
        return jax.vmap(lambda x, w: dot(x, w, _contracting((1,), (0,))), in_axes=(None, 0))

    layers.assert_trained_as_well(
        mapped(pallas_gemm.dot_general), mapped(jax.lax.dot_general), x, w
    )


def test_a_model_with_the_hooks_runs_on_the_kernels() -> None:
    layer = nn.Dense(1024, dtype=jnp.bfloat16, dot_general=pallas_gemm.dot_general)
    x = jax.ShapeDtypeStruct((2, 1024, 1024), jnp.bfloat16)
    params = jax.eval_shape(layer.init, jax.random.key(0), x)

    def loss(params: Any, x: Any) -> jax.Array:
        return jnp.sum(layer.apply(params, x), dtype=jnp.float32)

    with pallas_gemm.target("h200"):
        explained = explain(jax.grad(loss, (0, 1)), params, x)
    assert [decision.implementation for decision in explained.products] == ["hopper"] * 3
    # Both gradients read the operands as they are stored.
    assert {decision.problem.layout for decision in explained.products} == {"NN", "NT", "TN"}
    assert explained.copies == ()
