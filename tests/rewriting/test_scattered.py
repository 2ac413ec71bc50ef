"""A number that is added to zeros at a place of each row is a choice, however it is written."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core

from pallas_gemm.rewriting.inlining import inlined
from pallas_gemm.rewriting.scattered import chosen
from tests.rewriting.test_walk import assert_same

WORDS = 512
"""More than a label of 8 bits counts."""
NO_WORDS = (-1, -WORDS, -WORDS - 3, WORDS, WORDS + 7)


def _along(z: Any, labels: Any, **how: Any) -> Any:
    return jnp.take_along_axis(z, labels[:, None], -1, **how)[:, 0]


def _mapped(z: Any, labels: Any) -> Any:
    return jax.vmap(lambda row, label: row[label])(z, labels)


def _in_slices(z: Any, labels: Any) -> Any:
    return jax.vmap(lambda row, label: lax.dynamic_index_in_dim(row, label, 0, False))(z, labels)


def _indexed(z: Any, labels: Any) -> Any:
    return z[jnp.arange(len(z)), labels]


def _dropped(z: Any, labels: Any) -> Any:
    return z.at[jnp.arange(len(z)), labels].get(mode="fill", fill_value=0)


def _but_first(rows: Any, least: Any) -> Any:
    return lax.select_n(rows < least, rows, jnp.zeros_like(rows))


def _squared(pick: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the derivative of the squares, as an elementwise operation reads it."""

    def gradients(z: Any, labels: Any) -> Any:
        return 2 * jax.grad(lambda z: jnp.sum(jnp.square(pick(z, labels))))(z)

    return gradients


def _changed(f: Callable[..., Any], *args: Any) -> core.Jaxpr:
    program = jax.make_jaxpr(f)(*args).jaxpr
    return program.replace(eqns=list(chosen(program, inlined(program, program.eqns))))


def _names(program: core.Jaxpr) -> set[str]:
    return {e.primitive.name for e in program.eqns}


def _drawn(labels: Any) -> tuple[Any, Any]:
    z = np.random.default_rng(0).standard_normal((len(labels), WORDS))
    return jnp.asarray(z, jnp.float32), jnp.asarray(labels)


@pytest.mark.parametrize("pick", [_along, _mapped, _in_slices, _indexed, _dropped])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.uint32])
def test_numbers_are_where_the_program_has_them(pick: Any, dtype: Any) -> None:
    z, labels = _drawn(np.array([0, 1, 7, 100, 255], dtype))
    changed = _changed(_squared(pick), z, labels)
    assert "scatter-add" not in _names(changed)
    (ours,) = core.jaxpr_as_fun(core.ClosedJaxpr(changed, ()))(z, labels)
    assert_same(ours, _squared(pick)(z, labels))


@pytest.mark.parametrize("pick", [_along, _mapped, _in_slices, _dropped])
def test_places_beyond_a_row_are_the_programs(pick: Any) -> None:
    # Of `_indexed` it is promised that there are none.
    z, labels = _drawn(np.array(NO_WORDS, np.int32))
    changed = _changed(_squared(pick), z, labels)
    assert "scatter-add" not in _names(changed)
    (ours,) = core.jaxpr_as_fun(core.ClosedJaxpr(changed, ()))(z, labels)
    assert_same(ours, _squared(pick)(z, labels))


def test_rows_of_several_dimensions_are_counted() -> None:
    def pick(z: Any, labels: Any) -> Any:
        rows = jnp.indices(labels.shape, sparse=True)
        return z[(*rows, labels)]

    z, labels = _drawn(np.arange(6, dtype=np.int32) * 80)
    args = z.reshape(2, 3, WORDS), labels.reshape(2, 3)
    changed = _changed(_squared(pick), *args)
    assert "scatter-add" not in _names(changed)
    (ours,) = core.jaxpr_as_fun(core.ClosedJaxpr(changed, ()))(*args)
    assert_same(ours, _squared(pick)(*args))


@pytest.mark.parametrize(
    "rows",
    [
        lambda n: jnp.arange(n)[::-1],
        lambda n: jnp.arange(n) - 1,
        lambda n: jnp.zeros(n, jnp.int32),
        lambda n: jnp.arange(n // 5),
        lambda n: _but_first(jnp.arange(n), 2),
        lambda n: _but_first(jnp.arange(n), jnp.arange(n)[::-1]),
    ],
)
def test_rows_that_are_not_counted_are_added_to(rows: Any) -> None:
    z, labels = _drawn(np.array([5, 5, 7, 100, 5], np.int32))
    changed = _changed(_squared(lambda z, labels: z[rows(len(z)), labels]), z, labels)
    assert "scatter-add" in _names(changed)


def test_what_is_added_to_other_numbers_stays() -> None:
    def f(z: Any, labels: Any) -> Any:
        return 2 * z.at[jnp.arange(len(z)), labels].add(1.0)

    assert "scatter-add" in _names(_changed(f, *_drawn(np.arange(4))))
