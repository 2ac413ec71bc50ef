"""Products that a program adds up are one kernel, where that is predicted to be faster."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from pallas_gemm import accelerate, target
from pallas_gemm.rewriting import sums
from tests.reference import integers
from tests.rewriting.test_folds import BF16, SHAPE, count, rewritten
from tests.rewriting.test_walk import assert_same, derived, inside

N = 256
X = SHAPE((8, 1024, 1024), BF16)
WEIGHTS = tuple(SHAPE((1024, n), BF16) for n in (4096, 1024, 1024))


def _projections(x: Any, *weights: Any) -> Any:
    return [x @ w for w in weights]


def _gradient(x: Any, *weights: Any) -> Any:
    def loss(x: Any) -> Any:
        return sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in _projections(x, *weights))

    return jax.grad(loss)(x)


def _operands(count: int) -> list[Any]:
    rng = np.random.default_rng(0)
    return [integers(rng, (N, N), BF16) // 2 for _ in range(count)]


def test_gradients_of_one_input_are_one_product() -> None:
    program, found = rewritten(_gradient, X, *WEIGHTS)
    (total,) = (e for e in program.eqns if e.primitive.name == "pallas_gemm_sum")
    assert len(total.invars) == 6
    assert "add_any" not in [e.primitive.name for e in program.eqns]
    assert sum("added" in one.answer for one in found) == 3


def _with_a_residual(x: Any, a: Any, b: Any) -> Any:
    return x + x @ a + x @ b


def _in_a_tree(x: Any, a: Any, b: Any) -> Any:
    return (x @ a + x @ b) + (a @ x + b @ x)


def _read_by_others(x: Any, a: Any, b: Any) -> Any:
    first = x @ a
    return first + x @ b, first * 2


def _one_after_the_other(x: Any, a: Any, b: Any) -> Any:
    first = x @ a
    return first + (first.astype(BF16) + 1) @ b


def _twice(x: Any, a: Any, b: Any) -> Any:
    first = x @ a
    return first + first + x @ b


@pytest.mark.parametrize(
    ("f", "added"),
    [
        (_with_a_residual, 2),
        (_in_a_tree, 4),
        (_read_by_others, 0),
        (_one_after_the_other, 0),
        (_twice, 0),
    ],
)
def test_what_is_added_is_right(
    f: Callable[..., Any], added: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A sum is taken wherever it is one, whatever it saves.
    wanted = sums.sum_of

    def always(*args: Any) -> Any:
        found = wanted(*args)
        return found if found is None else dataclasses.replace(found, saved=1.0)

    monkeypatch.setattr("pallas_gemm.rewriting.walk.sum_of", always)
    args = _operands(3)
    with target("h200"):
        program = jax.make_jaxpr(accelerate(f))(*args)
        core.check_jaxpr(program)
        program = inside(program)
        found = jax.jit(accelerate(f))(*args)
    assert_same(found, jax.jit(f)(*args))
    wholes = [e for e in program.eqns if e.primitive.name == "pallas_gemm_sum"]
    assert sum(len(e.invars) // 2 for e in wholes) == added


def test_the_kernel_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: Any, a: Any, b: Any) -> Any:
        return x @ a + x @ b

    args = [x[:64, :64] for x in _operands(3)]
    wanted: Any = sums.sum_of

    def always(*args: Any) -> Any:
        return dataclasses.replace(wanted(*args), saved=1.0)

    monkeypatch.setattr("pallas_gemm.rewriting.walk.sum_of", always)
    program, _ = rewritten(f, *args, implementation="interpret")
    assert count(program, "pallas_gemm_sum") == 1
    assert_same(jax.jit(core.jaxpr_as_fun(program))(*args), [jax.jit(f)(*args)])


def test_exact_adds_nothing_up() -> None:
    program, _ = rewritten(_gradient, X, *WEIGHTS, exact=True)
    assert count(program, "pallas_gemm_sum") == 0


def test_it_can_be_derived() -> None:
    args = _operands(3)

    def f(x: Any, *weights: Any) -> Any:
        total = _projections(x, *weights)
        return total[0] + total[1]

    with target("h200"):
        found = jax.jit(derived(accelerate(f)))(*args)
    assert_same(found, jax.jit(derived(f))(*args))
