"""`ragged_dot` as a program calls it: JAX's arguments, and errors that say what would be legal."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gemm
from pallas_gemm.api.groups import grouped
from pallas_gemm.planning.by_xla import xla_groups

OVER_ROWS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
FEW = jnp.ones((2, 8, 4), jnp.int8)
LHS, RHS, SIZES = jnp.ones((6, 8)), jnp.ones((2, 8, 4)), jnp.array([2, 3])


@pytest.mark.parametrize("name", ["ragged_dot", "ragged_dot_general"])
def test_the_arguments_are_those_of_jax(name):
    ours, stock = (
        [
            (p.name, p.kind, p.default)
            for p in inspect.signature(getattr(m, name)).parameters.values()
        ]
        for m in (pallas_gemm, lax)
    )
    # And what is promised of the bits, which JAX has no word for.
    assert ours == [*stock, ("numerics", inspect.Parameter.KEYWORD_ONLY, None)]


@pytest.mark.parametrize(
    ("extras", "error", "words"),
    [
        ({"up": RHS[:, :, :2]}, TypeError, r"up must be like b, float32\[2, 8, 4\], got .*8, 2\]"),
        ({"up_bias": jnp.ones(4)}, ValueError, "up_bias has no meaning without up"),
        ({"bias": jnp.ones(3)}, ValueError, r"bias must have .* \[4\] or \[2, 4\], got \[3\]"),
        (
            {"row_scale": jnp.ones((2, 6))},
            ValueError,
            r"row_scale must be \[m / r, k / g\].* got \[2, 6\]",
        ),
        ({"alpha": jnp.ones(3)}, ValueError, r"alpha must be a number or .* \[2\], .* got \[3\]"),
        ({"up": RHS, "bias": jnp.ones(3)}, ValueError, r"^bias must have .* got \[3\]"),
        (
            {"up": RHS, "col_scale": jnp.ones((2, 2, 4))},
            ValueError,
            r"^col_scale must be \[k / g, n / c\]",
        ),
        (
            {"up": RHS, "up_scale": jnp.ones((2, 2, 4))},
            ValueError,
            "^up_scale must be .* columns of up and k=8",
        ),
        (
            {
                "up": FEW,
                "b": FEW,
                "col_zero": 1.0,
                "col_scale": jnp.ones(4),
                "up_scale": jnp.ones(4),
            },
            ValueError,
            "^col_zero must have the shape of col_scale",
        ),
        ({"activation": "relux"}, ValueError, "did you mean 'relu'"),
        (
            {"transpose_b": True},
            TypeError,
            r"a and b must agree .* 4 in b\[2, 8, 4\] \(dimension 2\)",
        ),
    ],
)
def test_what_no_epilogue_of_groups_takes_is_refused(extras, error, words):
    with pytest.raises(error, match=words):
        pallas_gemm.grouped_gemm(**{"a": LHS, "b": RHS, "group_sizes": SIZES} | extras)


@pytest.mark.parametrize(
    ("operands", "error", "words"),
    [
        ((LHS[0], RHS, SIZES), TypeError, r"lhs must be \[m, k\], got shape \[8\]"),
        ((LHS, RHS[0], SIZES), TypeError, r"rhs must be \[groups, k, n\], got shape \[8, 4\]"),
        ((LHS[:, :3], RHS, SIZES), TypeError, r"got 3 in lhs\[6, 3\] \(dimension 1\) and 8 in rhs"),
        ((LHS, RHS, SIZES[:1]), TypeError, "2 sizes, one for each matrix of .* got 1"),
        ((LHS, RHS, SIZES[None]), TypeError, r"must be \[groups\], got shape \[1, 2\]"),
        ((LHS, RHS, LHS[0, :2]), TypeError, "group_sizes must be integers, got float32"),
        ((LHS, "b", SIZES), TypeError, "rhs must be"),
        ((2**40, RHS, SIZES), TypeError, r"lhs must be \[m, k\], got shape \[\]; JAX says: Py"),
    ],
)
def test_errors_say_what_would_be_legal(operands, error, words):
    with pytest.raises(error, match=words):
        pallas_gemm.ragged_dot(*operands)


def test_a_type_of_64_bits_is_that_of_32_unless_they_are_enabled():
    # JAX's own function makes a program of two types of it.
    given = LHS.astype(int), RHS.astype(int), SIZES
    found = pallas_gemm.ragged_dot(*given, preferred_element_type=np.int64)
    np.testing.assert_array_equal(found, lax.ragged_dot(*given))
    with pytest.raises(TypeError, match=r"out_sharding must be .* got \['x'\]"):
        pallas_gemm.ragged_dot(LHS, RHS, SIZES, out_sharding=["x"])


def test_a_symbolic_number_of_groups_is_refused():
    struct, groups = jax.ShapeDtypeStruct, jax.export.symbolic_shape("groups")
    operands = LHS, struct((*groups, 8, 4), LHS.dtype), struct(groups, SIZES.dtype)
    for f, given in (
        (pallas_gemm.grouped_gemm, operands),
        (pallas_gemm.group_sums, (LHS.T, LHS, operands[2])),
    ):
        words = r"^group_sizes must have a known number of groups, got shape \[groups\]"
        with pytest.raises(TypeError, match=words):
            jax.export.export(jax.jit(f))(*given)


@pytest.mark.parametrize("make", [np.array, jnp.array])
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([2, -3], "group_sizes must not be negative, got -3 for group 1"),
        ([2, 5], "group_sizes must add up to at most the 6 rows, got 7"),
        ([2**31 - 1] * 2, "group_sizes must add up to at most the 6 rows, got 4294967294"),
    ],
)
@pytest.mark.parametrize(
    "call",
    [
        pallas_gemm.ragged_dot,
        pallas_gemm.grouped_gemm,
        functools.partial(pallas_gemm.ragged_dot, group_offset=jnp.array([0])),
        lambda a, b, sizes: pallas_gemm.ragged_dot_general(a, b, sizes, xla_groups.ROWS),
        lambda a, _, sizes: pallas_gemm.ragged_dot_general(a, a, sizes, OVER_ROWS),
        # Sizes are known where only the others are not.
        lambda a, b, sizes: jax.jit(lambda a, b: pallas_gemm.ragged_dot(a, b, sizes))(a, b),
        lambda a, b, sizes: jax.grad(lambda a: pallas_gemm.ragged_dot(a, b, sizes).sum())(a),
    ],
)
def test_sizes_that_are_known_are_checked(call, values, words, make):
    with pytest.raises(ValueError, match=words):
        call(LHS, RHS, make(values, np.int32))
    assert call(LHS, RHS, make([2, 4], np.int32)).dtype == jnp.float32


def test_sizes_that_are_not_known_and_products_of_jax_are_left_alone():
    bad = jnp.array([2, -3])
    assert jax.jit(pallas_gemm.ragged_dot)(LHS, RHS, bad).shape == (6, 4)
    # Several dimensions of a kind: the product is JAX's, and so is the say in sizes.
    numbers = lax.RaggedDotDimensionNumbers((((1, 2), (1, 2)), ((), ())), [0], [0])
    wide = LHS.reshape(6, 4, 2), RHS.reshape(2, 4, 2, 4), bad
    expected = lax.ragged_dot_general(*wide, numbers)
    np.testing.assert_array_equal(pallas_gemm.ragged_dot_general(*wide, numbers), expected)
    # The compiled program serves it: no check has the call made again without.
    given = dict(zip(("lhs", "rhs", "group_sizes"), wide, strict=True))
    grouped._check_started({**given, "ragged_dot_dimension_numbers": numbers})


@pytest.mark.parametrize(
    "operands",
    [
        (LHS[:, :3], RHS, SIZES),
        (LHS, RHS, SIZES[:1]),
        (LHS, RHS, SIZES[None]),
        (LHS, RHS, LHS[0, :2]),
        (LHS, RHS[0], SIZES),
        (LHS[0], RHS, SIZES),
    ],
)
@pytest.mark.parametrize("jit", [False, True])
def test_errors_have_the_words_of_jax_too(operands, jit):
    with pytest.raises(TypeError) as stock:
        lax.ragged_dot(*operands)
    run = jax.jit(pallas_gemm.ragged_dot) if jit else pallas_gemm.ragged_dot
    with pytest.raises(TypeError, match=re.escape(f"; JAX says: {stock.value}")):
        run(*operands)


@pytest.mark.parametrize(
    ("sizes", "offset", "words"),
    [
        (SIZES, jnp.array([0, 1]), r"group_offset must be .* shape \[1\], got int32\[2\]"),
        (SIZES, jnp.array([0.5]), "got float32"),
        (SIZES[:1], jnp.array([0]), "a size for each of 2 groups of rhs, got 1"),
    ],
)
def test_an_offset_among_groups_is_one_number(sizes, offset, words):
    with pytest.raises(TypeError, match=words):
        pallas_gemm.ragged_dot(LHS, RHS, sizes, group_offset=offset)


HIGHEST = lax.Precision.HIGHEST
OVER_COLUMNS = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
OPTIONS = (
    {"precision": HIGHEST},
    {"precision": lax.DotAlgorithmPreset.TF32_TF32_F32_X3},
    {"preferred_element_type": jnp.bfloat16},
    {"ragged_dot_dimension_numbers": OVER_COLUMNS},
)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_what_is_asked_for_beside_an_offset_is_computed_as_without_one(options):
    is_transposed = "ragged_dot_dimension_numbers" in options
    product = pallas_gemm.ragged_dot_general if is_transposed else pallas_gemm.ragged_dot
    rhs = jnp.swapaxes(RHS, 1, 2) if is_transposed else RHS

    def explained(offset):
        given = functools.partial(product, **options, group_offset=offset)
        with pallas_gemm.target("h200"):
            (found,) = pallas_gemm.explain(given, LHS, rhs, SIZES).products
        return found

    whole, part = explained(None), explained(jnp.array([0]))
    assert part.problem == whole.problem
    assert (part.implementation, part.refused) == (whole.implementation, whole.refused)
    assert ("precision" in str(part.refused)) == ("precision" in options)


def test_where_groups_have_no_matrices_there_is_no_offset():
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    with pytest.raises(NotImplementedError, match="group_offset must be None"):
        pallas_gemm.ragged_dot_general(LHS, LHS, SIZES, numbers, group_offset=jnp.array([0]))


def test_dimension_numbers_are_those_of_jax():
    numbers = ((1,), (0,)), ((), ())
    with pytest.raises(TypeError, match=r"must be jax.lax.RaggedDotDimensionNumbers\(...\), got"):
        pallas_gemm.ragged_dot_general(LHS, RHS, SIZES, numbers)
