"""`Recipe`: how operands of the three products of a layer are quantized, along which axis."""

import functools
import itertools
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import Cast, Recipe
from pallas_gemm.flax import linen
from tests import layers
from tests.quantized import quantized

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
RECIPES: Mapping[str, Recipe] = {
    "blocks": Recipe(),
    "e5m2 of gradients": Recipe(output_grad=Cast(E5M2)),
    "of DeepSeek-V3": Recipe(kernel_grad_block=(1, 128)),
    "powers of two of 32": Recipe(
        *(Cast(E4M3, (1, 32)), Cast(E4M3, (1, 32)), Cast(E5M2, (1, 32)), (1, 32)),
        power_of_two=True,
    ),
}
LAST = (((1,), (0,)), ((), ()))


def stood_for(x: Any, cast: Cast, axis: int, recipe: Recipe) -> np.ndarray:
    """What a quantized matrix stands for, as it lies."""
    kinds = {np.dtype(kind): kind for kind in (E4M3, E5M2)}
    found = quantized(x, cast.block, kinds[cast.dtype], axis=axis, power_of_two=recipe.power_of_two)
    block = cast.block if axis == -1 else cast.block[::-1]
    scale = found.scale
    for i, length in enumerate(block):
        scale = np.repeat(scale, length, i)
    return found.values * scale[: x.shape[0], : x.shape[1]]


def assert_near(found: Any, expected: np.ndarray) -> None:
    """As near as float32 sums and a few roundings to the other side are."""
    error = np.linalg.norm(np.asarray(found, np.float64) - expected)
    assert error < 2e-3 * np.linalg.norm(expected)


# No size is a multiple of a block but the first ones.
@pytest.mark.every_other
@pytest.mark.parametrize(("m", "k", "n"), [(256, 384, 128), (150, 200, 140), (40, 300, 60)])
@pytest.mark.parametrize("name", RECIPES)
def test_each_product_contracts_along_the_blocks_of_both_operands(
    name: str, m: int, k: int, n: int
) -> None:
    recipe = RECIPES[name]
    # Rows and columns of very different sizes: a scale along the other axis would show.
    rng = np.random.default_rng(0)
    x, w, g = (
        jnp.asarray(
            (rng.standard_normal(shape) * 2.0 ** rng.integers(-5, 5, spread)).astype(jnp.float32)
        )
        for shape, spread in (((m, k), (m, 1)), ((k, n), (1, n)), ((m, n), (m, 1)))
    )
    y, pull = jax.vjp(lambda x, w: recipe.dot_general(x, w, LAST), x, w)
    of_x, of_w = pull(g)
    cast = functools.partial(stood_for, recipe=recipe)
    assert_near(y, cast(x, recipe.inputs, -1) @ cast(w, recipe.kernel, -2))
    assert_near(of_x, cast(g, recipe.output_grad, -1) @ cast(w, recipe.kernel, -1).T)
    of_kernel = recipe.output_grad._replace(block=recipe.kernel_grad_block)
    assert_near(of_w, cast(x, recipe.inputs, -2).T @ cast(g, of_kernel, -2))
    # Without a derivative it is the same.
    np.testing.assert_array_equal(recipe.dot_general(x, w, LAST), y)


def test_any_dimensions_are_contracted() -> None:
    x, w = layers.normal(4, 8, 6, 16), layers.normal(16, 6, 5, seed=1)
    numbers = (((3, 2), (0, 1)), ((), ()))
    dot = Recipe().dot_general
    result = dot(x, w, numbers)
    exact = jax.lax.dot_general(x, w, numbers)
    assert result.shape == exact.shape == (4, 8, 5)
    assert np.linalg.norm(result - exact) < 0.06 * np.linalg.norm(exact)
    assert dot(x, w, numbers, preferred_element_type=jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize(("m", "k", "n"), [(0, 256, 128), (8, 256, 0), (8, 0, 16)])
def test_nothing_is_multiplied_to_zeros_or_nothing(m: int, k: int, n: int) -> None:
    x, w = jnp.ones((m, k)), jnp.ones((k, n))
    y, pull = jax.vjp(lambda x, w: Recipe().dot_general(x, w, LAST), x, w)
    layer = linen.Fp8Dense(n, recipe="blocks", use_bias=False)
    np.testing.assert_array_equal(y, np.zeros((m, n)))
    np.testing.assert_array_equal(layer.apply({"params": {"kernel": w}}, x), y)
    for own, given in zip(pull(y), (x, w), strict=True):
        np.testing.assert_array_equal(own, jnp.zeros_like(given))


def test_gradients_have_the_types_of_the_operands() -> None:
    x, w = layers.normal(32, 256, dtype=jnp.bfloat16), layers.normal(256, 64, dtype=jnp.float32)
    found = jax.grad(
        lambda x, w: Recipe().dot_general(x, w, LAST, preferred_element_type=jnp.float32).sum(),
        (0, 1),
    )
    with jax.numpy_dtype_promotion("standard"):
        of_x, of_w = found(x, w)
    assert (of_x.dtype, of_w.dtype) == (jnp.bfloat16, jnp.float32)


def test_a_mapped_layer_is_derived() -> None:
    """Inputs are mapped and the kernel is shared, as `vmap` over examples does."""
    x, w = layers.normal(3, 32, 256), layers.normal(256, 64, seed=1)
    dot = functools.partial(Recipe().dot_general, dimension_numbers=LAST)

    def loss(x: Any, w: Any) -> Any:
        return (dot(x, w) ** 2).sum()

    mapped = jax.vmap(jax.grad(loss, (0, 1)), (0, None))(x, w)
    for i, own in enumerate(x):
        for one, other in zip(jax.grad(loss, (0, 1))(own, w), mapped, strict=True):
            np.testing.assert_allclose(one, other[i], rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("empty_kernels")
def test_three_arrays_are_read_once_each_by_the_kernel() -> None:
    def step(x: Any, w: Any) -> Any:
        y, pull = jax.vjp(lambda x, w: Recipe().dot_general(x, w, LAST), x, w)
        return pull(y)

    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((512, 256), (256, 384))]
    with pallas_gemm.target("h200"):
        lowered = jax.jit(step).trace(*shapes).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("pallas_gemm_quantize") >= 3
    assert lowered.as_text().count("call @pallas_gemm") >= 3


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"inputs": (E4M3,)}, TypeError, r"inputs must be a Cast\(dtype, block\)"),
        ({"kernel": 8}, TypeError, r"kernel must be a Cast\(dtype, block\), got 8"),
        ({"inputs": Cast(jnp.bfloat16)}, TypeError, "inputs.dtype must be of 8 bits, got bfloat16"),
        ({"kernel": Cast(E4M3, (0, 128))}, ValueError, "block must be two positive integers"),
        ({"output_grad": Cast(E4M3, (1, 64))}, ValueError, "equally long.*output_grad 64"),
        ({"kernel_grad_block": (1, 64)}, ValueError, "equally long.*kernel_grad_block 64"),
        ({"inputs": Cast(E4M3, (3, 128))}, ValueError, "inputs.block must.*powers of two.*3, 128"),
        ({"kernel": Cast(E4M3, (1, 96))}, ValueError, "kernel.block must have sizes that are"),
        ({"output_grad": Cast(E4M3, (1, 8))}, ValueError, "output_grad.block.*at least 16"),
        ({"kernel_grad_block": (5, 128)}, ValueError, "kernel_grad_block must have sizes"),
        ({"kernel_grad_block": 128}, ValueError, "kernel_grad_block must be two positive"),
        ({"power_of_two": 1}, TypeError, "power_of_two must be True or False"),
    ],
)
def test_errors_of_a_recipe(options: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        Recipe(**options)


@pytest.mark.parametrize(
    ("numbers", "precision", "words"),
    [
        ((((2,), (1,)), ((0,), (0,))), None, "must name no batch dimensions"),
        ((((2,), (1,)), ((), ())), "highest", "precision has no meaning.*'highest'"),
    ],
)
def test_errors_of_its_product(numbers: Any, precision: Any, words: str) -> None:
    x = jnp.ones((2, 4, 8)), jnp.ones((2, 8, 3))
    with pytest.raises(ValueError, match=words):
        Recipe().dot_general(*x, numbers, precision)


def _rule(**fields: Any) -> Any:
    """A rule with the fields that `qwix.QtRule` has, and its defaults."""
    kinds = dict.fromkeys(("act_qtype", "weight_qtype", "bwd_qtype"), "float8_e4m3fn")
    rest = {
        "module_path": ".*",
        "op_names": (),
        "act_static_scale": None,
        "act_calibration_method": None,
        "act_batch_axes": (0,),
        "sparsity_rule": None,
        "bwd_weight_grad_tile_size": None,
        "disable_channelwise_axes": False,
        "bwd_stochastic_rounding": None,
        "channelwise_noise_axes": (0,),
        "additional_qt_config": None,
    }
    methods = dict.fromkeys(("weight_calibration_method", "bwd_calibration_method"), "absmax")
    return types.SimpleNamespace(**{**kinds, **rest, **methods, "tile_size": 128} | fields)


def test_a_rule_of_qwix_is_a_recipe() -> None:
    assert Recipe.from_qwix(_rule()) == Recipe(kernel=Cast(), kernel_grad_block=(1, 128))
    own = _rule(bwd_qtype=E5M2, tile_size=32, bwd_weight_grad_tile_size=32)
    expected = [Cast(E4M3, (1, 32)), Cast(E4M3, (1, 32)), Cast(E5M2, (1, 32)), (1, 32)]
    assert Recipe.from_qwix(own) == Recipe(*expected)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"bwd_qtype": None}, "bwd_qtype=None leaves the output_grad as they are"),
        ({"act_qtype": None}, "act_qtype=None leaves the inputs as they are"),
        ({"tile_size": None}, "tile_size must be how many.*got None.*QuantizedDense"),
        ({"tile_size": 0.25}, "tile_size must be how many.*got 0.25"),
        ({"act_static_scale": True}, "act_static_scale must be None or False, got True"),
        ({"weight_calibration_method": "minmax"}, "weight_calibration_method must be 'absmax'"),
        ({"bwd_stochastic_rounding": "uniform"}, "rounded to the nearest"),
        ({"bwd_weight_grad_tile_size": 64}, "bwd_weight_grad_tile_size must be None, got 64"),
    ],
)
def test_a_rule_that_is_no_recipe_says_why(fields: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Recipe.from_qwix(_rule(**fields))


def test_equal_recipes_are_one() -> None:
    assert Recipe() == Recipe(inputs=(jnp.float8_e4m3fn, [1, 128]))  # type: ignore[arg-type]
    assert len({*RECIPES.values(), Recipe()}) == len(RECIPES)
    for one, other in itertools.combinations(RECIPES.values(), 2):
        assert one != other
