"""Any contraction as one batched product: the same numbers, and no copies where none are needed."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from pallas_gemm.api import request
from pallas_gemm.api.gemm import answer, dot_general
from pallas_gemm.call import Call, Operands, Options
from pallas_gemm.op import canonical, contraction
from pallas_gemm.op.canonical import Form, Side
from pallas_gemm.op.contraction import Contraction, DimensionNumbers
from pallas_gemm.problem import Epilogue
from tests import reference

SIZES = (2, 3, 1, 4)
CALL = Call(jnp.float32)


def _matchings(lhs_rank: int, rhs_rank: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yields every way to pair dimensions of one operand with dimensions of the other."""
    for count in range(min(lhs_rank, rhs_rank) + 1):
        for lhs in itertools.combinations(range(lhs_rank), count):
            for rhs in itertools.permutations(range(rhs_rank), count):
                yield tuple(zip(lhs, rhs, strict=True))


def _numbers(pairs: Any, contracted: Any) -> DimensionNumbers:
    contract = tuple(pair for pair, flag in zip(pairs, contracted, strict=True) if flag)
    batch = tuple(pair for pair, flag in zip(pairs, contracted, strict=True) if not flag)
    sides = [tuple(tuple(p[side] for p in kind) for side in (0, 1)) for kind in (contract, batch)]
    return tuple(sides)  # type: ignore[return-value]


def _shapes(lhs_rank: int, rhs_rank: int, pairs: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    lhs = [SIZES[i] for i in range(lhs_rank)]
    rhs = [SIZES[-1 - i] + 3 for i in range(rhs_rank)]
    for i, j in pairs:
        rhs[j] = lhs[i]
    return tuple(lhs), tuple(rhs)


def _form(contraction: Contraction, *shapes: tuple[int, ...]) -> Form:
    signature = tuple((shape, np.dtype(np.float32)) for shape in shapes)
    dims, squeezed = contraction.without_ones(CALL, shapes)
    signature = tuple((shape, dtype) for shape, (_, dtype) in zip(squeezed, signature, strict=True))
    return canonical.merged(CALL, dims, signature).form


def _of_dot_general(lhs: Any, rhs: Any, numbers: DimensionNumbers) -> Form:
    return _form(contraction.of_dot_general(len(lhs), len(rhs), numbers), lhs, rhs)


def _of_matmul(a: Any, b: Any, *transposed: bool) -> Form:
    return _form(contraction.of_matmul(a, b, *transposed), a, b)


def _product(form: Form, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Computes a contraction as its form says, in NumPy."""
    if form.swapped:
        left, right = right, left
    a, b = _applied(form.a, left), _applied(form.b, right)
    a = a.swapaxes(-1, -2) if form.a.transposed else a
    b = b.swapaxes(-1, -2) if form.b.transposed else b
    product = np.matmul(a, b)
    assert product.shape == form.product_shape
    apart = product.reshape(form.parts)
    return apart if form.permutation is None else apart.transpose(form.permutation)


def _applied(side: Side, x: np.ndarray) -> np.ndarray:
    if side.permutation is not None:
        x = x.transpose(side.permutation)
    if side.broadcast is not None:
        own, whole, dims = side.broadcast
        places = [dims.index(i) if i in dims else None for i in range(len(whole))]
        x = x.reshape([1 if place is None else own[place] for place in places])
        x = np.broadcast_to(x, whole)
    return x.reshape(side.shape)


def _einsum(lhs: np.ndarray, rhs: np.ndarray, numbers: DimensionNumbers) -> np.ndarray:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    names = [chr(ord("a") + i) for i in range(lhs.ndim)]
    others = [chr(ord("k") + i) for i in range(rhs.ndim)]
    for i, j in zip((*lhs_contract, *lhs_batch), (*rhs_contract, *rhs_batch), strict=True):
        others[j] = names[i]
    free = [n for i, n in enumerate(names) if i not in (*lhs_contract, *lhs_batch)]
    free += [n for j, n in enumerate(others) if j not in (*rhs_contract, *rhs_batch)]
    out = [*(names[i] for i in lhs_batch), *free]
    return np.einsum(f"{''.join(names)},{''.join(others)}->{''.join(out)}", lhs, rhs)


@pytest.mark.parametrize("ranks", list(itertools.product(range(5), repeat=2)), ids=str)
def test_every_contraction_up_to_rank_4(ranks: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    for pairs in _matchings(*ranks):
        shapes = _shapes(*ranks, pairs)
        lhs, rhs = (rng.integers(-2, 3, shape) for shape in shapes)
        for contracted in itertools.product((False, True), repeat=len(pairs)):
            numbers = _numbers(pairs, contracted)
            form = _of_dot_general(*shapes, numbers)
            np.testing.assert_array_equal(
                _product(form, lhs, rhs), _einsum(lhs, rhs, numbers), strict=True
            )


@st.composite
def contractions(draw: Any) -> tuple[Any, Any, DimensionNumbers]:
    """Draws the shapes of two operands and legal dimension numbers, in any order."""
    ranks = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    pairs = draw(st.permutations(list(draw(st.sampled_from(list(_matchings(*ranks)))))))
    contracted = [draw(st.booleans()) for _ in pairs]
    return (*_shapes(*ranks, pairs), _numbers(pairs, contracted))


@settings(max_examples=40)
@given(contractions())
def test_dot_general_is_that_of_lax(case: tuple[Any, Any, DimensionNumbers]) -> None:
    lhs_shape, rhs_shape, numbers = case
    rng = np.random.default_rng(0)
    lhs = reference.integers(rng, lhs_shape, jnp.float32)
    rhs = reference.integers(rng, rhs_shape, jnp.float32)
    ours = dot_general(lhs, rhs, numbers)
    laxs = lax.dot_general(lhs, rhs, numbers)
    assert ours.dtype == laxs.dtype
    np.testing.assert_array_equal(ours, laxs, strict=True)


@settings(max_examples=6)
@given(contractions())
def test_dot_general_is_that_of_lax_in_the_simulator(case: Any) -> None:
    lhs_shape, rhs_shape, numbers = case
    rng = np.random.default_rng(0)
    lhs = reference.integers(rng, lhs_shape, jnp.bfloat16)
    rhs = reference.integers(rng, rhs_shape, jnp.bfloat16)
    ours = answer(request.of_dot_general(lhs, rhs, numbers, Options(implementation="interpret")))
    np.testing.assert_array_equal(
        reference.wide(ours), reference.wide(lax.dot_general(lhs, rhs, numbers)), strict=True
    )


@pytest.mark.parametrize(
    ("what", "lhs", "rhs", "numbers", "layout", "product"),
    [
        ("Dense, a matrix", (5, 4), (4, 6), (((1,), (0,)), ((), ())), "NN", (5, 6)),
        ("Dense, a sequence", (2, 5, 4), (4, 6), (((2,), (0,)), ((), ())), "NN", (10, 6)),
        ("Dense, a vector", (4,), (4, 6), (((0,), (0,)), ((), ())), "NN", (1, 6)),
        ("several features", (2, 5, 4), (4, 3, 7), (((2,), (0,)), ((), ())), "NN", (10, 21)),
        ("attention output", (2, 5, 3, 4), (3, 4, 6), (((2, 3), (0, 1)), ((), ())), "NN", (10, 6)),
        ("experts", (3, 5, 4), (3, 4, 6), (((2,), (1,)), ((0,), (0,))), "NN", (3, 5, 6)),
        ("tied embedding", (2, 5, 4), (9, 4), (((2,), (1,)), ((), ())), "NT", (10, 9)),
        ("swapped by einsum", (4, 3, 7), (2, 5, 4), (((0,), (2,)), ((), ())), "TT", (21, 10)),
        ("mapped weights", (5, 4), (3, 4, 6), (((1,), (1,)), ((), ())), None, (5, 18)),
        ("gradient of x", (2, 5, 6), (4, 6), (((2,), (1,)), ((), ())), "NT", (10, 4)),
        ("gradient of w", (2, 5, 6), (2, 5, 4), (((0, 1), (0, 1)), ((), ())), "TN", (6, 4)),
        ("unit dimensions", (5, 1, 4), (1, 4, 6), (((2,), (1,)), ((1,), (0,))), "NN", (5, 6)),
        ("a matrix and a vector", (5, 4), (4,), (((1,), (0,)), ((), ())), "NT", (1, 5)),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_layers_ask_for_needs_no_copy(
    what: str, lhs: Any, rhs: Any, numbers: Any, layout: str | None, product: Any
) -> None:
    form = _of_dot_general(lhs, rhs, numbers)
    assert form.product_shape == product
    if layout is None:
        # Only the right operand is transposed: its free dimensions do not lie side by side.
        assert form.a.is_free
        assert not form.b.is_free
        return
    assert form.a.is_free
    assert form.b.is_free
    assert "NT"[form.a.transposed] + "NT"[form.b.transposed] == layout


def test_the_cheaper_operand_is_transposed() -> None:
    # The contracted dimensions have another order in each operand: one of them has to move.
    numbers = (((1, 2), (1, 0)), ((), ()))
    large_right = _of_dot_general((2, 3, 5), (5, 3, 700), numbers)
    large_left = _of_dot_general((700, 3, 5), (5, 3, 2), numbers)
    assert (large_right.a.is_free, large_right.b.is_free) == (False, True)
    assert (large_left.a.is_free, large_left.b.is_free) == (True, False)


LEADS = ((), (1,), (3,), (2, 1), (1, 3), (2, 3))


@pytest.mark.parametrize("transposed", list(itertools.product((False, True), repeat=2)), ids=str)
def test_matmul_broadcasts_as_numpy(transposed: tuple[bool, bool]) -> None:
    rng = np.random.default_rng(0)
    shapes = [
        [(*lead, *((4, 5) if transposed[0] else (5, 4))) for lead in LEADS] + [(4,)],
        [(*lead, *((6, 4) if transposed[1] else (4, 6))) for lead in LEADS] + [(4,)],
    ]
    for a_shape, b_shape in itertools.product(*shapes):
        a, b = rng.integers(-2, 3, a_shape), rng.integers(-2, 3, b_shape)
        form = _of_matmul(a_shape, b_shape, *transposed)
        exact = np.matmul(
            a.swapaxes(-1, -2) if transposed[0] and a.ndim > 1 else a,
            b.swapaxes(-1, -2) if transposed[1] and b.ndim > 1 else b,
        )
        dims = contraction.of_matmul(a_shape, b_shape, *transposed)
        shapes_ = dims.without_ones(CALL, (a_shape, b_shape))[1]
        found = _product(form, a.reshape(shapes_[0]), b.reshape(shapes_[1]))
        np.testing.assert_array_equal(found, exact, strict=True)


def test_shared_right_operand_means_more_rows() -> None:
    form = _of_matmul((2, 3, 5, 4), (4, 6), False, False)
    assert form.product_shape == (30, 6)
    assert form.a.is_free


def test_a_vector_is_a_row() -> None:
    form = _of_matmul((5, 4), (4,), False, False)
    assert (form.product_shape, form.swapped, form.b.transposed) == ((1, 5), True, True)
    batched = _of_matmul((3, 5, 4), (4,), False, False)
    assert (batched.product_shape, batched.parts) == ((1, 15), (3, 5))


def test_the_signature_of_the_product_follows_the_form() -> None:
    a, b = jax.ShapeDtypeStruct((5, 4), jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.float16)
    asked = request.of_gemm(
        Operands(a, b), request.Epilogue(), Options(), preferred_element_type=jnp.float32
    )
    assert asked.merged.signature == (((1, 4), np.float16), ((5, 4), jnp.bfloat16))


def test_operands_keep_their_types_where_the_factors_change_places() -> None:
    call = Call(jnp.bfloat16, epilogue=Epilogue(residual=True))
    shapes, types = [(4, 8), (8, 6), (6, 4)], [jnp.bfloat16, jnp.float16, np.float32]
    signature = tuple((shape, np.dtype(own)) for shape, own in zip(shapes, types, strict=True))
    found = canonical.merged(call, Contraction("mk", "kn", "nm", residual="nm"), signature)
    assert found.form.swapped
    assert [own for _, own in found.signature] == [jnp.float16, jnp.bfloat16, np.float32]


@pytest.mark.parametrize("share", ["", "l"])
def test_rows_that_others_part_are_a_batch_that_shares_the_other_operand(share: str) -> None:
    """The first of two dimensions of rows, which lie apart in the operand and in the result."""
    dims = Contraction(f"{share}rmk", f"{share}kn", f"{share}rnm")
    sizes = {"l": 2, "r": 64, "m": 64, "k": 8, "n": 64}
    signature = tuple(
        (tuple(sizes[x] for x in own), np.dtype(np.float32)) for own in (dims.lhs, dims.rhs)
    )
    form = canonical.merged(CALL, dims, signature).form
    assert (form.a.permutation, form.permutation) == (None, None)
    assert math.prod(form.product_shape[:-2]) == (128 if share else 64)
