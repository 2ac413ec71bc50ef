"""Functions of products whose rows do not lie one after the other: some are a batch of products."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from pallas_gemm import gemm
from pallas_gemm.rewriting import folds
from tests.rewriting.test_folds import BF16, rewritten

X, W = (2, 64, 72), (64, 80)
"""Stored [batch, k, m] and [k, n]."""


def _drawn(*shape: int) -> Any:
    rng = np.random.default_rng(len(shape) + sum(shape))
    return jnp.asarray(rng.integers(-2, 3, shape).astype(BF16))


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "whole": (lambda s, y: s + y, (2, 72, 80)),
    "of a product": (lambda s, y: s + y, (2, 1, 1)),
    "rows": (lambda s, y: s + y, (2, 72, 1)),
    "rows of all": (lambda s, y: s + y, (72, 1)),
    "columns": (lambda s, y: s + y, (80,)),
    "sums of rows": (lambda s, y: jnp.sum(s * y, -1), (80,)),
    "sums of columns": (lambda s, y: jnp.sum(s * y, -2), (72, 1)),
    "largest of rows": (lambda s, y: (s, jnp.max(s * y, -1)), (80,)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("mapped", [False, True])
def test_each_product_has_its_own(name: str, mapped: bool) -> None:
    function, shape = FUNCTIONS[name]
    x, w, y = _drawn(*X), _drawn(*W), _drawn(*shape)

    def run(x: Any, y: Any) -> Any:
        how: Any = {"transpose_a": True, "implementation": "interpret"}
        with jax.numpy_rank_promotion("allow"):
            return gemm(x, w, epilogue=function, operands=(y.astype(jnp.float32),), **how)

    if mapped and len(shape) == 3:
        found = jax.vmap(run)(x, y)
    else:
        found = jax.vmap(lambda x: run(x, y))(x) if mapped else run(x, y)
    sums = np.einsum("bkm,kn->bmn", *(np.asarray(own, np.float32) for own in (x, w)))
    with jax.numpy_rank_promotion("allow"):
        exact = function(jnp.asarray(sums), y.astype(jnp.float32))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_so_it_is_where_a_program_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)

    def attended(values: Any, w: Any, residual: Any) -> Any:
        return jnp.einsum("nhdt,hde->nte", values, w) + residual

    args = _drawn(2, 2, 32, 72), _drawn(2, 32, 80), _drawn(2, 72, 80)
    program, found = rewritten(attended, *args, implementation="interpret")
    assert "add" in found[0].folded
    (ours,) = jax.jit(core.jaxpr_as_fun(program))(*args)
    np.testing.assert_array_equal(ours, attended(*args))
