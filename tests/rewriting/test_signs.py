"""Results of relu, which tell the derivative where the inputs are positive."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from pallas_gemm.rewriting import folds
from pallas_gemm.rewriting.signs import asked_of_results
from tests.reference import normal
from tests.rewriting.test_folds import BF16, LARGE, SHAPE, _check, exact, rewritten, step
from tests.rewriting.test_walk import assert_same

pytestmark = pytest.mark.usefixtures("as_users_write")


def _with(relu: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda x, w, v, bias: relu(x @ w + bias) @ v


RELUS: dict[str, Callable[[Any], Any]] = {
    "relu": jax.nn.relu,
    "called": jax.jit(jax.nn.relu),
    "named": lambda x: jax.nn.relu(checkpoint_name(x, "before")),
}


@pytest.mark.parametrize("name", RELUS)
def test_a_kernel_stores_the_result_alone(name: str) -> None:
    program, found = rewritten(step(_with(RELUS[name])), *LARGE, SHAPE((4096,), BF16))
    first = next(e for e in program.eqns if e.primitive.name == "pallas_gemm_fused")
    assert {"custom_jvp_call", "jit"} & set(found[0].folded)
    assert len(first.outvars) == 1


@pytest.mark.parametrize("name", RELUS)
def test_derivatives_are_the_programs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)
    rng = np.random.default_rng(1)
    x, w, v = (normal(rng, shape, BF16) for shape in ((72, 64), (64, 128), (128, 80)))
    args, f = (x, w, v, normal(rng, (128,), BF16)), step(_with(RELUS[name]))
    program, _ = rewritten(f, *args, implementation="interpret")
    _check(jax.jit(core.jaxpr_as_fun(program))(*args), jax.jit(f)(*args), exact(f, args))


def _asked(f: Callable[..., Any], *args: Any) -> list[Any]:
    """Returns what a function compares with 0: a name for an argument, or for what is made."""
    program = jax.make_jaxpr(f)(*args).jaxpr
    names = {x: str(i) for i, x in enumerate(program.invars)}
    names |= {x: e.primitive.name for e in program.eqns for x in e.outvars}
    found = asked_of_results(program.eqns)
    assert len(found) == len(program.eqns)
    changed = core.jaxpr_as_fun(core.ClosedJaxpr(program.replace(eqns=found), ()))
    for ours, theirs in zip(changed(*args), jax.tree.leaves(f(*args)), strict=True):
        assert_same(ours, theirs)
    return [names[e.invars[0]] for e in found if e.primitive is lax.gt_p]


NUMBERS = np.array([-2, -0.0, 0, 1, 3, np.nan, np.inf, -np.inf], np.float32)
ASKED: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "relu": (lambda x, y: (jax.nn.relu(x) * y, x > 0), ["custom_jvp_call"]),
    "the larger one": (lambda x, y: (lax.max(0.0, x) * y, x > 0), ["max"]),
    "asked before": (lambda x, y: (x > 0, jax.nn.relu(x) * y), ["0"]),
    "another value": (lambda x, y: (jax.nn.relu(x), y > 0), ["1"]),
    "another number": (lambda x, y: (lax.max(x, 1.0) * y, x > 0), ["0"]),
    "asked for another number": (lambda x, y: (jax.nn.relu(x) * y, x > 1), ["0"]),
    "an array": (lambda x, y: (lax.max(x, y), x > 0), ["0"]),
    "cut off above, too": (lambda x, y: (jax.nn.relu6(x) * y, x > 0), ["0"]),
    "softened": (lambda x, y: (jax.nn.leaky_relu(x) * y, x > 0), ["0"]),
    "squared": (lambda x, y: (jax.jit(lambda x: lax.max(x, 0.0) ** 2)(x) * y, x > 0), ["0"]),
}


@pytest.mark.parametrize("name", ASKED)
def test_only_a_relu_answers_for_what_it_is_given(name: str) -> None:
    function, expected = ASKED[name]
    assert _asked(function, jnp.asarray(NUMBERS), jnp.asarray(NUMBERS[::-1])) == expected
