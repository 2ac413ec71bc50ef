"""What NumPy makes of a program is what JAX makes of it, bit by bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from tests.quick import numpy_programs

SHAPE = (4, 8)
MEMORY = np.zeros(3, np.float32)


def _integers(i: Any, word: Any) -> list[Any]:
    halves = [word // 3, word % -5, -word // 7, lax.div(word, jnp.int32(-4)), lax.rem(word, i)]
    logic = [(word & 12) | (i ^ 5), ~word, jnp.abs(word)]
    by = [jnp.int32(3), jnp.int32(0), i, i + 25, i + 26, i - 7]
    logic += [
        shift(word, jnp.broadcast_to(bits, word.shape))
        for shift in (lax.shift_left, lax.shift_right_logical)
        for bits in by
    ]
    picked = [
        jnp.where(word > 2, word, i),
        lax.select_n(i % 3, word, -word, 2 * word),
        lax.select_n(word % 3, word, 5 * word, 2 * word),
        jnp.clip(word, -2, i),
        lax.dynamic_slice(word, (i - 9, i + 40), (2, 3)),
        word[1:4:2, 3].reshape(2, 1),
        lax.broadcast_in_dim(word[0], (8, 3), (0,)),
        jnp.minimum(word, i) - jnp.sign(word),
    ]
    truths = [word < i, word <= i, word > i, word >= i, (word == i) & (word != 3)]
    return [*halves, *logic, *picked, *truths]


def _reals(x: Any) -> list[Any]:
    types = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.int8)
    numbers = [jnp.sqrt(jnp.square(x)).astype(dtype) for dtype in types]
    narrow = x.astype(jnp.bfloat16)
    # One operation each: of several, XLA may make one that rounds once.
    operations = [x / jnp.flip(x, 0), narrow * narrow, narrow + narrow, jnp.maximum(x, jnp.nan)]
    extremes = [jnp.abs(x), jnp.max(x, 1), jnp.min(x, 0), jnp.max(x, (0, 1))]
    return [*numbers, *operations, *extremes, *_places(x), lax.erf(x)]


def _places(x: Any) -> list[Any]:
    counted = [
        lax.broadcasted_iota(dtype, SHAPE, axis)
        for dtype, axis in ((jnp.int32, 0), (jnp.float32, 1))
    ]
    places = jnp.array([[3, 0, 31], [-1, 32, 40]])
    taken = [jnp.take(x.ravel(), places), jnp.take(x, jnp.array([1, 3]), axis=1)]
    return [*counted, *taken, jnp.concatenate([x, x[:1], 2 * x]), jnp.concatenate([x, x], 1)]


def _control(i: Any, x: Any) -> list[Any]:
    def step(carry: Any, row: Any) -> Any:
        return (carry[0] + row, carry[1] + 1), (row * carry[1], carry[0])

    scale = i.astype(jnp.float32)

    scanned = [
        lax.scan(step, (jnp.zeros(8), jnp.float32(0)), x, reverse=reverse)
        for reverse in (False, True)
    ]
    looped = lax.while_loop(lambda c: c[0] < i, lambda c: (c[0] + 2, c[1] * 1.5), (0, x))
    switched = [
        lax.switch(i + add, [jnp.square, lambda x: x + scale, jax.nn.relu], x)
        for add in (-20, -5, 20)
    ]
    return jax.tree.leaves([scanned, looped, switched])


def _memory(x: Any) -> list[Any]:
    def read(add: Any) -> np.ndarray:
        MEMORY[:] += np.float32(add)
        return MEMORY

    like = jax.ShapeDtypeStruct(MEMORY.shape, MEMORY.dtype)
    return [io_callback(read, like, jnp.int32(add), ordered=True) for add in (1, 2)]


def _program(i: Any, word: Any, x: Any) -> list[Any]:
    return [*_integers(i, word), *_reals(x), *_control(i, x), *_memory(x)]


def test_results_are_those_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = (
        np.int32(6),
        np.arange(-16, 16, dtype=np.int32).reshape(SHAPE),
        np.append(np.random.default_rng(0).normal(size=29) * 100, [np.nan, np.inf, -0.0])
        .astype(np.float32)
        .reshape(SHAPE),
    )
    stock_rule, asked = numpy_programs._rule, set()
    monkeypatch.setattr(
        numpy_programs, "_rule", lambda eqn: (asked.add(eqn.primitive.name), stock_rule(eqn))[1]
    )
    traced = jax.make_jaxpr(_program)(*operands)
    found = numpy_programs.Program(traced.jaxpr)(*map(np.asarray, traced.consts), *operands)
    assert asked >= {*numpy_programs.FUNCTIONS, *numpy_programs.MAKERS}
    MEMORY[:] = 0
    expected = jax.tree.map(np.asarray, jax.jit(_program)(*operands))
    assert len(found) == len(expected)
    for ours, jaxs in zip(found, expected, strict=True):
        assert ours.dtype == jaxs.dtype
        np.testing.assert_array_equal(ours.astype(float), jaxs.astype(float))
