"""`pallas_gemm.flax`: the parameters of the stock layers, and what follows the product fused."""

import dataclasses
import functools
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx as stock_nnx
from jax.sharding import AxisType

import pallas_gemm
from pallas_gemm import explain
from pallas_gemm.flax import linen, nnx
from tests import forks, layers

INPUTS, FEATURES = 16, 24
X = (2, 5, INPUTS)
ACTIVATIONS: dict[str | None, Callable[..., Any]] = {
    None: lambda x: x,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
}
KEY = jax.random.key(0)


def _jaxs(activation: str | None) -> Callable[..., Any]:
    return ACTIVATIONS[activation]


@pytest.mark.parametrize("activation", ["gelu", None])
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
def test_a_linen_dense_is_the_stock_layer_and_what_follows(
    activation: str | None, residual: bool
) -> None:
    bias = {"bias_init": nn.initializers.normal()}
    ours = linen.Dense(FEATURES, activation=activation, **bias)
    stock = nn.Dense(FEATURES, **bias)
    x, rest = layers.normal(*X), layers.normal(*X[:-1], FEATURES, seed=1)
    params = stock.init(KEY, x)
    layers.assert_same_tree(ours.init(KEY, x), params)

    def follows(params: Any, x: Any, rest: Any) -> Any:
        result = _jaxs(activation)(stock.apply(params, x))
        return result + rest if residual else result

    def fused(params: Any, x: Any, rest: Any) -> Any:
        return ours.apply(params, x, residual=rest if residual else None)

    layers.assert_trained_as_well(fused, follows, params, x, rest)
    # One product, and nothing else but what is in it.
    [decision] = explain(fused, params, x, rest).products
    epilogue = decision.problem.epilogue
    assert (epilogue.bias, epilogue.residual) == (True, residual)
    assert (epilogue.activation is None) == (activation is None)


@pytest.mark.parametrize(
    ("layer", "sizes"),
    [
        (nnx.Linear, {"out_features": FEATURES}),
        (nnx.GatedDense, {"out_features": FEATURES}),
        (nnx.Experts, {"hidden_features": FEATURES, "num_experts": 2, "top_k": 1}),
    ],
    ids=["Linear", "GatedDense", "Experts"],
)
def test_an_nnx_layer_refuses_an_unknown_activation_when_it_is_made(
    layer: Any, sizes: dict[str, int]
) -> None:
    with pytest.raises(ValueError, match="activation='geluu' is unknown; did you mean 'gelu'"):
        layer(INPUTS, activation="geluu", rngs=stock_nnx.Rngs(0), **sizes)


@pytest.mark.parametrize("activation", ["silu", None])
def test_an_nnx_linear_is_the_stock_layer_and_what_follows(activation: str | None) -> None:
    options: Any = {"bias_init": stock_nnx.initializers.normal()}
    ours = nnx.Linear(INPUTS, FEATURES, activation=activation, rngs=stock_nnx.Rngs(0), **options)
    stock = stock_nnx.Linear(INPUTS, FEATURES, rngs=stock_nnx.Rngs(0), **options)
    (our_graph, our_params), (graph, params) = map(stock_nnx.split, (ours, stock))
    layers.assert_same_tree(*map(stock_nnx.to_pure_dict, (our_params, params)))

    def follows(params: Any, x: Any, rest: Any) -> Any:
        return rest + _jaxs(activation)(stock_nnx.merge(graph, params)(x))

    def fused(params: Any, x: Any, rest: Any) -> Any:
        return stock_nnx.merge(our_graph, params)(x, residual=rest)

    x, rest = layers.normal(*X), layers.normal(*X[:-1], FEATURES, seed=1)
    layers.assert_trained_as_well(fused, follows, params, x, rest)


class Swiglu(nn.Module):
    """The stock block that `linen.GatedDense` is instead of."""

    names: tuple[str, str]
    bias: Mapping[str, Any]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = functools.partial(nn.Dense, FEATURES, **self.bias)
        gate, up = (dense(name=name)(x) for name in self.names)
        return nn.silu(gate) * up


@pytest.mark.parametrize("names", [("gate", "up"), ("w1", "w3")], ids=str)
def test_a_linen_gated_dense_is_two_stock_layers(names: tuple[str, str]) -> None:
    # Those of the second have a bias too.
    bias: dict[str, Any] = {"use_bias": "w1" in names, "bias_init": nn.initializers.normal()}
    ours = linen.GatedDense(FEATURES, gate_name=names[0], up_name=names[1], **bias)
    stock = Swiglu(names, bias)
    x, rest = layers.normal(*X), layers.normal(*X[:-1], FEATURES, seed=1)
    params = stock.init(KEY, x)
    layers.assert_same_tree(ours.init(KEY, x), params)

    def follows(params: Any, x: Any, rest: Any) -> Any:
        return stock.apply(params, x) + rest

    def fused(params: Any, x: Any, rest: Any) -> Any:
        return ours.apply(params, x, residual=rest)

    layers.assert_trained_as_well(fused, follows, params, x, rest)
    [decision] = explain(fused, params, x, rest).products
    epilogue = decision.problem.epilogue
    assert epilogue.gated
    assert epilogue.residual
    assert (epilogue.bias, epilogue.up_bias) == (bias["use_bias"],) * 2


class NnxSwiglu(stock_nnx.Module):
    """The stock block that `nnx.GatedDense` is instead of."""

    def __init__(self, rngs: stock_nnx.Rngs, **bias: Any) -> None:
        self.gate = stock_nnx.Linear(INPUTS, FEATURES, rngs=rngs, **bias)
        self.up = stock_nnx.Linear(INPUTS, FEATURES, rngs=rngs, **bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        return stock_nnx.gelu(self.gate(x)) * self.up(x)


@pytest.mark.parametrize("use_bias", [True, False], ids=["bias", ""])
def test_an_nnx_gated_dense_is_two_stock_layers(use_bias: bool) -> None:
    bias: dict[str, Any] = {"use_bias": use_bias, "bias_init": stock_nnx.initializers.normal()}
    ours = nnx.GatedDense(INPUTS, FEATURES, activation="gelu", rngs=stock_nnx.Rngs(0), **bias)
    stock = NnxSwiglu(stock_nnx.Rngs(0), **bias)
    (our_graph, our_params), (graph, params) = map(stock_nnx.split, (ours, stock))
    layers.assert_same_tree(*map(stock_nnx.to_pure_dict, (our_params, params)))
    layers.assert_trained_as_well(
        lambda params, x: stock_nnx.merge(our_graph, params)(x),
        lambda params, x: stock_nnx.merge(graph, params)(x),
        params,
        layers.normal(*X),
    )


HEADS = {"query": 24, "key": 8, "value": 16}


class Projected(nn.Module):
    """Stock layers of the same inputs, or `linen.projections`."""

    ours: bool
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        options: dict[str, Any] = {
            "use_bias": self.use_bias,
            "bias_init": nn.initializers.normal(),
        }
        if self.ours:
            return jnp.concatenate(linen.projections(x, HEADS, **options), -1)
        layers = [nn.Dense(size, name=name, **options) for name, size in HEADS.items()]
        return jnp.concatenate([layer(x) for layer in layers], -1)


@pytest.mark.parametrize("use_bias", [True, False], ids=["bias", ""])
def test_linen_projections_are_stock_layers(use_bias: bool) -> None:
    ours, stock = (Projected(flag, use_bias) for flag in (True, False))
    x = layers.normal(*X)
    params = stock.init(KEY, x)
    layers.assert_same_tree(ours.init(KEY, x), params)
    layers.assert_trained_as_well(ours.apply, stock.apply, params, x)

    def loss(x: Any) -> jax.Array:
        return jnp.sum(ours.apply(params, x))

    with pallas_gemm.target("h200"):
        text = str(explain(jax.grad(loss), x))
    # The gradient of the inputs; no kernel takes such small pieces at once.
    assert all(f"n={INPUTS} k={size} NT" in text for size in HEADS.values())


@pytest.mark.parametrize("kind", [stock_nnx.Linear, nnx.Linear], ids=["stock", "ours"])
def test_nnx_projections_are_the_layers_they_are_given(kind: Any) -> None:
    def made() -> stock_nnx.List:
        rngs = stock_nnx.Rngs(0)
        options: dict[str, Any] = {"bias_init": stock_nnx.initializers.normal(), "rngs": rngs}
        sizes = HEADS.values()
        return stock_nnx.List([kind(INPUTS, size, use_bias=size > 8, **options) for size in sizes])

    graph, params = stock_nnx.split(made())

    def ours(params: Any, x: Any) -> Any:
        return jnp.concatenate(nnx.projections(x, stock_nnx.merge(graph, params)), -1)

    def stock(params: Any, x: Any) -> Any:
        return jnp.concatenate([layer(x) for layer in stock_nnx.merge(graph, params)], -1)

    layers.assert_trained_as_well(ours, stock, params, layers.normal(*X))


def test_nnx_projections_refuse_what_they_would_not_do() -> None:
    rngs = stock_nnx.Rngs(0)
    stock = stock_nnx.Linear(2, 2, rngs=rngs)
    x = jnp.ones((3, 2))
    with pytest.raises(ValueError, match="layers must be one layer or more"):
        nnx.projections(x, [])
    with pytest.raises(ValueError, match=r"layers must agree in dtype, got None in layers\[0\]"):
        nnx.projections(x, [stock, stock_nnx.Linear(2, 2, dtype=jnp.bfloat16, rngs=rngs)])
    with pytest.raises(ValueError, match=r"layers must agree in schedule, got None .* 'raster'"):
        nnx.projections(x, [stock, nnx.Linear(2, 2, schedule="raster", rngs=rngs)])
    with pytest.raises(ValueError, match=r"layers\[1\] .* no activation, got activation='relu'"):
        nnx.projections(x, [stock, nnx.Linear(2, 2, activation="relu", rngs=rngs)])
    other = stock_nnx.Linear(2, 2, dot_general=lambda *x, **_: x[0], rngs=rngs)
    with pytest.raises(ValueError, match=r"layers\[0\] must have no dot_general of its own"):
        nnx.projections(x, [other])
    with pytest.raises(ValueError, match="features must name one layer or more"):
        linen.projections(x, {})
    with pytest.raises(TypeError, match="layers must be a list of layers, got dict"):
        nnx.projections(x, {"query": stock})


SIZES = {
    "linen.Dense": lambda size: linen.Dense(size).init(KEY, jnp.ones(X)),
    "linen.GatedDense": lambda size: linen.GatedDense(size).init(KEY, jnp.ones(X)),
    "linen.QuantizedDense": lambda size: linen.QuantizedDense(size).init(KEY, jnp.ones(X)),
    "linen.Experts": lambda size: linen.Experts(2, size).init(KEY, jnp.ones(X)),
    "nnx.Linear": lambda size: nnx.Linear(2, size, rngs=stock_nnx.Rngs(0)),
    "nnx.GatedDense": lambda size: nnx.GatedDense(size, 2, rngs=stock_nnx.Rngs(0)),
    "nnx.Experts": lambda size: nnx.Experts(
        2, num_experts=2, hidden_features=size, rngs=stock_nnx.Rngs(0)
    ),
}


@pytest.mark.parametrize("make", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("size", [-1, 2.5])
def test_a_size_that_is_none_is_named(make: Callable[[Any], Any], size: Any) -> None:
    with pytest.raises(ValueError, match=f"features must be an integer of at least 0, got {size}"):
        make(size)


def test_a_type_that_is_none_is_named() -> None:
    with pytest.raises(TypeError, match="param_dtype='bf17' is no type of numbers"):
        linen.Dense(2, param_dtype="bf17").init(KEY, jnp.ones(X))
    with pytest.raises(TypeError, match=r"^dtype='bf17' is no type of numbers"):
        nnx.Linear(2, 2, dtype="bf17", rngs=stock_nnx.Rngs(0))


def test_checkpoints_load_both_ways() -> None:
    x = layers.normal(*X)
    ours, stock = linen.Dense(FEATURES), nn.Dense(FEATURES)
    saved = flax.serialization.to_bytes(stock.init(jax.random.key(1), x))
    loaded = flax.serialization.from_bytes(ours.init(KEY, x), saved)
    layers.assert_same_tree(loaded, stock.init(jax.random.key(1), x))
    saved = flax.serialization.to_bytes(loaded)
    layers.assert_same_tree(flax.serialization.from_bytes(stock.init(KEY, x), saved), loaded)
    # nnx: a state is put into the other layer.
    our_layer, layer = (
        cls(INPUTS, FEATURES, rngs=stock_nnx.Rngs(seed))
        for seed, cls in enumerate((nnx.Linear, stock_nnx.Linear))
    )
    stock_nnx.update(our_layer, stock_nnx.state(layer))
    layers.assert_same_tree(*map(stock_nnx.state, (our_layer, layer)))
    stock_nnx.update(layer, stock_nnx.state(our_layer))


# A layer's fields, and the type of its input.
TYPES: list[tuple[dict[str, Any], Any]] = [
    ({}, jnp.float32),
    ({"dtype": jnp.bfloat16}, jnp.float32),
    ({"param_dtype": jnp.bfloat16}, jnp.bfloat16),
    ({"dtype": jnp.bfloat16, "param_dtype": jnp.float16}, jnp.bfloat16),
    ({"dtype": jnp.float16, "use_bias": False}, jnp.float32),
    ({"precision": "highest"}, jnp.float32),
]


@pytest.mark.parametrize(("fields", "dtype"), TYPES, ids=str)
def test_types_are_those_of_the_stock_layer(fields: dict[str, Any], dtype: Any) -> None:
    x = jax.ShapeDtypeStruct(X, dtype)

    def kind(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)

    for ours, stock in (
        (linen.Dense(FEATURES, **fields), nn.Dense(FEATURES, **fields)),
        (
            linen.Dense(FEATURES, promote_dtype=_wide, **fields),
            nn.Dense(FEATURES, promote_dtype=_wide, **fields),
        ),
    ):
        assert kind(jax.eval_shape(ours.init_with_output, KEY, x)) == kind(
            jax.eval_shape(stock.init_with_output, KEY, x)
        )
    for cls, stock_cls in ((nnx.Linear, stock_nnx.Linear), (nnx.Dense, stock_nnx.Linear)):
        ours, stock = (
            make(INPUTS, FEATURES, rngs=stock_nnx.Rngs(0), **fields) for make in (cls, stock_cls)
        )
        assert kind(stock_nnx.state(ours)) == kind(stock_nnx.state(stock))
        assert kind(jax.eval_shape(lambda x, f=ours: f(x), x)) == kind(
            jax.eval_shape(lambda x, f=stock: f(x), x)
        )


def _wide(*operands: Any, dtype: Any) -> Any:
    """A `promote_dtype` of one's own."""
    return tuple(None if x is None else x.astype(jnp.float32) for x in operands)


def test_a_residual_promotes_as_an_addition_does() -> None:
    layer = nnx.Linear(INPUTS, FEATURES, dtype=jnp.bfloat16, rngs=stock_nnx.Rngs(0))
    x = jax.ShapeDtypeStruct(X, jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        for dtype in (jnp.bfloat16, jnp.float32):
            residual = jax.ShapeDtypeStruct((*X[:-1], FEATURES), dtype)
            result = jax.eval_shape(lambda x, r: layer(x, residual=r), x, residual)
            assert result.dtype == dtype
    preferring = nnx.Linear(
        INPUTS,
        FEATURES,
        dtype=jnp.bfloat16,
        use_bias=False,
        preferred_element_type=jnp.float32,
        rngs=stock_nnx.Rngs(0),
    )
    assert jax.eval_shape(preferring, x).dtype == jnp.float32


def test_a_bias_promotes_as_an_addition_does() -> None:
    x = jax.ShapeDtypeStruct(X, jnp.float32)
    for cls in (stock_nnx.Linear, nnx.Linear, nnx.GatedDense):
        for use_bias, dtype in ((False, jnp.bfloat16), (True, jnp.float32)):
            how: Any = {"use_bias": use_bias, "preferred_element_type": jnp.bfloat16}
            layer = cls(INPUTS, FEATURES, rngs=stock_nnx.Rngs(0), **how)
            with jax.numpy_dtype_promotion("standard"):
                assert jax.eval_shape(layer, x).dtype == dtype


def test_projections_have_the_types_of_their_layers() -> None:
    x, how = layers.normal(4, INPUTS), {"preferred_element_type": jnp.bfloat16}
    every = [
        nnx.Linear(INPUTS, FEATURES, rngs=stock_nnx.Rngs(0), use_bias=use_bias, **how)
        for use_bias in (True, False)
    ]
    with jax.numpy_dtype_promotion("standard"):
        for given in (every[:1] * 2, every[1:] * 2, every):
            for found, layer in zip(nnx.projections(x, given), given, strict=True):
                expected = layer(x)
                assert found.dtype == expected.dtype
                np.testing.assert_array_equal(found, expected)


def test_metadata_of_the_parameters_is_kept() -> None:
    split = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    x = jnp.ones(X)
    for layer in (linen.Dense(FEATURES, kernel_init=split), nn.Dense(FEATURES, kernel_init=split)):
        params = layer.init(KEY, x)
        assert nn.get_partition_spec(params)["params"]["kernel"] == jax.P(None, "model")
        assert jnp.shape(layer.apply(params, x)) == (*X[:-1], FEATURES)
    gated = linen.GatedDense(FEATURES, kernel_init=split).init(KEY, x)
    specs = nn.get_partition_spec(gated)["params"]
    assert specs["gate"]["kernel"] == specs["up"]["kernel"] == jax.P(None, "model")


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_layers_run_on_a_mesh(kind: AxisType) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    metadata: dict[str, Any] = {"kernel_metadata": {"out_sharding": (None, "model")}}
    bias: dict[str, Any] = {
        "bias_init": stock_nnx.initializers.normal(),
        "bias_metadata": {"out_sharding": ("model",)},
    }
    x = layers.normal(4, INPUTS)
    with jax.set_mesh(mesh):
        ours, stock = (
            cls(INPUTS, FEATURES, rngs=stock_nnx.Rngs(0), **metadata, **bias)
            for cls in (nnx.Linear, stock_nnx.Linear)
        )
        gated = nnx.GatedDense(INPUTS, FEATURES, rngs=stock_nnx.Rngs(0), **metadata)
        assert ours.kernel[...].sharding == stock.kernel[...].sharding
        split = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
        wanted = jax.P("data", "model") if kind is AxisType.Explicit else None
        results = [
            jax.jit(functools.partial(layer, out_sharding=wanted))(split) for layer in (ours, stock)
        ]
        if wanted is not None:
            assert [jax.typeof(result).sharding.spec for result in results] == [wanted] * 2
        gate = jax.jit(functools.partial(gated, out_sharding=wanted))(split)
        assert gate.shape == (4, FEATURES)
    np.testing.assert_array_equal(*results)


def test_arguments_that_have_no_meaning_are_refused() -> None:
    rngs = stock_nnx.Rngs(0)
    with pytest.raises(ValueError, match=r"dot_general=.* has no meaning for Linear"):
        nnx.Linear(2, 2, dot_general=jax.lax.dot_general, rngs=rngs)
    with pytest.raises(ValueError, match=r"dot_general_cls=.* has no meaning for Dense"):
        linen.Dense(2, dot_general_cls=lambda: jax.lax.dot_general).init(KEY, jnp.ones((2, 2)))
    with pytest.raises(ValueError, match=r"dot_general=.* has no meaning for Dense"):
        linen.Dense(2, dot_general=jax.lax.dot_general).init(KEY, jnp.ones((2, 2)))


HOW: dict[str, Any] = {
    "schedule": "hilbert",
    "config": pallas_gemm.HopperConfig(tile=(128, 128), late_store=False),
    "implementation": "hopper",
}
NARROW: dict[str, Any] = {"dtype": jnp.bfloat16, **HOW}


def _linen_layers() -> dict[str, tuple[Any, ...]]:
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> Any:
            return linen.projections(x, {"first": 512, "second": 256}, **NARROW)

    kinds = {
        "dense": linen.Dense(512, **NARROW),
        "gated": linen.GatedDense(512, **NARROW),
        "projections": Two(),
    }
    x = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    return {
        name: (layer.apply, jax.eval_shape(layer.init, KEY, x)) for name, layer in kinds.items()
    }


def _nnx_layers() -> dict[str, tuple[Any, ...]]:
    def linear() -> nnx.Linear:
        return nnx.Linear(256, 512, rngs=stock_nnx.Rngs(0), **NARROW)

    return {
        "linear": (linear(),),
        "gated": (nnx.GatedDense(256, 512, rngs=stock_nnx.Rngs(0), **NARROW),),
        "projections": (lambda x: nnx.projections(x, [linear(), linear()]),),
    }


def test_what_is_named_reaches_each_product() -> None:
    x = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    for made in (_linen_layers(), _nnx_layers()):
        for name, layer in made.items():
            with pallas_gemm.target("h200"):
                products = explain(*layer, x).products
            assert len(products) == (2 if name == "projections" else 1)
            for decision in products:
                assert decision.implementation == "hopper"
                assert decision.plan is not None
                assert decision.plan.config == dataclasses.replace(
                    HOW["config"], schedule="hilbert"
                )


def test_types_may_be_named() -> None:
    x = jax.ShapeDtypeStruct(X, jnp.bfloat16)
    fields = {"dtype": "f16", "param_dtype": "bf16"}
    for layer in (linen.Dense(FEATURES, **fields), linen.GatedDense(FEATURES, **fields)):
        result, params = jax.eval_shape(layer.init_with_output, KEY, x)
        assert result.dtype == jnp.float16
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(jnp.bfloat16)}
    for make in (nnx.Linear, nnx.GatedDense):
        made = make(
            INPUTS, FEATURES, preferred_element_type="f32", rngs=stock_nnx.Rngs(0), **fields
        )
        assert jax.eval_shape(made, x).dtype == jnp.float32
        leaves = jax.tree.leaves(stock_nnx.state(made))
        assert {leaf.dtype for leaf in leaves} == {np.dtype(jnp.bfloat16)}


def test_the_layers_of_a_model_run_on_the_kernels() -> None:
    layer = linen.GatedDense(4096, dtype=jnp.bfloat16)
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    params = jax.eval_shape(layer.init, KEY, x)
    with pallas_gemm.target("h200"):
        [decision] = explain(layer.apply, params, x).products
    assert decision.implementation == "hopper"
    assert decision.plan is not None
    assert decision.plan.realigned.unfused is None


@pytest.mark.gpu("hopper")
def test_on_a_gpu_the_kernels_train_as_the_stock_layer_does() -> None:
    bias = {"bias_init": nn.initializers.normal()}
    ours, stock = linen.Dense(1024, **bias), nn.Dense(1024, **bias)
    x = layers.normal(2, 512, 1024)
    params = stock.init(KEY, x)

    def fused(params: Any, x: Any) -> Any:
        return ours.apply(params, x, residual=x)

    def follows(params: Any, x: Any) -> Any:
        return x + stock.apply(params, x)

    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, x))
    assert explain(fused, *narrow).implementation == "hopper"
    layers.assert_trained_as_well(fused, follows, params, x)


def _in_another_process(code: str) -> subprocess.CompletedProcess[str]:
    return forks.of_session().run([sys.executable, "-c", code])


def test_importing_the_op_imports_no_flax() -> None:
    done = _in_another_process(
        "import sys, pallas_gemm; print([m for m in sys.modules if m.split('.')[0] == 'flax'])"
    )
    assert done.stdout == "[]\n", done.stderr


def test_without_flax_the_extra_is_named() -> None:
    done = _in_another_process(
        "import sys; sys.modules['flax'] = None\nimport pallas_gemm\nimport pallas_gemm.flax"
    )
    message = done.stderr.strip().splitlines()[-1]
    assert message == "ImportError: pallas_gemm.flax needs Flax: pip install '.[flax]'"
    assert "During handling" not in done.stderr
