"""The passes over memory that a program makes between its products, in bytes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gemm.api.explaining.passes import passes_of
from pallas_gemm.api.explaining.trace import trace_of

SIDE = 1024
ONE = 4 * SIDE**2
"""Bytes of an array."""
ROWS = 4 * SIDE
"""Bytes of a value for each row."""


def _softmax_of_a_sum(a: Any, b: Any, c: Any, d: Any) -> Any:
    return jnp.exp((s := a + b + c + d) - s.max(axis=1, keepdims=True))


PASSES: dict[str, tuple[Any, int, list[tuple[int, int]]]] = {
    "elementwise": (lambda a, b: jnp.tanh(a * b + 1), 2, [(3 * ONE, 1)]),
    "two results of the same": (lambda a: (jnp.sin(a), jnp.cos(a)), 1, [(3 * ONE, 1)]),
    "apart": (lambda a, b: (jnp.sin(a), jnp.cos(b)), 2, [(2 * ONE, 1), (2 * ONE, 1)]),
    "before and after a product": (
        lambda a, b: jnp.sin(jnp.cos(a) @ b),
        2,
        [(2 * ONE, 1), (2 * ONE, 1)],
    ),
    "nothing": (lambda a, b: (a @ b).reshape(-1), 2, []),
    "what XLA reads as it is stored": (lambda a, b: (a.T @ b).T, 2, []),
    "a reduction, and what needs it": (
        lambda a: a - a.sum(axis=1, keepdims=True),
        1,
        [(ONE + ROWS, 1), (2 * ONE + ROWS, 1)],
    ),
    # The sum of four is written once, where reading it again takes less than making it again.
    "a sum that is needed again": (
        _softmax_of_a_sum,
        4,
        [(5 * ONE + ROWS, 1), (2 * ONE + ROWS, 1)],
    ),
    "what nobody needs": (lambda a, b: (jnp.sum(jnp.sin(a)), a @ b)[1], 2, []),
    "a slice": (lambda a: jnp.sin(a[:, : SIDE // 4]), 1, [(ONE // 2, 1)]),
    "there and back": (
        lambda a, b: (a @ b).astype(jnp.bfloat16).astype(jnp.float32).astype(jnp.bfloat16),
        2,
        [(ONE + ONE // 2, 1)],
    ),
    "a loop": (
        lambda a: lax.fori_loop(0, 7, lambda _, x: jnp.sin(x @ x), a),
        1,
        [(2 * ONE, 7)],
    ),
    "again": (
        jax.grad(lambda a: jnp.sum(jax.checkpoint(lambda x: jnp.sin(jnp.cos(x @ x)))(a))),
        1,
        # Ones that come back into the sum, what they become, and the sum of two products.
        [(ONE, 1), (3 * ONE, 1), (3 * ONE, 1)],
    ),
}


@pytest.mark.parametrize(("f", "count", "expected"), PASSES.values(), ids=PASSES)
def test_passes(f: Any, count: int, expected: list[tuple[int, int]]) -> None:
    arrays = [jax.ShapeDtypeStruct((SIDE, SIDE), np.float32)] * count
    found = passes_of(trace_of(jax.make_jaxpr(f)(*arrays).jaxpr))
    assert [(own.bytes, own.times) for own in found] == expected
