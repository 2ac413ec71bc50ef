"""Vectors that a function of the product has along rows and along columns."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.kernels.functions.axes import Names
from pallas_gemm.kernels.functions.parts import Split
from pallas_gemm.kernels.functions.split import split
from tests import epilogues

pytestmark = pytest.mark.usefixtures("as_users_write")

M = 24


def _of_positions(s: Any, v: Any) -> Any:
    i = jnp.arange(M)
    return jnp.where(i[:, None] > i, s, -v), jnp.max(s + i, 0)


def _of_blocks(s: Any, v: Any) -> Any:
    i = jnp.arange(M)[:, None] // 5
    return jnp.where(i >= i.T, s, v)


def _of_an_argument(s: Any, v: Any) -> Any:
    return s * v[:, None] * v - v


def _of_what_follows(s: Any, v: Any) -> Any:
    total = jnp.cumsum(v * v).reshape(M, 1)
    i = jnp.arange(M, dtype=jnp.float32)
    decay = jnp.where(i[:, None] >= i, jnp.exp(total.T - total), 0)
    return s * decay + total, jnp.sum(s * decay, 1), jnp.sum(s * v[:, None] - i[:, None], 0)


FUNCTIONS = (_of_positions, _of_blocks, _of_an_argument, _of_what_follows)


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("f", FUNCTIONS)
def test_a_kernel_computes_both(f: Callable[..., Any], batch: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    s = jnp.asarray(rng.standard_normal((*batch, M, M)).astype(jnp.float32))
    v = jnp.asarray(rng.standard_normal(M).astype(jnp.float32))
    whole = jax.vmap(f, (0, None)) if batch else f
    parts = split(jax.make_jaxpr(whole)(s, v), Names("bmn"[-s.ndim :], "m", "n"))
    assert isinstance(parts, Split)
    assert not parts.left
    assert {own.kind for own in parts.program.operands} == {"m", "n"}
    taken = [
        x.reshape((M, 1) if own.kind == "m" else (1, M))
        for x, own in zip(parts.prepared([v]), parts.program.operands, strict=True)
    ]
    each = [epilogues.run(parts.program, [one], taken) for one in s.reshape(-1, M, M)]
    computed = [jnp.stack(x) if batch else x[0] for x in zip(*each, strict=True)]
    for x, y in zip(parts.finished([v], computed), jax.tree.leaves(whole(s, v)), strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_a_matrix_along_both_is_left_to_xla() -> None:
    square = jax.ShapeDtypeStruct((M, M), jnp.float32)
    for f in (lambda s, x: s * x + x.T, lambda s, x: s.T + s * x):
        found = split(jax.make_jaxpr(f)(square, square), Names("mn", "m", "n"))
        assert found == "the function uses one dimension as rows and as columns"


def test_what_is_reduced_is_reduced_once() -> None:
    def f(s: Any) -> Any:
        i = jnp.arange(M)
        z = jnp.where(i[:, None] >= i, s, 0.0)
        largest = jnp.max(z, 1)
        return z / largest[:, None], z - largest.reshape(M, 1)

    names = Names("mn", "m", "n")
    parts = split(jax.make_jaxpr(f)(jax.ShapeDtypeStruct((M, M), jnp.float32)), names)
    assert isinstance(parts, Split)
    assert [own.kind for own in parts.program.results] == ["mn", "m"]
