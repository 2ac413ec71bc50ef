"""Products of groups: exact, derived in both modes, whatever is in no group."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gemm import explain, grouped_gemm, ragged_dot, ragged_dot_general, target
from pallas_gemm.op import grouped
from pallas_gemm.op.permutation import permuted
from pallas_gemm.planning.dispatch import Decision
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
    outside = (_group_of(sizes) == GROUPS)[:, None]
    empty = (np.array(sizes) == 0)[:, None, None]
    poisons = (LHS, outside), (RHS, empty), (G, outside)
    # By NumPy: JAX would compile a program for each number of them.
    return tuple(jnp.asarray(np.where(own, np.float32(np.nan), x)) for x, own in poisons)


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


def test_ranks_are_named_before_anything_else():
    for a, b, name in ((LHS[0], RHS, "a"), (LHS, RHS[0], "b")):
        with pytest.raises(TypeError, match=rf"^{name} must be \["):
            grouped_gemm(a, b, jnp.array(SIZES["uneven"]))


BATCH_SIZES = jnp.array([[7, 0, 9], [20, 0, 0], [0, 0, 0], [1, 3, 30]])


def _of_batch(f: Any, shared: bool) -> Any:
    """Products of a batch, in both modes and with the batch in the middle."""
    sizes = BATCH_SIZES[0] if shared else BATCH_SIZES
    rows, matrices, other = _integers(8, 4, 20), _integers(3, 4, 8, 5, seed=1), _integers(4, 20, 6)
    over_rows = lax.RaggedDotDimensionNumbers((((0,), (2,)), ((1,), (1,))), [2], [0])
    over_k = lax.RaggedDotDimensionNumbers((((0,), (1,)), ((1,), (0,))), [0], [])
    return f(rows, matrices, sizes, over_rows), f(rows.T, other, sizes, over_k)


@pytest.mark.parametrize("shared", [False, True], ids=["own sizes", "shared sizes"])
def test_a_batch_is_groups_of_groups(shared):
    ours, stock = (_of_batch(f, shared) for f in (ragged_dot_general, lax.ragged_dot_general))
    assert [x.shape for x in ours] == [(4, 20, 5), (3, 4, 8, 6)]
    for own, other, sizes in zip(ours[0], stock[0], BATCH_SIZES, strict=True):
        count = int(BATCH_SIZES[0].sum() if shared else sizes.sum())
        np.testing.assert_array_equal(own[:count], other[:count])
        assert not own[count:].any()
    np.testing.assert_array_equal(ours[1], stock[1])


def test_a_batch_of_groups_may_be_a_symbol() -> None:
    (batch,) = jax.export.symbolic_shape("batch")
    rng = np.random.default_rng(0)
    given = [rng.standard_normal(x).astype(np.float32) for x in ((3, 8, 8), (3, 2, 8, 4))]
    given.append(np.array([[2, 3], [5, 0], [0, 8]], np.int32))

    def loss(a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(jax.vmap(ragged_dot)(a, b, sizes)))

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    symbols = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in given]
    exported = jax.export.export(step, platforms=["cpu", "cuda"])(*symbols)
    for x, y in zip(*map(jax.tree.leaves, (exported.call(*given), step(*given))), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scales", [(2, 8), (2, 4, 8)], ids=["columns", "blocks"])
def test_columns_of_few_bits_may_be_a_symbol(scales: tuple[int, ...]) -> None:
    (n,) = jax.export.symbolic_shape("n")
    rng = np.random.default_rng(0)
    given = [jnp.asarray(rng.integers(-4, 5, own), jnp.bfloat16) for own in ((8, 64), scales)]
    b = jnp.asarray(rng.integers(-4, 5, (2, 64, 8)), jnp.int4)

    @jax.jit
    def run(a: jax.Array, b: jax.Array, scale: jax.Array) -> jax.Array:
        return grouped_gemm(a, b, jnp.array([3, 5]), col_scale=scale)

    a, scale = given
    symbols = [jax.ShapeDtypeStruct((*x.shape[:-1], n), x.dtype) for x in (b, scale)]
    exported = jax.export.export(run, platforms=["cpu", "cuda"])(a, *symbols)
    np.testing.assert_array_equal(exported.call(a, b, scale), run(a, b, scale))


def test_a_batch_of_no_groups_is_zeros() -> None:
    given = jnp.ones((2, 5, 7)), jnp.ones((2, 0, 7, 4)), jnp.zeros((2, 0), jnp.int32)
    np.testing.assert_array_equal(jax.vmap(ragged_dot)(*given), jnp.zeros((2, 5, 4)))


def test_what_is_in_no_group_shows_in_no_batch():
    rows = jnp.full((3, 8, 8), jnp.nan).at[:, :5].set(1.0)
    sizes = jnp.array([[2, 3], [5, 0], [0, 4]])
    mapped = jax.jit(jax.vmap(ragged_dot))(rows, jnp.ones((3, 2, 8, 8)), sizes)
    np.testing.assert_array_equal(mapped.sum((1, 2)), 64 * sizes.sum(1))
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    sums = jax.vmap(lambda a, s: ragged_dot_general(a, a, s, numbers))(rows, sizes)
    np.testing.assert_array_equal(sums[..., 0, 0], sizes)


def test_a_batch_of_products_of_groups_is_one_kernel():
    both = jnp.stack([LHS, 2 * LHS]), jnp.stack([RHS, RHS]), jnp.array([SIZES["uneven"]] * 2)
    with target("h200"):
        (product,) = explain(jax.vmap(ragged_dot), *both).products
    assert (product.problem.groups, product.problem.m) == (2 * GROUPS, 2 * M)


def test_layers_that_are_scanned_and_computed_again_have_the_gradients_of_each():
    layers, rows = _integers(2, 3, 8, 8), _integers(20, 8, seed=1)
    # Each layer has groups of its own, in the same program.
    sizes = jnp.array([[7, 0, 9], [1, 18, 1]])

    def scanned(layers: jax.Array, rows: jax.Array) -> jax.Array:
        @jax.checkpoint
        def one(rows: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            return ragged_dot(rows, *layer), None

        return lax.scan(one, rows, (layers, sizes))[0]

    out, pull = jax.vjp(jax.jit(scanned), layers, rows)
    hidden, *_ = _exact(sizes[0], rows, layers[0], np.zeros((20, 8)))
    expected, of_hidden, of_second = _exact(sizes[1], hidden, layers[1], out)
    _, of_rows, of_first = _exact(sizes[0], rows, layers[0], of_hidden)
    np.testing.assert_array_equal(out, expected)
    of_layers, of_all_rows = pull(out)
    np.testing.assert_array_equal(of_layers, np.stack([of_first, of_second]))
    np.testing.assert_array_equal(of_all_rows, of_rows)


def test_a_permutation_is_derived_as_one_and_adds_nothing_up():
    x, g = _integers(6, 3), _integers(6, 3, seed=1)
    places = jnp.array([3, 1, 5, 0, 2, 4])
    inverse = jnp.argsort(places)

    def second(x: Any) -> Any:
        return jax.jvp(
            jax.grad(lambda x: (permuted(x, places, inverse) ** 2 * g).sum()), (x,), (x,)
        )

    for found in second(x):
        np.testing.assert_array_equal(found, 2 * x * g[inverse])
    assert "scatter" not in str(jax.make_jaxpr(second)(x))
    both = jax.vmap(permuted, (0, None, None))(jnp.stack([x, 2 * x]), places, inverse)
    np.testing.assert_array_equal(both, jnp.stack([x[places], 2 * x[places]]))


def test_an_offset_leaves_the_rows_of_other_groups_out():
    sizes = (37, 100, 140, 1)

    @jax.jit
    def step(lhs: Any, rhs: Any, offset: Any) -> Any:
        def own(lhs: Any, rhs: Any) -> Any:
            return ragged_dot(lhs, rhs, jnp.array(sizes), group_offset=offset)

        out, pull = jax.vjp(own, lhs, rhs)
        return out, *pull(G)

    expected = _exact(sizes, LHS, RHS, G)
    for offset in range(3):
        inside = np.isin(_group_of(sizes), (offset, offset + 1))
        lhs = LHS.at[~inside].set(jnp.nan)
        out, of_lhs, of_rhs = step(lhs, RHS[offset : offset + 2], jnp.array([offset]))
        for found, exact in zip((out, of_lhs), expected, strict=False):
            np.testing.assert_array_equal(found, np.where(inside[:, None], exact, 0))
        np.testing.assert_array_equal(of_rhs, expected[2][offset : offset + 2])


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
    out = ragged_dot(lhs, rhs, jnp.array([1, 0, 2] if len(lhs) else [0, 0, 0]))
    np.testing.assert_array_equal(out, np.zeros((shapes[0][0], shapes[1][2])))


@pytest.mark.parametrize(("rows", "groups"), [(0, 3), (8, 0)])
def test_an_epilogue_leaves_rows_in_no_group_zeros(rows, groups):
    operands = jnp.ones((rows, 8)), jnp.ones((groups, 8, 8)), jnp.zeros(groups, jnp.int32)
    out = grouped_gemm(*operands, bias=jnp.ones((groups, 8)))
    np.testing.assert_array_equal(out, np.zeros((rows, 8)))


@pytest.mark.every_other
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("scale", ["alpha", "row_scale", "col_scale"])
def test_sums_beyond_float16_that_a_scale_makes_small_are_derived(scale, gated):
    rows, matrices = jnp.full((4, 64), 64, jnp.float16), jnp.full((2, 64, 3), 32, jnp.float16)
    own = jnp.full({"alpha": (2,), "row_scale": (4,), "col_scale": (2, 3)}[scale], 2.0**-14)
    # Up needs a scale of its own that brings it within the numbers of float16.
    extras = {"up": matrices / 64, "up_scale": jnp.ones(3)} if gated else {}

    def total(rows: Any, own: Any) -> jax.Array:
        given = {scale: own} | extras
        out = grouped_gemm(rows, matrices, jnp.array([1, 3]), activation="silu", **given)
        return out.astype(jnp.float32).sum()

    of_rows, of_scale = jax.grad(total, (0, 1))(rows, own)
    for gradient in (of_rows, of_scale):
        assert np.all(np.isfinite(gradient))
        assert np.all(gradient != 0)
    value, slope = float(jax.nn.silu(8.0)), float(jax.grad(jax.nn.silu)(8.0))
    if not gated:
        assert np.allclose(total(rows, own), 12 * value, rtol=2**-10)
        count = {"alpha": np.array([3, 9]), "row_scale": 3, "col_scale": np.array([[1], [3]])}[
            scale
        ]
        expected = np.broadcast_to(count * slope * 2.0**17, own.shape)
        np.testing.assert_allclose(of_scale, expected, rtol=2**-9)


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


EXTRAS = {
    "up": _integers(GROUPS, K, N, seed=3),
    "bias": _integers(GROUPS, N, seed=4),
    "up_bias": _integers(N, seed=5),
    "col_scale": _integers(GROUPS, N, seed=6),
    "up_scale": _integers(N, seed=7),
    "row_scale": _integers(M, seed=8),
    "alpha": _integers(GROUPS, seed=9),
}
"""What all groups share, and what each has of its own."""


def _finished(sizes: Any, lhs: Any, rhs: Any, extras: Any) -> jax.Array:
    """The result with everything that there is, every row by every group."""
    group = _group_of(sizes)
    of_row = {n: x[np.minimum(group, GROUPS - 1)] for n, x in extras.items() if len(x) == GROUPS}
    named = extras | of_row
    factor = named["alpha"][:, None] * named["row_scale"][:, None]

    def value(matrices: Any, scale: Any, bias: Any) -> jax.Array:
        sums = jnp.einsum("mk,gkn->gmn", lhs, matrices)[np.minimum(group, GROUPS - 1), np.arange(M)]
        return factor * jnp.broadcast_to(scale, sums.shape) * sums + bias

    gate = value(rhs, named["col_scale"], named["bias"])
    up = value(extras["up"], named["up_scale"], jnp.broadcast_to(named["up_bias"], gate.shape))
    return jnp.where((group < GROUPS)[:, None], jax.nn.relu(gate) * up, 0)


def test_an_epilogue_and_its_gradients_are_exact():
    sizes = SIZES["uneven"]

    @jax.jit
    def both(lhs: Any, rhs: Any, extras: Any) -> Any:
        def ours(lhs: Any, rhs: Any, extras: Any) -> Any:
            return grouped_gemm(lhs, rhs, jnp.array(sizes), activation="relu", **extras)

        def stock(*operands: Any) -> Any:
            return _finished(sizes, *operands)

        return [(f(lhs, rhs, extras), jax.vjp(f, lhs, rhs, extras)[1](G)) for f in (ours, stock)]

    jax.tree.map(np.testing.assert_array_equal, *both(LHS, RHS, EXTRAS))


def _affine(lhs: Any, rhs: Any, extras: Any, f: Any = grouped_gemm) -> jax.Array:
    """A product of groups with a bias and scales, squared, so that gradients need it."""
    return jnp.square(f(lhs, rhs, jnp.array(SIZES["uneven"]), **extras)).sum()


def _affine_by_rows(lhs: Any, rhs: Any, sizes: Any, **extras: Any) -> jax.Array:
    group = jnp.minimum(_group_of(SIZES["uneven"]), GROUPS - 1)
    sums = jnp.einsum("mk,mkn->mn", lhs, rhs[group]) * extras["row_scale"][:, None]
    result = sums * extras["col_scale"][group] + extras["bias"][group]
    return jnp.where((_group_of(SIZES["uneven"]) < sizes.shape[0])[:, None], result, 0)


@pytest.mark.every_other
@pytest.mark.parametrize("moved", ["a", "b", "bias", "a b bias", "col_scale", "b row_scale"])
def test_products_with_a_bias_are_derived_without_their_bare_sums(moved):
    names = ("a", "b", "bias", "col_scale", "row_scale")
    every = dict(zip(names, (LHS, RHS, *(EXTRAS[name] for name in names[2:])), strict=True))
    chosen = {name: every[name] for name in moved.split()}

    def gradient(f: Any) -> Any:
        def of(chosen: Any) -> jax.Array:
            lhs, rhs, *extras = (every | chosen).values()
            return _affine(lhs, rhs, dict(zip(names[2:], extras, strict=True)), f)

        return jax.grad(of)

    found, expected = gradient(grouped_gemm)(chosen), gradient(_affine_by_rows)(chosen)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    # The result, a product for each factor that changes, and the sums that a scale's change needs.
    products = str(jax.make_jaxpr(gradient(grouped_gemm))(chosen)).count("pallas_gemm_grouped[")
    needed = len({"a", "b"} & set(chosen)) + any("scale" in name for name in chosen)
    assert products == 1 + needed


def test_the_kernel_is_simulated_with_everything_that_follows():
    lhs, rhs, _ = _poisoned(sizes := SIZES["uneven"])

    def wide(x: Any) -> jax.Array:
        # The right operand of the kernel has a multiple of 64 columns.
        return jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, 64 - N)])

    extras = {n: wide(x) if x.shape[-1] == N else x for n, x in EXTRAS.items()}
    extras["up"] = extras["up"].astype(jnp.bfloat16)
    options: Any = {"activation": "relu", "implementation": "interpret"}
    matrices = wide(rhs).astype(jnp.bfloat16)
    out = grouped_gemm(lhs.astype(jnp.bfloat16), matrices, jnp.array(sizes), **extras, **options)
    expected = _finished(sizes, LHS, RHS, EXTRAS)
    np.testing.assert_array_equal(out[:, :N], expected.astype(jnp.bfloat16))


def _unfused(decision: Decision) -> str | None:
    """Why XLA applies the epilogue."""
    assert decision.plan is not None
    return decision.plan.realigned.unfused


def test_a_pair_and_what_follows_are_one_product_of_a_kernel_and_derived_as_two():
    shape = jax.ShapeDtypeStruct
    rows, matrices = shape((4096, 1024), jnp.bfloat16), shape((8, 1024, 2048), jnp.bfloat16)
    given = rows, matrices, matrices, shape((8, 2048), jnp.float32), shape((8,), jnp.int32)

    def multiply(activation: Any, *given: Any) -> Any:
        a, b, up, bias, sizes = given
        return grouped_gemm(a, b, sizes, up=up, bias=bias, activation=activation)

    def loss(*given: Any) -> Any:
        return multiply("silu", *given).astype(jnp.float32).sum()

    with target("h200"):
        [alone] = explain(functools.partial(multiply, "silu"), *given).products
        narrow = [shape((*x.shape[:-1], 16), x.dtype) for x in given[1:4]]
        [few] = explain(functools.partial(multiply, "silu"), rows, *narrow, given[-1]).products
        derived = explain(jax.grad(loss, (0, 1, 2, 3)), *given).products
        # What the kernel cannot apply, XLA does, in one pass.
        [left] = explain(functools.partial(multiply, jax.scipy.special.gammaln), *given).products
    _, pull = jax.eval_shape(lambda *x: jax.vjp(functools.partial(multiply, "silu"), *x), *given)
    # Both products are kept, and nothing that is made of them.
    kept = [x.dtype for x in jax.tree.leaves(pull) if x.shape == (4096, 2048)]
    assert kept == [jnp.bfloat16] * 2
    assert alone.problem.epilogue.parts == ("bias", "gated", "silu")
    for own in (alone, few):
        assert (own.implementation, _unfused(own)) == ("hopper", None)
    grouped = [own for own in derived if own.problem.groups or own.problem.ragged_k]
    assert len(grouped) == 6
    assert {own.implementation for own in grouped} == {"hopper"}
    assert left.implementation == "hopper"
    assert "lgamma" in str(_unfused(left))


def test_no_product_is_computed_twice_where_an_activation_is_derived():
    shape = jax.ShapeDtypeStruct
    given = shape((4096, 1024), jnp.bfloat16), shape((8, 1024, 2048), jnp.bfloat16)
    given += shape((8, 2048), jnp.float32), shape((8,), jnp.int32)

    def loss(a: Any, b: Any, bias: Any, sizes: Any) -> Any:
        found = grouped_gemm(a, b, sizes, bias=bias, activation="relu")
        return jnp.sum(found.astype(jnp.float32) ** 2)

    with target("h200"):
        derived = explain(jax.grad(loss, (0, 1)), *given).products
    assert [own.problem.ragged_k for own in derived].count(True) == 1
    # The product, and the gradients of both factors.
    assert len(derived) == 3


@pytest.mark.parametrize(
    ("contracted", "ragged", "group", "ranks", "form"),
    [
        (((1,), (1,)), [0], [0], (2, 3), (False, False)),
        (((1,), (2,)), [0], [0], (2, 3), (False, True)),
        (((0,), (0,)), [0], [], (2, 2), (True, False)),
        # Groups of k that is last, of a right operand whose groups are last, and of one without.
        (((1,), (1,)), [1], [], (2, 2), None),
        (((1,), (1,)), [0], [2], (2, 3), None),
        (((1,), (0,)), [0], [], (2, 2), None),
        (((2,), (1,)), [0], [0], (3, 3), None),
    ],
)
def test_which_products_of_groups_are_ours(contracted, ragged, group, ranks, form):
    numbers = lax.RaggedDotDimensionNumbers((contracted, ((), ())), ragged, group)
    assert grouped.form_of(numbers, *ranks) == form


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


@pytest.mark.gpu("hopper")
@pytest.mark.parametrize(
    "sizes",
    [(0, 8192, 0, 0), (4001, 3, 4100, 88), (1000, 0, 7000, 191), (9000, 8192, 1, 0)],
    ids=["one", "two", "most", "too many"],
)
def test_crowded_groups_are_summed_in_parts_the_same_in_every_run(sizes):
    lhs, g = (_integers(8192, columns, seed=columns) for columns in (256, 512))
    ends = np.minimum(np.cumsum(sizes), 8192)
    spans = zip(np.append(0, ends[:-1]), ends, strict=True)
    expected = np.stack([np.asarray(lhs[i:j].T @ g[i:j]) for i, j in spans])
    lhs, g = (x.astype(jnp.bfloat16) for x in (lhs, g))
    contracted = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    multiply = jax.jit(lambda a, b, s: ragged_dot_general(a, b, s, contracted))
    first = multiply(lhs, g, jnp.array(sizes))
    np.testing.assert_array_equal(first, jnp.asarray(expected, jnp.bfloat16))
    noise = [jax.random.normal(jax.random.key(i), x.shape, x.dtype) for i, x in enumerate((lhs, g))]
    runs = [np.asarray(multiply(*noise, jnp.array(sizes)), np.float32) for _ in range(20)]
    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])


@pytest.mark.gpu("hopper")
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
def test_the_kernel_applies_what_follows_on_a_gpu(gated):
    sizes = (257, 0, 63, 1, 64, 400)
    shapes = {"bias": (6, 320), "col_scale": (6, 320), "row_scale": (800,), "alpha": (6,)}
    extras = {name: _integers(*shape, seed=len(name)) for name, shape in shapes.items()}
    lhs, rhs, up = (_integers(*shape) for shape in [(800, 192), (6, 192, 320), (6, 192, 320)])
    group = _group_of(sizes, 800)
    of_row = {n: x[np.minimum(group, 5)] for n, x in extras.items() if n != "row_scale"}
    plain = _exact(sizes, lhs, rhs, jnp.zeros((800, 320)))[0]
    factor = (of_row["alpha"] * extras["row_scale"])[:, None] * of_row["col_scale"]
    expected = np.maximum(factor * plain + of_row["bias"], 0)
    if gated:
        extras["up"] = up.astype(jnp.bfloat16)
        second = _exact(sizes, lhs, up, jnp.zeros((800, 320)))[0]
        expected = expected * (of_row["alpha"] * extras["row_scale"])[:, None] * second
    expected = np.where((group < 6)[:, None], expected, 0)
    lhs = lhs.at[group == 6].set(jnp.nan)
    multiply = jax.jit(functools.partial(grouped_gemm, activation="relu"))
    given = lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16), jnp.array(sizes)
    assert "mosaic_gpu" in multiply.lower(*given, **extras).as_text()
    out = multiply(*given, **extras)
    np.testing.assert_array_equal(out, jnp.asarray(expected, jnp.float32).astype(jnp.bfloat16))
