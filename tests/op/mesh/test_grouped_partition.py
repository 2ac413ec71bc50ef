"""Products of groups on meshes: exact however operands come, and no more is sent than need be."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_gemm import explain_on_mesh, grouped_gemm, ragged_dot
from pallas_gemm.op.mesh import traffic
from tests import reference

M, K, N, GROUPS = 64, 16, 24, 8
SIZES = jnp.array([3, 0, 20, 9, 0, 11, 0, 13])
BAD = jnp.array([3, 0, 20, 9, -2, 11, 0, 13])
"""As sizes that are not known while tracing may be: a negative one counts as none."""
"""8 rows are in no group."""
MESHES = {
    "rows and columns": (P("x"), P(None, None, "y"), P("x", "y")),
    "rows, and matrices gathered": (P("x"), P(None, "x", "y"), P("x", "y")),
    "k, and rows scattered": (P(None, "y"), P(None, "y"), P("y")),
    "experts": (P("x"), P("y"), P("x")),
    "nothing": (P(), P(), P()),
    "rows and k, wanted otherwise": (P("y", "x"), P(("x", "y")), P(None, "x")),
}
"""How the left operand comes, and the matrices; how the result is wanted. So are the gradients."""


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def _integers(*shape: int, seed: int) -> jax.Array:
    return reference.integers(np.random.default_rng(seed), shape, jnp.float32)


def _step(a: Any, b: Any, g: Any, bias: Any, scale: Any, sizes: Any) -> Any:
    out, pull = jax.vjp(lambda a, b: ragged_dot(a, b, sizes), a, b)
    fused = grouped_gemm(a, b, sizes, bias=bias, row_scale=scale, activation="relu")
    return out, fused, *pull(g)


def _expected(a: Any, b: Any, g: Any, bias: Any, scale: Any) -> Any:
    sizes = np.maximum(BAD, 0)
    outside = np.full(M - sizes.sum(), GROUPS)
    group = np.concatenate([np.repeat(np.arange(GROUPS), sizes), outside])
    own = (group[:, None] == np.arange(GROUPS)).astype(np.float32)
    out = np.einsum("mg,mk,gkn->mn", own, a, b)
    fused = np.maximum(out * scale[:, None] + own @ bias, 0)
    of_a, of_b = np.einsum("mg,mn,gkn->mk", own, g, b), np.einsum("mg,mk,mn->gkn", own, a, g)
    return out, fused, of_a, of_b


@pytest.mark.parametrize("case", MESHES)
def test_every_device_computes_its_part(case, mesh):
    lhs, rhs, out = (NamedSharding(mesh, spec) for spec in MESHES[case])
    a, b, g = _integers(M, K, seed=0), _integers(GROUPS, K, N, seed=1), _integers(M, N, seed=2)
    bias, scale = _integers(GROUPS, N, seed=3), _integers(M, seed=4)
    step = jax.jit(_step, out_shardings=(out, out, lhs, rhs))
    own = (jax.device_put(np.asarray(x), split) for x, split in ((a, lhs), (b, rhs)))
    found = step(*own, g, bias, scale, BAD)
    for own, expected in zip(
        found, _expected(*map(np.asarray, (a, b, g, bias, scale))), strict=True
    ):
        np.testing.assert_array_equal(own, expected)


@pytest.mark.parametrize("out", [P(("x", "y")), P(None, ("x", "y")), P("x", "y")], ids=str)
@pytest.mark.parametrize("splits", [(P(), P()), (P("x"), P("y")), (P(None, "x"), P("x"))], ids=str)
def test_sizes_that_each_axis_divides_but_not_both(splits, out):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    sizes = np.array([1, 0, 2, 1, 0, 1])
    a, b = _integers(6, 6, seed=0), _integers(6, 6, 6, seed=1)
    rows = [np.asarray(a)[i] @ np.asarray(b)[group] for i, group in enumerate([0, 2, 2, 3, 5])]

    def split(x: jax.Array, spec: P) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    @jax.jit
    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return split(ragged_dot(split(a, splits[0]), split(b, splits[1]), jnp.array(sizes)), out)

    np.testing.assert_array_equal(product(a, b), np.stack([*rows, np.zeros(6)]))


@pytest.mark.parametrize(("rows", "matrices"), [(P("x"), P(None, None, "y")), (P(), P("x"))])
def test_nothing_more_is_sent_than_for_the_product_of_jax(rows, matrices, mesh):
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((M, K), rows), ((GROUPS, K, N), matrices))
    ]
    ours, jaxs = (
        traffic.received(
            jax.jit(lambda a, b, f=f: f(a, b, SIZES)).lower(*shapes).compile().as_text()
        )
        for f in (ragged_dot, lax.ragged_dot)
    )
    assert ours <= jaxs


def test_it_is_told_what_each_device_computes(mesh):
    a = jax.device_put(_integers(M, K, seed=0), NamedSharding(mesh, P("y")))
    b = jax.device_put(_integers(GROUPS, K, N, seed=1), NamedSharding(mesh, P("x")))
    (product,) = explain_on_mesh(lambda a, b: ragged_dot(a, b, SIZES), a, b).products
    assert (product.problem.m, product.problem.groups) == (M // 4, GROUPS // 2)
    assert "splits m along y, g along x" in str(product.mesh)


def test_programs_whose_products_of_groups_differ_are_cached_apart(mesh):
    a = jax.ShapeDtypeStruct((M, K), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    b = jax.ShapeDtypeStruct((GROUPS, K, N), jnp.float32)

    def name(**options: Any) -> set[str]:
        text = jax.jit(lambda a, b: grouped_gemm(a, b, SIZES, **options)).lower(a, b).as_text()
        return {word for word in text.split('"') if len(word) == 64}

    names = [name(), name(activation="relu"), name(activation="silu")]
    assert all(len(found) == 1 for found in names)
    assert len(frozenset.union(*map(frozenset, names))) == len(names)


def test_a_simulation_of_several_devices_is_refused(mesh):
    a = jax.ShapeDtypeStruct((M, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P("y")))
    b = jax.ShapeDtypeStruct((GROUPS, 64, 64), jnp.bfloat16)
    simulated = functools.partial(grouped_gemm, group_sizes=SIZES, implementation="interpret")
    with pytest.raises(ValueError, match="simulates the kernel of one GPU"):
        jax.jit(simulated).lower(a, b)
