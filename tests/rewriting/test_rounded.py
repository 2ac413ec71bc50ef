"""What a kernel adds up is what it stores, where something reads both."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core

from pallas_gemm.rewriting import folds, inside, rounded
from tests.reference import normal
from tests.rewriting.test_folds import BF16, rewritten
from tests.rewriting.test_walk import assert_same


@pytest.fixture(autouse=True)
def _all_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)


def _ours(f: Callable[..., Any], *args: Any, folded: str = "reduce_sum") -> list[Any]:
    """Computes a program with reductions in the kernels of its products."""
    program, found = rewritten(f, *args, implementation="interpret")
    assert any(folded in one.folded for one in found)
    return jax.jit(core.jaxpr_as_fun(program))(*args)


def _odd() -> tuple[Any, Any]:
    """Returns operands; each element of their product is 257, which bfloat16 rounds to 256."""
    return jnp.ones((64, 64), BF16), jnp.full((64, 128), 4, BF16).at[0].set(5)


def test_scores_of_a_sure_softmax_do_not_move() -> None:
    rng = np.random.default_rng(0)
    v, change = normal(rng, (128, 64), BF16), normal(rng, (64, 64), BF16)
    sure = jnp.asarray(rng.integers(0, 128, 64))

    def derivative(z: Any, v: Any) -> Any:
        return jax.vjp(lambda z: jax.nn.softmax(z).astype(BF16) @ v, z)[1](change)

    (ours,) = _ours(derivative, jax.nn.one_hot(sure, 128) * 200, v)
    assert not jnp.any(ours)


def test_shares_of_one_are_whole() -> None:
    # One row has 65 and zeros: its exponentials are no larger than float32 has.
    def f(x: Any, w: Any) -> Any:
        exps = jnp.exp((x @ w).astype(jnp.float32) / 4)
        return exps / jnp.sum(exps, -1, keepdims=True)

    x, w = jnp.ones((64, 64), BF16), jnp.zeros((64, 128), BF16).at[:, 5].set(4).at[0, 5].set(5)
    (ours,) = _ours(f, x, w)
    np.testing.assert_array_equal(ours[:, 5], 1)


def test_a_batch_of_one_example_is_normalized_to_nothing() -> None:
    def f(x: Any, w: Any) -> Any:
        z = (x @ w).astype(jnp.float32)
        scale = jax.lax.rsqrt(z.var(0, keepdims=True) + 1e-5)
        return (z - z.mean(0, keepdims=True)) * scale

    rng = np.random.default_rng(0)
    x = jnp.broadcast_to(normal(rng, (64,), BF16), (64, 64))
    (ours,) = _ours(f, x, normal(rng, (64, 128), BF16))
    assert jnp.max(jnp.abs(ours)) < 0.01


def test_the_largest_value_is_one_that_a_product_picks() -> None:
    def f(x: Any, w: Any, labels: Any) -> Any:
        z = x @ w
        picked = jnp.einsum("nc,nc->n", z, labels, preferred_element_type=jnp.float32)
        return picked >= jnp.max(z.astype(jnp.float32), -1)

    (is_largest,) = _ours(
        f, *_odd(), jax.nn.one_hot(jnp.arange(64), 128, dtype=BF16), folded="reduce_max"
    )
    assert jnp.all(is_largest)


def test_what_leaves_together_belongs_together() -> None:
    def f(x: Any, w: Any) -> Any:
        z = x @ w
        return z, jnp.sum(z.astype(jnp.float32), -1)

    stored, total = _ours(f, *_odd())
    assert_same(total, jnp.sum(stored.astype(jnp.float32), -1))


def test_a_sum_that_meets_no_summand_is_of_float32() -> None:
    def f(x: Any, w: Any) -> Any:
        z = x @ w
        return z @ w.T, jnp.sum(z.astype(jnp.float32), 0)

    _, total = _ours(f, *_odd())
    assert_same(total, jnp.full((128,), 64 * 257, jnp.float32))


def test_a_common_part_of_what_is_stored_and_added_up_is_rounded() -> None:
    def f(x: Any, w: Any) -> Any:
        z = x @ w
        return -z, jnp.sum(z.astype(jnp.float32), -1)

    stored, total = _ours(f, *_odd())
    assert_same(total, -jnp.sum(stored.astype(jnp.float32), -1))


@pytest.mark.parametrize("where", ["all but sums", "sums"])
def test_weights_of_distances_are_those_that_are_added_up(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A weight is 64 where the distance is 0, which the rounding of the product hides.
    if where != "sums":
        monkeypatch.setattr(inside, "REDUCTIONS", {})

    def f(x: Any, y: Any) -> Any:
        squares = jnp.sum(jnp.square(x.astype(jnp.float32)), -1)
        products = (x @ y.T).astype(jnp.float32)
        distances = squares[:, None] + squares[None, :] + 2 * products
        weights = 1 / (jnp.maximum(distances, 0) + 1 / 64)
        # No kernel reduces the precision.
        factor = lax.reduce_precision(weights, 8, 7) if where == "sums" else weights
        # Both parts meet some operations after the product.
        moved = -lax.neg((factor.astype(BF16) @ x).astype(jnp.float32))
        return moved - jnp.sum(weights, -1, keepdims=True) * x.astype(jnp.float32)

    x = normal(np.random.default_rng(0), (64, 64), BF16)
    (ours,) = _ours(f, x, -x, folded="reduce_sum" if where == "sums" else "div")
    assert jnp.max(jnp.abs(ours)) < 2


@pytest.mark.parametrize("near", [1, 6, rounded.MOST])
def test_it_is_rounded_however_far_what_reads_both_is(
    near: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounded, "NEAR", near)

    def f(x: Any, w: Any) -> Any:
        z = x @ w
        total = jnp.sum(z.astype(jnp.float32), -1, keepdims=True)
        for _ in range(8):
            total = total / 2
        return z @ w.T, z.astype(jnp.float32) - total * 2

    _, difference = _ours(f, *_odd())
    assert not jnp.any(difference)


@pytest.mark.parametrize(("most", "summand"), [(1, 256), (rounded.MOST, 257)])
def test_what_is_too_much_to_look_at_may_read_both(
    most: int, summand: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounded, "NEAR", 1)
    monkeypatch.setattr(rounded, "MOST", most)

    def f(x: Any, w: Any) -> Any:
        z = x @ w
        total = jnp.sum(z.astype(jnp.float32), 0)
        for _ in range(8):
            total = -total
        return z @ w.T, total

    _, total = _ours(f, *_odd())
    assert_same(total, jnp.full((128,), 64 * summand, jnp.float32))


@pytest.mark.parametrize("exact", [False, True])
def test_a_sum_of_8_bits_is_rounded_and_goes_on_in_them(exact: bool) -> None:
    # Each sum is 257, which float8_e4m3fn rounds to 256.
    dtype = jnp.float8_e4m3fn
    x, w = (own.astype(dtype) for own in _odd())

    def f(x: Any, w: Any) -> Any:
        z = lax.dot(x, w)
        return z.astype(jnp.float32) + 1, jnp.maximum(z, dtype(0)) * dtype(0.5)

    program, found = rewritten(f, x, w, exact=exact, implementation="interpret")
    assert "max" in found[0].folded
    wide, half = jax.jit(core.jaxpr_as_fun(program))(x, w)
    assert_same(wide, jnp.full((64, 128), 257, jnp.float32))
    assert_same(half, jnp.full((64, 128), 128, dtype))
