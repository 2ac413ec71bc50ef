"""Functions around products that few models have, and operations that change no value."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from pallas_gemm import accelerate, target
from pallas_gemm.rewriting import folds
from tests.rewriting.test_folds import BF16, LARGE, _check, drawn, exact, rewritten, step

pytestmark = pytest.mark.usefixtures("as_users_write")


def _straight_through(z: Any) -> Any:
    """Rounds, with the derivative of no rounding."""
    return z + lax.stop_gradient(jnp.round(z * 4) / 4 - z)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "elu": jax.nn.elu,
    "selu": jax.nn.selu,
    "celu": jax.nn.celu,
    "named": lambda z: jax.nn.gelu(checkpoint_name(z, "before")),
    "named after": lambda z: checkpoint_name(jax.nn.gelu(z), "after"),
    "stopped": lambda z: jax.nn.gelu(z) * lax.stop_gradient(jnp.tanh(z)),
    "log2": lambda z: jnp.log2(1 + jnp.square(z)),
    "not": lambda z: jnp.where(~(z > 0), z / 2, z),
}


def _program(function: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda x, w, bias: function(x @ w + bias)


@pytest.mark.parametrize("name", [*FUNCTIONS, "straight through"])
def test_they_are_folded(name: str) -> None:
    function = FUNCTIONS.get(name, _straight_through)
    program, _ = rewritten(_program(function), *LARGE[:2], jax.ShapeDtypeStruct((4096,), BF16))
    assert [e.primitive.name for e in program.eqns] == ["pallas_gemm_fused"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_as_good_as_the_programs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)
    x, w, _, bias = drawn(40, 64, 128)
    args, f = (x, w, bias), step(_program(FUNCTIONS[name]))
    program, found = rewritten(f, *args, implementation="interpret")
    assert found[0].folded
    expected, values = jax.jit(f)(*args), exact(f, args)
    _check(jax.jit(core.jaxpr_as_fun(program))(*args), jax.tree.leaves(expected), values)
    with target("h200"):
        derived = jax.jit(step(accelerate(_program(FUNCTIONS[name]))))(*args)
    _check(derived, expected, values)


@pytest.mark.parametrize("outside", [False, True])
def test_a_rounding_with_another_derivative_keeps_it(
    outside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)
    rng = np.random.default_rng(2)
    x, w = (
        jnp.asarray((rng.integers(-3, 4, own) / 8).astype(BF16)) for own in ((72, 64), (64, 128))
    )

    def f(x: Any) -> Any:
        return jnp.sum(_straight_through(x @ w).astype(jnp.float32) * 3)

    program = jax.grad(f)
    if outside:
        with target("h200"):
            found = jax.grad(accelerate(f))(x)
    else:
        new, records = rewritten(program, x, implementation="interpret")
        assert records
        (found,) = core.jaxpr_as_fun(new)(x)
    np.testing.assert_array_equal(found, program(x))
    assert np.any(np.asarray(found, np.float32) != 0)
