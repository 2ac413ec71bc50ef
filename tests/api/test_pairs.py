"""Every two choices of a public function together, exact; every three with `-m stress`."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from pallas_gemm import numerics, target
from pallas_gemm.planning import precision
from tests import choices, covering, reference
from tests.covering import Case


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Draws the cases of a test; those of three choices only where they are asked for."""
    of_two = (test_any_two_choices, test_any_two_choices_obey_a_promise)
    if metafunc.function not in (*of_two, test_any_three_choices):
        return
    strength = 2 if metafunc.function in of_two else 3
    is_left_out = strength == 3 and "not stress" in metafunc.config.getoption("markexpr")
    drawn = 100 if is_left_out else {2: 10_000, 3: 20_000}[strength]
    metafunc.parametrize("case", _cases(drawn, strength), ids=_name)


@functools.cache
def _cases(drawn: int, strength: int) -> list[Case]:
    return covering.pairs(
        choices.OPTIONS, choices.is_legal, drawn, strength=strength, settled=choices.settled
    )


def _name(case: Case) -> str:
    said = {k: v for k, v in case.items() if v != choices.PLAIN[k]}
    types = "-".join(jnp.dtype(x).name for x in said.pop("types", ()))
    return " ".join(
        [case["function"], types, *(f"{k}={v}" for k, v in said.items() if k != "function")]
    )


def test_any_two_choices(case: Case) -> None:
    check(case)


def test_any_two_choices_obey_a_promise(case: Case) -> None:
    """Every product is one of ours that is promised, or an error says why it is not."""
    case = {**case, "mesh": None}
    rng = np.random.default_rng(0)
    given = choices.typed(case, choices.draw(case, rng))
    f: Any = functools.partial(choices.call, case)
    if case["mapped"]:
        f = jax.vmap(f, in_axes=(choices.mapped_axes(case),))
    # Nothing is promised of sums over rows that the gradients of other operands are.
    names = [name for name in choices.changed(case) if name in ("a", "b", "u")]

    def program(given: Any) -> Any:
        if not case["derivative"] or not names:
            return f(given)
        results, pull = jax.vjp(lambda own: f(given | own), {x: given[x] for x in names})
        return results, pull([jnp.ones(x.shape, x.dtype) for x in results])

    try:
        with numerics(invariant="rows"), target("h200"):
            jaxpr, refused = jax.make_jaxpr(program)(given).jaxpr, ""
    except ValueError as error:
        jaxpr, refused = None, str(error)
    if jaxpr is None:
        assert "numerics(invariant='rows') is a promise of the kernels" in refused
        return
    promised = [call.options.numerics for call in _calls(jaxpr) if call is not None]
    assert promised, jaxpr
    assert None not in promised, jaxpr
    names_of_jaxs = {"dot_general", "ragged_dot_general", "ragged_dot"}
    assert names_of_jaxs.isdisjoint(_primitives(jaxpr)), jaxpr


def _primitives(jaxpr: core.Jaxpr) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        if (inner := equation.params.get("jaxpr")) is not None:
            yield from _primitives(getattr(inner, "jaxpr", inner))


@pytest.mark.stress
def test_any_three_choices(case: Case) -> None:
    check(case)


def check(case: Case) -> None:
    """Computes a case, and compares all of it."""
    rng = np.random.default_rng(0)
    values = choices.draw(case, rng)
    exact = choices.exact(case, values)
    moves = choices.draw(case, rng)
    back = [rng.choice([-1.0, 0.0, 1.0], x.shape) for x in exact.results]
    given, tangents = choices.typed(case, values), choices.typed(case, moves)
    tangents = {name: tangents[name] for name in choices.changed(case)}
    types = choices.types_of_results(case)
    cotangents = [jnp.asarray(g.astype(dtype)) for g, dtype in zip(back, types, strict=True)]
    results, found = _computed(case, given, tangents, cotangents)
    for result, expected, dtype in zip(results, exact.results, types, strict=True):
        assert result.dtype == dtype
        reference.assert_exact(result, expected)
    if case["derivative"] == "forward":
        for i, change in enumerate(found):
            along = [np.tensordot(moves[x].ravel(), exact.changes[x][i], 1) for x in tangents]
            reference.assert_exact(change, np.sum(along, axis=0))
    if case["derivative"] == "reverse":
        for name, gradient in found.items():
            pulled = sum(
                np.tensordot(change, g, g.ndim)
                for change, g in zip(exact.changes[name], back, strict=True)
            )
            assert gradient.dtype == given[name].dtype, name
            both = functools.partial(choices.both_halves, case, name)
            reference.assert_exact(both(gradient), both(np.reshape(pulled, gradient.shape)))


def _computed(case: Case, given: Any, tangents: Any, cotangents: Any) -> Any:
    """Returns results and derivatives, in one program."""
    f: Any = functools.partial(choices.call, case)
    axes = choices.mapped_axes(case)
    if case["mapped"]:
        f = jax.vmap(f, in_axes=(axes,))
    mesh = choices.make_mesh(case["mesh"]) if case["mesh"] else None
    split = {name: choices.sharding(case, mesh, name) for name in given} if mesh else {}
    if mesh:
        given, tangents = (
            {name: jax.device_put(np.asarray(x), split[name]) for name, x in own.items()}
            for own in (given, tangents)
        )

    def program(given: Any, tangents: Any, cotangents: Any) -> Any:
        own = {name: given[name] for name in tangents}

        def of_changed(own: Any) -> Any:
            return f(given | own)

        if case["derivative"] == "forward":
            return jax.jvp(of_changed, (own,), (tangents,))
        if case["derivative"] == "reverse":
            results, pull = jax.vjp(of_changed, own)
            if mesh:
                places = [jax.typeof(x).sharding for x in results]
                explicit = case["mesh"].startswith("explicit")
                cotangents = (
                    list(map(jax.sharding.reshard, cotangents, places)) if explicit else cotangents
                )
            return results, pull(cotangents)[0]
        return f(given), None

    traced = jax.jit(program).trace(given, tangents, cotangents)
    _assert_precise(case, traced.jaxpr.jaxpr)
    return traced.lower().compile()(given, tangents, cotangents)


def _assert_precise(case: Case, jaxpr: core.Jaxpr) -> None:
    """Asserts that every product of ours has the precision that was asked for."""
    asked = precision.resolve(case["precision"])
    allowed = [asked, asked[::-1]] if isinstance(asked, tuple) else [asked]
    found = [call.precision for call in _calls(jaxpr)]
    assert all(own in allowed for own in found), found


def _calls(jaxpr: core.Jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if (call := equation.params.get("call")) is not None and hasattr(call, "precision"):
            yield call
        for inner in core.jaxprs_in_params(equation.params):
            yield from _calls(inner)
