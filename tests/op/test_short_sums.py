"""Short sums of 8-bit floats, as a precision asks for them, simulated in all their forms."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gemm import (
    dot_general,
    explain,
    gated_gemm,
    gemm,
    gram,
    grouped_gemm,
    numerics,
    target,
)
from pallas_gemm.planning.scheme import SUM_OF_8_BITS
from pallas_gemm.problem import Blocks
from tests import reference
from tests.reference import Formula

M, N, K = 72, 112, 400
E4M3, E5M2, F32, BF16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32, jnp.bfloat16
HOW: Any = {"implementation": "interpret", "precision": "highest", "preferred_element_type": F32}
SIMULATED = functools.partial(gemm, **HOW)


def drawn(*shape: int, seed: int = 0, dtype: Any = E4M3) -> jax.Array:
    return reference.integers(np.random.default_rng(seed), shape, dtype)


@pytest.mark.every_other
@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("precision", ["highest", "ANY_F8_ANY_F8_F32"])
def test_operands_are_stored_in_any_way(precision: str, layout: str) -> None:
    left, right = (side == "T" for side in layout)
    a = drawn(*((K, M) if left else (M, K)), dtype=E5M2)
    b = drawn(*((N, K) if right else (K, N)), seed=1)
    way = {"transpose_a": left, "transpose_b": right}
    reference.assert_exact(SIMULATED(a, b, **way, precision=precision), Formula(**way)(a, b))


@pytest.mark.every_other
@pytest.mark.parametrize("rows", [1, 8, 200])
@pytest.mark.parametrize("k", [128, 144, 1040])
def test_k_ends_anywhere_in_a_block(rows: int, k: int) -> None:
    a, b = drawn(rows, k), drawn(64, k, seed=1)
    result = SIMULATED(a, b, transpose_b=True)
    reference.assert_exact(result, Formula(transpose_b=True)(a, b))


def test_each_product_of_a_batch_has_them() -> None:
    a, b = drawn(3, M, K), drawn(3, N, K, seed=1)
    reference.assert_exact(SIMULATED(a, b, transpose_b=True), Formula(transpose_b=True)(a, b))


def test_an_epilogue_follows_them() -> None:
    a, b = drawn(M, K), drawn(N, K, seed=1)
    extras: Any = {"bias": drawn(N, seed=2, dtype=F32), "residual": drawn(M, N, seed=3, dtype=F32)}
    result = SIMULATED(a, b, **extras, activation="relu", transpose_b=True)
    reference.assert_exact(result, Formula(activation="relu", transpose_b=True)(a, b, **extras))


def test_a_function_follows_them() -> None:
    a, b = drawn(M, K), drawn(N, K, seed=1)
    found, largest = gemm(
        *(a, b),
        epilogue=lambda s: ((2 * s).astype(BF16), jnp.max(s, -1)),
        precision="highest",
        transpose_b=True,
        implementation="interpret",
    )
    exact = reference.wide(a) @ reference.wide(b).T
    reference.assert_exact(found, 2 * exact)
    reference.assert_exact(largest, exact.max(-1))


def test_both_sums_of_a_gate_are_short() -> None:
    a, gate, up = drawn(M, K), drawn(128, K, seed=1), drawn(128, K, seed=2)
    result = gated_gemm(a, gate, up, activation="relu", transpose_b=True, **HOW)
    exact = Formula(activation="relu", transpose_b=True)(a, gate, up=up)
    reference.assert_exact(result, exact)


def test_rows_in_groups_have_them() -> None:
    a, b, sizes = drawn(M, K), drawn(3, N, K, seed=1), np.array([30, 0, 37], np.int32)
    result = grouped_gemm(a, b, sizes, transpose_b=True, **HOW)
    each = np.repeat(np.arange(3), sizes)
    rows, matrices = reference.wide(a)[: len(each), None], reference.wide(b)[each]
    exact = (rows @ matrices.swapaxes(1, 2))[:, 0]
    reference.assert_exact(result, np.pad(exact, ((0, M - len(each)), (0, 0))))


def test_scales_of_blocks_stay() -> None:
    a, b = drawn(M, 512), drawn(N, 512, seed=1)
    row = jnp.asarray((2.0 ** np.random.default_rng(2).integers(-2, 3, (M, 4))).astype(F32))
    result = SIMULATED(a, b, row_scale=row, transpose_b=True)
    exact = (reference.wide(a) * np.repeat(np.asarray(row), 128, 1)) @ reference.wide(b).T
    reference.assert_exact(result, exact)


def test_a_promise_holds_for_them() -> None:
    a, b = drawn(M, K), drawn(64, K, seed=1)
    with numerics(invariant="rows"):
        result = SIMULATED(a, b, transpose_b=True)
    reference.assert_exact(result, Formula(transpose_b=True)(a, b))


def planned(f: Any, *shapes: Any) -> Any:
    with target("h200"):
        return explain(f, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))


LEFT, RIGHT = ((4096, 8192), E4M3), ((2048, 8192), E4M3)


def test_short_sums_are_the_parts_that_are_promised() -> None:
    multiply = functools.partial(
        gemm, transpose_b=True, precision="highest", preferred_element_type=F32
    )
    with numerics(invariant="rows"):
        own = planned(multiply, LEFT, RIGHT)
    assert own.implementation == "hopper"
    problem = own.plan.realigned.problem
    assert (problem.parts, problem.blocks) == (1, Blocks(SUM_OF_8_BITS))


@pytest.mark.parametrize(
    ("precision", "found"),
    [
        ("highest", Blocks(SUM_OF_8_BITS)),
        (("default", "highest"), Blocks(SUM_OF_8_BITS)),
        ("ANY_F8_ANY_F8_F32", Blocks(SUM_OF_8_BITS)),
        ("ANY_F8_ANY_F8_F32_FAST_ACCUM", None),
        (None, None),
    ],
)
def test_a_kernel_of_blocks_without_scales_computes_them(precision: Any, found: Any) -> None:
    multiply = functools.partial(gemm, transpose_b=True, precision=precision)
    own = planned(multiply, LEFT, RIGHT)
    assert own.implementation == "hopper"
    assert own.plan.realigned.problem.blocks == found
    assert not own.plan.realigned.bytes


def test_a_plan_keeps_the_scales_of_blocks() -> None:
    def multiply(a: Any, b: Any, row: Any) -> jax.Array:
        return gemm(a, b, row_scale=row, transpose_b=True, precision="highest")

    own = planned(multiply, LEFT, RIGHT, ((4096, 64), F32))
    assert own.implementation == "hopper"
    assert own.plan.realigned.problem.blocks == Blocks(128, rows=1)


def test_all_of_a_symmetric_result_is_computed() -> None:
    own = planned(functools.partial(gram, precision="highest"), LEFT)
    assert own.implementation == "hopper"
    problem = own.plan.realigned.problem
    assert (problem.symmetric, problem.blocks) == ("", Blocks(SUM_OF_8_BITS))


def test_no_other_parts_can_be_named() -> None:
    multiply = functools.partial(gemm, precision="highest", transpose_b=True)
    with pytest.raises(ValueError, match="HIGHEST says itself in which parts"), numerics(part=1024):
        planned(multiply, LEFT, RIGHT)


def test_gradients_that_ask_for_it_have_them() -> None:
    """Layers of Flax ask for it with these types."""

    def of_rows(g: jax.Array, b: jax.Array) -> jax.Array:
        numbers = ((1,), (1,)), ((), ())
        return dot_general(
            *(g, b, numbers), precision=lax.Precision.HIGHEST, preferred_element_type=BF16
        )

    own = planned(of_rows, ((4096, 2048), E5M2), ((8192, 2048), E4M3))
    assert own.plan.realigned.problem.blocks == Blocks(SUM_OF_8_BITS)
