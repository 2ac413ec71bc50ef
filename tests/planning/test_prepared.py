"""Dispatch compares predicted times where a kernel, or XLA, prepares operands."""

import csv
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import explain, gemm, grouped_gemm, target
from pallas_gemm.device import H200
from pallas_gemm.planning import tables
from pallas_gemm.problem import Problem

RESULTS = pathlib.Path(__file__).parents[2] / "bench" / "results"


def test_kernels_that_transpose_8_bits_take_as_long_as_predicted() -> None:
    with (RESULTS / "h200_8_bits_by_layout.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if _is_turned(row)]
    errors = [_seconds_turned(row) * 1e6 / float(row["us"]) - 1 for row in rows]
    assert len(errors) == 15
    assert max(map(abs, errors)) < 0.08
    assert np.median(np.abs(errors)) < 0.025


def _is_turned(row: dict[str, str]) -> bool:
    """Whether a measured product is one of many rows whose operands are transposed first."""
    named = row["variant"], row["batch"], row["precision"]
    return named == ("turned", "1", "default") and int(row["m"]) >= 512


def _seconds_turned(row: dict[str, str]) -> float:
    """Returns how long the kernel is predicted to take for a measured product."""
    m, n, k, left, right = _stored(row)
    a = jax.ShapeDtypeStruct((k, m) if left else (m, k), row["a"])
    b = jax.ShapeDtypeStruct((n, k) if right else (k, n), row["b"])
    how = {"transpose_a": left, "transpose_b": right, "implementation": "hopper"}
    with target("h200"):
        found = explain(functools.partial(gemm, preferred_element_type=jnp.bfloat16, **how), a, b)
    assert found.plan is not None
    return found.plan.seconds


def _stored(row: dict[str, str]) -> tuple[int, int, int, bool, bool]:
    """Returns the sizes of a measured product, and which operands are transposed."""
    m, n, k = (int(row[letter]) for letter in "mnk")
    left, right = (letter == "T" for letter in row["layout"])
    return m, n, k, left, right


def _asked(row: dict[str, str]) -> str:
    """Returns what computes a measured product."""
    m, n, k, left, right = _stored(row)
    shapes = ((k, m) if left else (m, k)), ((n, k) if right else (k, n))
    operands = [jax.ShapeDtypeStruct(shape, row["dtype"]) for shape in shapes]
    with target("h200"):
        found = explain(lambda a, b: gemm(a, b, transpose_a=left, transpose_b=right), *operands)
    return found.implementation


def test_the_faster_one_computes_most_products_that_were_measured_both_ways() -> None:
    with (RESULTS / "h200_odd_sizes.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["seed"] == "5"]
    over_xla = np.array([float(row["xla_us"]) / float(row["kernel_us"]) for row in rows])
    taken = np.array([_asked(row) == "hopper" for row in rows])
    lines = np.array([_begins_in_a_line(row) for row in rows])
    assert (len(rows), lines.sum()) == (130, 75)
    gained = np.where(taken, over_xla, 1.0)
    assert gained.min() > 0.94
    assert np.exp(np.log(gained[lines]).mean()) > 1.18
    # Whole lines of float32 are read by XLA as fast as memory allows.
    assert not taken[~lines].any()


def _begins_in_a_line(row: dict[str, str]) -> bool:
    size = np.dtype(row["dtype"]).itemsize
    sides = zip(row["layout"], (row["k"], row["n"]), (row["m"], row["k"]), strict=True)
    return any(int(k if layout == "N" else m) * size % 128 for layout, k, m in sides)


@pytest.mark.parametrize(
    ("sizes", "layout", "taken"),
    [
        # Each side of where XLA's kernel for few rows is as fast.
        ((249, 5947, 6920), "TN", "hopper"),
        ((17, 6222, 3584), "NN", "xla"),
        ((2398, 2560, 1563), "NT", "hopper"),
        ((14, 788, 1024), "NN", "xla"),
        # XLA takes 30 us, and is predicted to take 21.
        ((1001, 1001, 1001), "NN", "hopper"),
        # Its result alone is odd, and nothing is prepared.
        ((384, 1731, 2216), "NT", "hopper"),
    ],
)
def test_odd_sizes_are_judged_by_the_time_with_passes(
    sizes: tuple[int, int, int], layout: str, taken: str
) -> None:
    row = dict(zip("mnk", map(str, sizes), strict=True))
    assert _asked(row | {"layout": layout, "dtype": "bfloat16"}) == taken


@pytest.mark.parametrize("epilogue", [{}, {"activation": "gelu"}], ids=["plain", "gelu"])
def test_few_rows_of_float32_are_not_rounded_first(epilogue: dict[str, str]) -> None:
    """64 x 5120 x 11008 takes 170 us so on an H200, and 68 by XLA."""
    a, b = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 11008), (5120, 11008)))
    with target("h200"):
        found = explain(lambda a, b: gemm(a, b, transpose_b=True, **epilogue), a, b)
    assert found.implementation == "xla"


def test_each_operand_is_rounded_once_and_that_is_counted() -> None:
    shapes = (512, 1024), (2048, 1024)
    a, b = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    with target("h200"):
        named = explain(lambda a, b: gemm(a, b, transpose_b=True, implementation="hopper"), a, b)
        turned = explain(
            lambda a, b: gemm(a.T, b, transpose_b=True, implementation="hopper"),
            jax.ShapeDtypeStruct((1024, 512), jnp.float32),
            b,
        )
    assert named.plan is not None
    assert list(map(str, named.plan.realigned.passes)) == [
        "round a to 512 x 1024 of tf32: moves 4.2 MB",
        "round b to 2048 x 1024 of tf32: moves 16.8 MB",
    ]
    assert turned.plan is not None
    assert [step.action for step in turned.plan.realigned.passes] == ["transpose", "round"]


def test_groups_of_float32_are_rounded_with_all_their_matrices() -> None:
    a, b = (jax.ShapeDtypeStruct(x, jnp.float32) for x in ((512, 1024), (8, 2048, 1024)))
    with target("h200"):
        sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
        found = explain(lambda a, b, s: grouped_gemm(a, b, s, transpose_b=True), a, b, sizes)
    assert found.plan is not None
    assert found.plan.realigned.bytes == 8 * (512 * 1024 + 8 * 2048 * 1024)


def test_nothing_is_saved_where_what_is_turned_is_rounded_as_well() -> None:
    hints = []
    for dtype in (jnp.float32, jnp.float8_e4m3fn):
        a, b = (jax.ShapeDtypeStruct(x, dtype) for x in ((512, 1024), (8, 1024, 2048)))
        with target("h200"):
            found = explain(grouped_gemm, a, b, jax.ShapeDtypeStruct((8,), jnp.int32))
        assert found.plan is not None
        assert "transpose" in [step.action for step in found.plan.realigned.passes]
        hints.append("store b" in str(found))
    assert hints == [False, True]


@pytest.mark.parametrize(("over_xla", "taken"), [(1.1, "hopper"), (0.9, "xla")])
def test_what_was_tuned_was_timed_with_its_rounding(over_xla: float, taken: str) -> None:
    shapes = (512, 1024), (2048, 1024)
    a, b = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    problem = Problem(512, 2048, 1024, *3 * [np.dtype(np.float32)], transpose_b=True)
    with target("h200"):
        named = explain(lambda a, b: gemm(a, b, transpose_b=True, implementation="hopper"), a, b)
        assert named.plan is not None
        entries = {tables.Key.of(problem): tables.Entry(named.plan.config, 1e-5, over_xla)}
        with tables.Table.of(H200.kind, entries):
            found = explain(lambda a, b: gemm(a, b, transpose_b=True), a, b)
    assert found.implementation == taken
