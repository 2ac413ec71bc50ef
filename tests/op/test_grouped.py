"""Products of groups: exact, derived in both modes, whatever is in no group."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gemm import explain, ragged_dot, ragged_dot_general, target
from pallas_gemm.op.grouped import grouped
from pallas_gemm.planning.call import GroupedCall, Options
from tests import reference

M, K, N, GROUPS = 300, 24, 40, 4
SIZES = {"uneven": (37, 0, 140, 1), "all": (0, 299, 1, 0), "none": (0, 0, 0, 0)}


def _integers(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return reference.integers(np.random.default_rng(seed), shape, dtype)


LHS, RHS, G = _integers(M, K), _integers(GROUPS, K, N, seed=1), _integers(M, N, seed=2)


def _group_of(sizes: Any, rows: int = M) -> np.ndarray:
    """The group of each row; the number of groups for those in none."""
    group = np.full(rows, len(sizes))
    group[: sum(sizes)] = np.repeat(np.arange(len(sizes)), sizes)
    return group


def _exact(sizes: Any, lhs: Any, rhs: Any, g: Any) -> tuple[np.ndarray, ...]:
    """The result and both gradients."""
    lhs, rhs, g = (np.asarray(x, np.float64) for x in (lhs, rhs, g))
    out, of_lhs, of_rhs = np.zeros(g.shape), np.zeros(lhs.shape), np.zeros(rhs.shape)
    for row, group in enumerate(_group_of(sizes, len(lhs))):
        if group < len(sizes):
            out[row] = lhs[row] @ rhs[group]
            of_lhs[row] = rhs[group] @ g[row]
            of_rhs[group] += np.outer(lhs[row], g[row])
    return out, of_lhs, of_rhs


@jax.jit
def _step(lhs: Any, rhs: Any, sizes: Any, g: Any) -> Any:
    out, pull = jax.vjp(lambda lhs, rhs: ragged_dot(lhs, rhs, sizes), lhs, rhs)
    return out, *pull(g)


def _poisoned(sizes: Any) -> tuple[jax.Array, ...]:
    """Operands with NaN in all rows that are in no group, and in the matrices of empty groups."""
    outside = _group_of(sizes) == GROUPS
    empty = np.array(sizes) == 0
    return LHS.at[outside].set(jnp.nan), RHS.at[empty].set(jnp.nan), G.at[outside].set(jnp.nan)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_result_and_gradients_are_exact_whatever_is_in_no_group(sizes):
    lhs, rhs, g = _poisoned(sizes)
    found = _step(lhs, rhs, jnp.array(sizes), g)
    for own, expected in zip(found, _exact(sizes, LHS, RHS, G), strict=True):
        np.testing.assert_array_equal(own, expected)


def test_one_group_is_not_poisoned_by_its_neighbours():
    sizes = (37, 100, 140, 23)
    inside = _group_of(sizes) == 1
    lhs, rhs = LHS.at[~inside].set(jnp.nan), RHS.at[jnp.array([0, 2, 3])].set(jnp.nan)
    out, of_lhs, of_rhs = _step(lhs, rhs, jnp.array(sizes), G)
    expected = _exact(sizes, LHS, RHS, G)
    np.testing.assert_array_equal(out[inside], expected[0][inside])
    np.testing.assert_array_equal(of_lhs[inside], expected[1][inside])
    np.testing.assert_array_equal(of_rhs[1], expected[2][1])


def test_one_program_serves_all_sizes():
    step: Any = _step
    step.clear_cache()
    for sizes in SIZES.values():
        step(LHS, RHS, jnp.array(sizes), G)
    assert step._cache_size() == 1


def test_forward_mode_and_second_order_are_those_of_jax():
    sizes = jnp.array(SIZES["uneven"])
    small = LHS[:, :8], RHS[:, :8, :8]

    def second(f: Callable[..., Any], lhs: Any, rhs: Any) -> Any:
        def loss(lhs: Any, rhs: Any) -> Any:
            return (f(lhs, rhs, sizes) ** 2).sum()

        def gradients(lhs: Any, rhs: Any) -> Any:
            return jax.grad(loss, (0, 1))(lhs, rhs)

        return jax.jvp(gradients, (lhs, rhs), (rhs.sum() + lhs, 2 * rhs))

    def dense(lhs: Any, rhs: Any, sizes: Any) -> Any:
        ends = jnp.cumsum(sizes)[:, None]
        row = jnp.arange(M)[None]
        own = (ends - sizes[:, None] <= row) & (row < ends)
        return jnp.einsum("gm,mk,gkn->mn", own.astype(lhs.dtype), lhs, rhs)

    ours, stock = (jax.jit(functools.partial(second, f))(*small) for f in (ragged_dot, dense))
    jax.tree.map(np.testing.assert_array_equal, ours, stock)


def test_a_map_computes_each_example_with_its_own_groups():
    sizes = jnp.array([SIZES["uneven"], SIZES["all"]])
    both = jnp.stack([LHS, 2 * LHS])
    out = jax.jit(jax.vmap(ragged_dot, (0, None, 0)))(both, RHS, sizes)
    for own, lhs, groups in zip(out, both, sizes, strict=True):
        np.testing.assert_array_equal(own, _exact(groups, lhs, RHS, G)[0])


CONTRACTED = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
TRANSPOSED = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
BATCHED = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), (1,), (2,))


@pytest.mark.parametrize(
    ("numbers", "lhs", "rhs"),
    [
        (CONTRACTED, LHS, G),
        (TRANSPOSED, G, RHS),
        (BATCHED, LHS[None], jnp.swapaxes(RHS, 0, 1)[None]),
    ],
    ids=["contracted", "transposed", "batched"],
)
def test_other_dimensions_are_those_of_jax(numbers, lhs, rhs):
    sizes = jnp.array((37, 100, 140, 23))
    found = ragged_dot_general(lhs, rhs, sizes, numbers)
    expected = lax.ragged_dot_general(lhs, rhs, sizes, numbers)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shapes", [((0, 8), (3, 8, 8)), ((8, 0), (3, 0, 8)), ((8, 8), (3, 8, 0))])
def test_empty_operands_give_zeros(shapes):
    lhs, rhs = (jnp.ones(shape) for shape in shapes)
    out = ragged_dot(lhs, rhs, jnp.array([1, 0, 2]))
    np.testing.assert_array_equal(out, np.zeros((shapes[0][0], shapes[1][2])))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn])
def test_types_are_those_of_jax(dtype):
    lhs, rhs = LHS.astype(dtype), RHS.astype(dtype)
    for wanted in (None, jnp.float32):
        ours, stock = (
            jax.eval_shape(functools.partial(f, preferred_element_type=wanted), lhs, rhs, sizes)
            for f in (ragged_dot, lax.ragged_dot)
            for sizes in [jnp.zeros(GROUPS, jnp.int32)]
        )
        assert (ours.shape, ours.dtype) == (stock.shape, stock.dtype)


def test_a_kernel_computes_groups_on_a_hopper_gpu():
    shapes = ((16384, 2048), jnp.bfloat16), ((64, 2048, 1024), jnp.bfloat16), ((64,), jnp.int32)

    def loss(lhs: Any, rhs: Any, sizes: Any) -> Any:
        return ragged_dot(lhs, rhs, sizes).astype(jnp.float32).sum()

    with target("h200"):
        told = explain(jax.grad(loss, (0, 1)), *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    assert [product.implementation for product in told.products] == ["hopper"] * 3
    # Forward, and the gradients of the matrices and of the rows.
    assert [product.problem.layout for product in told.products] == ["NN", "TN", "NT"]
    assert [product.problem.groups for product in told.products] == [64, 0, 64]
    assert told.products[1].problem.ragged_k


def test_the_kernel_is_simulated():
    lhs, rhs, _ = _poisoned(sizes := SIZES["uneven"])
    call = GroupedCall(jnp.bfloat16, options=Options(implementation="interpret"))
    # The right operand of the kernel has a multiple of 64 columns.
    wide = jnp.pad(rhs, ((0, 0), (0, 0), (0, 64 - N))).astype(jnp.bfloat16)
    out = jax.jit(functools.partial(grouped, call))(
        lhs.astype(jnp.bfloat16), wide, jnp.array(sizes)
    )
    expected = _exact(sizes, LHS, RHS, G)[0]
    np.testing.assert_array_equal(out[:, :N].astype(jnp.float32), expected)


@pytest.mark.gpu("hopper")
@pytest.mark.parametrize(
    "sizes",
    [(257, 0, 63, 1, 64, 415), (0, 0, 800, 0, 0, 0), (1, 7, 8, 9, 0, 128), (0,) * 6],
    ids=["uneven", "one", "few", "none"],
)
def test_the_kernel_is_exact_whatever_is_in_no_group(sizes):
    lhs, rhs, g = (
        _integers(*shape, seed=seed)
        for seed, shape in enumerate([(800, 192), (6, 192, 320), (800, 320)])
    )
    expected = _exact(sizes, lhs, rhs, g)
    outside, empty = _group_of(sizes, 800) == 6, np.array(sizes) == 0
    poisoned = (
        lhs.at[outside].set(jnp.nan),
        rhs.at[empty].set(jnp.nan),
        g.at[outside].set(jnp.inf),
    )
    lhs, rhs, g = (x.astype(jnp.bfloat16) for x in poisoned)
    step = _step.lower(lhs, rhs, jnp.array(sizes), g)
    assert step.as_text().count("mosaic_gpu") >= 3
    for own, exact in zip(_step(lhs, rhs, jnp.array(sizes), g), expected, strict=True):
        # All of these sums are exact in bfloat16, or rounded once.
        np.testing.assert_array_equal(own, jnp.asarray(exact, jnp.bfloat16))
