"""XLA is asked for float32 where it would compute less than the name of a precision says."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gemm import einsum, gemm, grouped_gemm
from pallas_gemm.call import GroupedCall
from pallas_gemm.planning.by_xla import xla_groups

F32 = jnp.float32
NAMES = {
    "BF16_BF16_F32_X3": "3 of bf16",
    "BF16_BF16_F32_X6": "6 of bf16",
    "BF16_BF16_F32_X9": "9 of bf16",
    "TF32_TF32_F32_X3": "3 of tf32",
}
"""Names of precisions, and what they are in a program."""
FLOAT32 = "[HIGHEST, HIGHEST]"
_PRODUCT = re.compile(
    r"stablehlo\.dot_general .*?precision = (?P<words>\[\w+, \w+\])"
    r"(?:, algorithm = <lhs_precision_type = (?P<type>\w+),.*?operations = (?P<count>\d))?"
)


def _asked(f: Any, *shapes: tuple[int, ...], **options: Any) -> list[str]:
    """Returns what XLA is asked for in the products of a function."""
    run = jax.jit(functools.partial(f, **options))
    traced = run.trace(*(jax.ShapeDtypeStruct(shape, F32) for shape in shapes))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    found = [x.groupdict() for x in _PRODUCT.finditer(text)]
    assert len(found) == text.count("dot_general") > 0, text
    return [f"{x['count']} of {x['type']}" if x["type"] else x["words"] for x in found]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "shapes",
    [
        *(((1, 64), (64, 48)), ((48, 64), (64, 1)), ((1, 64), (64, 1))),
        *(((3, 1, 64), (3, 64, 48)), ((1, 1, 64), (64, 48)), ((1, 48, 64), (1, 64, 1))),
    ],
    ids=str,
)
def test_a_vector_is_multiplied_in_float32(shapes: Any, name: str) -> None:
    expected = NAMES[name] if name.startswith("TF32") else FLOAT32
    assert _asked(gemm, *shapes, precision=name) == [expected]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "shapes",
    [((2, 64), (64, 48)), ((48, 64), (64, 2)), ((3, 2, 64), (3, 64, 48)), ((3, 1, 64), (64, 48))],
    ids=str,
)
def test_more_rows_are_multiplied_as_their_name_says(shapes: Any, name: str) -> None:
    expected = FLOAT32 if name.endswith("X9") else NAMES[name]
    assert _asked(gemm, *shapes, precision=name) == [expected]


@pytest.mark.parametrize("precision", [None, "highest", "BF16_BF16_F32", "TF32_TF32_F32"])
def test_other_precisions_stay(precision: Any) -> None:
    shapes = (1, 64), (64, 48)
    stock = _asked(jnp.matmul, *shapes, precision=precision)
    assert _asked(gemm, *shapes, precision=precision) == stock


def test_gradients_of_a_row_are_of_float32_too() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return (gemm(x, w, precision="BF16_BF16_F32_X6") ** 2).sum()

    # That of the right operand has many rows and columns, and sums of one product.
    assert sorted(_asked(jax.grad(f, (0, 1)), (1, 64), (64, 48))) == ["6 of bf16", *[FLOAT32] * 2]


def test_other_orders_of_dimensions_are_no_other_case() -> None:
    multiply = functools.partial(einsum, "kna,bk->nab", precision="BF16_BF16_F32_X3")
    assert _asked(multiply, (64, 1, 1), (5, 64)) == [FLOAT32]
    assert _asked(multiply, (64, 1, 2), (5, 64)) == ["3 of bf16"]


@pytest.mark.parametrize(("columns", "vector"), [(1, True), (8, False)])
@pytest.mark.parametrize("name", list(NAMES)[:3])
def test_groups_are_asked_for_likewise(name: str, columns: int, *, vector: bool) -> None:
    sizes = jnp.array([3, 5], jnp.int32)
    multiply = functools.partial(grouped_gemm, group_sizes=sizes, precision=name)
    expected = FLOAT32 if vector or name.endswith("X9") else NAMES[name]
    assert set(_asked(multiply, (8, 64), (2, 64, columns))) == {expected}


Shape = tuple[int, ...]
GROUPS: list[tuple[Shape, Shape, dict[str, bool], bool]] = [
    ((8, 64), (2, 64, 5), {}, False),
    ((8, 1), (2, 1, 5), {}, False),
    ((1, 64), (2, 64, 5), {}, True),
    ((8, 64), (2, 64, 1), {}, True),
    ((8, 64), (2, 1, 64), {"transpose_b": True}, True),
    ((8, 1), (2, 5, 1), {"transpose_b": True}, False),
    ((64, 3), (64, 5), {"contracted": True}, False),
    ((1, 3), (1, 5), {"contracted": True}, False),
    ((64, 1), (64, 5), {"contracted": True}, True),
    ((64, 3), (64, 1), {"contracted": True}, True),
    ((1, 64), (5, 64), {"contracted": True, "transpose_b": True}, True),
    ((3, 64), (5, 64), {"contracted": True, "transpose_b": True}, False),
]
"""Shapes of factors of groups, how they are stored, and whether a result is a row or a column."""


@pytest.mark.parametrize(("left", "right", "stored", "vector"), GROUPS)
def test_one_product_of_all_groups_is_asked_for_likewise(
    left: Shape, right: Shape, stored: dict[str, bool], *, vector: bool
) -> None:
    own = lax.DotAlgorithmPreset.BF16_BF16_F32_X6
    call = GroupedCall(np.dtype(np.float32), precision=own, **stored)
    shapes = [jax.ShapeDtypeStruct(shape, F32) for shape in (left, right)]
    sizes = jax.ShapeDtypeStruct((2,), jnp.int32)
    jaxpr = jax.make_jaxpr(functools.partial(xla_groups.by_jax, call))(*shapes, sizes)
    (found,) = (x for x in jaxpr.eqns if x.primitive.name == "ragged_dot_general")
    assert found.params["precision"] == ((lax.Precision.HIGHEST,) * 2 if vector else own)
