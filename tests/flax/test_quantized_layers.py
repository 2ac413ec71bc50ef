"""Layers of 8 bits: beside stock layers, and beside Flax's own of 8-bit floats."""

from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx as stock_nnx
from flax.linen import fp8_ops
from jax.sharding import AxisType

import pallas_gemm
from pallas_gemm import Cast, Recipe, explain
from pallas_gemm.flax import linen, nnx
from pallas_gemm.layers import per_channel
from tests import layers, reference

INPUTS, FEATURES, ROWS = 16, 24, (2, 5)
KEY = jax.random.key(0)
BIAS: dict[str, Any] = {"bias_init": nn.initializers.normal()}


def _integers(*shape: int, seed: int = 0) -> jax.Array:
    return reference.integers(np.random.default_rng(seed), shape, jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn], ids=str)
def test_a_quantized_row_is_nearest_to_what_it_stands_for(dtype: Any) -> None:
    x = layers.normal(7, 33).at[3].set(0)
    values, scale = per_channel.quantize(x, dtype)
    assert (values.dtype, scale.dtype, scale.shape) == (dtype, jnp.float32, (7,))
    wide = reference.wide(values) * reference.wide(scale)[:, None]
    if dtype == jnp.int8:
        assert np.all(np.abs(wide - reference.wide(x)) <= 0.5001 * reference.wide(scale)[:, None])
        assert np.all(np.abs(reference.wide(values)).max(1) == [127, 127, 127, 0, 127, 127, 127])
    else:
        # Half of the last of three bits, or of the smallest number's step.
        step = np.maximum(np.abs(reference.wide(x)) / 16, reference.wide(scale)[:, None] / 1024)
        assert np.all(np.abs(wide - reference.wide(x)) <= 1.001 * step)
        assert np.all(np.abs(reference.wide(values)).max(1) == [448, 448, 448, 0, 448, 448, 448])
    broken = per_channel.quantize(x.at[1, 1].set(jnp.nan), dtype)
    assert np.isnan(broken.scale[1])
    assert np.isfinite(np.delete(broken.scale, 1)).all()


def _of_127(x: jax.Array) -> jax.Array:
    """Rows of integers whose largest is 127: quantized, they are what they were."""
    return x.at[..., 0].set(127)


@pytest.mark.parametrize("activation", ["relu", None])
def test_a_quantized_dense_is_the_stock_layer_where_nothing_is_rounded(
    activation: str | None,
) -> None:
    stock = nn.Dense(FEATURES, bias_init=nn.initializers.ones)
    ours = linen.QuantizedDense(FEATURES, activation=activation)
    x, rest = _of_127(_integers(*ROWS, INPUTS)), _integers(*ROWS, FEATURES, seed=1)
    trained = stock.init(KEY, x)
    trained["params"]["kernel"] = _of_127(_integers(INPUTS, FEATURES, seed=2).T).T
    abstract = jax.eval_shape(ours.init, KEY, x)
    variables = linen.quantized(abstract, trained)
    layers.assert_same_structure(abstract, variables)
    assert variables["quantized"]["kernel"]["values"].shape == (FEATURES, INPUTS)

    def follows(params: Any, x: Any, rest: Any) -> Any:
        return (jax.nn.relu if activation else jnp.positive)(stock.apply(params, x)) + rest

    def fused(bias: Any, x: Any, rest: Any) -> Any:
        return ours.apply(variables | {"params": bias}, x, residual=rest)

    @jax.jit
    def both(x: Any, rest: Any, g: Any) -> Any:
        alone = fused(variables["params"], x[0, 0], rest[0, 0])
        result, pull = jax.vjp(fused, variables["params"], x, rest)
        expected, stock_pull = jax.vjp(follows, trained, x, rest)
        return alone, (result, *pull(g)), (expected, *stock_pull(g))

    alone, ours_, stocks = both(x, rest, _integers(*ROWS, FEATURES, seed=3))
    reference.assert_exact(ours_[0], reference.wide(stocks[0]))
    np.testing.assert_array_equal(alone, ours_[0][0, 0])
    own = {"bias": stocks[1]["params"]["bias"]}
    jax.tree.map(np.testing.assert_array_equal, ours_[1:], (own, *stocks[2:]))


@pytest.mark.parametrize("dtype", ["s8", "e4m3"])
def test_quantized_layers_err_as_little_as_their_types_do(dtype: str) -> None:
    stock = stock_nnx.Linear(128, 64, rngs=stock_nnx.Rngs(0))
    ours = nnx.QuantizedLinear.of(stock, dtype, activation="gelu")
    x = layers.normal(32, 128)

    def both(f: Any) -> Any:
        result, pull = jax.vjp(f, x)
        return result, pull(x[:, :64])[0]

    # The result, and the gradient of the inputs. Measured: 0.010 and 0.036; 0.011 and 0.034.
    exact = both(lambda x: jax.nn.gelu(stock(x)))
    for value, right in zip(jax.jit(lambda: both(ours))(), exact, strict=True):
        error = np.linalg.norm(value - right) / np.linalg.norm(right)
        assert 0 < error < (0.02 if dtype == "s8" else 0.07)
    assert [type(leaf) for leaf in (ours.kernel_values, ours.kernel_scale)] == [nnx.Quantized] * 2
    # The weights are no parameters, and the layer's own initial values are those that are given.
    assert list(stock_nnx.to_pure_dict(stock_nnx.state(ours, stock_nnx.Param))) == ["bias"]
    same = nnx.QuantizedLinear(
        128, 64, quantized_dtype=dtype, activation="gelu", rngs=stock_nnx.Rngs(0)
    )
    layers.assert_same_tree(*map(stock_nnx.state, (same, ours)))


class Stock(nn.Module):
    """Two layers, of which one stays as it is."""

    kinds: tuple[Any, Any]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        up, down = self.kinds
        return down(8, use_bias=False, name="down")(up(FEATURES, name="up")(x))


def test_a_trained_model_is_quantized_where_it_has_quantized_layers() -> None:
    x = _integers(3, INPUTS)
    trained = Stock((nn.Dense, nn.Dense)).init(KEY, x)
    model = Stock((linen.QuantizedDense, nn.Dense))
    abstract = jax.eval_shape(model.init, KEY, x)
    variables = linen.quantized(abstract, trained)
    layers.assert_same_structure(abstract, variables)
    np.testing.assert_array_equal(
        variables["params"]["down"]["kernel"], trained["params"]["down"]["kernel"]
    )
    assert jnp.shape(model.apply(variables, x)) == (3, 8)
    other = Stock((linen.QuantizedDense, linen.QuantizedDense))
    with pytest.raises(ValueError, match=r"down/kernel must be a kernel of shape \[24, 8\]"):
        linen.quantized(
            jax.eval_shape(other.init, KEY, x), {"params": {"up": trained["params"]["up"]}}
        )


def test_delayed_scaling_is_flaxs() -> None:
    stock = nn.Dense(FEATURES, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp, **BIAS)
    ours = linen.Fp8Dense(FEATURES, scaling="delayed", **BIAS)
    x = _integers(*ROWS, INPUTS)
    variables: Any = stock.init(KEY, x)
    layers.assert_same_tree(ours.init(KEY, x), variables)
    # Scales that are powers of two, and numbers that 8 bits hold: nothing is rounded.
    states = variables["_overwrite_with_gradient"]["Fp8DirectDotGeneralOp_0"]
    for tensor, amax in (("input", 448 / 8), ("kernel", 448 / 4), ("output_grad", 57344 / 2)):
        history = states[f"{tensor}_amax_history"]
        states[f"{tensor}_amax_history"] = history.at[5].set(amax)
    variables["params"] = {
        "kernel": _integers(INPUTS, FEATURES, seed=1),
        "bias": jnp.ones(FEATURES),
    }
    g = _integers(*ROWS, FEATURES, seed=2)
    (result, pulled), (expected, stock_pulled) = (
        jax.jit(lambda v, x, f=f: (f(v, x), jax.vjp(f, v, x)[1](g)))(variables, x)
        for f in (ours.apply, stock.apply)
    )
    np.testing.assert_array_equal(result, expected)
    jax.tree.map(np.testing.assert_array_equal, pulled, stock_pulled)
    new = pulled[0]["_overwrite_with_gradient"]["Fp8DirectDotGeneralOp_0"]
    assert [float(new[f"{t}_scale"][0]) for t in ("input", "kernel", "output_grad")] == [
        *(0.125, 0.25, 0.5)
    ]


HOW: Any = ({"scaling": "current"}, {"scaling": "delayed"}, {"recipe": "blocks"})


@pytest.mark.parametrize("how", HOW)
def test_zeros_stay_zeros_in_8_bits_and_their_gradients_are_finite(how: Any) -> None:
    layer = nnx.Fp8Linear(INPUTS, FEATURES, **how, rngs=stock_nnx.Rngs(0))
    result, pull = jax.vjp(layer, jnp.zeros((3, INPUTS)))
    np.testing.assert_array_equal(result, jnp.zeros((3, FEATURES)))
    assert np.isfinite(pull(result + 1)[0]).all()
    np.testing.assert_array_equal(pull(result)[0], jnp.zeros((3, INPUTS)))


def test_the_residual_widens_the_result_of_8_bits_and_no_gradient() -> None:
    # Of sevens nothing is rounded: the scales are powers of two.
    eye: Any = 7 * np.eye(INPUTS, FEATURES)
    layer = linen.Fp8Dense(FEATURES, dtype="bf16", use_bias=False, kernel_init=lambda *_: eye)
    x, rest = _integers(4, INPUTS).at[:, 0].set(7), _integers(4, FEATURES, seed=1) + 2.0**-10
    exact, x = x @ eye + rest, x.astype(jnp.bfloat16)
    variables = layer.init(KEY, x)
    f = jax.jit(lambda x, rest: layer.apply(variables, x, residual=rest))
    with jax.numpy_dtype_promotion("standard"):
        result, pull = jax.vjp(f, x, rest)
    np.testing.assert_array_equal(result, exact, strict=True)
    assert [g.dtype for g in pull(result)] == [jnp.bfloat16, jnp.float32]


@pytest.mark.parametrize("how", HOW)
def test_fp8_layers_of_both_interfaces_agree(how: Any) -> None:
    options: dict[str, Any] = {**how, "activation": "gelu"}
    x, rest = layers.normal(*ROWS, INPUTS), layers.normal(*ROWS, FEATURES, seed=1)
    of_linen = linen.Fp8Dense(FEATURES, **options)
    of_nnx = nnx.Fp8Linear(INPUTS, FEATURES, rngs=stock_nnx.Rngs(0), **options)
    stock = stock_nnx.Linear(INPUTS, FEATURES, rngs=stock_nnx.Rngs(0))
    graph, params, states = stock_nnx.split(of_nnx, stock_nnx.Param, ...)
    both = stock_nnx.merge_state(params, states)
    layers.assert_same_tree(*map(stock_nnx.to_pure_dict, (params, stock_nnx.state(stock))))
    variables: Any = {"params": stock_nnx.to_pure_dict(params)}
    own = stock_nnx.to_pure_dict(states)
    if own:
        variables["_overwrite_with_gradient"] = {"Fp8DirectDotGeneralOp_0": own}
    layers.assert_same_structure(jax.eval_shape(of_linen.init, KEY, x), variables)

    def by_linen(variables: Any, x: Any, rest: Any) -> Any:
        return of_linen.apply(variables, x, residual=rest)

    def by_nnx(variables: Any, x: Any, rest: Any) -> Any:
        held = dict(variables["params"])
        for states in variables.get("_overwrite_with_gradient", {}).values():
            held |= states
        traced = jax.tree.map(jnp.asarray, both)
        stock_nnx.replace_by_pure_dict(traced, held)
        return stock_nnx.merge(graph, traced)(x, residual=rest)

    def pulled(f: Any) -> Any:
        result, pull = jax.vjp(f, variables, x, rest)
        return result, pull(rest)

    ours, theirs = jax.jit(lambda: (pulled(by_linen), pulled(by_nnx)))()
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    # As the stock layer, to what three bits give; the residual's gradient is not rounded.
    exact, pull = jax.vjp(lambda x: jax.nn.gelu(stock(x)), x)
    for value, wanted in ((ours[0] - rest, exact), (ours[1][1], pull(rest)[0])):
        assert jnp.linalg.norm(value - wanted) < 0.15 * jnp.linalg.norm(wanted)
    np.testing.assert_array_equal(ours[1][2], rest)


def test_a_layer_of_a_recipe_is_its_product_and_what_follows() -> None:
    """Rows of several examples are those of one matrix; the bias and the residual are exact."""
    recipe = Recipe(output_grad=Cast(jnp.float8_e5m2))
    layer = linen.Fp8Dense(FEATURES, recipe=recipe, activation="silu", **BIAS)
    x, rest = layers.normal(2, 70, 260), layers.normal(2, 70, FEATURES, seed=1)
    variables = nn.Dense(FEATURES, **BIAS).init(KEY, x)
    layers.assert_same_structure(jax.eval_shape(layer.init, KEY, x), variables)

    def ours(variables: Any, x: Any, rest: Any) -> Any:
        return layer.apply(variables, x, residual=rest)

    def expected(variables: Any, x: Any, rest: Any) -> Any:
        params = variables["params"]
        product = recipe.dot_general(x, params["kernel"], (((2,), (0,)), ((), ())))
        return jax.nn.silu(product + params["bias"][None, None]) + rest

    (result, pull), (wanted, pull_wanted) = (
        jax.vjp(f, variables, x, rest) for f in (ours, expected)
    )
    np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ours(variables, x, rest), result, rtol=1e-5, atol=1e-5)
    g = layers.normal(2, 70, FEATURES, seed=2)
    for own, other in zip(*map(jax.tree.leaves, (pull(g), pull_wanted(g))), strict=True):
        # A gradient that is rounded the other way once in a while differs by a step.
        assert jnp.linalg.norm(own - other) < 1e-2 * jnp.linalg.norm(other)


def test_each_product_is_one_kernel_of_8_bits() -> None:
    x = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)
    fields: dict[str, Any] = {"dtype": jnp.bfloat16, "activation": "gelu"}
    for layer, operands in (
        (linen.QuantizedDense(2048, **fields), "int8"),
        (linen.Fp8Dense(2048, **fields), "float8_e4m3fn"),
    ):
        variables = jax.eval_shape(layer.init, KEY, x)
        with pallas_gemm.target("h200"):
            [decision] = explain(layer.apply, variables, x).products
        assert (decision.implementation, str(decision.problem.a_dtype)) == ("hopper", operands)
        assert decision.plan is not None
        assert decision.plan.realigned.unfused is None
    assert not [step for step in decision.plan.realigned.steps if step.operand == "a"]


@pytest.mark.parametrize("dtype", ["s8", "e4m3"])
def test_gradients_of_inputs_are_a_kernels_products_of_what_the_weights_stand_for(
    dtype: str,
) -> None:
    x = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)
    layer = linen.QuantizedDense(2048, dtype=jnp.bfloat16, quantized_dtype=dtype)
    variables = jax.eval_shape(layer.init, KEY, x)

    def gradient(variables: Any, x: Any) -> Any:
        result, pull = jax.vjp(lambda x: layer.apply(variables, x), x)
        return pull(result)

    with pallas_gemm.target("h200"):
        products = explain(gradient, variables, x).products
    assert {product.implementation for product in products} == {"hopper"}
    assert [str(product.problem.b_dtype) for product in products][-1] == "bfloat16"


def test_what_has_no_meaning_is_refused() -> None:
    rngs = stock_nnx.Rngs(0)
    with pytest.raises(ValueError, match="scaling='late' is unknown; legal: 'current', 'delayed'"):
        nnx.Fp8Linear(2, 2, scaling="late", rngs=rngs)
    with pytest.raises(ValueError, match="scaling='late' is unknown"):
        jax.eval_shape(linen.Fp8Dense(2, scaling="late").init, KEY, jnp.ones((2, 2)))
    with pytest.raises(ValueError, match="recipe='block' is unknown; legal: 'blocks', or a"):
        nnx.Fp8Linear(2, 2, recipe="block", rngs=rngs)
    both = linen.Fp8Dense(2, recipe="blocks", scaling="delayed")
    with pytest.raises(ValueError, match="scaling='delayed' has no meaning with a recipe"):
        jax.eval_shape(both.init, KEY, jnp.ones((2, 2)))
    layer = nnx.QuantizedLinear(2, 2, rngs=rngs)
    with pytest.raises(ValueError, match=r"layers\[0\] must be .* got a QuantizedLinear"):
        nnx.projections(jnp.ones((3, 2)), [layer])
    for given in (layer, 3):
        with pytest.raises(TypeError, match=f"with a kernel, .* got {type(given).__name__}"):
            nnx.QuantizedLinear.of(given)
    with pytest.raises(TypeError, match="quantized_dtype='int9' is no type of numbers"):
        nnx.QuantizedLinear(2, 2, quantized_dtype="int9", rngs=rngs)
    with pytest.raises(ValueError, match=r"""model must have the collection "quantized", got \["""):
        linen.quantized({"params": {}}, {"params": {}})
    with pytest.raises(ValueError, match=r"""stock must have the collection "params", got \["""):
        linen.quantized({"quantized": {}}, {})


@pytest.mark.parametrize("dtype", ["uint8", "int4", "int32", "float32", "float8_e8m0fnu", None])
def test_weights_are_of_a_type_that_has_their_numbers(dtype: Any) -> None:
    """Numbers below 0 were others in uint8, and most were in int4."""
    message = f"must be int8, float8_e4m3fn or float8_e5m2 without bits, got {dtype}"
    with pytest.raises(ValueError, match=message):
        linen.QuantizedDense(2, quantized_dtype=dtype).init(KEY, jnp.ones((2, 2)))
    with pytest.raises(ValueError, match=message):
        nnx.QuantizedLinear(2, 2, quantized_dtype=dtype, rngs=stock_nnx.Rngs(0))


def test_states_accumulate_as_flaxs_do() -> None:
    ours = linen.Fp8Dense(FEATURES, scaling="delayed", use_bias=False)
    x = _integers(4, INPUTS)
    variables: Any = flax.core.unfreeze(ours.init(KEY, x))
    own = variables.pop("_overwrite_with_gradient")

    def loss(states: Any) -> jax.Array:
        real = jax.tree.map(lambda s: jax.lax.convert_element_type(s, fp8_ops.fm32), states)
        both = [
            jnp.sum(ours.apply(variables | {"_overwrite_with_gradient": real}, scale * x))
            for scale in (1, 3)
        ]
        return both[0] + both[1]

    found = jax.jit(jax.grad(loss))(own)["Fp8DirectDotGeneralOp_0"]
    # Of both uses, the larger.
    assert float(found["input_amax_history"][0]) == 6


@pytest.mark.parametrize("make", [nnx.QuantizedLinear, nnx.Fp8Linear])
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_layers_of_8_bits_run_on_a_mesh(kind: AxisType, make: Any) -> None:
    # Of these, quantizing leaves nothing away: the scales are powers of two.
    peak = 127 if make is nnx.QuantizedLinear else 7
    x, g = (_integers(4, size, seed=size).at[:, 0].set(peak) for size in (INPUTS, FEATURES))
    g = g.at[0, 0].set(7) if peak == 7 else g
    kernel = np.asarray(_integers(INPUTS, FEATURES).at[0].set(peak))
    options: dict[str, Any] = {
        "kernel_init": lambda *_: jnp.zeros(kernel.shape) + kernel,
        "rngs": stock_nnx.Rngs(0),
    }

    def trained(layer: Any, x: jax.Array, g: jax.Array) -> Any:
        graph, params, rest = stock_nnx.split(layer, stock_nnx.Param, ...)

        def result(params: Any, x: jax.Array) -> jax.Array:
            return stock_nnx.merge(graph, params, rest)(x)

        y, pull = jax.vjp(result, params, x)
        return y, jax.tree.leaves(pull(g))

    alone = jax.jit(trained)(make(INPUTS, FEATURES, **options), x, g)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        metadata: Any = {"out_sharding": (None, "model")}
        layer = make(INPUTS, FEATURES, kernel_metadata=metadata, **options)
        placed = (
            jax.device_put(value, jax.NamedSharding(mesh, spec))
            for value, spec in ((x, jax.P("data")), (g, jax.P("data", "model")))
        )
        found = jax.jit(trained)(layer, *placed)
    if kind is AxisType.Explicit:
        assert jax.typeof(found[0]).sharding.spec == jax.P("data", "model")
    jax.tree.map(np.testing.assert_array_equal, found, alone)
    np.testing.assert_array_equal(found[0], x @ kernel)
    np.testing.assert_array_equal(found[1][-1], g @ kernel.T)


@pytest.mark.parametrize("make", [nnx.QuantizedLinear, nnx.Fp8Linear])
def test_gradients_in_shard_map_are_summed_over_devices(make: Any) -> None:
    x, g = _integers(4, INPUTS), _integers(4, FEATURES, seed=1)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    layer = make(INPUTS, FEATURES, rngs=stock_nnx.Rngs(0))
    graph, params, rest = stock_nnx.split(layer, stock_nnx.Param, ...)

    def local(params: Any, x: jax.Array, g: jax.Array) -> jax.Array:
        y = stock_nnx.merge(graph, params, rest)(x)
        return jax.lax.psum(jnp.sum(y * g), "data")

    rows = jax.P("data")
    loss = jax.shard_map(local, mesh=mesh, in_specs=(jax.P(), rows, rows), out_specs=jax.P())
    found = jax.jit(jax.grad(loss))(params, x, g)
    np.testing.assert_array_equal(found["bias"][...], jnp.sum(g, axis=0))


def test_the_type_of_weights_may_be_named() -> None:
    dense: Any = linen.QuantizedDense(16, quantized_dtype=jnp.float8_e4m3fn)
    stored = dense.init(KEY, jnp.ones((2, 8)))
    assert stored["quantized"]["kernel"]["values"].dtype == jnp.float8_e4m3fn
    trained = stock_nnx.Linear(8, 16, rngs=stock_nnx.Rngs(0))
    layers = (
        nnx.QuantizedLinear(8, 16, quantized_dtype="e4m3", rngs=stock_nnx.Rngs(0)),
        nnx.QuantizedLinear.of(trained, quantized_dtype="e4m3"),
    )
    for layer in layers:
        assert layer.kernel_values[...].dtype == jnp.float8_e4m3fn
