"""Linear attention in chunks, whose scores decay: masks of one vector of positions, used twice."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from pallas_gemm.rewriting import folds
from tests.reference import normal
from tests.rewriting.test_folds import BF16, SHAPE, _check, count, exact, rewritten, step

pytestmark = pytest.mark.usefixtures("as_users_write")


def _chunk(c: Any, b: Any, x: Any, rate: Any) -> Any:
    """Returns what the tokens of each chunk read of each other, as Mamba-2 does."""
    total, i = jnp.cumsum(-jnp.square(rate), -1), jnp.arange(rate.shape[-1])
    decay = jnp.exp(total[..., :, None] - total[..., None, :])
    decay = jnp.where(i[:, None] >= i[None], decay, 0)
    scores = jnp.einsum("htd,hsd->hts", c, b, preferred_element_type=rate.dtype) * decay
    return jnp.einsum("hts,hsd->htd", scores.astype(x.dtype), x)


def test_decays_are_computed_in_the_kernel() -> None:
    vectors = SHAPE((1024, 256, 128), BF16)
    args = vectors, vectors, SHAPE((1024, 256, 64), BF16), SHAPE((1024, 256), jnp.float32)
    forward, _ = rewritten(_chunk, *args)
    (first, _) = (e for e in forward.eqns if e.primitive.name.startswith("pallas_gemm"))
    # The kernel reads the sums of the rates, and no decay of each element.
    assert sorted(x.aval.shape for x in first.invars[2:]) == [(1024, 1, 256), (1024, 256, 1)]
    both, found = rewritten(step(_chunk), *args)
    assert sum("exp" in one.folded for one in found) == 2
    for equation in both.eqns:
        if equation.primitive.name == "pallas_gemm_fused":
            # It reads no large array but the scores, for the gradients of the rates.
            large = [x for x in equation.invars if x.aval.shape == (1024, 256, 256)]
            assert len(large) <= 1
    assert count(both, "pallas_gemm_fused") == 3


def test_values_are_as_good_as_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)
    rng = np.random.default_rng(0)
    c, b, x = (normal(rng, (2, 64, 64), BF16) for _ in range(3))
    args, f = (c, b, x, normal(rng, (2, 64), np.dtype(np.float32))), step(_chunk)
    program, found = rewritten(f, *args, implementation="interpret")
    assert sum("exp" in one.folded for one in found) == 2
    _check(jax.jit(core.jaxpr_as_fun(program))(*args), jax.jit(f)(*args), exact(f, args))
