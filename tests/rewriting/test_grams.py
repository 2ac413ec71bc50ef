"""A product of an array and itself is computed by half, where that is predicted to be faster."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from pallas_gemm import accelerate, target
from pallas_gemm.rewriting import grams
from tests.reference import integers
from tests.rewriting.test_folds import BF16, SHAPE, count, rewritten
from tests.rewriting.test_walk import assert_same, derived, names

LARGE = SHAPE((4096, 4096), BF16)


def _rows(x: Any) -> Any:
    return x @ x.T


def _columns(x: Any) -> Any:
    return x.T @ x


def _turned(x: Any) -> Any:
    return jnp.einsum("ak,bk->ba", x, x)


def _several(x: Any) -> Any:
    each = x.reshape(2, -1, x.shape[1])
    return jnp.einsum("gak,gbk->gab", each, each)


FORMS = (_rows, _columns, _turned, _several)


@pytest.mark.parametrize("f", FORMS)
def test_it_is_found(f: Callable[..., Any]) -> None:
    program, (found,) = rewritten(f, LARGE)
    assert count(program, "pallas_gemm_symmetric") == 1
    assert found.answer == "by a kernel, with the symmetry of its result"


@pytest.mark.parametrize("f", FORMS)
def test_the_kernel_computes_it(f: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grams, "LEAST_SAVED", -99.0)
    x = integers(np.random.default_rng(0), (256, 128), BF16)
    program, _ = rewritten(f, x, implementation="interpret")
    assert count(program, "pallas_gemm_symmetric") == 1
    assert_same(jax.jit(core.jaxpr_as_fun(program))(x), [jax.jit(f)(x)])


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x @ x,
        lambda x: jnp.einsum("ak,bk->ab", x, x + 1),
        lambda x: jnp.einsum("ak,bk->ab", x, x.T),
        lambda x: jnp.einsum("ga,gb->gab", x[:, :512], x[:, :512]),
    ],
)
def test_what_is_not_symmetric_is_not(f: Callable[..., Any]) -> None:
    program, _ = rewritten(f, LARGE)
    assert count(program, "pallas_gemm_symmetric") == 0


def test_it_can_be_derived() -> None:
    with target("h200"):
        program = jax.make_jaxpr(derived(accelerate(lambda x, y: (_rows(x), y))))(LARGE, LARGE)
    core.check_jaxpr(program)
    assert "pallas_gemm_symmetric" in names(program)
