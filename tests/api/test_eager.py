"""Calls outside of any trace: what a second one costs, and that all that is asked still counts."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_gemm import dot_general, gated_gemm, gemm, matmul, projections

A = jnp.arange(12.0).reshape(3, 4)
B = jnp.arange(20.0).reshape(4, 5)
CALLS: dict[str, Callable[[], Any]] = {
    "matmul": lambda: matmul(A, B),
    "gemm": lambda: gemm(A, B, bias=B[0], activation="gelu", alpha=2),
    "dot_general": lambda: dot_general(A, B, (((1,), (0,)), ((), ()))),
    "gated_gemm": lambda: gated_gemm(A, B, B),
    "projections": lambda: projections(A, [B, B], biases=[B[0], None]),
}


def _python_calls(f: Callable[[], Any]) -> int:
    """Returns how many functions of Python a call calls."""
    count = 0

    def note(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        f()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("name", CALLS)
def test_a_second_call_is_a_look_up(name: str) -> None:
    call = CALLS[name]
    first = jax.block_until_ready(call())
    operands = _python_calls(lambda: B[0])
    # 300 to 600 if the request is made anew; `jnp.matmul` needs 1.
    assert _python_calls(call) - operands < 30
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), call(), first))


def test_what_is_asked_counts_each_time() -> None:
    assert gemm(A, B).dtype == jnp.float32
    assert gemm(A, B, preferred_element_type=jnp.bfloat16).dtype == jnp.bfloat16
    assert gemm(A, B, alpha=3.0)[2, 4] == 3 * gemm(A, B)[2, 4]
    assert gemm(A.astype(jnp.bfloat16), B.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    with jax.disable_jit():
        assert gemm(A, B)[0, 0] == 70
    # Lists are no options that a program could be filed under.
    assert dot_general(A, B, [[[1], [0]], [[], []]]).shape == (3, 5)


@pytest.fixture
def traceback_for_users() -> Iterator[None]:
    """Filtered, as other tests do without."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "auto")
    yield
    jax.config.update("jax_traceback_filtering", before)


@pytest.mark.usefixtures("traceback_for_users")
def test_errors_are_ours_and_no_frame_of_jax_is_between() -> None:
    with pytest.raises(TypeError, match="agree in the contracted size") as raised:
        gemm(A, A)
    assert raised.value.__context__ is None
    assert not any("/jax/" in str(entry.path) for entry in raised.traceback)
