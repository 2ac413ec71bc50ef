"""The types of results are those of JAX, for all pairs of types, weak ones among them."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gemm import dot_general, einsum, gemm, matmul

NUMBERS = (((1,), (0,)), ((), ()))

STRONG = (
    *("bool_", "int2", "int4", "int8", "int16", "int32", "uint4", "uint8", "uint16", "uint32"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e5m2fnuz", "float8_e4m3"),
    *("bfloat16", "float16", "float32", "complex64"),
)
# What Python numbers are.
WEAK = ("bool_", "int32", "float32", "complex64")
TYPES = [
    jax.ShapeDtypeStruct((2, 2), getattr(jnp, name), weak_type=weak)
    for names, weak in ((STRONG, False), (WEAK, True))
    for name in names
]
PAIRS = list(itertools.product(TYPES, repeat=2))

Product = Callable[[Any, Any], jax.Array]


def _type_of(product: Product, a: Any, b: Any) -> Any:
    """Returns the type of a product, weak or not, or the kind of error that there is none."""
    try:
        result = jax.eval_shape(product, a, b)
    except (TypeError, ValueError) as error:
        return TypeError if isinstance(error, TypeError) else ValueError
    return result.dtype, result.weak_type


def _mistaken(ours: Product, stock: Product, pairs: list[Any]) -> dict[str, Any]:
    """Returns what we say and what JAX says for each pair for which that is not the same."""
    return {
        f"{a.dtype}/{a.weak_type} {b.dtype}/{b.weak_type}": (found, right)
        for a, b in pairs
        if (found := _type_of(ours, a, b)) != (right := _type_of(stock, a, b))
    }


@pytest.mark.parametrize("promotion", ["standard", "strict"])
@pytest.mark.parametrize(
    ("ours", "stock", "pairs"),
    [
        (
            lambda a, b: dot_general(a, b, NUMBERS),
            lambda a, b: lax.dot_general(a, b, NUMBERS),
            PAIRS,
        ),
        # One function says it for both: here a third is enough, each type on either side.
        (gemm, jnp.matmul, PAIRS[::3]),
    ],
    ids=["dot_general", "gemm"],
)
def test_each_pair_of_types_gives_what_jax_gives(
    ours: Product, stock: Product, pairs: list[Any], promotion: str
) -> None:
    with jax.numpy_dtype_promotion(promotion):
        assert not _mistaken(ours, stock, pairs)


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("preferred", [jnp.int16, jnp.float32])
def test_a_preferred_type_is_what_jax_gives_or_refuses(preferred: Any) -> None:
    how = {"preferred_element_type": preferred}
    pairs = list(itertools.product(TYPES[::3], repeat=2))
    assert not _mistaken(
        functools.partial(matmul, **how), functools.partial(jnp.matmul, **how), pairs
    )
    assert not _mistaken(
        functools.partial(dot_general, dimension_numbers=NUMBERS, **how),
        functools.partial(lax.dot_general, dimension_numbers=NUMBERS, **how),
        pairs,
    )


def test_wide_types_are_known_where_they_are_enabled() -> None:
    wide = [jax.ShapeDtypeStruct((2, 2), name) for name in ("float64", "int64", "bfloat16")]
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        for a, b in itertools.product(wide, wide):
            assert _type_of(matmul, a, b) == _type_of(jnp.matmul, a, b)


@pytest.mark.parametrize("preferred", [None, bool, jnp.float32])
def test_a_mask_selects_rows(rng: np.random.Generator, preferred: Any) -> None:
    mask = jnp.asarray(rng.integers(0, 2, (5, 6)).astype(bool))
    values = jnp.asarray(rng.integers(-3, 4, (6, 7)).astype(jnp.float32))
    both = jnp.asarray(rng.integers(0, 2, (6, 7)).astype(bool))
    with jax.numpy_dtype_promotion("standard"):
        for right in (values, both):
            for ours, stock in (
                (matmul, jnp.matmul),
                (gemm, jnp.matmul),
                (
                    lambda a, b, **how: dot_general(a, b, NUMBERS, **how),
                    lambda a, b, **how: lax.dot_general(a, b, NUMBERS, **how),
                ),
                (
                    lambda a, b, **how: einsum("ij,jk->ki", a, b, **how),
                    lambda a, b, **how: jnp.einsum("ij,jk->ki", a, b, **how),
                ),
            ):
                found = ours(mask, right, preferred_element_type=preferred)
                right_one = stock(mask, right, preferred_element_type=preferred)
                assert found.dtype == right_one.dtype
                np.testing.assert_array_equal(found, right_one)


@jax.numpy_dtype_promotion("standard")
def test_a_mask_may_be_mapped_derived_and_followed_by_an_epilogue(rng: np.random.Generator) -> None:
    masks = jnp.asarray(rng.integers(0, 2, (3, 5, 6)).astype(bool))
    values = jnp.asarray(rng.integers(-3, 4, (6, 7)).astype(jnp.float32))
    bias = jnp.arange(7.0)

    def loss(op: Any, values: jax.Array) -> jax.Array:
        return jnp.sum(jax.vmap(lambda mask: op(mask, values))(masks) ** 2)

    ours = jax.grad(lambda x: loss(matmul, x))(values)
    np.testing.assert_array_equal(ours, jax.grad(lambda x: loss(jnp.matmul, x))(values))
    found = gemm(masks[0], values, bias=bias, activation="relu")
    wanted = jnp.maximum(masks[0].astype(jnp.float32) @ values + bias[None], 0)
    np.testing.assert_array_equal(found, wanted)


@jax.numpy_dtype_promotion("standard")
def test_integers_times_floats_are_added_up_as_floats() -> None:
    a, b = jnp.ones((2, 4), jnp.int8), jnp.full((4, 3), 0.5)
    result = gemm(a, b, bias=jnp.ones(3))
    np.testing.assert_array_equal(result, np.full((2, 3), 3.0))


@pytest.mark.parametrize(
    ("lhs", "rhs", "numbers"),
    [
        (2.0, np.ones((3, 4), np.float32), (((), ()), ((), ()))),
        (np.ones((3, 4), np.float32), 2, (((), ()), ((), ()))),
        (np.float32(2), np.float32(3), (((), ()), ((), ()))),
        (np.ones((3, 4), np.float32), np.ones((4, 2), np.float32), ((1, 0), ((), ()))),
        (np.ones((3, 4), np.float32), np.ones((3, 2), np.float32), (((), ()), (0, np.int64(0)))),
        (
            np.ones((3, 4), np.float32),
            np.ones((4, 2), np.float32),
            ((np.array([1]), [0]), ([], ())),
        ),
        (np.ones((3, 4), np.float32), np.ones((4,), np.float32), None),
    ],
    ids=["left", "right", "both", "numbers", "batch", "arrays", "none"],
)
def test_scalars_and_numbers_are_taken_where_lax_takes_them(
    lhs: Any, rhs: Any, numbers: Any
) -> None:
    ours, stock = (op(lhs, rhs, numbers) for op in (dot_general, lax.dot_general))
    assert jax.typeof(ours) == jax.typeof(stock)
    np.testing.assert_array_equal(ours, stock)


@pytest.mark.parametrize(
    ("shapes", "numbers"),
    [
        (((3, 4), (3, 4)), (((1,), (0,)), ((), ()))),
        (((3, 4), (4, 3)), (((-1,), (0,)), ((), ()))),
        (((3, 4), (4, 3)), (((1,), (2,)), ((), ()))),
        (((3, 3), (3, 3)), (((1, 1), (0, 1)), ((), ()))),
        (((3, 3), (3, 3)), (((1,), (0,)), ((1,), (0,)))),
        (((3, 4), (4, 3)), (((1,), ()), ((), ()))),
        (((3, 4), (2, 4)), (((1,), (1,)), ((0,), (0,)))),
        (((3, 4), (3, 4)), None),
    ],
)
def test_mistakes_are_of_the_kind_that_they_are_in_lax(shapes: Any, numbers: Any) -> None:
    lhs, rhs = map(jnp.ones, shapes)
    with pytest.raises((TypeError, ValueError)) as theirs:
        lax.dot_general(lhs, rhs, numbers)
    with pytest.raises(theirs.type, match=r"lhs|dimension_numbers"):
        dot_general(lhs, rhs, numbers)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.ones((3, 4)), np.ones((3, 4))),
        (np.ones(3), np.ones(4)),
        (np.ones((2, 3, 4)), np.ones((3, 4, 5))),
        (np.ones(()), np.ones(4)),
        (np.ones(4), 2.0),
        ([1.0], np.ones(1)),
        (np.ma.masked_array(np.ones(4)), np.ones(4)),
        (None, np.ones(4)),
    ],
    ids=["matrices", "vectors", "batches", "scalar", "number", "list", "masked", "none"],
)
def test_mistakes_are_of_the_kind_that_they_are_in_jnp(a: Any, b: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as theirs:
        jnp.matmul(a, b)
    for ours in (matmul, gemm):
        with pytest.raises(theirs.type):
            ours(a, b)


def test_an_epilogue_follows_exact_sums_of_integers_though_its_result_is_of_floats() -> None:
    """Beyond 2^24, where float32 has no odd numbers."""
    a = np.full((2, 3001), 127, np.int8)
    a[0, :7] = 126
    exact = a.astype(np.int64) @ a.T.astype(np.int64)
    how: dict[str, Any] = {"preferred_element_type": jnp.float32, "activation": "relu"}
    found = gemm(jnp.asarray(a), jnp.asarray(a.T), implementation="xla", **how)
    assert exact.min() > 2**24
    np.testing.assert_array_equal(found, exact.astype(np.float32))
