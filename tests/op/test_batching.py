"""What `vmap` makes of a product: right for every combination, and without copies where it can."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import gemm
from tests import reference, traced

SIZE = 6


def _integers(*shape: int) -> jax.Array:
    return reference.integers(np.random.default_rng(len(shape)), shape, jnp.float32)


def _primitives(f: Callable[..., Any], *args: Any) -> set[str]:
    return {equation.primitive.name for equation in jax.make_jaxpr(f)(*args).jaxpr.eqns}


@pytest.mark.every_other
@pytest.mark.parametrize("layout", list(itertools.product((False, True), repeat=2)), ids=str)
@pytest.mark.parametrize("batch", ["none", "left", "right", "both"])
def test_every_combination_of_mapped_operands(layout: tuple[bool, bool], batch: str) -> None:
    left = (4,) if batch in ("left", "both") else ()
    right = (4,) if batch in ("right", "both") else ()
    shapes = {
        "a": (*left, *((5, 3) if layout[0] else (3, 5))),
        "b": (*right, *((7, 5) if layout[1] else (5, 7))),
        "bias": (7,),
        "residual": (*max(left, right, key=len), 3, 7),
    }

    def product(a: Any, b: Any, bias: Any, residual: Any, implementation: Any = None) -> jax.Array:
        return gemm(
            a,
            b,
            bias=bias,
            residual=residual,
            activation="relu",
            transpose_a=layout[0],
            transpose_b=layout[1],
            implementation=implementation,
        )

    by_xla = functools.partial(product, implementation="xla")
    every = [mapped for mapped in itertools.product((False, True), repeat=4) if any(mapped)]
    operands = [
        [
            _integers(*((SIZE,) if flag else ()), *shape)
            for flag, shape in zip(mapped, shapes.values(), strict=True)
        ]
        for mapped in every
    ]

    # One program: to compile each by itself takes three times as long.
    @jax.jit
    def both(operands: Any) -> Any:
        return [
            [jax.vmap(f, [0 if flag else None for flag in mapped])(*own) for f in (product, by_xla)]
            for mapped, own in zip(every, operands, strict=True)
        ]

    for result, expected in both(operands):
        np.testing.assert_array_equal(result, expected, strict=True)


@pytest.mark.parametrize("axes", [(0, None), (1, None), (2, 0), (None, 1), (1, 2)], ids=str)
def test_other_axes_and_results(axes: tuple[int | None, int | None]) -> None:
    a, b = _integers(SIZE, SIZE, SIZE), _integers(SIZE, SIZE, SIZE)
    operands = (a if axes[0] is not None else a[0], b if axes[1] is not None else b[0])
    for out_axis in (0, 1, 2):
        result = jax.vmap(gemm, axes, out_axis)(*operands)
        expected = jax.vmap(jnp.matmul, axes, out_axis)(*operands)
        np.testing.assert_array_equal(result, expected, strict=True)


@pytest.mark.parametrize("empty", ["m", "n", "k", "lead", "mapped"])
@pytest.mark.parametrize("lead", [(), (4,)], ids=str)
def test_empty_dimensions(empty: str, lead: tuple[int, ...]) -> None:
    sizes = {"m": 3, "n": 7, "k": 5, "mapped": SIZE} | {empty: 0}
    m, n, k = (sizes[name] for name in "mnk")
    lead = (0,) if empty == "lead" else lead
    shapes = ((*lead, m, k), (*lead, k, n), (n,), (*lead, m, n))

    def product(a: Any, b: Any, bias: Any, residual: Any, implementation: Any = None) -> jax.Array:
        return gemm(a, b, bias=bias, residual=residual, implementation=implementation)

    @jax.jit
    def all_mapped() -> Any:
        found = []
        for mapped in ("a", "b", "a b", "bias", "a residual", "a b bias residual"):
            flags = [name in mapped.split() for name in ("a", "b", "bias", "residual")]
            axes = [0 if flag else None for flag in flags]
            operands = [
                _integers(*((sizes["mapped"],) if flag else ()), *shape)
                for flag, shape in zip(flags, shapes, strict=True)
            ]
            every = (product, functools.partial(product, implementation="xla"))
            found.append([jax.vmap(f, in_axes=axes)(*operands) for f in every])
        return found

    for result, expected in all_mapped():
        np.testing.assert_array_equal(result, expected, strict=True)


def test_a_mapped_left_operand_is_more_rows() -> None:
    a, b = _integers(SIZE, 3, 5), _integers(5, 7)
    mapped = jax.vmap(gemm, (0, None))
    assert traced.shapes(mapped, a, b) == [[(SIZE * 3, 5), (5, 7)]]
    assert _primitives(mapped, a, b) == {"pallas_gemm"}
    twice = jax.vmap(jax.vmap(gemm, (0, None)), (0, None))
    assert traced.shapes(twice, a[None], b) == [[(SIZE * 3, 5), (5, 7)]]


def test_mapped_vectors_are_rows_on_either_side() -> None:
    vectors, matrix = _integers(SIZE, 5), _integers(7, 5)
    assert traced.shapes(jax.vmap(gemm, (None, 0)), matrix, vectors) == [[(SIZE, 5), (7, 5)]]
    assert traced.shapes(jax.vmap(gemm, (0, None)), vectors, matrix.T) == [[(SIZE, 5), (5, 7)]]


def test_both_mapped_are_a_batch() -> None:
    a, b = _integers(SIZE, 3, 5), _integers(SIZE, 5, 7)
    assert traced.shapes(jax.vmap(gemm), a, b) == [[(SIZE, 3, 5), (SIZE, 5, 7)]]
    nested = jax.vmap(jax.vmap(gemm))
    assert traced.shapes(nested, a[:, None], b[:, None]) == [[(SIZE, 3, 5), (SIZE, 5, 7)]]


def test_an_operand_that_is_not_mapped_is_not_copied() -> None:
    a, b = _integers(3, 5), _integers(SIZE, 5, 7)
    assert traced.shapes(jax.vmap(gemm, (None, 0)), a, b) == [[(3, 5), (SIZE, 5, 7)]]
    transposed = jax.vmap(lambda a, b: gemm(a, b, transpose_a=True), (0, None))
    many, b = _integers(SIZE, 5, 64), _integers(5, 64)
    assert traced.shapes(transposed, many, b) == [[(SIZE, 5, 64), (5, 64)]]


def test_an_epilogue_that_is_not_mapped_is_not_copied_and_one_that_is_comes_along() -> None:
    a, b = _integers(SIZE, 64, 5), _integers(SIZE, 5, 7)
    bias, residual = _integers(SIZE, 7), _integers(64, 7)

    def layer(a: Any, b: Any, bias: Any, residual: Any) -> jax.Array:
        return gemm(a, b, bias=bias, residual=residual)

    for axes, operands in (
        ((None, 0, 0, None), (a[0], b, bias, residual)),
        ((0, None, 0, None), (a, b[0], bias, residual)),
        ((0, None, None, None), (a, b[0], bias[0], residual)),
        ((0, 0, None, None), (a, b, bias[0], residual)),
    ):
        shapes = [x.shape for x in operands]
        assert traced.shapes(jax.vmap(layer, axes), *operands) == [shapes]


def test_few_rows_with_biases_of_their_own_are_one_product() -> None:
    a, b, bias = _integers(SIZE, 5), _integers(5, 7), _integers(SIZE, 7)
    mapped = jax.vmap(lambda a, bias: gemm(a, b, bias=bias, activation="relu"))
    assert traced.shapes(mapped, a, bias) == [[(SIZE, 5), (5, 7)]]
    np.testing.assert_array_equal(mapped(a, bias), np.maximum(a @ b + bias, 0))


def test_more_rows_for_each_product_of_a_batch_where_that_is_cheaper() -> None:
    rows, matrices = _integers(SIZE, 4, 3, 5), _integers(4, 5, 70)
    mapped = jax.vmap(gemm, (0, None))
    assert traced.shapes(mapped, rows, matrices) == [[(4, SIZE * 3, 5), (4, 5, 70)]]
    np.testing.assert_array_equal(mapped(rows, matrices), jnp.matmul(rows, matrices[None]))


def test_a_mapped_epilogue_computes_the_sum_once() -> None:
    a, b, bias = _integers(3, 5), _integers(5, 7), _integers(SIZE, 7)
    mapped = jax.vmap(lambda bias: gemm(a, b, bias=bias, activation="relu"))
    assert traced.shapes(mapped, bias) == [[(3, 5), (5, 7)]]


def test_gradients_of_single_examples() -> None:
    weights, examples = _integers(5, 7), _integers(SIZE, 3, 5)

    def loss(weights: jax.Array, x: jax.Array, implementation: Any = None) -> jax.Array:
        return jnp.sum(jnp.square(gemm(x, weights, implementation=implementation)))

    result = jax.vmap(jax.grad(loss), (None, 0))(weights, examples)
    expected = jax.vmap(jax.grad(lambda w, x: loss(w, x, "xla")), (None, 0))(weights, examples)
    assert result.shape == (SIZE, 5, 7)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("first", ["left", "right"])
def test_all_pairs_of_vectors_are_one_product(first: str) -> None:
    a, b = _integers(5, 3), _integers(7, 3)
    axes = [(0, None), (None, 0)]
    inner, outer = axes if first == "left" else axes[::-1]
    pairs = jax.vmap(jax.vmap(gemm, inner), outer)
    expected = a @ b.T if outer == (0, None) else b @ a.T
    np.testing.assert_array_equal(pairs(a, b), expected)
    # In the order of the result, which then needs no transposition.
    assert traced.shapes(pairs, a, b) == [[(7, 3), (5, 3)] if first == "left" else [(5, 3), (7, 3)]]
    gradients = jax.grad(lambda a, b: jnp.sum(pairs(a, b) ** 2), (0, 1))
    exact = jax.grad(lambda a, b: jnp.sum((a @ b.T) ** 2), (0, 1))(a, b)
    jax.tree.map(np.testing.assert_array_equal, gradients(a, b), exact)
    assert len(traced.shapes(gradients, a, b)) == 3


def test_mapped_vectors_are_columns_of_one_product() -> None:
    a, b = _integers(5, 3), _integers(7, 3)
    of_each = jax.vmap(functools.partial(gemm, activation="relu"), (None, 0))
    stored = jax.vmap(lambda a, b: gemm(a, b[:, None]), (None, 0))
    np.testing.assert_array_equal(of_each(a, b), np.maximum(b @ a.T, 0))
    np.testing.assert_array_equal(stored(a, b)[..., 0], b @ a.T)
    assert traced.shapes(stored, a, b) == [[(7, 3), (5, 3)]]
    # One of size 1 that is contracted is no column.
    outer = jax.vmap(gemm, (None, 0))(a[:, :1], b[:, None, :])
    np.testing.assert_array_equal(outer, a[None, :, :1] * b[:, None, :])
