"""What XLA copies before it adds up, beside its programs and what it took."""

import csv
import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import explain, gemm, target
from pallas_gemm.device import H200
from pallas_gemm.planning.by_xla import copies, few_outputs, xla_time
from pallas_gemm.problem import Problem

RESULTS = pathlib.Path(__file__).parents[2] / "bench" / "results"
F32 = np.dtype(np.float32)
LONG = Problem(8, 1024, 99992, transpose_b=True)


def _rows(name: str, column: str, value: str) -> list[dict[str, str]]:
    with (RESULTS / f"{name}.csv").open() as file:
        return [row for row in csv.DictReader(file) if row[column] == value]


def _stored_so(row: dict[str, str], dtype: Any = jnp.bfloat16, out: Any = jnp.bfloat16) -> Problem:
    left, right = (letter == "T" for letter in row["layout"])
    sizes = {name: int(row.get(name, "1")) for name in ("m", "n", "k", "batch")}
    types = {"a_dtype": dtype, "b_dtype": dtype, "out_dtype": out}
    return Problem(**sizes, **types, transpose_a=left, transpose_b=right)


@pytest.mark.parametrize(("half", "count", "right"), [("fitted", 469, 461), ("judged", 199, 194)])
def test_programs_of_xla_pad_as_is_said(half: str, count: int, right: int) -> None:
    rows = _rows("xla_padding", "half", half)
    told = 0
    for row in rows:
        dtype, out = (np.dtype(row[name]) for name in ("dtype", "out"))
        own = _stored_so(row, dtype, out)
        told += (copies.copied(own) > 0) == (row["padded"] == "1")
    assert len(rows) == count
    assert told >= right


@pytest.mark.parametrize(
    ("drawn", "count", "copied", "half", "most"),
    [("seed600", 210, 80, 0.08, 0.36), ("seed601", 130, 52, 0.06, 0.22)],
)
def test_long_sums_are_predicted_as_is_said(
    drawn: str, count: int, copied: int, half: float, most: float
) -> None:
    measured = [
        (_stored_so(row), float(row["xla_us"])) for row in _rows("h200_long_sums", "drawn", drawn)
    ]
    errors = {
        own: abs(np.log((xla_time.seconds(own, H200) or 0) * 1e6 / us)) for own, us in measured
    }
    with_copies = [error for own, error in errors.items() if copies.copied(own)]
    assert (len(measured), len(with_copies)) == (count, copied)
    assert np.median(list(errors.values())) < half
    assert np.quantile(list(errors.values()), 0.9) < most
    assert np.median(with_copies) < 0.06
    assert np.quantile(with_copies, 0.9) < 0.2


@pytest.mark.parametrize(("drawn", "least"), [("seed600", 0.975), ("seed601", 0.965)])
def test_the_faster_one_is_taken(drawn: str, least: float) -> None:
    shares = []
    for row in _rows("h200_long_sums", "drawn", drawn):
        if row["kernel_us"]:
            own = _stored_so(row)
            a, b = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in (own.a_shape, own.b_shape))
            how = {"transpose_a": own.transpose_a, "transpose_b": own.transpose_b}
            with target("h200"):
                taken = explain(lambda a, b, how=how: gemm(a, b, **how), a, b).products[0].plan
            both = float(row["xla_us"]), float(row["kernel_us"])
            shares.append(min(both) / both[taken is not None])
    assert np.exp(np.mean(np.log(shares))) > least


def test_what_is_copied_is_read_and_written_once() -> None:
    assert copies.copied(LONG) == (8 + 1024) * 99992
    assert copies.seconds(LONG) == pytest.approx(0.5e-6 + 4 * 1032 * 99992 / 3.15e12)
    alone = dataclasses.replace(LONG, k=98304)
    assert copies.seconds(alone) == 0
    longer = (xla_time.seconds(LONG, H200) or 0) - (xla_time.seconds(alone, H200) or 0)
    assert longer == pytest.approx(copies.seconds(LONG), rel=0.05)


@pytest.mark.parametrize(
    ("dtype", "bytes_in_a_second"),
    [("float8_e4m3fn", 1.5e12), ("float16", 3.15e12), ("float32", 4e12)],
)
def test_copies_take_longer_in_small_elements(dtype: str, bytes_in_a_second: float) -> None:
    own = dataclasses.replace(LONG, a_dtype=dtype, b_dtype=dtype)
    moved = 2 * 1032 * 99992 * np.dtype(dtype).itemsize
    assert copies.seconds(own) == pytest.approx(0.5e-6 + moved / bytes_in_a_second)


@pytest.mark.parametrize(
    ("change", "copied"),
    [
        ({"k": 99840}, 0),  # 64 pieces of 1560.
        ({"k": 100000}, 1032 * 100000),
        ({"m": 4096, "n": 4096}, 0),
        ({"batch": 64}, 64 * 1032 * 99992),
        ({"batch": 256}, 0),
        ({"groups": 4}, 0),
        ({"m": 8, "n": 8, "k": 5000}, 0),
        ({"m": 8, "n": 16, "k": 5000}, 24 * 5000),
        # 16 bytes are four elements of float32.
        ({"k": 99584}, 1032 * 99584),
        ({"k": 99584, "a_dtype": F32, "b_dtype": F32, "out_dtype": F32}, 0),
    ],
)
def test_padding(change: dict[str, Any], copied: int) -> None:
    assert copies.copied(dataclasses.replace(LONG, **change)) == copied


VECTOR = Problem(1, 2048, 2048)


@pytest.mark.parametrize(
    ("change", "copied"),
    [
        ({}, 2048 * 2048),
        ({"transpose_b": True}, 0),
        ({"n": 2044}, 0),
        ({"n": 512, "k": 256}, 0),
        ({"batch": 2}, 0),
        ({"groups": 2}, 0),
        ({"m": 2048, "n": 1, "transpose_a": True}, 2048 * 2048),
        ({"m": 2048, "n": 1}, 0),
        ({"n": copies.FEW_COLUMNS}, 0),
        ({"n": 1024, "k": copies.SHORT_COLUMNS}, 0),
        ({"a_dtype": F32, "b_dtype": F32, "out_dtype": F32}, 0),
        # Larger ones are padded.
        ({"n": 8192, "k": 9000}, 8193 * 9000),
    ],
)
def test_one_row_times_a_small_matrix(change: dict[str, Any], copied: int) -> None:
    assert copies.copied(dataclasses.replace(VECTOR, **change)) == copied


def test_no_rule_leaves_to_xla_what_it_copies() -> None:
    """107000 x 1664 was left to it, as rows of 1664 elements begin within a line."""
    a, b = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((1, 107000), (107000, 1664)))
    with target("h200"):
        assert explain(gemm, a, b).products[0].plan is not None


def test_few_outputs_of_long_sums_are_predicted_as_is_said() -> None:
    errors = []
    for drawn in ("seed600", "seed601"):
        for row in _rows("h200_long_sums", "drawn", drawn):
            if few_outputs.has_few_outputs(own := _stored_so(row)):
                predicted = (xla_time.seconds(own, H200) or 0) * 1e6
                errors.append(abs(np.log(predicted / float(row["xla_us"]))))
    assert len(errors) == 62
    assert np.median(errors) < 0.11
    assert np.quantile(errors, 0.9) < 0.33
