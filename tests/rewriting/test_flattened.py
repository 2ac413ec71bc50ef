"""Products of rows that a program makes one dimension of are those of the rows as they were."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from pallas_gemm import accelerate, target
from pallas_gemm.rewriting.flattened import with_rows_apart
from tests.rewriting.test_folds import (
    BF16,
    FOLDED,
    LARGE,
    SHAPE,
    _check,
    count,
    drawn,
    exact,
    rewritten,
    step,
)
from tests.rewriting.test_walk import assert_same

pytestmark = pytest.mark.usefixtures("as_users_write")


def _layer(x: Any, w: Any) -> Any:
    """Multiplies as libraries that know matrices alone do."""
    flat = x.reshape(-1, x.shape[-1]) @ w
    return flat.reshape(*x.shape[:-1], w.shape[-1])


def _mlp(x: Any, w: Any, v: Any, bias: Any) -> Any:
    return x + _layer(jax.nn.gelu(_layer(x, w) + bias), v)


def test_what_is_around_flat_products_is_folded() -> None:
    program, _ = rewritten(step(_mlp), *LARGE, SHAPE((4096,), BF16))
    assert count(program, "pallas_gemm_fused") == FOLDED["mlp"]
    reshapes = [e for e in program.eqns if e.primitive.name == "reshape"]
    # The gradient of the bias has one.
    assert all(e.outvars[0].aval.size == 4096 for e in reshapes)


@pytest.mark.parametrize("numerics", [None, "exact"])
def test_values_are_as_good_as_the_programs(numerics: Any) -> None:
    args, f = drawn(128, 256, 512), step(_mlp)
    with target("h200"):
        found = jax.jit(accelerate(f, numerics=numerics))(*args)
    _check(found, jax.jit(f)(*args), exact(f, args))


def _rows(x: Any, y: Any) -> Any:
    return (x.reshape(6, 5) @ y[0].T).reshape(2, 3, 4)


def _rows_of_three(x: Any, y: Any) -> Any:
    return (x.reshape(1, 2, 3, 5).reshape(6, 5) @ y[0].T).reshape(1, 2, 3, 4)


def _sums(x: Any, y: Any) -> Any:
    return jnp.einsum("rk,rn->kn", x.reshape(6, 5), (y[:2, :3] * 2).reshape(6, 5))


def _in_a_batch(x: Any, y: Any) -> Any:
    every = jax.vmap(lambda x, y: (x.reshape(6, 5) @ y.T).reshape(2, 3, 4))
    return every(jnp.stack([x, -x]), y[:2])


APART = [_rows, _rows_of_three, _sums, _in_a_batch]


def _whole(x: Any, y: Any) -> Any:
    # Columns are not rows.
    return (x.reshape(6, 5) @ y[0].T).reshape(6, 2, 2)


def _columns(x: Any, y: Any) -> Any:
    return jnp.einsum("rk,abk->rab", x.reshape(6, 5), y[:2]).reshape(2, 3, 4, 2)


def _others(x: Any, y: Any) -> Any:
    # The rows are two times three, and then three times two.
    return (x.reshape(6, 5) @ y[0].T).reshape(3, 2, 4)


def _read_twice(x: Any, y: Any) -> Any:
    z = x.reshape(6, 5) @ y[0].T
    return z.reshape(2, 3, 4), z + 1


def _returned(x: Any, y: Any) -> Any:
    z = x.reshape(6, 5) @ y[0].T
    return z.reshape(2, 3, 4), z


def _turned(x: Any, y: Any) -> Any:
    return jnp.einsum("rk,rn->kn", x.reshape(6, 5), y[:2, :3].swapaxes(0, 1).reshape(6, 5))


LEFT = [_whole, _columns, _others, _read_twice, _returned, _turned]


def _changed(f: Callable[..., Any]) -> tuple[bool, Any, Any]:
    """Returns whether a program changes, what it then computes, and what it computed."""
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.integers(-4, 5, s).astype(jnp.float32)) for s in ((2, 3, 5), (3, 4, 5)))
    program = jax.make_jaxpr(f)(x, y).jaxpr
    equations = with_rows_apart(program, program.eqns)
    changed = core.ClosedJaxpr(program.replace(eqns=list(equations)), ())
    core.check_jaxpr(changed.jaxpr)
    return equations is not program.eqns, core.jaxpr_as_fun(changed)(x, y), f(x, y)


@pytest.mark.parametrize("f", APART)
def test_rows_stay_apart(f: Callable[..., Any]) -> None:
    is_changed, (found,), expected = _changed(f)
    assert is_changed
    assert_same(found, expected)


@pytest.mark.parametrize("f", LEFT)
def test_what_is_no_product_of_rows_apart_stays(f: Callable[..., Any]) -> None:
    is_changed, _, _ = _changed(f)
    assert not is_changed
