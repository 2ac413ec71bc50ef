"""Layers of experts: what a dense program of the same parameters computes, of linen and of nnx."""

import functools
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx as stock_nnx

import pallas_gemm
from pallas_gemm import explain
from pallas_gemm.flax import linen, nnx
from pallas_gemm.layers import fused, routed
from tests import layers, reference

EXPERTS, INPUTS, HIDDEN, TOP_K = 4, 16, 24, 2
X = (2, 9, INPUTS)
SHAPES = {
    "gate": (EXPERTS, INPUTS, HIDDEN),
    "up": (EXPERTS, INPUTS, HIDDEN),
    "down": (EXPERTS, HIDDEN, INPUTS),
}
SIZES: dict[str, int] = {"num_experts": EXPERTS, "hidden_features": HIDDEN}
KEY = jax.random.key(0)


def _by_logits(logits: jax.Array, top_k: int) -> routed.Choice:
    """Weighs the experts of the largest logits by these, so that integers stay integers."""
    return routed.Choice(*jax.lax.top_k(logits, top_k))


def _dense(params: Any, x: jax.Array) -> jax.Array:
    """Every token by every expert, of which those that it chose count."""
    kernels = {name: layer["kernel"] for name, layer in params.items()}
    best, chosen = jax.lax.top_k(jnp.einsum("bsd,de->bse", x, kernels["router"]), TOP_K)
    counts = best[..., None] * jax.nn.one_hot(chosen, EXPERTS)
    gate, up = (jnp.einsum("bsd,edh->bseh", x, kernels[name]) for name in ("gate", "up"))
    each = jnp.einsum("bseh,ehd->bsed", jax.nn.relu(gate) * up, kernels["down"])
    return (each * counts.sum(2)[..., None]).sum(2)


@functools.cache
def _initial() -> Any:
    """The parameters that a layer begins with."""
    layer = nnx.Experts(INPUTS, **SIZES, rngs=stock_nnx.Rngs(0))
    return stock_nnx.to_pure_dict(stock_nnx.state(layer))


def test_parameters_are_named_as_those_of_stock_layers_in_linen_and_nnx() -> None:
    x, initial = jax.ShapeDtypeStruct(X, jnp.float32), _initial()
    router = jax.eval_shape(nn.Dense(EXPERTS, use_bias=False).init, KEY, x)["params"]
    layers.assert_same_structure(initial["router"], router)
    assert {name: initial[name]["kernel"].shape for name in SHAPES} == SHAPES
    params = jax.eval_shape(linen.Experts(**SIZES).init, KEY, x)["params"]
    layers.assert_same_structure(params, initial)
    # As of a stock layer of one expert: an expert more makes no input smaller.
    for name, (_, inputs, _) in SHAPES.items():
        assert abs(initial[name]["kernel"].std() * np.sqrt(inputs) - 1) < 0.1


def test_results_and_gradients_are_those_of_all_experts_of_all_tokens() -> None:
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: reference.integers(rng, x.shape, x.dtype), _initial())
    x, g = (reference.integers(rng, X, jnp.float32) for _ in range(2))
    options: Any = {"routing": _by_logits, "activation": "relu", **SIZES}
    layer = nnx.Experts(INPUTS, **options, rngs=stock_nnx.Rngs(0))

    def by_linen(params: Any, x: Any) -> Any:
        return linen.Experts(**options).apply({"params": params}, x)

    def by_nnx(params: Any, x: Any) -> Any:
        graph, state = stock_nnx.split(layer)
        stock_nnx.replace_by_pure_dict(state, params)
        return stock_nnx.merge(graph, state)(x)

    @jax.jit
    def all_ways(params: Any, x: Any, g: Any) -> Any:
        return [(f(params, x), jax.vjp(f, params, x)[1](g)) for f in (by_linen, by_nnx, _dense)]

    *ours, dense = all_ways(params, x, g)
    for found in ours:
        layers.assert_same_tree(found, dense)


def test_weights_are_the_softmax_of_the_largest_logits() -> None:
    logits = jnp.array([[1.0, 5.0, 2.0, 5.0], [0.0, -300.0, 200.0, -400.0]])
    weights, experts = routed.softmax_of_best(logits, 2)
    np.testing.assert_array_equal(experts, [[1, 3], [2, 0]])
    np.testing.assert_array_equal(weights, [[0.5, 0.5], [1, 0]])


def test_what_experts_return_is_weighed_and_added_up_in_float32() -> None:
    # In bfloat16 both weights have the same size, and the sum is zero; so has float16.
    weights = jnp.array([[1 + 2.0**-12, -1.0]])
    choice = routed.Choice(weights, jnp.array([[1, 0]]))
    for dtype in (jnp.bfloat16, jnp.float16):
        total = routed.apply(jnp.ones((1, 3), dtype), choice, 2, lambda rows, _: rows)
        np.testing.assert_array_equal(total, np.full((1, 3), 2.0**-12, dtype), strict=True)
    # float64 is not narrowed either.
    with jax.enable_x64(True):
        choice = routed.Choice(jnp.array([[1 + 2.0**-40, -1.0]]), choice.experts)
        total = routed.apply(jnp.ones((1, 3), jnp.float64), choice, 2, lambda rows, _: rows)
        np.testing.assert_array_equal(total, np.full((1, 3), 2.0**-40), strict=True)


def _to_the_last(logits: jax.Array, top_k: int) -> routed.Choice:
    """Sends every token to the last expert, and to it alone."""
    shape = (logits.shape[0], top_k)
    return routed.Choice(jnp.ones(shape), jnp.full(shape, logits.shape[1] - 1))


def test_one_expert_may_get_all_tokens_and_none_is_dropped() -> None:
    x = layers.normal(*X)
    model = linen.Experts(**SIZES, routing=_to_the_last, activation=None, top_k=1)

    @jax.jit
    def both(params: Any, x: jax.Array) -> Any:
        gate, up, down = (params[name]["kernel"][-1] for name in SHAPES)
        return model.apply({"params": params}, x), ((x @ gate) * (x @ up)) @ down

    np.testing.assert_array_equal(*both(_initial(), x))


def test_the_router_is_in_float32_and_the_rest_as_told() -> None:
    options: Any = {"dtype": "bf16", "param_dtype": "bf16"}
    model, x = linen.Experts(**SIZES, **options), jnp.zeros(X, jnp.bfloat16)
    params = jax.eval_shape(model.init, KEY, x)
    types = {name: layer["kernel"].dtype for name, layer in params["params"].items()}
    assert types == dict.fromkeys(SHAPES, jnp.bfloat16) | {"router": jnp.float32}
    results = jax.eval_shape(lambda *given: model.apply(*given, with_logits=True), params, x)
    assert [result.dtype for result in results] == [jnp.bfloat16, jnp.float32]
    ours = nnx.Experts(INPUTS, **SIZES, **options, rngs=stock_nnx.Rngs(0))
    assert {name: getattr(ours, name).kernel.dtype for name in types} == types
    both = jax.eval_shape(functools.partial(ours, with_logits=True), x)
    assert [result.dtype for result in both] == [jnp.bfloat16, jnp.float32]


def test_kernels_may_be_split_by_expert_over_a_mesh() -> None:
    split: Any = nn.with_partitioning(routed.KERNEL_INIT, ("expert", None, "model"))
    params = jax.eval_shape(linen.Experts(**SIZES, kernel_init=split).init, KEY, jnp.ones(X))
    specs = flax.core.unfreeze(nn.get_partition_spec(params))["params"]
    named = jax.P("expert", None, "model")
    assert specs == {name: {"kernel": named} for name in SHAPES} | {"router": {"kernel": jax.P()}}


def test_all_products_of_a_training_step_are_the_kernels() -> None:
    model: Any = linen.Experts(
        num_experts=8, hidden_features=14336, dtype="bf16", param_dtype="bf16"
    )
    x = jax.ShapeDtypeStruct((1, 8192, 4096), jnp.bfloat16)
    params = jax.eval_shape(model.init, KEY, x)
    with pallas_gemm.target("h200"):
        explained = explain(
            jax.grad(lambda *given: model.apply(*given).sum(dtype=jnp.float32), (0, 1)), params, x
        )
    _, pull = jax.eval_shape(lambda *given: jax.vjp(model.apply, *given), params, x)
    kept = [leaf for leaf in jax.tree.leaves(pull) if 2 * 8192 in leaf.shape and leaf.ndim == 2]
    # The rows by expert, what they are by gate and up, hidden ones and results: none in float32.
    assert {leaf.dtype for leaf in kept} == {jnp.dtype(jnp.bfloat16)}
    assert sorted(leaf.shape[1] for leaf in kept) == [4096] * 2 + [14336] * 3
    grouped = [product for product in explained.products if product.problem.groups]
    sums = [product for product in explained.products if product.problem.ragged_k]
    # Gate, up and down; of each the rows' gradient and the kernels'.
    assert (len(grouped), len(sums)) == (6, 3)
    assert {product.implementation for product in (*grouped, *sums)} == {"hopper"}


def test_there_is_one_expert_at_least() -> None:
    with pytest.raises(ValueError, match="num_experts must be an integer of at least 1, got 0"):
        linen.Experts(**SIZES | {"num_experts": 0}).init(KEY, jnp.ones(X))
    with pytest.raises(ValueError, match=r"at least 1, got 2\.5"):
        linen.Experts(**SIZES | {"num_experts": 2.5}).init(KEY, jnp.ones(X))
    one = linen.Experts(**SIZES | {"num_experts": 1, "top_k": 1})
    params: Any = jax.eval_shape(one.init, KEY, jnp.ones(X))["params"]
    assert params["gate"]["kernel"].shape[0] == 1


def test_each_product_of_experts_has_the_precision() -> None:
    rows, kernels, sizes = jnp.ones((4, 8)), [jnp.ones((2, 8, 8))] * 3, jnp.array([1, 3])
    program = jax.make_jaxpr(routed.gated(kernels, "relu", "highest"))(rows, sizes)
    calls = [x.params["call"] for x in program.eqns if "call" in x.params]
    assert [call.precision for call in calls] == [(jax.lax.Precision.HIGHEST,) * 2] * 2


@pytest.mark.parametrize("top_k", [0, EXPERTS + 1, 1.5, "2"])
def test_a_token_has_one_expert_at_least_and_all_at_most(top_k: Any) -> None:
    message = f"top_k must be an integer from 1 to num_experts, which is {EXPERTS}, got {top_k!r}"
    with pytest.raises(ValueError, match=message):
        nnx.Experts(INPUTS, **SIZES, top_k=top_k, rngs=stock_nnx.Rngs(0))
    with pytest.raises(ValueError, match=message):
        linen.Experts(**SIZES, top_k=top_k).init(KEY, jnp.ones(X))


def _routed(routing: Any, experts: int = EXPERTS) -> jax.Array:
    how = SIZES | {"num_experts": experts, "rngs": stock_nnx.Rngs(0)}
    return nnx.Experts(INPUTS, **how, routing=routing)(jnp.ones((6, INPUTS)))


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (None, "NoneType"),
        (jnp.ones((6, 2)), r"float32\[6, 2\]"),
        # The wrong way round.
        ((jnp.zeros((6, 2), int), jnp.ones((6, 2))), r"int32\[6, 2\] and float32\[6, 2\]"),
        ((jnp.ones(6), jnp.zeros(6, int)), r"float32\[6\] and int32\[6\]"),
        ((jnp.ones((3, 2)), jnp.zeros((3, 2), int)), r"float32\[3, 2\] and int32\[3, 2\]"),
        ((jnp.ones((6, 1)), jnp.zeros((6, 2), int)), r"float32\[6, 1\] and int32\[6, 2\]"),
    ],
)
def test_what_a_routing_function_may_not_return_is_named(returned: Any, got: str) -> None:
    message = (
        r"^routing must return weights \(floats\) and numbers of experts \(integers\), both"
        r" \[6, 2\], got "
    )
    with pytest.raises(TypeError, match=f"{message}{got}$"):
        _routed(lambda *_: returned)
    with pytest.raises(TypeError, match=r"routing must be a function .* got 'softmax'"):
        _routed("softmax")


def test_numbers_of_experts_may_be_of_a_type_that_has_not_all() -> None:
    def chosen(dtype: Any) -> jax.Array:
        return _routed(lambda *_: (jnp.ones((6, 2)), jnp.array([[5, 7]] * 6, dtype)), 300)

    np.testing.assert_array_equal(chosen(jnp.uint8), chosen(jnp.int32))


@pytest.mark.parametrize("name", ["in_features", "hidden_features"])
def test_no_size_is_less_than_nothing(name: str) -> None:
    sizes = {"in_features": INPUTS, **SIZES, name: -1}
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 0, got -1"):
        nnx.Experts(**sizes, rngs=stock_nnx.Rngs(0))
    fused.check_sizes(**{name: 0})


def test_the_router_begins_as_it_is_told() -> None:
    layer = linen.Experts(**SIZES, router_init=nn.initializers.ones)
    params = layer.init(KEY, jnp.ones(X))["params"]
    np.testing.assert_array_equal(params["router"]["kernel"], jnp.ones((INPUTS, EXPERTS)))
