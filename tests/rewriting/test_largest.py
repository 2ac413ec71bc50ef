"""The largest values of products: they are among the values that others read."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from pallas_gemm import accelerate, target
from pallas_gemm.rewriting import folds
from tests.reference import normal
from tests.rewriting.test_folds import BF16, rewritten


@pytest.fixture(autouse=True)
def _all_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)


def _drawn() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return normal(rng, (128, 64), BF16), normal(rng, (64, 256), BF16)


def _accuracy(x: Any, w: Any, labels: Any) -> Any:
    logits = (x @ w).astype(jnp.float32)
    own = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return jnp.mean((own >= logits.max(-1)).astype(jnp.float32))


@pytest.mark.parametrize("exact", [False, True])
def test_the_likeliest_class_is_the_largest(exact: bool) -> None:
    x, w = _drawn()
    labels = jnp.argmax(x @ w, -1).astype(jnp.int32)
    program, found = rewritten(_accuracy, x, w, labels, exact=exact, implementation="interpret")
    assert "reduce_max" in found[0].folded
    assert jax.jit(core.jaxpr_as_fun(program))(x, w, labels) == [1]


@pytest.mark.parametrize("reduce", [jnp.max, jnp.min])
def test_a_derivative_finds_the_largest(reduce: Any) -> None:
    def gradient(x: Any, w: Any) -> Any:
        return jax.grad(lambda x: reduce((x @ w).astype(jnp.float32), -1).sum())(x)

    x, w = _drawn()
    program, found = rewritten(gradient, x, w, implementation="interpret")
    assert {"reduce_max", "reduce_min"} & set(found[0].folded)
    (ours,) = jax.jit(core.jaxpr_as_fun(program))(x, w)
    # Each row has a largest value, and is moved by it.
    assert np.all(np.any(np.asarray(ours, np.float32) != 0, -1))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("function", [jax.nn.silu, jax.nn.gelu])
def test_the_largest_of_what_is_computed_again_is_found(function: Any, axis: int) -> None:
    def gradient(x: Any, w: Any) -> Any:
        return jax.grad(lambda x: jnp.max(function(x @ w), axis).astype(jnp.float32).sum())(x)

    x, w = (own / 8 for own in _drawn())
    program, _ = rewritten(gradient, x, w, implementation="interpret")
    (ours,) = jax.jit(core.jaxpr_as_fun(program))(x, w)
    assert np.isfinite(np.asarray(ours, np.float32)).all()
    assert np.any(np.asarray(ours, np.float32) != 0)


@pytest.mark.parametrize("numerics", [None, "exact"])
def test_derivatives_from_outside_see_float32_sums(numerics: Any) -> None:
    x, w = _drawn()

    def f(x: Any, w: Any) -> Any:
        sums = jnp.matmul(x, w, preferred_element_type=jnp.float32)
        return jnp.sum(jnp.max(sums, -1) * jnp.cos(jnp.arange(len(x), dtype=jnp.float32)))

    with target("h200"):
        found = jax.jit(jax.grad(accelerate(f, numerics=numerics)))(x, w)
    expected = np.asarray(jax.jit(jax.grad(f))(x, w), np.float32)
    error = np.linalg.norm(np.asarray(found, np.float32) - expected) / np.linalg.norm(expected)
    assert error < 0.01


@pytest.mark.parametrize(("function", "is_read"), [(jnp.tanh, False), (jnp.positive, True)])
def test_a_kernel_looks_for_the_largest_only_among_what_it_reads(
    function: Any, is_read: bool
) -> None:
    # The largest of an input's values beside the product, of which the kernel of a gradient could
    # make the values again, in float32. None of these is the largest rounded one.
    def loss(x: Any, w: Any) -> Any:
        largest = jnp.max(function(x), -1).astype(jnp.float32)
        return jnp.sum(largest) + jnp.sum(jnp.square((x @ w).astype(jnp.float32)))

    args = (jax.ShapeDtypeStruct(shape, BF16) for shape in ((8192, 1024), (1024, 4096)))
    _, found = rewritten(jax.grad(loss), *args)
    assert "add_any" in found[1].folded
    assert ("eq" in found[1].folded) == is_read


@pytest.mark.parametrize(("function", "is_read"), [(jnp.tanh, False), (jnp.positive, True)])
def test_what_is_as_large_as_the_largest_is_so_in_memory(function: Any, is_read: bool) -> None:
    def loss(x: Any, w: Any) -> Any:
        y = function(x)
        largest = jnp.where(y >= jnp.max(y, -1, keepdims=True), y, 0).astype(jnp.float32)
        return jnp.sum(largest) + jnp.sum(jnp.square((x @ w).astype(jnp.float32)))

    args = (jax.ShapeDtypeStruct(shape, BF16) for shape in ((8192, 1024), (1024, 1024)))
    with jax.numpy_dtype_promotion("standard"):
        _, found = rewritten(jax.grad(loss), *args)
    assert "add_any" in found[1].folded
    assert ("ge" in found[1].folded) == is_read
