"""Kernels of a program that read each other's results run in an order."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from pallas_gemm.rewriting import folds
from tests.reference import normal
from tests.rewriting.test_folds import BF16, _check, exact, rewritten


def test_a_sum_depends_on_all_that_its_kernel_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first kernel reads the second product for another result than its sum.
    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)

    def wide(x: Any) -> Any:
        return x.astype(jnp.float32) if x.dtype == BF16 else x

    def f(x: Any, w: Any) -> Any:
        one, other = x @ w, jnp.cos(x) @ w
        total = jnp.sum(jnp.square(wide(one)), -1, keepdims=True)
        return jnp.tanh(one) * other, wide(other) * total

    rng = np.random.default_rng(0)
    args = normal(rng, (64, 64), BF16), normal(rng, (64, 128), BF16)
    program, found = rewritten(f, *args, implementation="interpret")
    assert "reduce_sum" in found[0].folded
    _check(jax.jit(core.jaxpr_as_fun(program))(*args), jax.jit(f)(*args), exact(f, args))
