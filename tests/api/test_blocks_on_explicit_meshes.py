"""Scales of blocks on an explicit mesh: results and gradients are split as without them."""

import contextlib
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_gemm import gated_gemm, gemm, quantize
from tests import meshes

M, N, K = 32, 96, 128


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return meshes.make_mesh(AxisType.Explicit)


def _drawn(*shape: int, seed: int = 0) -> jax.Array:
    """Draws integers, of which sums are exact in float32."""
    rng = np.random.default_rng(seed + sum(shape))
    return jnp.asarray(rng.integers(-4, 5, shape).astype(np.float32))


def _scales(*shape: int) -> jax.Array:
    """Draws powers of two: scaled integers are exact, too."""
    return 2.0 ** (_drawn(*shape) % 4 - 2)


# How both factors are split, and the scales if they are; both shapes of these; how it is computed.
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "whole blocks": ((("x",), (None, "y"), ("x",), (None, "y")), ((M, 4), (4, 12)), {}),
    # A device has less than a block of rows, of columns, or of k.
    "rows, k": ((("x", "y"), ()), ((2, 2), (2, 3)), {"residual": _drawn(M, N, seed=1)}),
    "rows": (((("x", "y"),), ()), ((4, 4), (4, 3)), {"epilogue": jnp.abs}),
    "columns": (
        ((), (None, ("x", "y"))),
        ((M, 2), (4, 3)),
        {"bias": jnp.arange(96.0), "activation": "relu"},
    ),
    "columns, function": (((), (None, ("x", "y"))), ((8, 4), (4, 3)), {"epilogue": jnp.abs}),
    "columns, XLA": (((None, "x"), (None, "y")), ((8, 2), (4, 3)), {"implementation": "xla"}),
    "k": (((None, ("y", "x")), ()), ((8, 4), (4, 3)), {}),
    "k of both": (((None, "y"), ("y",)), ((8, 2), (2, 3)), {"out_sharding": P("x", "y")}),
    # Scales are split as nothing else is, and the last block is a part of one.
    "scales": (((), ("x", "y"), (None, "y"), ("y", "x")), ((8, 4), (4, 2)), {}),
    "k of both, function": (
        ((None, ("x", "y")), (("x", "y"),)),
        ((M, 2), (4, N)),
        {"out_sharding": P(("x", "y"), None), "epilogue": jnp.abs},
    ),
    # They are as long as k: a value for each row, or for each column.
    "more rows": ((("x",), (), ("x",)), ((8, 1), (4, 3)), {"epilogue": jnp.abs}),
    "rows of scales": (((None, "y"), ("y",), ("x",)), ((M, 1), (1, 3)), {"out_sharding": P()}),
}


@pytest.mark.parametrize(("case", "is_entered"), [(x, i % 2 == 0) for i, x in enumerate(CASES)])
def test_types_are_those_of_products_without_scales(
    mesh: Mesh, case: str, is_entered: bool
) -> None:
    split, shapes, how = CASES[case]
    given = _drawn(M, K), _drawn(K, N), *(_scales(*shape) for shape in shapes)
    sharding = how.get("out_sharding")
    if sharding is not None and not is_entered:
        # Else only arrays know the mesh.
        sharding = NamedSharding(mesh, sharding)

    def both(given: Any, out_sharding: Any = None) -> Any:
        own = how | {"out_sharding": out_sharding}

        def run(a: jax.Array, b: jax.Array, row: jax.Array, col: jax.Array) -> jax.Array:
            return gemm(a, b, row_scale=row, col_scale=col, **own)

        result, pull = jax.vjp(run, *given)
        return result, *pull(3 + 0 * result)

    with jax.set_mesh(mesh) if is_entered else contextlib.nullcontext():
        pairs = itertools.zip_longest(given, split, fillvalue=())
        placed = [meshes.place(mesh, x, *spec) for x, spec in pairs]
        found = jax.jit(functools.partial(both, out_sharding=sharding))(placed)
        stock = jax.eval_shape(functools.partial(jnp.matmul, out_sharding=sharding), *placed[:2])
    for one, other in zip(found, jax.jit(both)(given), strict=True):
        np.testing.assert_array_equal(one, other)
    types = [jax.typeof(x).sharding for x in (*found, *placed)]
    assert types[: len(found)] == [stock.sharding, *types[len(found) :]]


def test_all_other_operands_say_how_a_gated_result_is_split(mesh: Mesh) -> None:
    given = _drawn(M, K), _drawn(K, N), _drawn(K, N, seed=1), _drawn(M, N)
    specs = (), (), (None, "y"), ("x",)
    scales = {"row_scale": _scales(8, 4), "gate_scale": _scales(4, 3), "up_scale": _scales(4, 3)}
    placed = [meshes.place(mesh, x, *spec) for x, spec in zip(given, specs, strict=True)]
    result, expected = (
        gated_gemm(*own[:3], residual=own[3], activation="relu", **scales)
        for own in (placed, given)
    )
    assert jax.typeof(result).sharding.spec == P("x", "y")
    np.testing.assert_array_equal(result, expected)


def test_the_last_block_may_have_a_size_that_no_axis_divides(mesh: Mesh) -> None:
    a, b, scale = _drawn(M, K), _drawn(K, 95), _scales(4, 2)
    with jax.set_mesh(mesh):
        placed = (meshes.place(mesh, x, *own) for x, own in ((a, "x"), (b, ()), (scale, "yx")))
        result = jax.jit(lambda a, b, scale: gemm(a, b, col_scale=scale))(*placed)
    np.testing.assert_array_equal(result, gemm(a, b, col_scale=scale))


def test_jax_says_what_types_cannot_be(mesh: Mesh) -> None:
    x, scale = meshes.place(mesh, _drawn(K, K)), _scales(4, 4)

    def reduced(x: jax.Array) -> jax.Array:
        return jax.sharding.reshard(x, P(None, None, reduced={"x"}))

    with jax.set_mesh(mesh):
        found = jax.eval_shape(lambda x: quantize(reduced(x)), x)
        assert {y.sharding.spec.reduced for y in found} == {frozenset({"x"})}
        with pytest.raises(Exception, match="another input is reduced"):
            jax.eval_shape(lambda x: gemm(x, reduced(x), col_scale=scale), x)
    automatic = NamedSharding(meshes.make_mesh(), P("x"))
    with pytest.raises(ValueError, match="axis names that are of type Auto"):
        gemm(_drawn(M, K), _drawn(K, K), col_scale=scale, out_sharding=automatic)


@pytest.mark.parametrize(
    ("a", "b"),
    # Each device has half a block of columns, or of rows.
    [((), (None, ("x", "y"))), ((("x", "y"), None), ())],
)
def test_parts_of_blocks_are_not_gathered(mesh: Mesh, a: Any, b: Any) -> None:
    placed = meshes.place(mesh, _drawn(M, K), *a), meshes.place(mesh, _drawn(K, 128), *b)
    scales = {"row_scale": _scales(4, 4), "col_scale": _scales(4, 4)}
    _, sent = meshes.run(functools.partial(gemm, **scales), *placed)
    assert not sent


def test_along_manual_axes_each_device_has_its_own(mesh: Mesh) -> None:
    given = _drawn(M, K), _drawn(K, N), _scales(8, 4)
    rows, whole = P("x", None), P(None, None)

    def run(a: jax.Array, b: jax.Array, row: jax.Array) -> Any:
        product = functools.partial(gemm, row_scale=row, col_scale=_scales(4, 3))
        result, pull = jax.vjp(product, a, b)
        return result, *pull(3 + 0 * result), *quantize(a, block=(4, 128))

    with jax.set_mesh(mesh):
        results = (rows, rows, whole, rows, rows)
        own = jax.shard_map(run, axis_names={"x"}, in_specs=(rows, whole, rows), out_specs=results)
        pairs = zip(given, (("x", "y"), (), ("x",)), strict=True)
        found = jax.jit(own)(*(meshes.place(mesh, x, *spec) for x, spec in pairs))
    for one, other in zip(found, run(*given), strict=True):
        np.testing.assert_array_equal(one, other)
