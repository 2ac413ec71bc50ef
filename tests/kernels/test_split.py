"""A function of the sums in its parts: what the kernel computes, and what XLA does around it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gemm.kernels.functions import vectors
from pallas_gemm.kernels.functions.axes import Names
from pallas_gemm.kernels.functions.parts import Split
from pallas_gemm.kernels.functions.split import split
from tests import epilogues

pytestmark = pytest.mark.usefixtures("as_users_write")

M, N = 6, 10
BF16, F32 = jnp.bfloat16, jnp.float32


def _split(
    function: Callable[..., Any], *operands: Any, shape: tuple[int, ...] = (M, N), out: str = "mn"
) -> Split | str:
    names = Names(out, out[:-1] if out != "bmn" else "m", out[-1])
    types = [jax.ShapeDtypeStruct(shape, F32), *operands]
    return split(jax.make_jaxpr(function)(*types), names)


def _type(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _labelled(s: Any, label: Any) -> Any:
    hit = jnp.arange(s.shape[1])[None] == label[:, None]
    return jnp.sum(jnp.where(hit, s, 0.0), 1), jnp.max(s, 1)


def _picked(s: Any, label: Any) -> Any:
    position = lax.broadcasted_iota(jnp.int32, s.shape, 1)
    return jnp.sum(jnp.where(position == label[:, None], s, 0.0), -1)


def _parts_of_logsumexp(s: Any, residual: Any) -> Any:
    z = s + residual
    largest = jnp.max(z, -1, keepdims=True)
    return largest, jnp.sum(jnp.exp(z - largest), -1), z.astype(BF16)


def _normalised(s: Any, residual: Any, weight: Any) -> Any:
    z = s + residual.astype(F32)
    return (z * jax.lax.rsqrt(jnp.mean(z * z, -1, keepdims=True) + 1e-6) * weight).astype(BF16)


def _with_its_parts(s: Any, gate: Any, up: Any) -> Any:
    hidden = jax.nn.silu(gate.astype(F32)) * up.astype(F32)
    return s * gate.astype(F32) + up.astype(F32), hidden.astype(BF16), (up > 0).astype(jnp.int8)


def _beside_others(s: Any, gate: Any, up: Any) -> Any:
    return s * gate, gate * up


def _backward(s: Any, pre: Any) -> Any:
    _, pull = jax.vjp(jax.nn.gelu, pre.astype(F32))
    (g,) = pull(s)
    return g.astype(BF16), g.sum(0)


# A function, its operands; the kinds of what the kernel takes, and the kernel's results.
CASES: dict[str, tuple[Any, tuple[Any, ...], str, str]] = {
    "bias, kept": (
        lambda s, b: (jax.nn.relu(s + b).astype(BF16), s + b),
        (_type(N),),
        "n",
        "mn bfloat16, mn float32",
    ),
    "column": (lambda s, v: s * v, (_type(M, 1),), "m", "mn float32"),
    "a vector by its use": (lambda s, v: s * v[:, None], (_type(M),), "m", "mn float32"),
    "number": (lambda s, x: s * x, (_type(),), "-", "mn float32"),
    "a number everywhere, rounded": (
        lambda s: s + jnp.full((M, N), 0.3, BF16).astype(F32),
        (),
        "",
        "mn float32",
    ),
    "numbers that XLA multiplies": (
        lambda s: s * (jnp.full((M, N), 2.0) * 3),
        (),
        "-",
        "mn float32",
    ),
    "squares of rows": (
        lambda s, r: ((s + r).astype(BF16), jnp.sum((s + r) ** 2, -1)),
        (_type(M, N),),
        "mn",
        "mn bfloat16, sum m",
    ),
    "gradient of a bias": (_backward, (_type(M, N, dtype=BF16),), "mn", "mn bfloat16, sum n"),
    "of what is loaded, without the sums": (
        _with_its_parts,
        (_type(M, N, dtype=BF16), _type(M, N, dtype=BF16)),
        "mn mn",
        "mn float32, mn bfloat16",
    ),
    "of what is not loaded otherwise": (
        _beside_others,
        (_type(M, N), _type(M, N)),
        "mn",
        "mn float32",
    ),
    "label": (_labelled, (_type(M, dtype=jnp.int32),), "m n", "sum m, max m"),
    "all": (lambda s: jnp.max(jnp.abs(s)), (), "", "max m"),
    "mask": (
        lambda s, m: jnp.where(m, s, -1.0).astype(BF16),
        (_type(M, N, dtype=jnp.bool_),),
        "mn",
        "mn bfloat16",
    ),
    "norm after": (
        _normalised,
        (_type(M, N, dtype=BF16), _type(N)),
        "mn",
        "mn float32, sum m",
    ),
    "positions": (
        lambda s, v: jnp.where(lax.broadcasted_iota(jnp.int32, s.shape, 0) < v, s, 0.0),
        (_type(N, dtype=jnp.int32),),
        "n m",
        "mn float32",
    ),
    "transposed": (lambda s: (s * 2).T.astype(BF16), (), "", "mn bfloat16"),
    "transposed first": (
        lambda s, r, v: (jnp.maximum(z := s.T * v + r, 0), jnp.sum(z, 0), jnp.max(z, 1)),
        (_type(N, M), _type(M)),
        "mn m",
        "mn float32, sum m, max n",
    ),
    "a triangle": (lambda s: jnp.where(jnp.tri(M, N, 1), s, 0.0), (), "m n", "mn float32"),
    "a triangle, transposed": (
        lambda s: jnp.sum(jnp.where(jnp.tri(N, M, 1), s.T, 0.0), 0),
        (),
        "m n",
        "sum m",
    ),
    "log-sum-exp": (lambda s: jax.nn.logsumexp(s * 2, -1), (), "", "logsumexp m, max m"),
    "log-sum-exp of all, and a label": (
        lambda s, x: (jax.nn.logsumexp(s), _picked(s, x)),
        (_type(M, dtype=jnp.int32),),
        "m n",
        "logsumexp m, max m, sum m",
    ),
    "both parts": (
        _parts_of_logsumexp,
        (_type(M, N),),
        "mn",
        "max m, logsumexp m, mn bfloat16",
    ),
    "exp beside an operand": (lambda s, v: jnp.sum(jnp.exp(s - v), -1), (_type(N),), "n", "sum m"),
    "along columns": (lambda s: jax.nn.logsumexp(s, 0), (), "", "mn float32, max n"),
    "unused operand": (lambda s, x: s * 2 if x.ndim else s, (_type(M, N),), "", "mn float32"),
    "before": (lambda s, v: s * jnp.sqrt(jnp.cumsum(v)), (_type(N),), "n", "mn float32"),
    "integers": (lambda s: (s > 0, s.astype(jnp.int8)), (), "", "mn float32"),
}


def _text(parts: Split) -> tuple[str, str]:
    program = parts.program
    taken = " ".join(operand.kind or "-" for operand in program.operands)
    results = [
        f"{own.reduction} {own.kind}" if own.reduction else f"mn {own.dtype}"
        for own in program.results
    ]
    return taken, ", ".join(results)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_parts(case: tuple[Any, tuple[Any, ...], str, str]) -> None:
    function, operands, taken, results = case
    parts = _split(function, *operands)
    assert isinstance(parts, Split)
    own, made = _text(parts)
    assert (sorted(own.split()), made) == (sorted(taken.split()), results)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_parts_compute_the_function(case: tuple[Any, tuple[Any, ...], str, str]) -> None:
    function, operands, _, _ = case
    parts = _split(function, *operands)
    assert isinstance(parts, Split)
    rng = np.random.default_rng(0)

    def drawn(x: Any) -> Any:
        if x.dtype == jnp.bool_:
            return jnp.asarray(rng.integers(0, 2, x.shape) > 0)
        return jnp.asarray(rng.integers(1, 5, x.shape).astype(x.dtype))

    s, given = drawn(_type(M, N)), [drawn(x) for x in operands]
    wide = {"m": (M, 1), "n": (1, N), "mn": (M, N), "": ()}
    taken, prepared = parts.program.operands, parts.prepared(given)
    # Whole arrays in the type in which they are loaded, and others in that of the program.
    types = [own.loaded if own.kind == "mn" else own.dtype for own in taken]
    assert [x.dtype for x in prepared] == types
    assert [(x.shape, x.dtype) for x in parts.types()] == [(x.shape, x.dtype) for x in prepared]
    prepared = [x.reshape(wide[own.kind]) for x, own in zip(prepared, taken, strict=True)]
    computed = epilogues.run(parts.program, [s], prepared)
    found = parts.finished(given, computed)
    expected = jax.tree.leaves(function(s, *given))
    for x, y in zip(found, expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(np.asarray(x, F32), np.asarray(y, F32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "prepared"),
    [(jnp.bfloat16, jnp.bfloat16), (jnp.float16, jnp.float16), (F32, F32), (jnp.int32, F32)],
)
def test_a_vector_is_widened_by_the_kernel(given: Any, prepared: Any) -> None:
    parts = _split(lambda s, v: s * v.astype(F32)[None], _type(N, dtype=given))
    assert isinstance(parts, Split)
    assert [own.dtype for own in parts.program.operands] == [F32]
    assert [x.dtype for x in parts.types()] == [prepared]


@pytest.mark.parametrize(
    ("function", "stored", "given"),
    [
        (lambda s, v: s + v[None, None], (4, 5), [0]),
        (lambda s, v: s + v.reshape(1, 4, 5).astype(F32), (4, 5), [0]),
        (lambda s, v: s + v.T.astype(F32)[None], (5, 4), [None]),
        (lambda s, v: s + v[:, None].astype(F32)[None], (4,), [None]),
        (lambda s, v: s + jnp.exp(v)[None], (4, 5), [None]),
        (lambda s, v: s * v, (3, 4, 5), [None]),
    ],
    ids=["as it is", "in another shape", "turned", "repeated", "computed", "each element"],
)
def test_which_operand_each_vector_is(
    function: Callable[..., Any], stored: tuple[int, ...], given: list[int | None]
) -> None:
    types = (_type(3, 4, 5), _type(*stored, dtype=jnp.bfloat16))
    parts = split(jax.make_jaxpr(function)(*types), Names("mnh", "m", "nh"))
    assert isinstance(parts, Split)
    assert vectors.given(parts) == given


def test_an_array_of_each_element_is_in_its_programs_type() -> None:
    parts = _split(lambda s, x: s * x.astype(F32), _type(M, N, dtype=jnp.bfloat16))
    assert isinstance(parts, Split)
    assert [(own.kind, own.dtype) for own in parts.program.operands] == [("mn", jnp.bfloat16)]


@pytest.mark.parametrize(
    ("function", "is_coarse"),
    [
        (lambda s: jnp.exp(s).astype(jnp.bfloat16), True),
        (jnp.exp, False),
        (lambda s: jnp.sum(jnp.exp(s), -1), True),
        (lambda s: jnp.sum(jnp.log1p(jnp.abs(s)), 0), True),
        (lambda s: jnp.max(jnp.exp(s), -1), False),
        (lambda s: (jnp.sum(jnp.exp(s), -1), jnp.exp(s)), False),
        (lambda s: (jnp.sum(jnp.exp(s), -1), s, jnp.max(jnp.abs(s), -1)), True),
        # The quick tanh errs by more than the last bits of float32.
        (lambda s: jnp.sum(jnp.tanh(s), -1), False),
        (lambda s: jnp.tanh(s).astype(jnp.bfloat16), True),
    ],
)
def test_sums_and_what_is_rounded_may_be_coarse(
    function: Callable[..., Any], is_coarse: bool
) -> None:
    parts = _split(function)
    assert isinstance(parts, Split)
    assert parts.program.is_coarse == is_coarse


def test_rows_and_columns_are_told_apart_in_squares() -> None:
    square = _type(M, M)
    along_rows = _split(lambda s, v: s * v[:, None], _type(M), shape=square.shape)
    along_columns = _split(lambda s, v: s * v, _type(M), shape=square.shape)
    assert isinstance(along_rows, Split)
    assert isinstance(along_columns, Split)
    assert along_rows.program.operands[0].kind == "m"
    assert along_columns.program.operands[0].kind == "n"


def test_positions_of_rows_and_columns_are_told_apart_in_squares() -> None:
    parts = _split(lambda s: jnp.where(jnp.tri(M), s, 0.0), shape=(M, M))
    assert isinstance(parts, Split)
    assert sorted(own.kind for own in parts.program.operands) == ["m", "n"]
    assert not parts.left


SCORES = {"b": 2, "t": 3, "g": 4, "s": 5}
"""Scores of heads in groups, as a product has them."""


def _masked(s: Any, r: Any, x: Any) -> Any:
    z = jnp.transpose(s * 2, (2, 0, 1, 3)) + r
    z = jnp.where(x & jnp.tri(*z.shape[-2:], dtype=bool), z, -1.0)
    largest = jnp.max(z, -1, keepdims=True)
    return z, jnp.sum(jnp.exp(z - largest), -1), jnp.min(z, (0, 2)), largest


@pytest.mark.parametrize(
    ("mask", "kinds", "bytes_of_masks"),
    [
        ((2, 1, 5), ["m", "n", "n"], 0),
        # XLA joins the masks: two that are the same for some rows would be two arrays.
        ((1, 3, 5), ["mn"], 3 * 5 + 3 * 4 * 5 * 2),
        ((2, 3, 5), ["mn"], 2 * 3 * 5 + 2 * 3 * 4 * 5 * 2),
    ],
)
@pytest.mark.parametrize("is_turned", [False, True])
def test_scores_that_are_transposed(
    is_turned: bool, mask: tuple[int, ...], kinds: list[str], bytes_of_masks: int
) -> None:
    shape = tuple(SCORES.values())
    turned = tuple(SCORES[x] for x in "gbts")
    beside = _type(*(turned if is_turned else (1, 1, 1, 5)))
    function = jax.make_jaxpr(_masked)(_type(*shape), beside, _type(*mask, dtype=jnp.bool_))
    parts = split(function, Names("btgs", "tg", "s"))
    assert isinstance(parts, Split)
    every = sorted(own.kind for own in parts.program.operands)
    assert every == sorted([*kinds, "mn" if is_turned else "n"])
    copied = 2 * np.prod(turned) * 4 if is_turned else 0
    assert parts.spread_bytes == copied + bytes_of_masks
    rng = np.random.default_rng(0)
    s, r = (jnp.asarray(rng.standard_normal(x.shape).astype(F32)) for x in (_type(*shape), beside))
    given = [r, jnp.asarray(rng.random(mask) < 0.7)]
    # What the kernel computes for each matrix of the batch.
    wide = {"m": (-1, 12, 1), "n": (-1, 1, 5), "mn": (-1, 12, 5)}
    every = zip(prepared := parts.prepared(given), parts.program.operands, strict=True)
    assert [(x.shape, x.dtype) for x in parts.types()] == [(x.shape, x.dtype) for x in prepared]
    taken = [x.reshape(wide[own.kind]) for x, own in every]
    each = [
        epilogues.run(parts.program, [s[i].reshape(12, 5)], [x[i % len(x)] for x in taken])
        for i in range(2)
    ]
    axes = [int(own.vectors > 1) for own in parts.program.results]
    computed = [jnp.stack(x, axis) for x, axis in zip(zip(*each, strict=True), axes, strict=True)]
    for x, y in zip(parts.finished(given, computed), _masked(s, *given), strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_results_that_a_batch_shares_are_xlas() -> None:
    def function(s: Any, u: Any, v: Any) -> Any:
        outer = u[:, None] * v
        return s * outer, outer

    parts = _split(function, _type(M), _type(N), shape=(2, M, N), out="bmn")
    assert isinstance(parts, Split)
    assert [own.kind for own in parts.program.operands] == ["m", "n"]
    assert len(parts.program.results) == 1
    s, u, v = (jnp.ones(shape) * 3 for shape in ((2, M, N), (M,), (N,)))
    for x, y in zip(parts.finished([u, v], [s * 9]), function(s, u, v), strict=True):
        np.testing.assert_array_equal(x, y)


def test_what_xla_makes_for_a_kernel_counts_as_moved() -> None:
    parts = _split(lambda s, r: s + jnp.cumsum(r, 1), _type(M, N))
    assert isinstance(parts, Split)
    assert parts.spread_bytes == 2 * M * N * 4
    parts = _split(lambda s, r: s + r * 2, _type(M, N))
    assert isinstance(parts, Split)
    assert parts.spread_bytes == 0
    # Masks come in 16 bits.
    parts = _split(lambda s, r: jnp.where(r, s, 0.0), _type(M, N, dtype=jnp.bool_))
    assert isinstance(parts, Split)
    assert parts.spread_bytes == 3 * M * N


def test_one_dimension_in_two_roles_is_left_to_xla() -> None:
    found = _split(lambda s: s + s.T, shape=(M, M))
    assert found == "the function uses one dimension as rows and as columns"


@pytest.mark.places
@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda s: jnp.sort(s, -1) + 1, "sort"),
        (lambda s: jnp.cumsum(s, 0), "cumsum"),
        (lambda s: jax.nn.softmax(s, -1), "sub"),
    ],
)
def test_what_is_left_is_named_with_its_line(function: Any, named: str) -> None:
    found = _split(function)
    assert isinstance(found, Split)
    assert found.left.startswith(f"{named} (test_split.py:")


def test_a_function_that_ignores_the_product_is_left_to_xla() -> None:
    assert _split(lambda s, x: x + s.ndim, _type(M)) == "the function does not use the product"


def test_equal_operations_are_computed_once() -> None:
    once = _split(lambda s: (jnp.tanh(s + 1), jnp.abs(jnp.tanh(s + 1))))
    assert isinstance(once, Split)
    names = [step.primitive.name for step in once.program.steps]
    assert names.count("tanh") == names.count("add") == 1


def test_numbers_of_columns_are_counted_by_a_kernel_and_not_loaded() -> None:
    parts = _split(_picked, _type(M, dtype=jnp.int32))
    assert isinstance(parts, Split)
    assert [(own.kind, own.counts) for own in parts.program.operands] == [
        ("m", False),
        ("n", True),
    ]
    assert [own.kind for own in parts.program.compared] == ["m"]


def _numbered(axis: int, dtype: Any, times: int = 1) -> Callable[[Any], Any]:
    return lambda s: s * (times * lax.broadcasted_iota(dtype, s.shape, axis))


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (_numbered(0, jnp.int32), Names("mn", "m", "n")),
        (_numbered(1, F32), Names("mn", "m", "n")),
        (_numbered(1, jnp.int32, 2), Names("mn", "m", "n")),
        # In columns of two dimensions, the numbers of the second begin anew.
        (_numbered(2, jnp.int32), Names("mnh", "m", "nh")),
        (_numbered(1, jnp.int32), Names("mnh", "m", "nh")),
    ],
)
def test_other_numbers_are_loaded(function: Callable[[Any], Any], names: Names) -> None:
    types = _type(*(M, N, 4)[: len(names.out)])
    parts = split(jax.make_jaxpr(function)(types), names)
    assert isinstance(parts, Split)
    assert len(parts.program.operands) == 1
    assert not parts.program.operands[0].counts
    assert not parts.program.compared


def test_a_sum_over_some_rows_only_is_left_to_xla() -> None:
    found = _split(lambda s: jnp.sum(s * 2, 0), shape=(3, M, N), out="tmn")
    assert isinstance(found, Split)
    assert [own.kind for own in found.program.results] == ["mn"]
    whole = _split(lambda s: jnp.sum(s * 2, (0, 1)), shape=(3, M, N), out="tmn")
    assert isinstance(whole, Split)
    assert [own.kind for own in whole.program.results] == ["n"]
