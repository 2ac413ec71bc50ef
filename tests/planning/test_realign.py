"""What is done to operands before a kernel: the same numbers, by the fewest bytes."""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_gemm.call import NO_EPILOGUE, Call, Operands, signature_of
from pallas_gemm.kernels.hopper import problems
from pallas_gemm.planning.by_xla import xla
from pallas_gemm.planning.realign import (
    Realigned,
    Step,
    _more_rows,
    realign,
    realign_function,
)
from pallas_gemm.problem import Epilogue, Problem
from tests import reference

TYPES = (
    (jnp.bfloat16, jnp.bfloat16, jnp.bfloat16),
    (jnp.float32, jnp.float32, jnp.float32),
    (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16),
    (jnp.int8, jnp.int8, jnp.int32),
)


def _call(
    m: int,
    n: int,
    k: int,
    types: Any = TYPES[0],
    layout: str = "NN",
    epilogue: Epilogue = NO_EPILOGUE,
    batch: tuple[int | None, int | None] = (None, None),
) -> tuple[Call, tuple[Any, ...]]:
    """Returns a call and its operands, small integers."""
    rng = np.random.default_rng(0)
    call = Call(types[2], layout[0] == "T", layout[1] == "T", epilogue)
    lead = [() if size is None else (size,) for size in batch]
    both = max(lead, key=len)
    a = (*lead[0], *((k, m) if call.transpose_a else (m, k)))
    b = (*lead[1], *((n, k) if call.transpose_b else (k, n)))
    operands = Operands(
        reference.integers(rng, a, types[0]),
        reference.integers(rng, b, types[1]),
        reference.integers(rng, b, types[1]) if epilogue.gated else None,
        reference.integers(rng, (n,), jnp.float32) if epilogue.bias else None,
        reference.integers(rng, (*both, m, n), types[2]) if epilogue.residual else None,
    )
    return call, operands.present()


def _realigned(call: Call, operands: tuple[Any, ...]) -> Realigned:
    found = realign(call, signature_of(operands), problems.refusals)
    assert found is not None
    return found


def _computed(call: Call, realigned: Realigned, operands: tuple[Any, ...]) -> jax.Array:
    """Computes a call as a kernel would, with XLA in the kernel's place."""
    problem = realigned.problem
    inner = Call(problem.out_dtype, problem.transpose_a, problem.transpose_b, problem.epilogue)
    ready = realigned.prepare(call.unpack(operands))
    assert (ready.a.shape, ready.b.shape) == (problem.a_shape, problem.b_shape)
    if ready.residual is not None:
        assert ready.residual.shape == problem.residual_shape
    rows, cols = problem.kept or (problem.m, problem.n)
    plain = dataclasses.replace(inner, epilogue=NO_EPILOGUE, out_dtype=problem.accumulator_dtype)
    sums = [
        xla.product(plain, ready.a, b)[..., :rows, :cols]
        for b in (ready.b, ready.up)
        if b is not None
    ]
    cut = ready._replace(residual=None if ready.residual is None else ready.residual[..., :cols])
    result = xla.finish(inner.epilogue, sums, cut).astype(problem.out_dtype)
    assert result.shape == problem.out_shape
    return realigned.restore(result)


sizes = st.one_of(st.integers(1, 40), st.sampled_from([64, 128]))


@settings(max_examples=30)
@given(
    st.tuples(sizes, sizes, sizes),
    st.sampled_from(TYPES),
    st.sampled_from(["NN", "NT", "TN", "TT"]),
    st.booleans(),
    st.sampled_from([(None, None), (3, 3), (3, None), (None, 3), (1, 1), (1, None)]),
)
def test_every_product_can_be_realigned_for_the_hopper_kernel(
    size: tuple[int, int, int], types: Any, layout: str, extras: bool, batch: Any
) -> None:
    with_extras = extras and types[0] != jnp.int8
    epilogue = Epilogue(bias=with_extras, residual=with_extras)
    call, operands = _call(*size, types, layout, epilogue, batch)
    realigned = _realigned(call, operands)
    assert not problems.refusals(realigned.problem)
    result = _computed(call, realigned, operands)
    expected = xla.product(call, *operands)
    np.testing.assert_array_equal(reference.wide(result), reference.wide(expected), strict=True)


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("size", [(128, 128, 64), (1000, 1000, 1000), (17, 64, 8), (200, 264, 72)])
def test_aligned_products_of_16_bits_need_nothing(layout: str, size: Any) -> None:
    m, n, k = size
    if layout[0] == "T":
        m = -(-m // 8) * 8
    if layout == "TN":
        # One of the operands is read as columns by the tensor cores: 64 of them at a time.
        n = -(-n // 64) * 64
    call, operands = _call(m, n, k, layout=layout)
    assert _realigned(call, operands).steps == ()


def _actions(realigned: Realigned) -> list[str]:
    return [f"{step.action} {step.operand}" for step in realigned.steps]


@pytest.mark.parametrize(
    ("size", "layout", "actions"),
    [
        # Only what has rows that are not a multiple of 16 bytes moves, and what has to match it.
        ((65, 64, 63), "NN", ["pad a", "pad b"]),
        ((65, 64, 63), "NT", ["pad a", "pad b"]),
        ((65, 63, 64), "NN", ["pad b"]),
        # What is too much of the result is left out by the kernel.
        ((65, 63, 64), "NT", []),
        ((63, 64, 64), "TN", ["pad a"]),
        ((64, 64, 65), "TN", ["pad a", "pad b"]),
        # To transpose the operand would move a little less, in lines of memory that lie apart.
        ((63, 64, 64), "TT", ["pad a"]),
    ],
)
def test_what_is_padded(size: Any, layout: str, actions: list[str]) -> None:
    call, operands = _call(*size, layout=layout)
    assert _actions(_realigned(call, operands)) == actions


def test_a_function_follows_longer_sums() -> None:
    def padded(*size: int, layout: str) -> list[str]:
        call, operands = _call(*size, layout=layout)
        problem = call.problem(signature_of(operands))
        own = realign_function(problem, problems.refusals)
        assert own is not None
        assert not problems.refusals(own.problem)
        assert own.problem.out_shape == problem.out_shape
        return _actions(own)

    assert padded(65, 72, 63, layout="NT") == ["pad a", "pad b"]
    assert padded(72, 64, 65, layout="TN") == ["pad a", "pad b"]
    assert padded(65, 72, 64, layout="NT") == []


def test_a_residual_is_padded_where_threads_store_the_result() -> None:
    call, operands = _call(65, 63, 64, layout="NT", epilogue=Epilogue(residual=True))
    realigned = _realigned(call, operands)
    assert _actions(realigned) == ["pad residual"]
    assert realigned.problem.residual_shape == (65, 64)


def test_a_kernel_that_keeps_all_of_the_result_is_followed_by_a_slice() -> None:
    call, operands = _call(65, 63, 64, layout="NT")

    def refusals(problem: Problem) -> list[str]:
        return ["odd rows"] if problem.out_shape[-1] % 8 or problem.kept else []

    realigned = realign(call, signature_of(operands), refusals)
    assert realigned is not None
    assert _actions(realigned) == ["pad b", "slice result"]
    pad, cut = realigned.steps
    assert (pad.operand, pad.bytes) == ("b", 2 * (63 * 64 + math.prod(pad.shape)))
    assert (cut.operand, cut.bytes) == ("result", 2 * 2 * 65 * 63)
    np.testing.assert_array_equal(
        reference.wide(_computed(call, realigned, operands)),
        reference.wide(xla.product(call, *operands)),
    )


@pytest.mark.parametrize("types", TYPES[1:], ids=["float32", "float8", "int8"])
def test_operands_of_8_and_32_bits_are_turned_until_k_is_last(types: Any) -> None:
    expected = {"NN": ["b"], "NT": [], "TN": ["a", "b"], "TT": ["a"]}
    for layout, names in expected.items():
        call, operands = _call(64, 128, 64, types, layout)
        realigned = _realigned(call, operands)
        assert [step.operand for step in realigned.steps] == names
        assert {step.action for step in realigned.steps} <= {"transpose"}
        assert realigned.problem.layout == "NT"


def test_padding_and_the_transposition_after_it_are_one_pass() -> None:
    call, operands = _call(64, 65, 63, TYPES[1], "NN")
    turned = [step for step in _realigned(call, operands).steps if step.operand == "b"]
    assert [step.action for step in turned] == ["pad", "transpose"]
    assert [step.bytes for step in turned] == [0, 4 * (63 * 65 + math.prod(turned[1].shape))]


def test_a_batch_with_one_right_operand_is_more_rows() -> None:
    call, operands = _call(8, 64, 64, batch=(5, None))
    realigned = _realigned(call, operands)
    assert realigned.problem.batch == 1
    assert realigned.problem.m == 40
    assert realigned.bytes == 0


def test_rows_of_a_batch_that_are_turned_are_read_and_written_once() -> None:
    found = _more_rows(Problem(8, 64, 64, batch=5, transpose_a=True, shared_b=True))
    assert _actions(found) == ["transpose a", "reshape a", "reshape result"]
    assert [step.bytes for step in found.steps] == [2 * 2 * 5 * 8 * 64, 0, 0]


@pytest.mark.parametrize(
    ("layout", "batch", "own_bias"),
    [
        ("NT", (None, 4), False),
        ("NT", (None, 4), True),
        ("NT", (4, None), True),
        ("TN", (4, None), False),
    ],
    ids=["left", "left, own bias", "right, own bias", "right, turned rows"],
)
def test_what_a_batch_shares_is_read_where_it_is(layout: str, batch: Any, own_bias: bool) -> None:
    call, operands = _call(16, 64, 64, layout=layout, epilogue=Epilogue(bias=True), batch=batch)
    if own_bias:
        operands = (*operands[:2], jnp.arange(4 * 64.0).reshape(4, 64))
    realigned = _realigned(call, operands)
    assert realigned.steps == ()
    assert (realigned.problem.shared_a, realigned.problem.shared_b) == (
        batch[0] is None,
        batch[1] is None,
    )
    assert realigned.problem.mirrored().mirrored() == realigned.problem
    np.testing.assert_array_equal(
        reference.wide(_computed(call, realigned, operands)),
        reference.wide(xla.product(call, *operands)),
    )


def test_what_a_batch_shares_is_padded_once() -> None:
    call, operands = _call(16, 64, 63, layout="NT", batch=(None, 4))
    realigned = _realigned(call, operands)
    assert _actions(realigned) == ["pad a", "pad b"]
    assert realigned.steps[0].bytes == 2 * 16 * (63 + 64)
    np.testing.assert_array_equal(
        reference.wide(_computed(call, realigned, operands)),
        reference.wide(xla.product(call, *operands)),
    )


def test_what_no_remedy_helps_is_refused() -> None:
    call, operands = _call(64, 64, 64)
    signature = signature_of(operands)
    assert realign(call, signature, lambda _: ("never",)) is None
    odd = tuple((shape, np.dtype(np.int32)) for shape, _ in signature)
    assert realign(call, odd, problems.refusals) is None


def test_steps_say_what_they_do() -> None:
    assert str(Step("a", "pad", (4, 8), 96_000_000)) == "pad a to 4 x 8: moves 96.0 MB"
    assert str(Step("a", "reshape", (4, 8))) == "reshape a to 4 x 8: free"


@pytest.mark.parametrize("layout", [*map("".join, itertools.product("NT", repeat=2))])
def test_a_problem_is_the_one_that_the_shapes_pose(layout: str) -> None:
    call, operands = _call(3, 5, 7, layout=layout, batch=(2, 2))
    problem = call.problem(signature_of(operands))
    assert problem == Problem(
        m=3, n=5, k=7, batch=2, transpose_a=layout[0] == "T", transpose_b=layout[1] == "T"
    )
