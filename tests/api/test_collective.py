"""Products of gathered rows, and of sums that are scattered, against those of whole arrays."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_gemm
from pallas_gemm.api.collective import all_gather_gemm, gemm_reduce_scatter
from tests import meshes, reference

ROWS, K, N = 16, 24, 8


def _mesh(devices: int) -> Mesh:
    return jax.make_mesh(
        (devices,), ("x",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,)
    )


def _integers(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return reference.integers(np.random.default_rng(seed), shape, dtype)


def _gathering(mesh: Mesh, checked: bool = True, **options: Any) -> Callable[..., jax.Array]:
    lead = (None,) * options.pop("lead", 0)
    w = P("x", None) if options.get("transpose_b") else P(None, "x")
    return jax.shard_map(
        functools.partial(all_gather_gemm, axis_name="x", **options),
        mesh=mesh,
        in_specs=(P(*lead, "x", None), w),
        out_specs=P(*lead, None, "x"),
        check_vma=checked,
    )


def _scattering(mesh: Mesh, checked: bool = True, **options: Any) -> Callable[..., jax.Array]:
    lead = (None,) * options.pop("lead", 0)
    w = P(None, "x") if options.get("transpose_b") else P("x", None)
    return jax.shard_map(
        functools.partial(gemm_reduce_scatter, axis_name="x", **options),
        mesh=mesh,
        in_specs=(P(*lead, None, "x"), w),
        out_specs=P(*lead, "x", None),
        check_vma=checked,
    )


def _layers(first: Any, second: Any, x: Any, w: Any, v: Any) -> jax.Array:
    """Of small integers, so that sums are exact in every order."""
    return jnp.sum(jnp.maximum(second(jnp.maximum(first(x, w), 0), v), 0))


@pytest.mark.parametrize(("devices", "checked"), [(1, True), (2, False), (8, True)])
def test_forward_and_backward(devices: int, checked: bool) -> None:
    mesh = _mesh(devices)
    x, w, v = _integers(ROWS, K), _integers(K, N, seed=1), _integers(N, K, seed=2)
    gathering, scattering = _gathering(mesh, checked), _scattering(mesh, checked)
    np.testing.assert_array_equal(jax.jit(gathering)(x, w), x @ w)
    ours = jax.jit(jax.value_and_grad(functools.partial(_layers, gathering, scattering), (0, 1, 2)))
    stock = jax.value_and_grad(functools.partial(_layers, jnp.matmul, jnp.matmul), (0, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, ours(x, w, v), stock(x, w, v))


def test_leading_dimensions_and_transposed_weights() -> None:
    mesh = _mesh(4)
    x, w, v = _integers(2, ROWS, K), _integers(N, K, seed=1), _integers(K, N, seed=2)
    gathering = _gathering(mesh, lead=1, transpose_b=True)
    scattering = _scattering(mesh, lead=1, transpose_b=True)

    def stock(a: Any, b: Any) -> jax.Array:
        return a @ b.T

    ours = jax.jit(jax.grad(functools.partial(_layers, gathering, scattering), (0, 1, 2)))
    theirs = jax.grad(functools.partial(_layers, stock, stock), (0, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, ours(x, w, v), theirs(x, w, v))


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_bias_and_activation(activation: str | None) -> None:
    mesh = _mesh(4)
    rng = np.random.default_rng(0)
    x = reference.normal(rng, (128, 64), jnp.bfloat16)
    w = reference.normal(rng, (64, 256), jnp.bfloat16)
    bias = reference.normal(rng, (256,), jnp.float32)

    def ours(x: Any, w: Any, bias: Any) -> jax.Array:
        def local(x: Any, w: Any, bias: Any) -> jax.Array:
            return all_gather_gemm(x, w, "x", bias=bias, activation=activation)

        specs = (P("x"), P(None, "x"), P("x"))
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(None, "x"))(x, w, bias)

    whole = functools.partial(pallas_gemm.gemm, activation=activation)
    exact = reference.Formula(activation=activation)(x, w, bias=bias)
    reference.assert_as_good_as_xla(jax.jit(ours)(x, w, bias), whole(x, w, bias=bias), exact)
    gradients, expected = (
        jax.jit(jax.grad(lambda *args, f=f: jnp.sum(f(*args).astype(jnp.float32)), (0, 1, 2)))(
            x, w, bias
        )
        for f in (ours, lambda x, w, bias: whole(x, w, bias=bias))
    )
    for our, their in zip(gradients, expected, strict=True):
        scale = np.abs(reference.wide(their)).max()
        np.testing.assert_allclose(
            reference.wide(our), reference.wide(their), rtol=0, atol=2**-7 * scale
        )


def test_sums_travel_in_the_type_of_the_result_or_another() -> None:
    mesh = _mesh(8)
    rng = np.random.default_rng(0)
    a = reference.normal(rng, (64, 512), jnp.bfloat16)
    b = reference.normal(rng, (512, 64), jnp.bfloat16)
    exact = reference.Formula()(a, b)
    rounded = jax.jit(_scattering(mesh))(a, b)
    with pallas_gemm.reduce_in(jnp.float32):
        result = jax.jit(_scattering(mesh))(a, b)
    reference.assert_as_good_as_xla(result, a @ b, exact)
    # Seven more roundings: the error shows how sums did travel.
    errors = [np.abs(reference.wide(x) - exact).mean() for x in (result, rounded)]
    assert errors[0] < errors[1] < 4 * errors[0]


def test_integers() -> None:
    mesh = _mesh(4)
    a, b = _integers(ROWS, K, dtype=jnp.int8), _integers(K, N, seed=1, dtype=jnp.int8)
    result = jax.jit(_scattering(mesh, preferred_element_type=jnp.int32))(a, b)
    np.testing.assert_array_equal(result, np.asarray(a, np.int32) @ np.asarray(b, np.int32))


@jax.numpy_dtype_promotion("standard")
def test_integers_times_floats_are_added_up_as_floats() -> None:
    mesh, a, b = _mesh(4), jnp.ones((ROWS, K), jnp.int8), jnp.full((K, N), 0.5)
    for product in (_gathering(mesh), _scattering(mesh)):
        np.testing.assert_array_equal(jax.jit(product)(a, b), np.full((ROWS, N), K / 2))


def test_along_one_axis_of_two() -> None:
    mesh = meshes.make_mesh()
    x, w, v = _integers(ROWS, K), _integers(K, N, seed=1), _integers(N, K, seed=2)

    def local(x: Any, w: Any, v: Any) -> jax.Array:
        hidden = jnp.maximum(all_gather_gemm(x, w, "y"), 0)
        return gemm_reduce_scatter(hidden, v, "y")

    rows = P(("x", "y"))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(rows, P(None, "y"), P("y")), out_specs=rows)

    def stock(x: Any, w: Any, v: Any) -> jax.Array:
        return jnp.maximum(x @ w, 0) @ v

    def gradients(f: Callable[..., jax.Array]) -> Any:
        # The gradients of weights that both halves of x share are added up.
        return jax.jit(jax.grad(lambda *args: jnp.sum(jnp.square(f(*args))), (0, 1, 2)))(x, w, v)

    jax.tree.map(np.testing.assert_array_equal, gradients(mapped), gradients(stock))


def test_second_order() -> None:
    mesh = _mesh(2)
    x, w, v = (z / 4 for z in (_integers(4, 4), _integers(4, 4, seed=1), _integers(4, 4, seed=2)))

    def second(first: Any, last: Any) -> Any:
        def loss(x: Any) -> jax.Array:
            return jnp.sum(jnp.tanh(last(jnp.tanh(first(x, w)), v)))

        return jax.jit(jax.grad(lambda x: jnp.sum(jnp.square(jax.grad(loss)(x)))))(x)

    np.testing.assert_allclose(
        second(_gathering(mesh), _scattering(mesh)),
        second(jnp.matmul, jnp.matmul),
        rtol=1e-4,
        atol=1e-4,
    )


def test_what_travels() -> None:
    mesh = _mesh(4)

    def shape(*sizes: int, spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=NamedSharding(mesh, spec))

    for f, sent, operands in (
        (
            _gathering(mesh),
            "all-gather",
            (shape(ROWS, K, spec=P("x")), shape(K, N, spec=P(None, "x"))),
        ),
        (
            _scattering(mesh),
            "reduce-scatter",
            (shape(ROWS, K, spec=P(None, "x")), shape(K, N, spec=P("x"))),
        ),
    ):
        text = jax.jit(f).lower(*operands).compile().as_text()
        assert meshes.sent_in(text) == {sent: 1}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, b: all_gather_gemm(a, b, "model"), r"axis_name='model' must name one axis"),
        (
            lambda a, b: all_gather_gemm(a, b, ("x", "y")),
            "must name one axis",
        ),
        (lambda a, b: all_gather_gemm(a[0], b, "x"), r"a must have the shape \[..., rows, k\]"),
        (lambda a, b: all_gather_gemm(a, b[None], "x"), r"b must have the shape \[k, n\]"),
        (
            lambda a, b: all_gather_gemm(a, b, "x", transpose_b=True),
            "columns of a and .* columns of b",
        ),
        (lambda a, b: all_gather_gemm(a, b, "x", bias=b), "bias must have one value per column"),
        (
            lambda a, b: gemm_reduce_scatter(a, b, "x", transpose_b="no"),
            "transpose_b must be True or False, got str: 'no'",
        ),
        (
            lambda a, b: gemm_reduce_scatter(a[:3], b, "x"),
            "a multiple of the 4 devices .* got 3",
        ),
    ],
)
def test_bad_input(call: Callable[..., Any], message: str) -> None:
    a, b = _integers(4, K), _integers(K, N)
    mapped = jax.shard_map(call, mesh=_mesh(4), in_specs=(P(), P()), out_specs=P("x"))
    with pytest.raises((TypeError, ValueError), match=message):
        mapped(a, b)


def test_outside_of_shard_map() -> None:
    with pytest.raises(ValueError, match="around the call"):
        all_gather_gemm(_integers(4, K), _integers(K, N), "x")


def _scaled(s: jax.Array, scale: jax.Array) -> Any:
    z = s * scale[None]
    return z.astype(jnp.bfloat16), jnp.sum(z, -1)


@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize("gathering", [True, False])
def test_a_function_follows_the_product_that_is_asked_for(
    gathering: bool, transpose_b: bool
) -> None:
    x, w = _integers(ROWS, K), _integers(K, K, seed=1)
    make = _gathering if gathering else _scattering
    options = {"transpose_b": transpose_b, "precision": "highest"}
    plain = jax.jit(make(_mesh(4), checked=False, **options))
    function = jax.jit(make(_mesh(4), checked=False, epilogue=lambda s: 2 * s, **options))
    np.testing.assert_array_equal(function(x, w), 2 * plain(x, w))
    np.testing.assert_array_equal(plain(x, w), x @ (w.T if transpose_b else w))
    assert function.lower(x, w).as_text().count("precision = [HIGHEST, HIGHEST]") == 1


@pytest.mark.parametrize("gathering", [True, False])
def test_a_function_of_what_devices_compute_together(gathering: bool) -> None:
    mesh = _mesh(4)
    x, w = _integers(ROWS, K), _integers(K, N, seed=1)
    scale = _integers(N, seed=2)
    function = all_gather_gemm if gathering else gemm_reduce_scatter
    split = P("x", None) if gathering else P(None, "x")

    def ours(x: Any, w: Any, scale: Any) -> Any:
        return function(x, w, "x", epilogue=_scaled, operands=(scale,))

    every = jax.shard_map(
        ours,
        mesh=mesh,
        in_specs=(split, P() if gathering else P("x", None), P()),
        out_specs=(P(), P()) if gathering else (P("x"), P("x")),
        check_vma=False,
    )
    expected = _scaled(x @ w, scale)
    for found, own in zip(jax.jit(every)(x, w, scale), expected, strict=True):
        np.testing.assert_array_equal(found, own)

    def loss(f: Any) -> Any:
        return lambda *x: jnp.sum(jnp.sin(f(*x)[1]))

    if not gathering:
        found = jax.grad(loss(every), (0, 1, 2))(x, w, scale)
        wanted = jax.grad(loss(lambda x, w, scale: _scaled(x @ w, scale)), (0, 1, 2))(x, w, scale)
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)
