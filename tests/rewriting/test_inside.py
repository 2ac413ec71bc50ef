"""What a kernel would read to compute the operands of operations that follow its product."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gemm.rewriting.inside import ALLOWED, Inside, Operands
from pallas_gemm.rewriting.level import Level

ROWS, WIDTH = 64, 32
SHAPE = (ROWS, WIDTH)


def _program(rng: np.random.Generator) -> Any:
    """Returns a function of sums and products of values that it drew, some of them matrices'."""

    def program(x: Any, row: Any, w: Any) -> Any:
        values = [x, jnp.broadcast_to(row, SHAPE), x * 2]
        for _ in range(12):
            one, other = (values[i] for i in rng.integers(max(0, len(values) - 5), len(values), 2))
            ways = (lax.add, lax.add, lax.mul, lambda one, _: lax.dot(one, w))
            values.append(ways[rng.integers(len(ways))](one, other))
        return values[-2:]

    return program


def _level(program: Any, *shapes: tuple[int, ...]) -> Level:
    jaxpr = jax.make_jaxpr(program)(*(jax.ShapeDtypeStruct(own, jnp.float32) for own in shapes))
    return Level(jaxpr, jaxpr.eqns)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_surely_read_is_read_if_one_looks_far_back(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = _level(_program(np.random.default_rng(seed)), SHAPE, (WIDTH,), (WIDTH, WIDTH))
    values = [x for e in level.equations for x in e.outvars if x.aval.shape == SHAPE]
    near = [Operands(level, SHAPE, ALLOWED).of(x) for x in values]
    monkeypatch.setattr(Operands, "_is_surely_much", lambda *_: False)
    assert near == [Operands(level, SHAPE, ALLOWED).of(x) for x in values]


def _model(blocks: int) -> Level:
    """A model whose blocks add to what all blocks before have added up."""

    def model(x: Any, w: Any) -> Any:
        for _ in range(blocks):
            x = x + lax.dot(jnp.sin(x), w)
        return jnp.tanh(x)

    return _level(model, SHAPE, (WIDTH, WIDTH))


def test_one_looks_no_further_back_in_the_last_block_of_a_long_model() -> None:
    seen = []
    for blocks in (4, 32):
        level = _model(blocks)
        *_, last = (e for e in level.equations if e.primitive.name == "dot_general")
        seen.append(len(Inside(level, tuple(last.outvars), exact=False).operands._known))
    assert seen[0] == seen[1]


def test_a_value_is_stored_while_one_of_its_readers_has_it_in_memory() -> None:
    level = _level(lambda x, w: (lax.dot(jnp.sin(x), w), jnp.sin(x) + 1), SHAPE, (WIDTH, WIDTH))
    dot, sine = (
        next(e for e in level.equations if e.primitive.name == name)
        for name in ("dot_general", "sin")
    )
    (x,) = sine.outvars
    assert x in dot.invars
    assert level.is_stored(x)
    level.remove(dot)
    assert not level.is_stored(x)
    level.put_back([dot], [])
    assert level.is_stored(x)
    assert not level.is_stored(x, but=dot)
