"""Products of float32 by arrays of float16: what they lose, and which operands may be split so."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import explain, gated_gemm, gemm, numerics, target
from pallas_gemm.call import Call, Options
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.planning import halves, implementation
from pallas_gemm.planning.sums import Sums
from tests import reference

K = 1024
# JAX would compile their reductions each time that they are not part of a program.
MEASURE = jax.jit(halves.measure, static_argnums=1, static_argnames="alone")
CLOSELY = jax.jit(halves.closely, static_argnums=1)
LOST = 2.0**-23, 2.0**-50
"""Of an element, as a share of itself or of the largest one."""
TERMS = {"three": ((1, 0), (0, 1), (0, 0)), "four": ((1, 1), (1, 0), (0, 1), (0, 0))}
LEFT_OUT = {"three": 2.0**-22, "four": 0}
"""The product of the second arrays, as a share of `|x| @ |y|`."""


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def sizes(*shape: int, most: int, seed: int = 0) -> np.ndarray:
    """Elements whose exponents differ by `most` at most."""
    exponents = np.random.default_rng(seed).integers(-most, 1, shape)
    return normal(*shape, seed=seed + 1) * np.float32(2) ** exponents.astype(np.float32)


def split(x: np.ndarray, axis: int) -> tuple[Any, list[np.ndarray]]:
    """Returns what is known of an operand, and the values of its arrays."""
    known = MEASURE(jnp.asarray(x), axis, alone=False)
    arrays = halves.split(jnp.asarray(x) * jnp.expand_dims(known.scale, axis))
    assert [array.dtype for array in arrays] == [jnp.float16] * 2
    undone = np.expand_dims(reference.wide(known.undone), axis)
    return known, [reference.wide(y) * 2.0 ** (-11 * i) * undone for i, y in enumerate(arrays)]


def fits(x: np.ndarray, y: np.ndarray, *, alone: bool = False) -> tuple[bool, bool]:
    """Whether rows of one array and of another, which are columns of a right operand, fit.

    And whether that is sure without a close look.
    """
    a, b = jnp.asarray(x), jnp.asarray(y.T)
    known = MEASURE(a, 1, alone=alone), MEASURE(b, 0, alone=alone)
    surely = bool(halves.fit(*known, alone=alone))
    found = surely or bool(CLOSELY((a, b), (1, 0), known))
    return found, surely


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("most", [0, 12, 40, 80])
def test_arrays_add_up_to_an_operand(axis: int, most: int) -> None:
    x = sizes(96, 96, most=most) * 10.0 ** np.random.default_rng(2).integers(-20, 20, (96, 1))
    x = (x if axis else x.T).astype(np.float32)
    _, arrays = split(x, axis)
    own, largest = LOST[0] * np.abs(x), LOST[1] * np.abs(x).max(axis, keepdims=True)
    error = np.abs(sum(arrays) - x.astype(np.float64))
    assert np.all(error <= np.maximum(own, largest))
    # Each bound is needed.
    assert most < 40 or np.any(error > own)
    assert np.any(error > largest)


def test_the_first_array_alone_has_eleven_bits() -> None:
    x = np.float32([[1 + 2.0**-10, 1 + 2.0**-11, 1 + 2.0**-22, 1 + 2.0**-11 + 2.0**-22]])
    _, (first, second) = split(x, 1)
    assert first.tolist() == [[1 + 2.0**-10, 1, 1, 1 + 2.0**-10]]
    assert second.tolist() == [[0, 2.0**-11, 2.0**-22, 2.0**-22 - 2.0**-11]]


OPERANDS: dict[str, Callable[[int], np.ndarray]] = {
    "normal": lambda seed: normal(48, K, seed=seed),
    "half of it 0": lambda seed: np.maximum(normal(48, K, seed=seed), 0),
    "a row of 0": lambda seed: normal(48, K, seed=seed) * (np.arange(48) > 0)[:, None],
    "rows of all sizes": lambda seed: (
        normal(48, K, seed=seed) * np.float32(10) ** np.linspace(-17, 17, 48)[:, None]
    ),
    "sizes of 4 bits": lambda seed: sizes(48, K, most=4, seed=seed),
    "sizes of 10 bits": lambda seed: sizes(48, K, most=10, seed=seed),
    "sizes of 60 bits": lambda seed: sizes(48, K, most=60, seed=seed),
    "one is small": lambda seed: (
        normal(48, K, seed=seed) * np.where(np.arange(48 * K).reshape(48, K), 1, 1e-12)
    ),
    "ones": lambda seed: np.eye(48, K, k=seed),
    "few": lambda seed: normal(48, K, seed=seed) * (np.arange(K) % 16 == 0),
}
FIT = {
    ("normal", "normal"): True,
    ("normal", "half of it 0"): True,
    ("half of it 0", "half of it 0"): False,
    ("a row of 0", "normal"): True,
    ("rows of all sizes", "a row of 0"): True,
    ("normal", "few"): False,
    ("normal", "ones"): False,
    ("sizes of 4 bits", "sizes of 4 bits"): True,
    ("sizes of 10 bits", "normal"): True,
    ("sizes of 10 bits", "sizes of 10 bits"): False,
    ("sizes of 10 bits", "half of it 0"): False,
    ("sizes of 60 bits", "normal"): False,
    ("ones", "ones"): False,
    ("normal", "one is small"): True,
}


def test_every_kind_of_operand_is_looked_at() -> None:
    assert {name for pair in FIT for name in pair} == set(OPERANDS)


ALONE = {
    ("half of it 0", "half of it 0"): (True, True),
    ("few", "ones"): (True, True),
    ("sizes of 10 bits", "sizes of 10 bits"): (True, True),
    ("one is small", "normal"): (True, False),
    ("sizes of 60 bits", "normal"): (False, False),
    ("normal", "normal"): (True, True),
    ("rows of all sizes", "a row of 0"): (True, True),
}
"""Which of them fit where each operand is one array, and whether that is sure at once."""


@pytest.mark.parametrize("pair", ALONE, ids=" and ".join)
def test_one_array_loses_what_tf32_does(pair: tuple[str, str]) -> None:
    x, y = (np.asarray(OPERANDS[name](i), np.float32) for i, name in enumerate(pair))
    assert fits(x, y, alone=True) == ALONE[pair]
    known = [MEASURE(jnp.asarray(z), i, alone=True) for z, i in ((x, 1), (y.T, 0))]
    if ALONE[pair][0]:
        left = reference.wide(jnp.asarray(x * known[0].scale[:, None]).astype(jnp.float16))
        right = reference.wide(jnp.asarray(y.T * known[1].scale[None]).astype(jnp.float16))
        undone = [reference.wide(own.undone) for own in known]
        wide_x, wide_y = reference.wide(x), reference.wide(y).T
        error = np.abs((left @ right) * np.multiply.outer(*undone) - wide_x @ wide_y)
        assert np.all(error <= (2.0**-10 + 2.0**-13) * (np.abs(wide_x) @ np.abs(wide_y)))


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("pair", FIT, ids=" and ".join)
def test_products_that_fit_lose_what_a_rounding_of_float32_does(
    pair: tuple[str, str], terms: str
) -> None:
    x, y = (np.asarray(OPERANDS[name](i), np.float32) for i, name in enumerate(pair))
    (_, xs), (_, ys) = split(x, 1), split(y.T, 0)
    is_whole = all(np.all(row) or not np.any(row) for own in (x, y) for row in own)
    # What has no 0, or nothing else, and nothing far smaller, need not be looked at closely.
    surely = FIT[pair] and is_whole and "one is small" not in pair
    assert fits(x, y) == fits(y, x) == (FIT[pair], surely)
    if FIT[pair]:
        wide_x, wide_y = reference.wide(x), reference.wide(y).T
        total = sum(xs[i] @ ys[j] for i, j in TERMS[terms])
        error = np.abs(total - wide_x @ wide_y)
        bound = (LEFT_OUT[terms] + 2 * LOST[0] + 2.0**-24) * (np.abs(wide_x) @ np.abs(wide_y))
        assert np.all(error <= bound)


def test_small_elements_that_a_sum_consists_of_do_not_fit() -> None:
    # Each product of the left and the right is as large, and most of the left is lost.
    scale = np.float32(2) ** np.linspace(-40, 40, K).astype(np.float32)
    x, y = normal(48, K) * scale, normal(48, K, seed=1) / scale
    (_, xs), (_, ys) = split(x, 1), split(y.T, 0)
    assert fits(x, y) == (False, False)
    wide_x, wide_y = reference.wide(x), reference.wide(y).T
    error = np.abs(sum(xs[i] @ ys[j] for i, j in TERMS["four"]) - wide_x @ wide_y)
    assert np.any(error > 2.0**-20 * (np.abs(wide_x) @ np.abs(wide_y)))


@pytest.mark.parametrize("size", [2.0**60, 2.0**61, 2.0**-60, 2.0**-61, np.inf, np.nan])
@pytest.mark.parametrize("alone", [False, True])
def test_what_float32_can_barely_hold_does_not_fit(size: float, alone: bool) -> None:
    x = np.ones((48, K), np.float32)
    x[5] = size
    assert fits(x, x, alone=alone)[0] is (0.5**60 <= size <= 2**60)


SINGLE = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)


def explained(function: Callable[..., Any], *operands: Any) -> Any:
    with target("h200"):
        return explain(function, *operands).products[0].plan


def scheme_of(function: Callable[..., Any], *operands: Any) -> str:
    plan = explained(function, *operands)
    assert plan is not None
    assert plan.realigned.scheme is not None
    assert (plan.otherwise is not None) == (plan.realigned.scheme.dtype == jnp.float16)
    return f"{len(plan.realigned.scheme.terms)} of {plan.realigned.scheme.dtype}"


@pytest.mark.parametrize(
    ("precision", "size", "found"),
    [
        ("TF32_TF32_F32_X3", (4096, 2048, 2048), "3 of float16"),
        ("TF32_TF32_F32_X3", (2048, 2048, 2048), "3 of float16"),
        ("BF16_BF16_F32_X6", (2048, 2048, 2048), "6 of bfloat16"),
        ("TF32_TF32_F32_X3", (1024, 1024, 2048), "6 of bfloat16"),
        ("BF16_BF16_F32_X6", (4096, 8192, 512), "4 of float16"),
        ("highest", (512, 4096, 8192), "4 of float16"),
        (None, (8192, 4096, 4096), "0 of float16"),
        ("highest", (1024, 1024, 1024), "6 of bfloat16"),
        ("BF16_BF16_F32_X3", (4096, 4096, 4096), "3 of bfloat16"),
        ("BF16_BF16_F32_X9", (4096, 4096, 4096), "9 of bfloat16"),
    ],
)
def test_large_products_are_of_float16(
    precision: str, size: tuple[int, int, int], found: str
) -> None:
    m, n, k = size
    product = functools.partial(gemm, precision=precision)
    assert scheme_of(product, SINGLE((m, k)), SINGLE((k, n))) == found


def test_what_is_named_or_promised_is_of_bfloat16() -> None:
    x = SINGLE((4096, 4096))
    product = functools.partial(gemm, precision="highest")
    assert scheme_of(product, x, x) == "4 of float16"
    assert scheme_of(functools.partial(product, numerics=numerics("rows")), x, x) == "6 of bfloat16"
    config = HopperConfig(tile=(128, 128), late_store=False, store_columns=32, partial_sums=64)
    assert scheme_of(functools.partial(product, config=config), x, x) == "6 of bfloat16"
    whole = SINGLE((8192, 8192))
    assert scheme_of(gemm, whole, whole) == "0 of float16"
    named = explained(functools.partial(gemm, precision="TF32_TF32_F32"), whole, whole)
    assert named is not None
    assert named.realigned.scheme is None
    gated = functools.partial(gated_gemm, precision="highest", activation="silu")
    assert scheme_of(gated, x, x, x) == "6 of bfloat16"
    assert scheme_of(functools.partial(gated_gemm, activation="silu"), x, x, x) == "0 of float16"


@pytest.mark.parametrize(
    ("how", "by_xla"),
    [({}, True), ({"implementation": "hopper"}, False), ({"numerics": numerics("run")}, False)],
    ids=["", "named", "promised"],
)
def test_xla_computes_one_product_that_does_not_fit_unless_a_kernel_has_to(
    how: dict[str, Any], by_xla: bool
) -> None:
    x = SINGLE((8192, 8192))
    with target("h200"):
        (decision,) = explain(functools.partial(gemm, **how), x, x).products
    call = Call(jnp.float32, options=Options(**how))
    assert decision.plan is not None
    assert decision.plan.otherwise is not None
    assert implementation.by_xla_otherwise(decision.plan, call) is by_xla


@pytest.mark.parametrize(
    ("k", "how", "apart"),
    [
        (4096, {}, True),
        (1024, {}, False),
        (512, {}, False),
        (4096, {"implementation": "hopper"}, False),
        (4096, {"numerics": numerics("run")}, False),
    ],
    ids=["large", "a short k", "small", "named", "promised"],
)
def test_xla_applies_a_function_to_a_large_product(
    k: int, how: dict[str, Any], apart: bool
) -> None:
    x, w = SINGLE((4096, k)), SINGLE((16384, k))

    def both(a: Any, b: Any) -> Any:
        return gemm(a, b, transpose_b=True, epilogue=lambda s: (s, jnp.tanh(s)), **how)

    with target("h200"):
        (decision,) = explain(both, x, w).products
        (alone,) = explain(functools.partial(gemm, transpose_b=True), x, w).products
    # With a short k, float16 gains less than the pass of the function takes.
    assert (alone.plan is not None and alone.plan.otherwise is not None) == (k > 512)
    assert decision.plan is not None
    assert (decision.problem.epilogue.program is None) == apart
    assert (decision.plan.otherwise is not None) == apart


def test_both_ways_are_explained() -> None:
    x = SINGLE((4096, 4096))
    with target("h200"):
        found: Any = explain(functools.partial(gemm, precision="highest"), x, x)
    text = " ".join(str(found).split())
    assert "4 products of float16" in text
    assert "6 products of bfloat16 where elements differ too much in size" in text
    assert "4 terms, the largest in 64 x 1 steps of 64" in text
    steps = [step.action for step in found.products[0].plan.realigned.passes]
    assert steps == ["measure", "split"] * 2


def test_bits_of_a_row_depend_on_both_ways() -> None:
    x = SINGLE((4096, 4096))
    with target("h200"):
        by_halves, alone = (
            Sums.of(explain(functools.partial(gemm, precision="highest", **how), x, x).products[0])
            for how in ({}, {"numerics": numerics("rows")})
        )
    assert (by_halves.invariant, alone.invariant) == ("run", "rows")
    assert alone.whole is None
    assert by_halves.whole is not None
    # In arrays of float16, or in those of the other way.
    assert [own.a_dtype for own in by_halves.whole[::2]] == [jnp.float16, jnp.bfloat16]
