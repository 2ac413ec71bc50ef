"""Layers of 8 bits in blocks on an explicit mesh: what they return is split as by stock ones."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx as stock_nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from pallas_gemm import Recipe
from pallas_gemm.flax import linen, nnx
from tests import meshes, reference

# Of integers, quantizing leaves nothing away if scales are powers of two.
EXACT = Recipe(power_of_two=True)
EXAMPLES, POSITIONS, INPUTS, FEATURES = 8, 32, 256, 256
# A device has 64 columns along y, which are half a block.
PLACES = [
    (("x", None, None), (None, None)),
    ((None, "x", None), (None, None)),
    ((None, None, None), ("y", None)),
    (("x", None, None), (None, "y")),
    (("x", None, None), ("x", "y")),
    (("x", "y", None), (None, None)),
    ((("y", "x"), None, None), (None, None)),
    (("x", None, "y"), (None, None)),
    ((None, "y", None), (None, "x")),
    ((None, None, "x"), (None, "x")),
]
LAST = (((2,), (0,)), ((), ()))
X, W = (EXAMPLES, POSITIONS, INPUTS), (INPUTS, FEATURES)
HEADS = (EXAMPLES, POSITIONS, 4, 64), (4, 64, FEATURES)
# What is contracted, both shapes, how both are split, and how the result is to be, if that is said.
PRODUCTS = [
    (LAST, (X, W), (("x", None, "y"), (None, None)), None),
    (LAST, (X, W), ((None, "y", None), ("x", None)), None),
    (
        LAST,
        ((EXAMPLES, POSITIONS, INPUTS), (INPUTS, 4, 64)),
        ((None, "x", None), (None, "y")),
        None,
    ),
    ((((2, 3), (0, 1)), ((), ())), HEADS, (("x", None, "y"), ()), None),
    ((((2, 3), (0, 1)), ((), ())), HEADS, ((None, "x"), ("y",)), None),
    ((((2, 3), (0, 1)), ((), ())), HEADS, (("x",), (None, "y")), None),
    ((((0,), (1,)), ((), ())), ((INPUTS, 4, 64), W), ((None, "y", "x"), (None, None)), None),
    (LAST, (X, W), (("x", None, "y"), ("y", None)), P(None, "x", None)),
]


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return meshes.make_mesh(AxisType.Explicit)


def _drawn(*shape: int) -> np.ndarray:
    return np.asarray(reference.integers(np.random.default_rng(sum(shape)), shape, jnp.float32))


def _trained(f: Callable[..., jax.Array]) -> Any:
    @jax.jit
    def step(g: jax.Array, *given: jax.Array) -> Any:
        result, pull = jax.vjp(f, *given)
        # Of the type of the result, whatever that is.
        return result, *pull(g + 0 * result)

    return step


def _checked(ours: Any, stock: Any) -> None:
    for one, other in zip(ours, stock, strict=True):
        assert jax.typeof(one).sharding == jax.typeof(other).sharding
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("case", range(len(PLACES)))
def test_a_layer_is_split_as_the_stock_one(mesh: Mesh, case: int) -> None:
    of_inputs, of_kernel = PLACES[case]
    is_entered = case % 2 == 0
    lead = (*of_inputs[:-1], None if of_kernel[-1] in of_inputs else of_kernel[-1])
    g = _drawn(EXAMPLES, POSITIONS, FEATURES)
    given = (
        meshes.place(mesh, g, *lead),
        meshes.place(mesh, _drawn(EXAMPLES, POSITIONS, INPUTS), *of_inputs),
        meshes.place(mesh, _drawn(INPUTS, FEATURES), *of_kernel),
        meshes.place(mesh, _drawn(FEATURES), of_kernel[-1]),
        # Else only arrays know the mesh, and this one is on none.
        meshes.place(mesh, g + 1, *lead) if is_entered else jnp.asarray(g + 1),
    )

    def stock(x: jax.Array, kernel: jax.Array, bias: jax.Array, residual: jax.Array) -> jax.Array:
        params = {"params": {"kernel": kernel, "bias": bias}}
        return jax.nn.relu(nn.Dense(FEATURES).apply(params, x)) + residual

    def ours(x: jax.Array, kernel: jax.Array, bias: jax.Array, residual: jax.Array) -> jax.Array:
        layer = linen.Fp8Dense(FEATURES, recipe=EXACT, activation="relu")
        return layer.bind({"params": {"kernel": kernel, "bias": bias}})(x, residual=residual)

    with jax.set_mesh(mesh) if is_entered else contextlib.nullcontext():
        _checked(_trained(ours)(*given), _trained(stock)(*given))


@pytest.mark.parametrize(("numbers", "shapes", "split", "wanted"), PRODUCTS)
def test_the_product_of_a_recipe_is_split_as_that_of_jax(
    mesh: Mesh, numbers: Any, shapes: Any, split: Any, wanted: Any
) -> None:
    x, kernel = (
        meshes.place(mesh, _drawn(*shape), *own) for shape, own in zip(shapes, split, strict=True)
    )
    with jax.set_mesh(mesh):
        results = [
            _trained(lambda x, w, f=f: f(x, w, numbers, out_sharding=wanted))(
                jnp.float32(2), x, kernel
            )
            for f in (EXACT.dot_general, jax.lax.dot_general)
        ]
    _checked(*results)


def test_what_is_padded_is_split_as_far_as_its_size_can_be() -> None:
    thirds = jax.make_mesh((3,), ("z",), (AxisType.Explicit,), devices=jax.devices()[:3])
    given = _drawn(8, 192), _drawn(192, 192)
    step = _trained(lambda x, w: EXACT.dot_general(x, w, (((1,), (0,)), ((), ()))))
    placed = meshes.place(thirds, given[0], None, "z"), meshes.place(thirds, given[1])
    for one, other in zip(step(jnp.float32(2), *placed), step(jnp.float32(2), *given), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_residual_may_be_split_along_other_dimensions(mesh: Mesh) -> None:
    residual = _drawn(EXAMPLES, POSITIONS, FEATURES)
    given = _drawn(EXAMPLES, POSITIONS, INPUTS), _drawn(INPUTS, FEATURES), residual
    specs = ("y", None, None), (None, None), (None, "x", None)
    placed = [meshes.place(mesh, x, *own) for x, own in zip(given, specs, strict=True)]

    def ours(x: jax.Array, kernel: jax.Array, residual: jax.Array) -> jax.Array:
        layer = linen.Fp8Dense(FEATURES, recipe=EXACT, use_bias=False)
        return layer.bind({"params": {"kernel": kernel}})(x, residual=residual)

    def stock(x: jax.Array, kernel: jax.Array, residual: jax.Array) -> jax.Array:
        return x @ kernel + residual

    with jax.set_mesh(mesh):
        _checked(*(_trained(f)(jnp.float32(2), *placed) for f in (ours, stock)))


@pytest.mark.parametrize("wanted", [P("x", None, None), P(None, "x", "y"), P()], ids=str)
def test_a_sum_over_devices_is_split_as_is_asked(mesh: Mesh, wanted: Any) -> None:
    x = meshes.place(mesh, _drawn(EXAMPLES, POSITIONS, INPUTS), None, None, "y")
    kernel = _drawn(INPUTS, FEATURES)
    with jax.set_mesh(mesh):
        options: Any = {"kernel_metadata": {"out_sharding": ("y", None)}, "use_bias": False}
        options |= {"kernel_init": lambda *_: jnp.zeros(kernel.shape) + kernel}
        made = (
            nnx.Fp8Linear(INPUTS, FEATURES, recipe=EXACT, rngs=stock_nnx.Rngs(0), **options),
            stock_nnx.Linear(INPUTS, FEATURES, rngs=stock_nnx.Rngs(0), **options),
        )
        results = [
            _trained(lambda x, own=own: own(x, out_sharding=wanted))(jnp.float32(2), x)
            for own in made
        ]
        _checked(*results)
        with pytest.raises(Exception, match="specify the output sharding"):
            made[0](x)


# What is split in two dimensions of rows, or in the inner one, is not gathered.
@pytest.mark.parametrize("place", [PLACES[i] for i in (0, 1, 3, 5, 6)], ids=str)
def test_a_layer_sends_sums_of_gradients_only(mesh: Mesh, place: Any) -> None:
    x = meshes.place(mesh, _drawn(EXAMPLES, 1024, INPUTS), *place[0])
    kernel = meshes.place(mesh, _drawn(INPUTS, 512), *place[1])
    step = _trained(lambda x, w: Recipe().dot_general(x, w, LAST))
    with jax.set_mesh(mesh):
        sent = meshes.sent_in(step.lower(jnp.float32(2), x, kernel).compile().as_text())
    assert set(sent) == {"all-reduce"}
