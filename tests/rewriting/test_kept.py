"""A value that is kept for a derivative is computed again by the kernel that reads its parts."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core

from pallas_gemm.call import signature_of
from pallas_gemm.device import H200
from pallas_gemm.kernels.functions.parts import Split
from pallas_gemm.op import fused
from pallas_gemm.rewriting import folds, kept
from tests.rewriting.test_folds import (
    BF16,
    SHAPE,
    _check,
    _swiglu,
    count,
    drawn,
    exact,
    rewritten,
    step,
)

pytestmark = pytest.mark.usefixtures("as_users_write")

LARGE = (SHAPE((16384, 4096), BF16), SHAPE((4096, 14336), BF16), SHAPE((14336, 4096), BF16))
BIAS = SHAPE((14336,), BF16)


def _blocks(x: Any, w: Any, v: Any, bias: Any, number: int = 3) -> Any:
    for _ in range(number):
        x = x + _swiglu(x, w, v, bias)
    return x


def _kept_by_the_caller(x: Any, w: Any, v: Any, bias: Any) -> Any:
    hidden = jax.nn.silu(x @ w) * (x @ (w + bias))
    return _blocks(x + hidden @ v, w, v, bias, 2), hidden


def _results(program: Any) -> list[int]:
    own = (e for e in program.eqns if e.primitive.name == "pallas_gemm_fused")
    return sorted(len(e.outvars) for e in own)


def _stored_by_its_kernel(equation: Any) -> int:
    """Returns how many of the results the kernel stores: XLA would keep the others."""
    params = equation.params
    parts = fused.parts_of(params["contraction"], params["function"])
    assert isinstance(parts, Split)
    return len(parts.stored)


def _config(equation: Any) -> Any:
    params = equation.params
    call, dims = params["call"].with_target(H200), params["contraction"]
    given = signature_of(tuple(x.aval for x in equation.invars))
    found = fused.plan(call, dims, params["function"], given)
    assert isinstance(found, fused.Fused)
    assert found.decision.plan is not None
    return found.decision.plan.config


def test_what_is_read_much_later_is_stored_by_the_kernel_that_reads_its_parts() -> None:
    program, _ = rewritten(step(_blocks), *LARGE, BIAS)
    # The last block's is read at once.
    assert _results(program).count(3) == 2
    own = [e for e in program.eqns if e.primitive.name == "pallas_gemm_fused"]
    for equation in (e for e in own if len(e.outvars) == 3):
        readers = [e for e in program.eqns if equation.outvars[-1] in e.invars]
        assert len(readers) == 1
        assert _stored_by_its_kernel(equation) == 3
    # One consumer loads and stores while the other one multiplies.
    tiles = {(config.pingpong, config.tile) for config in map(_config, own)}
    assert tiles == {(True, (64, 256)), (True, (64, 224))}


def test_exact_computes_nothing_again() -> None:
    program, _ = rewritten(step(_blocks), *LARGE, BIAS, exact=True)
    assert 3 not in _results(program)


@pytest.mark.parametrize("again", [lambda x: x * x, lambda x: jnp.sin(jnp.cos(x))])
def test_what_the_kernel_reads_anyway_is_not_computed_again(again: Any) -> None:
    def f(x: Any, w: Any, v: Any) -> Any:
        hidden = again(x)
        y = hidden @ v
        for _ in range(2):
            y = jnp.sin(y @ w) @ v
        return jnp.tanh(y @ w) * hidden + x

    args = (SHAPE((8192, 4096), BF16), SHAPE((1024, 4096), BF16), SHAPE((4096, 1024), BF16))
    program, found = rewritten(f, *args)
    assert {"tanh", "mul", "add"} <= set(found[-1].folded)
    assert _results(program) == [1, 1, 1]


def test_a_factor_of_the_product_is_not_computed_again() -> None:
    def f(x: Any, w: Any, v: Any) -> Any:
        hidden = jnp.sin(x)
        y = hidden @ v
        for _ in range(2):
            y = jnp.sin(y @ w) @ v
        # The product depends on the others.
        return jnp.tanh(hidden @ (y.T @ x)) * x

    args = (SHAPE((4096, 4096), BF16), SHAPE((4096, 4096), BF16), SHAPE((4096, 4096), BF16))
    program, found = rewritten(f, *args)
    assert {"tanh", "mul"} <= set(found[-1].folded)
    assert set(_results(program)) == {1}


def test_two_kernels_do_not_wait_for_what_each_other_stores() -> None:
    # The second product waits for the first kernel, and that for the first product.
    def f(x: Any, w: Any, v: Any, u: Any) -> Any:
        hidden = jnp.sin(x)
        square = (hidden @ v).T @ (hidden @ v)

        def last(y: Any) -> Any:
            for _ in range(2):
                y = jnp.sin(y @ square @ w) @ v
            return jnp.tanh(y @ w) * x

        return last(hidden @ (v + u)), last(hidden @ (v - u))

    args = (SHAPE((8192, 4096), BF16), SHAPE((1024, 4096), BF16), *[SHAPE((4096, 1024), BF16)] * 2)
    program, _ = rewritten(f, *args)
    assert _results(program) == [1, 1, 1, 1, 1, 2]


def _only_of_the_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the folds that read gate and up, whatever they are predicted to save."""
    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)
    fold, saved = folds.Folder.fold, folds.Folder._saved

    def of_both(*args: Any) -> Any:
        found = fold(*args)
        is_meant = found and (len(found.region.operands), len(found.region.results)) == (2, 2)
        return found._replace(saved=1.0) if is_meant else None

    def in_any_case(*args: Any) -> Any:
        return None if saved(*args) is None else 1.0

    monkeypatch.setattr(folds.Folder, "fold", of_both)
    monkeypatch.setattr(folds.Folder, "_saved", in_any_case)


def test_values_are_as_good_as_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    f = _kept_by_the_caller
    _only_of_the_derivative(monkeypatch)
    found: list[Any] = []
    apply = kept._apply
    monkeypatch.setattr(kept, "_apply", lambda *args: (found.append(1), apply(*args)))
    args = drawn(64, 64, 128)
    program, _ = rewritten(step(f), *args, implementation="interpret")
    assert len(found) == 1
    given = jax.jit(core.jaxpr_as_fun(program))(*args)
    expected, values = jax.jit(step(f))(*args), exact(step(f), args)
    _check(given, *map(jax.tree.leaves, (expected, values)))
    assert count(program, "dot_general") == 0
    assert jnp.isfinite(given[0]).all()
