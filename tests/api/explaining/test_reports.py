"""What reports say: their numbers, names and layout, of functions whose report is known."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import (
    QuantizedWeight,
    explain,
    gated_gemm,
    gemm,
    linear_cross_entropy,
    numerics,
    symmetric_matmul,
    target,
)
from pallas_gemm.api import bits
from pallas_gemm.api.explaining import explanation

COUNT, VARIANTS = 7, 5


def _other_rows(seed: int) -> list[int]:
    """How many rows each choice of the kit has."""
    return [len(own.rows) for own in bits._variants(COUNT, VARIANTS, seed)]


@pytest.mark.parametrize("seed", range(3))
def test_the_kit_counts_every_element_and_those_that_differ(seed: int) -> None:
    rows = _other_rows(seed)
    x = jnp.arange(COUNT * 3.0).reshape(COUNT, 3)
    same = numerics.check(lambda x: 2 * x, x, variants=VARIANTS, seed=seed)
    assert (same.variants, same.elements, same.differing) == (VARIANTS, 3 * sum(rows), 0)
    found = numerics.check(
        lambda x: jnp.full_like(x[:, 0], x.shape[0]), x, variants=VARIANTS, seed=seed
    )
    assert found.elements == sum(rows)
    assert found.differing == sum(own for own in rows if own != COUNT)
    assert f"{found.differing} of {found.elements} elements differ" in str(found)


def test_an_argument_without_rows_is_taken_whole() -> None:
    x, w = jnp.arange(COUNT * 3.0).reshape(COUNT, 3), jnp.arange(6.0).reshape(2, 3)
    found = numerics.check(lambda x, w: x * w[1:], x, w, rows=0, variants=VARIANTS)
    assert found.elements == 3 * sum(_other_rows(0))
    assert found.differing == 0


def test_rows_of_a_result_are_found_where_they_lie() -> None:
    shapes, longer = [(4, 6), (6, 8), (4, 4), (9,)], [(5, 6), (6, 10), (5, 5), (9,)]
    types, others = (
        [jax.ShapeDtypeStruct(x, jnp.float32) for x in some] for some in (shapes, longer)
    )
    assert bits._axes(types, others, 4) == [(0, 1), (1, 2), None, None]


def test_both_of_two_that_should_be_alike_are_named() -> None:
    a = jnp.eye(4).at[1, 3].set(5.0).at[3, 1].set(7.0)
    with pytest.raises(ValueError, match=r"got 5\.0 at \[1, 3\] and 7\.0 at \[3, 1\]"):
        symmetric_matmul(a, jnp.eye(4), check=True)


@pytest.mark.parametrize(
    ("multiply", "names"),
    [
        (lambda x, w, z: gemm(x, w, col_zero=z), ("col_zero", "col_scale")),
        (lambda x, w, z: gated_gemm(x, w, w, gate_zero=z), ("gate_zero", "gate_scale")),
    ],
    ids=["one", "gated"],
)
def test_operands_are_called_what_the_caller_calls_them(
    multiply: Callable[..., Any], names: tuple[str, str]
) -> None:
    x, w, zero = jnp.ones((8, 32), jnp.bfloat16), jnp.ones((32, 16), jnp.int8), jnp.ones(16)
    with pytest.raises(ValueError, match="{} needs {}".format(*names)):
        multiply(x, w, zero)


def test_a_group_of_zeros_stays_zeros_and_is_no_nan() -> None:
    w = jnp.ones((64, 8), jnp.float32).at[16:32].set(0)
    made = QuantizedWeight.of(w, group=16, dtype="e4m3")
    assert made.scale.shape == (4, 8)
    np.testing.assert_array_equal(made.scale[1], 1)
    np.testing.assert_array_equal(made.values[16:32].astype(jnp.float32), 0)


def test_a_last_layer_has_the_precision_that_is_set() -> None:
    operands = jnp.ones((16, 8)), jnp.ones((8, 32)), jnp.zeros(16, jnp.int32)

    def program() -> str:
        return str(jax.make_jaxpr(linear_cross_entropy)(*operands))

    with jax.default_matmul_precision("highest"):
        highest = program()
    assert highest != program()


def test_float32_that_is_fast_enough_is_not_told_to_be_bfloat16() -> None:
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    with target("h200"):
        found = explain(lambda a, b: gemm(a, b, precision="BF16_BF16_F32_X3"), x, x)
    plan = found.products[0].plan
    assert plan is not None
    assert plan.realigned.scheme is not None
    assert plan.realigned.bytes > 0
    assert not any("bfloat16" in hint for hint in explanation.hints(found))


def test_rows_of_a_report_have_a_name_and_a_column_of_text() -> None:
    text = "a pass over two-dimensional operands " * 8
    first, *rest = explanation._row("why", text, 2).splitlines()
    assert first.startswith("  why           a pass")
    assert len(rest) > 1
    for line in rest:
        assert re.match(r" {16}\S", line)
        # Words are kept whole.
        assert not line.endswith("-")
    assert explanation._row("to change", "it", 0) == "to change     it"


def test_all_that_a_report_has_to_say_begins_its_lines() -> None:
    def f(x: Any, w: Any, heads: Any, labels: Any) -> Any:
        scores = pallas_gemm.einsum("bqhd,bkhd->bhqk", heads, heads)
        return linear_cross_entropy(gemm(x, w) @ w, w, labels), scores

    shape = jax.ShapeDtypeStruct
    square = shape((1024, 1024), jnp.bfloat16)
    given = square, square, shape((2, 256, 8, 64), jnp.bfloat16), shape((1024,), jnp.int32)
    with target("h200"):
        text = str(explain(f, *given))
    named = ("last layer", "before it", "JAX's own", "to change")
    for name in named:
        assert re.search(rf"^{name:<14}\S", text, re.MULTILINE), text


def test_what_is_moved_is_that_of_every_copy_and_pass() -> None:
    def f(heads: Any, x: Any, w: Any) -> Any:
        return pallas_gemm.einsum("bqhd,bkhd->bhqk", heads, heads), gemm(x, w)

    shape = jax.ShapeDtypeStruct
    heads = shape((2, 1024, 8, 64), jnp.bfloat16)
    odd = shape((4096, 8191), jnp.bfloat16), shape((8191, 4096), jnp.bfloat16)
    with target("h200"):
        found = explain(f, heads, *odd)
    copied = sum(own.bytes * own.times for own in found.all_copies)
    passed = sum(own.passes for own in found.groups)
    assert copied == 2 * 2 * heads.size * 2
    assert passed > 0
    assert dict(explanation._totals(found))["moved"].startswith(f"{(copied + passed) / 1e6:.1f} MB")
