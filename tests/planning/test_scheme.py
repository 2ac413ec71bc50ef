"""Products of more precision than the tensor cores have, as sums of products that they compute."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gemm import explain, gemm, target
from pallas_gemm.call import Call, GroupedCall
from pallas_gemm.device import H200
from pallas_gemm.planning import halves
from pallas_gemm.planning import scheme as schemes
from pallas_gemm.planning.by_xla import xla_time
from pallas_gemm.planning.scheme import HIGHEST, SHORTEST_SUM, Scheme
from pallas_gemm.problem import Epilogue, Problem
from tests import reference
from tests.planning.test_halves import MEASURE

PRESET, MOST = lax.DotAlgorithmPreset, lax.Precision.HIGHEST
DEFAULT = (lax.Precision.DEFAULT,) * 2
F32, BF16, F16 = map(np.dtype, (jnp.float32, jnp.bfloat16, jnp.float16))
E4M3, E5M2 = map(np.dtype, (jnp.float8_e4m3fn, jnp.float8_e5m2))
SPLITS = {
    name: schemes.scheme(getattr(PRESET, name), (F32, F32))
    for name in ("BF16_BF16_F32_X3", "BF16_BF16_F32_X6", "BF16_BF16_F32_X9")
}
LARGE = (((2048, 2048), np.dtype(np.float32)),) * 2


def in_float16(name: str) -> Scheme:
    """Returns the scheme by arrays of float16 of a large product."""
    precision = (MOST, MOST) if name == "HIGHEST" else getattr(PRESET, name)
    call = Call(F32, precision=precision)
    own = schemes.of_call(call, LARGE)
    assert own is not None
    halved = schemes.in_float16(call, own, (F32, F32))
    assert halved is not None
    assert halved.otherwise == own
    assert halved.name == own.name
    return halved


HALVED = ("TF32_TF32_F32_X3", "BF16_BF16_F32_X6", "HIGHEST")


@pytest.mark.parametrize(
    ("precision", "dtypes", "found"),
    [
        (DEFAULT, (F32, F32), None),
        (DEFAULT, (BF16, BF16), None),
        (DEFAULT, (BF16, F32), "TF32_TF32_F32: one product of tf32"),
        (DEFAULT, (F16, BF16), "TF32_TF32_F32: one product of tf32"),
        ((MOST, DEFAULT[0]), (F32, F32), "HIGHEST: 6 products of bfloat16 in one sum, smallest"),
        ((MOST, MOST), (BF16, BF16), None),
        ((MOST, MOST), (E4M3, E5M2), "HIGHEST: one product, in sums of 128 elements"),
        ((DEFAULT[0], MOST), (E4M3, E4M3), "HIGHEST: one product, in sums of 128"),
        (PRESET.ANY_F8_ANY_F8_F32, (E4M3, E4M3), "ANY_F8_ANY_F8_F32: one product, in sums of 128"),
        (PRESET.ANY_F8_ANY_F8_F32_FAST_ACCUM, (E4M3, E4M3), None),
        (DEFAULT, (E4M3, E5M2), None),
        ((MOST, MOST), (E4M3, BF16), None),
        (PRESET.BF16_BF16_F32, (F32, F32), "BF16_BF16_F32: one product of bfloat16"),
        (PRESET.BF16_BF16_F32, (BF16, F32), "BF16_BF16_F32: one product of bfloat16"),
        (PRESET.TF32_TF32_F32, (F32, F32), None),
        (PRESET.TF32_TF32_F32, (BF16, F32), "TF32_TF32_F32: one product of tf32"),
        (PRESET.BF16_BF16_F32_X3, (F32, F32), "BF16_BF16_F32_X3: 3 products of bfloat16"),
        (PRESET.TF32_TF32_F32_X3, (F32, F32), "TF32_TF32_F32_X3: 6 products of bfloat16"),
        (PRESET.F32_F32_F32, (F32, F32), None),
    ],
    ids=str,
)
def test_a_precision_names_a_scheme(precision: Any, dtypes: Any, found: str | None) -> None:
    own = schemes.scheme(precision, dtypes)
    assert own is None if found is None else str(own).startswith(found)


@pytest.mark.parametrize("name", SPLITS)
def test_terms_grow_and_the_last_is_of_the_largest_arrays(name: str) -> None:
    own = SPLITS[name]
    assert own is not None
    sizes = [left + right for left, right in own.terms]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 0
    assert len(set(own.terms)) == len(own.terms) == int(name[-1])


@pytest.mark.parametrize(
    ("own", "left"),
    [(SPLITS["BF16_BF16_F32_X3"], 2**-17), (HIGHEST, 0)],
    ids=str,
)
def test_arrays_add_up_to_an_operand(own: Scheme, left: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(4096) * 10.0 ** rng.integers(-27, 30, 4096)
    x = np.append(x, [0, 1, -1, 3.4028e38, -3.4028e38, 1 + 2**-23]).astype(np.float32)
    arrays = own.arrays(jnp.asarray(x))
    assert [array.dtype for array in arrays] == [own.dtype] * own.count
    total = sum(reference.wide(array) for array in arrays)
    assert np.all(np.abs(total - x) <= left * np.abs(x))


def test_what_is_infinite_or_no_number_is_in_the_first_array_alone() -> None:
    x = jnp.asarray([np.inf, -np.inf, np.nan, 1.5], jnp.float32)
    first, *others = HIGHEST.arrays(x)
    np.testing.assert_array_equal(reference.wide(first), reference.wide(x))
    assert not any(reference.wide(other).any() for other in others)


def _truncated(x: np.ndarray, unit: np.ndarray) -> np.ndarray:
    return np.trunc(x / unit) * unit


def _add(total: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Adds products as tensor cores do: 16 at a time, aligned to the largest, and cut off."""
    for start in range(0, x.shape[-1], 16):
        each = x[:, start : start + 16] * y[:, start : start + 16]
        each = np.concatenate([total[:, None], each], axis=1)
        top = np.exp2(np.frexp(np.abs(each).max(axis=1))[1] - 1.0)
        total = _truncated(each, top[:, None] * 2.0**-25).sum(axis=1)
        total = _truncated(total, np.exp2(np.frexp(np.abs(total))[1] - 1.0) * 2.0**-23)
    return total


def _by_tensor_cores(own: Scheme, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns products of rows in the order of a kernel of this scheme."""
    is_halved = own.otherwise is not None
    known = [MEASURE(each, 1, alone=False) for each in (x, y)]
    scales = [own.scale[:, None] if is_halved else 1 for own in known]
    left, right = (
        [reference.wide(z) for z in own.arrays(jnp.asarray(each) * scale)]
        for each, scale in zip((x, y), scales, strict=True)
    )
    total, (*small, _) = np.zeros(len(x)), own.terms
    for number, (i, j) in enumerate(small):
        total = _add(total, left[i], right[j])
        # Arrays that were made larger make a sum that is made smaller.
        if is_halved and sum(own.terms[number + 1]) < i + j:
            total = total * 2.0**-halves.SHIFT
    if not own.longest_sum:
        return _add(total, left[0], right[0])
    for start in range(0, x.shape[1], own.longest_sum):
        part = slice(start, start + own.longest_sum)
        summand = _add(np.zeros(len(x)), left[0][:, part], right[0][:, part])
        total = (total + summand).astype(np.float32).astype(np.float64)
    undone = [reference.wide(own.undone) if is_halved else 1 for own in known]
    return total * undone[0] * undone[1]


def _in_single(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    total = np.zeros(len(x), np.float64)
    for column in range(x.shape[1]):
        each = x[:, column].astype(np.float64) * y[:, column]
        total = (total + each).astype(np.float32).astype(np.float64)
    return total


@functools.cache
def _rows(positive: bool) -> tuple[np.ndarray, np.ndarray]:
    """1,000 rows of 1,024 elements, of which half have condition numbers from 10 to 1e6."""
    rng = np.random.default_rng(1)
    x, y = (rng.standard_normal((1000, 1024)).astype(np.float32) for _ in range(2))
    if positive:
        return np.abs(x), np.abs(y)
    # The last product leaves little of the sum of the others.
    kept = np.where(np.arange(1000) % 2, 10.0 ** rng.uniform(-5, 0, 1000), 1)
    exact = (x[:, :-1].astype(np.float64) * y[:, :-1]).sum(axis=1)
    x[:, -1] = 1
    y[:, -1] = np.where(kept < 1, (kept - 1) * exact, y[:, -1])
    return x, y


def _errors(result: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    each = x.astype(np.float64) * y
    return np.abs(result - each.sum(axis=1)) / np.abs(each).sum(axis=1)


@pytest.mark.every_other
@pytest.mark.parametrize("own", [HIGHEST, *map(in_float16, HALVED)], ids=str)
@pytest.mark.parametrize("positive", [False, True])
def test_highest_errs_no_more_than_float32(positive: bool, own: Scheme) -> None:
    x, y = _rows(positive)
    each = x.astype(np.float64) * y
    conditions = np.abs(each).sum(axis=1) / np.abs(each.sum(axis=1))
    assert positive or conditions.max() > 1e6
    ours, single = (
        _errors(result, x, y) for result in (_by_tensor_cores(own, x, y), _in_single(x, y))
    )
    assert np.sqrt(np.mean(ours**2)) <= np.sqrt(np.mean(single**2))
    assert ours.max() <= single.max()
    # As one sum it would, and with fewer terms.
    other = Scheme("", BF16, schemes.SIX) if positive else Scheme("", BF16, schemes.THREE, 64)
    assert _errors(_by_tensor_cores(other, x, y), x, y).max() > single.max()


@pytest.mark.parametrize("name", ["BF16_BF16_F32_X6", "BF16_BF16_F32_X9"])
@pytest.mark.parametrize("positive", [False, True])
def test_parts_err_far_less_than_one_sum_of_the_tensor_cores(name: str, positive: bool) -> None:
    x, y = _rows(positive)
    own = SPLITS[name]
    assert own is not None
    one = dataclasses.replace(own, longest_sum=0)
    ours, whole = (
        np.sqrt(np.mean(_errors(_by_tensor_cores(each, x, y), x, y) ** 2)) for each in (own, one)
    )
    assert ours < whole / 2.5
    # What three arrays leave out is less than the error of float32.
    single = np.sqrt(np.mean(_errors(_in_single(x, y), x, y) ** 2))
    assert ours < single


def _cut(x: np.ndarray) -> list[np.ndarray]:
    """Splits as XLA does."""
    first = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return [reference.wide(first), reference.wide((x - first).astype(jnp.bfloat16))]


def test_three_products_err_less_than_xlas() -> None:
    x, y = _rows(False)
    own = SPLITS["BF16_BF16_F32_X3"]
    assert own is not None
    ours = _errors(_by_tensor_cores(own, x, y), x, y)
    left, right = _cut(x), _cut(y)
    terms = (_add(np.zeros(len(x)), left[i], right[j]) for i, j in own.terms)
    xlas = _errors(sum(terms, np.zeros(len(x))), x, y)
    assert ours.max() < xlas.max() / 2


def _explained(precision: str, **options: Any) -> Any:
    a = jnp.zeros((1, 1), jnp.float32).aval.update(shape=(4096, 4096))
    with target("h200"):
        return explain(lambda a, b: gemm(a, b, precision=precision, **options), a, a)


@pytest.mark.parametrize("name", ["BF16_BF16_F32_X3", "BF16_BF16_F32_X9", *HALVED])
def test_a_split_is_counted_and_shown(name: str) -> None:
    found = _explained("highest" if name == "HIGHEST" else name)
    assert found.implementation == "hopper"
    own = found.plan.realigned.scheme
    splits = [step for step in found.plan.realigned.passes if step.action == "split"]
    assert [step.operand for step in splits] == ["a", "b"]
    measured = 4 * (own.otherwise is not None)
    moved = 4096**2 * (measured + 4 + own.count * own.dtype.itemsize)
    assert found.plan.realigned.bytes == 2 * moved
    assert str(own) in " ".join(str(found).split())
    assert f"{own.count} arrays" in str(found)


def test_a_longest_sum_takes_so_many_partial_sums() -> None:
    found = _explained("highest").plan
    assert found.config.partial_sums == 4096 // SHORTEST_SUM
    worse = found.config.__class__(tile=(128, 128), late_store=False, store_columns=32)
    problem = found.realigned.problem
    assert any("partial_sums must be at least 64" in why for why in worse.refusals(problem, H200))


TIMES = {
    "BF16_BF16_F32_X3": 728,
    "BF16_BF16_F32_X6": 1502,
    "TF32_TF32_F32_X3": 1262,
    "highest": 2672,
}


@pytest.mark.parametrize(("name", "us"), TIMES.items())
def test_xla_is_predicted_to_take_what_it_took(name: str, us: float) -> None:
    precision = (MOST, MOST) if name == "highest" else getattr(PRESET, name)
    problem = Problem(4096, 4096, 4096, F32, F32, F32)
    predicted = xla_time.seconds(problem, H200, precision)
    assert predicted == pytest.approx(us * 1e-6, rel=0.05)


@pytest.mark.parametrize(
    ("size", "us"),
    [
        *(((64, 2048, 4096), 36.1), ((128, 4096, 1920), 51.9), ((128, 4096, 2048), 55.1)),
        *(((1024, 1024, 1024), 52.4), ((256, 256, 8192), 31.1), ((512, 512, 512), 11.6)),
        *(((2048, 2048, 512), 80), ((1024, 1024, 2048), 86.8), ((4096, 1024, 1024), 133)),
    ],
    ids=str,
)
def test_xla_splits_operands_of_small_products_within_one_kernel(
    size: tuple[int, int, int], us: float
) -> None:
    problem = Problem(*size, F32, F32, F32)
    predicted = xla_time.seconds(problem, H200, PRESET.TF32_TF32_F32_X3)
    assert predicted == pytest.approx(us * 1e-6, rel=0.25)


@pytest.mark.parametrize(
    ("size", "name", "us"),
    [
        *(
            ((64, 14336, 4096), "BF16_BF16_F32_X3", 116),
            ((64, 14336, 4096), "BF16_BF16_F32_X6", 168),
        ),
        *(
            ((256, 14336, 4096), "BF16_BF16_F32_X3", 418),
            ((256, 14336, 4096), "BF16_BF16_F32_X6", 692),
        ),
        *(
            ((256, 4096, 4096), "BF16_BF16_F32_X3", 123),
            ((256, 4096, 4096), "BF16_BF16_F32_X6", 197),
        ),
        *(
            ((64, 14336, 4096), "TF32_TF32_F32_X3", 143),
            ((256, 14336, 4096), "TF32_TF32_F32_X3", 538),
        ),
    ],
    ids=str,
)
def test_xla_splits_few_rows_within_one_kernel(
    size: tuple[int, int, int], name: str, us: float
) -> None:
    problem = Problem(*size, F32, F32, F32, transpose_b=True)
    predicted = xla_time.seconds(problem, H200, getattr(PRESET, name))
    assert predicted == pytest.approx(us * 1e-6, rel=0.1)


@pytest.mark.parametrize(
    ("rows", "name", "ours"),
    [
        *((rows, name, False) for rows in (1, 64) for name in ("X3", "X6")),
        *((256, name, True) for name in ("X3", "X6")),
        # XLA computes this one in float32.
        *((rows, "X9", rows > 64) for rows in (1, 64, 256)),
    ],
)
def test_few_rows_are_xlas_where_it_computes_as_much(rows: int, name: str, ours: bool) -> None:
    a, b = (jax.ShapeDtypeStruct(shape, F32) for shape in ((rows, 4096), (14336, 4096)))
    multiply = functools.partial(gemm, transpose_b=True, precision=f"BF16_BF16_F32_{name}")
    with target("h200"):
        found = explain(multiply, a, b)
    assert (found.implementation == "hopper") is ours


@pytest.mark.parametrize(
    ("size", "ours"),
    [
        *(((64, 1024, 768), False), ((64, 2048, 4096), False), ((512, 512, 512), False)),
        *(((1024, 1024, 1024), True), ((2048, 2048, 512), True), ((2048, 2048, 2048), True)),
    ],
    ids=str,
)
def test_three_products_of_tf32_are_xlas_where_it_is_faster(
    size: tuple[int, int, int], ours: bool
) -> None:
    m, n, k = size
    a, b = (jax.ShapeDtypeStruct(shape, F32) for shape in ((m, k), (k, n)))
    with target("h200"):
        found = explain(lambda a, b: gemm(a, b, precision="TF32_TF32_F32_X3"), a, b)
    assert (found.implementation == "hopper") is ours


@pytest.mark.parametrize(("name", "bits"), [("BF16_BF16_F32_X3", 7), ("BF16_BF16_F32_X9", 7)])
def test_arrays_have_as_many_bits_as_are_multiplied(name: str, bits: int) -> None:
    own = SPLITS[name]
    assert own is not None
    # As many bits as one array has, and one more.
    x = jnp.asarray([1 + 2.0**-bits, 1 + 2.0 ** -(bits + 1)], jnp.float32)
    first, second, *_ = own.arrays(x)
    assert first.dtype == own.dtype
    assert first.tolist() == [1 + 2.0**-bits, 1]
    assert second.tolist() == [0, 2.0 ** -(bits + 1)]


def _name(x: Any) -> str:
    """Names a case the same in every process, which a set does not."""
    return "+".join(sorted(map(str, x))) if isinstance(x, set) else str(x)


@pytest.mark.parametrize(
    ("precision", "dtypes", "groups", "found"),
    [
        (DEFAULT, {BF16, F32}, False, {BF16, F32}),
        (None, {BF16, F32}, False, {BF16, F32}),
        (PRESET.DEFAULT, {BF16, F32}, False, {BF16, F32}),
        (DEFAULT, {BF16, F32}, True, {F32}),
        (None, {BF16, F32}, True, {F32}),
        (PRESET.DEFAULT, {BF16, F32}, True, {F32}),
        ((MOST, MOST), {BF16, F32}, False, {BF16}),
        (PRESET.BF16_BF16_F32, {BF16, F32}, False, {BF16}),
        (PRESET.F16_F16_F32, {F16, F32}, False, {F16}),
        (PRESET.BF16_BF16_F32, {F32}, True, {F32}),
        (PRESET.F32_F32_F32, {BF16, F32}, True, {BF16, F32}),
        (DEFAULT, {BF16, E4M3}, True, {BF16, E4M3}),
    ],
    ids=_name,
)
def test_operands_of_two_types_are_cast_where_a_kernel_multiplies_one(
    precision: Any, dtypes: Any, groups: bool, found: Any
) -> None:
    assert schemes.multiplied(precision, dtypes, groups=groups) == found


@pytest.mark.parametrize(
    ("fields", "precision", "types", "found"),
    [
        ({}, PRESET.BF16_BF16_F32_X3, (F32, F32), (3, True)),
        ({}, PRESET.BF16_BF16_F32_X6, (F32, F32), None),
        ({}, PRESET.TF32_TF32_F32_X3, (F32, F32), None),
        ({}, PRESET.BF16_BF16_F32, (F32, F32), (0, False)),
        ({}, DEFAULT, (F32, F32), None),
        ({}, DEFAULT, (BF16, F32), (0, False)),
        ({"epilogue": Epilogue(bias=True)}, PRESET.BF16_BF16_F32_X3, (F32, F32), None),
        ({"contracted": True}, PRESET.BF16_BF16_F32_X3, (F32, F32), (3, True)),
        ({"contracted": True}, DEFAULT, (F32, F32), None),
        ({"contracted": True}, None, (F32, BF16), (0, False)),
        ({"contracted": True}, PRESET.TF32_TF32_F32, (F32, F32), None),
        ({"contracted": True}, (MOST, MOST), (F32, F32), None),
        ({"contracted": True}, DEFAULT, (BF16, BF16), None),
        ({"contracted": True}, DEFAULT, (E4M3, F32), None),
    ],
    ids=str,
)
def test_products_of_groups_have_schemes_of_their_own(
    fields: Any, precision: Any, types: Any, found: Any
) -> None:
    call = GroupedCall(F32, precision=precision, **fields)
    own = schemes.of_call(call, (((64, 64), types[0]), ((64, 64), types[1])))
    assert (own and (len(own.terms), own.apart)) == found
