"""What a decision stands for, with NumPy in the place of the kernel: all that is done around it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.call import GroupedCall, Numerics, Operands, Options, SumCall
from pallas_gemm.computer import multiplying
from pallas_gemm.planning import dispatch, implementation
from pallas_gemm.planning.by_xla import xla, xla_groups
from pallas_gemm.planning.dispatch import Decision
from pallas_gemm.problem import Epilogue, Problem
from tests.planning.products import F16, F32, HIGHEST, PRESET, SINGLES, Asked, asked

NAMED = Options("hopper")


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def _stored(x: Any, turned: bool) -> np.ndarray:
    return np.swapaxes(_wide(x), -1, -2) if turned else _wide(x)


def _sum(problem: Problem, left: Any, right: Any) -> np.ndarray:
    """Multiplies two operands that are stored as a problem says."""
    for x, shape in ((left, problem.a_shape), (right, problem.b_shape)):
        assert problem.terms or x.shape == shape
    return _stored(left, problem.transpose_a) @ _stored(right, problem.transpose_b)


def _of_groups(problem: Problem, a: Any, b: Any, sizes: Any) -> np.ndarray:
    ends = np.minimum(np.cumsum(sizes), problem.m)
    result = np.zeros((problem.m, problem.n))
    for group, (first, end) in enumerate(zip((0, *ends), ends, strict=False)):
        result[first:end] = _wide(a)[first:end] @ _stored(b[group], problem.transpose_b)
    return result


def _kernel(problem: Problem, *_: Any) -> Any:
    """Returns the function of the operands that a kernel for a problem is."""
    factors = 1 + problem.sums

    def run(*operands: Any) -> jax.Array:
        assert {x.dtype for x in operands[:factors]} <= {problem.a_dtype, problem.b_dtype}
        if problem.groups:
            *given, sizes = operands[: factors + 1]
            sums = [_of_groups(problem, given[0], right, sizes) for right in given[1:]]
            rest = operands[factors + 1 :]
        elif problem.terms:
            parts = 1 + max(map(max, problem.arrays), default=len(problem.terms) - 1)
            each = [operands[factors * i : factors * (i + 1)] for i in range(parts)]
            which = problem.arrays or [(i, i) for i in range(parts)]
            sums = [
                sum(_sum(problem, each[i][0], each[j][1 + own]) for i, j in which)
                for own in range(problem.sums)
            ]
            rest = operands[factors * parts :]
        else:
            sums = [_sum(problem, operands[0], right) for right in operands[1:factors]]
            rest = operands[factors:]
        return _finished(problem, sums, rest)

    return run


def _finished(problem: Problem, sums: Sequence[Any], rest: Sequence[Any]) -> jax.Array:
    rows, cols = problem.kept or (problem.m, problem.n)
    given = Operands(None, None, **dict(zip(problem.epilogue.operands, rest, strict=True)))
    if given.residual is not None:
        given = given._replace(residual=given.residual[..., :cols])
    kept = [jnp.asarray(x[..., :rows, :cols], jnp.float32) for x in sums]
    result = xla.finish(problem.epilogue, kept, given).astype(problem.out_dtype)
    assert result.shape == problem.out_shape
    return result


def _instead(decision: Decision) -> Decision:
    """Returns a decision with NumPy in the place of its kernel."""
    assert decision.plan is not None
    own = dataclasses.replace(decision.plan.architecture, build=_kernel)
    return dataclasses.replace(decision, plan=dataclasses.replace(decision.plan, architecture=own))


def _operands(own: Asked) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.integers(-3, 4, shape).astype(dtype) for shape, dtype in own.signature]


WORDS = Epilogue(alpha=2.0, bias=True, residual=True, row_scale=True)
ODD = Epilogue(activation=jnp.sinh, bias=True)
GATED_ODD = Epilogue(activation=jnp.sinh, gated=True, residual=True)
WAYS: dict[str, Asked] = {
    "as it is": asked((16, 64, 64), epilogue=WORDS, options=NAMED),
    "padded": asked((5, 7, 9), "NN", options=NAMED, epilogue=WORDS),
    "turned": asked((5, 7, 9), "TN", options=NAMED),
    "padded, gated": asked((5, 7, 9), options=NAMED, epilogue=Epilogue(gated=True, residual=True)),
    "a batch": asked((5, 7, 9), "TT", batch=3, options=NAMED, epilogue=WORDS),
    "a batch of rows": asked(
        (5, 16, 64), batch=3, own="a residual row_scale", options=NAMED, epilogue=WORDS
    ),
    "a turned batch of rows": asked(
        (5, 16, 64), "TT", batch=3, own="a residual row_scale", options=NAMED, epilogue=WORDS
    ),
    "a batch of one": asked((8, 16, 64), batch=1, options=NAMED, epilogue=WORDS),
    "a batch of one on the left": asked((8, 16, 64), batch=1, own="a residual", options=NAMED),
    "without its epilogue": asked((8, 16, 64), options=NAMED, epilogue=ODD),
    "padded, without its epilogue": asked((5, 7, 9), options=NAMED, epilogue=GATED_ODD),
    "cast": asked((8, 16, 64), types=(F32, F16, F32), precision=PRESET.F16_F16_F32, options=NAMED),
    "padded and cast": asked(
        (5, 7, 9), types=SINGLES, precision=PRESET.BF16_BF16_F32, options=NAMED, epilogue=WORDS
    ),
    "cast, without its epilogue": asked(
        (8, 16, 64), types=SINGLES, precision=PRESET.BF16_BF16_F32, options=NAMED, epilogue=ODD
    ),
    "split": asked((5, 7, 9), types=SINGLES, precision=HIGHEST, options=NAMED, epilogue=WORDS),
    "split, gated": asked(
        (8, 16, 64),
        types=SINGLES,
        precision=HIGHEST,
        options=NAMED,
        epilogue=Epilogue(gated=True, residual=True),
    ),
    "split in two, without its epilogue": asked(
        (8, 16, 64),
        types=SINGLES,
        precision=PRESET.BF16_BF16_F32_X3,
        options=NAMED,
        epilogue=GATED_ODD,
    ),
    "a sum": asked((8, 16, 64), kind=SumCall, options=NAMED),
}


@pytest.mark.parametrize("name", WAYS)
def test_what_is_done_around_a_kernel_changes_no_number(name: str) -> None:
    own = WAYS[name]
    decision = _instead(dispatch.decide(own.resolved, own.signature))
    operands = _operands(own)
    found = implementation.of(decision, own.call)(*map(jnp.asarray, operands))
    if isinstance(own.call, SumCall):
        each = (_sum(decision.problem, *pair) for pair in own.call.pairs(operands))
        expected = np.asarray(sum(each)).astype(own.call.out_dtype)
    else:
        call = dataclasses.replace(own.call, precision=HIGHEST)
        expected = jax.jit(lambda *x: xla.product(call, *x))(*operands)
    assert found.dtype == own.call.out_dtype
    np.testing.assert_allclose(_wide(found), _wide(expected), rtol=2e-5, atol=1e-5)


OF_GROUPS = {
    "as it is": {},
    "turned": {"layout": "NN", "sizes": (24, 72, 64)},
    "gated": {"epilogue": Epilogue(gated=True)},
    "with a bias": {"epilogue": Epilogue(bias=True, alpha=2.0)},
    "without its epilogue": {"epilogue": ODD},
    "gated, without its epilogue": {"epilogue": Epilogue(gated=True, activation=jnp.sinh)},
    "split": {"types": SINGLES, "precision": PRESET.BF16_BF16_F32_X3},
}


@pytest.mark.parametrize("name", OF_GROUPS)
def test_what_is_done_around_a_kernel_of_groups_changes_no_number(name: str) -> None:
    fields: dict[str, Any] = {"layout": "NT", "sizes": (24, 64, 64)} | OF_GROUPS[name]
    sizes, layout = fields.pop("sizes"), fields.pop("layout")
    # XLA takes what a group has of its own, and NumPy what all share.
    lead = "b up bias" if name == "without its epilogue" else "b up"
    given = {"batch": 3, "own": lead, "kind": GroupedCall, "options": NAMED}
    own = asked(sizes, layout, **given, **fields)
    decision = _instead(dispatch.decide(own.resolved, own.signature))
    operands = _operands(own)
    place = [shape for shape, _ in own.signature].index((3,))
    operands[place] = np.array([7, 0, 12], np.int32)
    found = implementation.of(decision, own.call)(*map(jnp.asarray, operands))
    call = dataclasses.replace(own.call, precision=HIGHEST)
    expected = xla_groups.by_tiles(call, *map(jnp.asarray, operands))
    assert found.dtype == own.call.out_dtype
    # Rows in no group are zeros, or what a kernel left there.
    np.testing.assert_allclose(_wide(found)[:19], _wide(expected)[:19], rtol=2e-5, atol=1e-5)


def test_a_decision_for_xla_is_its_product() -> None:
    own = asked((5, 7, 9), options=Options("xla"), epilogue=WORDS)
    decision, operands = dispatch.decide(own.resolved, own.signature), _operands(own)
    found = implementation.of(decision, own.call)(*operands)
    np.testing.assert_array_equal(_wide(found), _wide(xla.product(own.call, *operands)))


@pytest.mark.parametrize(
    ("precision", "most"),
    [
        (HIGHEST, 2.0**-23),
        (PRESET.BF16_BF16_F32_X9, 2.0**-23),
        (PRESET.BF16_BF16_F32_X3, 2.0**-16),
        (PRESET.BF16_BF16_F32, 2.0**-8),
    ],
    ids=str,
)
def test_more_terms_are_nearer_to_the_product(precision: Any, most: float) -> None:
    own = asked((8, 16, 64), types=SINGLES, precision=precision, options=NAMED)
    decision = _instead(dispatch.decide(own.resolved, own.signature))
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape, _ in own.signature)
    found = implementation.of(decision, own.call)(jnp.asarray(a), jnp.asarray(b))
    error = np.abs(_wide(found) - _wide(a) @ _wide(b).T) / (np.abs(a) @ np.abs(b).T)
    assert most / 128 < error.max() < most


def test_the_simulator_keeps_no_promise_where_numpy_adds_up_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulated = Options("interpret")
    promised = asked((64, 512, 512), options=simulated, promised=Numerics("rows"))
    free = asked((64, 512, 512), options=simulated)
    given = []

    def build(problem: Problem, config: Any, device: Any, interpret: Any) -> Any:
        given.append(interpret)
        return _kernel(problem)

    def run(own: Asked) -> None:
        decision = dispatch.decide(own.resolved, own.signature)
        assert decision.plan is not None
        kind = dataclasses.replace(decision.plan.architecture, build=build)
        plan = dataclasses.replace(decision.plan, architecture=kind)
        implementation.of(dataclasses.replace(decision, plan=plan), own.call)

    for alike in (True, False):
        monkeypatch.setattr(multiplying, "adds_up_alike", lambda alike=alike: alike)
        run(free)
        if alike:
            run(promised)
    with pytest.raises(ValueError, match=r"numerics\(invariant='rows'\).*does not add up alike"):
        run(promised)
    assert [type(x).__name__ for x in given] == ["InterpretGPUParams"] * 3
    run_on_gpu = asked((64, 512, 512), options=NAMED, promised=Numerics("rows"))
    run(run_on_gpu)
    assert given[-1] is False
