"""Large results with a short K: the tiles and the order that are chosen, and what was measured."""

import csv
import dataclasses
import functools
import pathlib
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import explain, gemm, target
from pallas_gemm.device import B200, H200
from pallas_gemm.kernels.functions import words
from pallas_gemm.planning import bands, heuristics, written
from pallas_gemm.planning.architectures import ARCHITECTURES
from pallas_gemm.planning.by_xla import fused, xla_faster
from pallas_gemm.problem import Epilogue, Problem

RESULTS = pathlib.Path(__file__).parents[2] / "bench" / "results"
FILE, JUDGED_FILE = (RESULTS / f"h200_short_k{name}.csv" for name in ("", "_judged"))
FOLLOWED, GELU = (Epilogue(bias=True, activation=own) for own in (jax.nn.relu, jax.nn.gelu))
LARGE = Problem(8192, 4096, 128)
(HOPPER,) = (own for own in ARCHITECTURES if own.fits(H200))
JUDGED = ("seed403", "seed404")


def measured() -> dict[tuple[str, Problem], dict[str, float]]:
    found: dict[tuple[str, Problem], dict[str, float]] = defaultdict(dict)
    with FILE.open() as file:
        for row in csv.DictReader(file):
            own = _problem(row, FOLLOWED if row["epilogue"] == "relu" else Epilogue())
            found[row["drawn"], own][row["config"]] = float(row["us"])
    return found


def judged() -> list[tuple[Problem, dict[str, str]]]:
    followed = {"bare": Epilogue(), "relu": FOLLOWED, "gelu": GELU}
    with JUDGED_FILE.open() as file:
        rows = list(csv.DictReader(file))
    return [(_problem(row, followed[row["epilogue"]]), row) for row in rows]


def _problem(row: dict[str, str], epilogue: Epilogue) -> Problem:
    left, right = (letter == "T" for letter in row["layout"])
    sizes = {name: int(row[name]) for name in ("m", "n", "k", "batch")}
    return Problem(**sizes, transpose_a=left, transpose_b=right, epilogue=epilogue)


def mean(values: list[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def chosen(problem: Problem) -> Any:
    return heuristics.best(problem, H200, HOPPER)


def test_their_tiles_have_128_rows_and_are_walked_row_after_row() -> None:
    for problem in (LARGE, dataclasses.replace(LARGE, m=4096, n=8192, epilogue=FOLLOWED)):
        config = chosen(problem)
        assert config.tile[0] == written.ROWS
        assert config.schedule == ("raster:cols" if config.mirrored else "raster")


@pytest.mark.parametrize(
    "change",
    [
        {"k": 136},
        {"m": 2048, "n": 4224},
        {"out_dtype": jnp.float32},
        {"a_dtype": "float8_e4m3fn", "b_dtype": "float8_e4m3fn"},
        {"epilogue": Epilogue(residual=True)},
        {"epilogue": Epilogue(gated=True)},
        {"n": 4097},
    ],
)
def test_others_have_any_tiles(change: dict[str, Any]) -> None:
    other = dataclasses.replace(LARGE, **change)
    assert not written.is_large(other)
    rows = {draft.config.tile[0] for draft in HOPPER.drafts(other, H200)}
    assert len(rows) > 1
    assert written.order(other, mirrored=False) is None


@pytest.mark.parametrize(
    ("change", "is_ordered"),
    [
        ({}, True),
        ({"n": 3008}, False),
        ({"n": 3000}, True),
        ({"m": 2552, "n": 8192}, False),
        ({"n": 46848}, True),
        ({"n": 46912}, False),
        ({"batch": 2}, False),
    ],
)
def test_which_are_walked_row_after_row(change: dict[str, Any], is_ordered: bool) -> None:
    own = dataclasses.replace(LARGE, **change)
    assert written.is_large(own)
    orders = [written.order(own, mirrored=mirrored) for mirrored in (False, True)]
    assert orders == (["raster", "raster:cols"] if is_ordered else [None, None])
    assert chosen(own).schedule.startswith("raster" if is_ordered else "swizzle")


def test_blackwell_keeps_its_bands() -> None:
    (blackwell,) = (own for own in ARCHITECTURES if own.fits(B200))
    config = heuristics.best(LARGE, B200, blackwell)
    assert config is not None
    assert str(config.schedule).startswith("swizzle")


def test_to_walk_so_is_not_predicted_to_read_more() -> None:
    config = chosen(LARGE)
    banded = dataclasses.replace(config, schedule="swizzle:4")
    neighbours = [bands.rows_of_neighbours(LARGE, own, H200) for own in (config, banded)]
    assert neighbours[0] <= neighbours[1]
    longer = dataclasses.replace(LARGE, k=256)
    neighbours = [bands.rows_of_neighbours(longer, own, H200) for own in (config, banded)]
    assert neighbours[0] > neighbours[1]


def test_kernels_are_faster_so() -> None:
    by_rows, by_order = [], []
    for (_, own), us in measured().items():
        if "rows of 128" in us:
            assert written.is_large(own)
            by_rows.append(us["heuristics before"] / us["rows of 128"])
            if written.order(own, mirrored=False):
                by_order.append(us["rows of 128"] / us["rows of 128 ordered"])
    assert (len(by_rows), len(by_order)) == (118, 28)
    assert mean(by_rows) > 1.035
    assert mean(by_order) > 1.05


def test_other_products_are_faster_in_that_order_too() -> None:
    faster = [
        us["128x128 swizzle:8"] / us["128x128 raster"]
        for (drawn, own), us in measured().items()
        if drawn not in JUDGED and "128x128 raster" in us and written.order(own, mirrored=False)
    ]
    assert len(faster) == 18
    assert mean(faster) > 1.04


def test_half_steps_are_xlas() -> None:
    left, kept = [], []
    for (_, own), us in measured().items():
        kernel = us.get("rows of 128 ordered", us.get("heuristics before"))
        if kernel is None or not own.epilogue.is_identity or own.batch * own.m * own.n < 2**20:
            continue
        (left if xla_faster.half_steps(own) else kept).append(us["xla"] / kernel)
    assert len(left) == 21
    assert mean(left) < 0.9
    assert max(left) < 1.06
    assert mean(kept) > 0.95


def test_half_steps_of_another_seed_are_xlas_too() -> None:
    faster = [
        float(row["xla_us"]) / float(row["kernel_us"])
        for own, row in judged()
        if row["kernel_us"] and xla_faster.half_steps(own)
    ]
    assert len(faster) == 11
    assert mean(faster) < 0.88


def test_what_follows_is_faster_in_kernels_than_in_a_pass() -> None:
    """The kernel is taken where XLA would store sums in float32."""
    faster = []
    for own, row in judged():
        if row["words_us"] and not own.epilogue.is_identity:
            faster.append(float(row["words_us"]) / float(row["kernel_us"]))
            assert _implementation(own) == "hopper"
    assert len(faster) == 24
    assert min(faster) > 1.5


@pytest.mark.parametrize(
    ("own", "too_slow", "fast"),
    [
        (Problem(424, 7552, 64, transpose_a=True, transpose_b=True), 1.6, 1.7),
        (Problem(8192, 1000, 5000), 1.9, 2.1),
        (Problem(8192, 4304, 1152), 1.1, 1.2),
        (Problem(59408, 768, 72, transpose_b=True), 1.1, 1.2),
        # Nothing makes up for these.
        (Problem(4096, 8, 256), 9.0, None),
    ],
)
def test_how_much_faster_a_kernel_must_be_predicted(
    own: Problem, too_slow: float, fast: float | None
) -> None:
    followed = dataclasses.replace(own, epilogue=GELU)
    assert xla_faster.why_xla(followed, too_slow) is not None
    if fast is not None:
        assert xla_faster.why_xla(followed, fast) is None
        assert xla_faster.why_xla(own, fast) is not None


def _implementation(own: Problem) -> str:
    """Returns what computes a product with bias and activation."""
    lead = () if own.batch == 1 else (own.batch,)
    shapes = (*lead, *own.a_shape[-2:]), (*lead, *own.b_shape[-2:]), (own.n,)
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def layer(a: jax.Array, b: jax.Array, bias: jax.Array) -> jax.Array:
        turned = {"transpose_a": own.transpose_a, "transpose_b": own.transpose_b}
        return gemm(a, b, bias=bias, activation=own.epilogue.activation, **turned)

    with target("h200"):
        return explain(layer, *given).implementation


def test_kernels_of_another_seed_are_faster_too() -> None:
    found = [
        float(row["before_us"]) / float(row["kernel_us"])
        for own, row in judged()
        if written.is_large(own) and row["before_us"] and row["kernel_us"]
    ]
    assert len(found) == 60
    assert mean(found) > 1.04


@pytest.mark.parametrize(
    ("change", "is_xlas"),
    [
        ({}, True),
        ({"batch": 8, "m": 512, "n": 512}, True),
        ({"k": 48}, False),
        ({"m": 1016}, False),
        ({"out_dtype": jnp.float32}, False),
        ({"epilogue": FOLLOWED}, False),
    ],
)
def test_which_half_steps(change: dict[str, Any], is_xlas: bool) -> None:
    own = dataclasses.replace(Problem(1024, 1024, 32), **change)
    assert (xla_faster.half_steps(own) is not None) == is_xlas
    assert (xla_faster.why_xla(own) is not None) == is_xlas


def test_large_batches_are_xlas() -> None:
    left = []
    for (drawn, own), us in measured().items():
        if drawn in JUDGED and own.batch > 1 and own.epilogue.is_identity and xla_faster.large(own):
            left.append(us["xla"] / us["rows of 128 ordered"])
    assert len(left) == 14
    assert mean(left) < 0.92
    batch = Problem(512, 1024, 128, batch=48)
    assert xla_faster.large(batch)
    assert not xla_faster.large(dataclasses.replace(batch, batch=47))
    assert not xla_faster.large(dataclasses.replace(batch, k=136))
    # Twice as long are sums of one product with few columns alone.
    few = Problem(98304, 256, 256)
    assert xla_faster.large(few)
    assert not xla_faster.large(dataclasses.replace(few, m=49152, batch=2))


def test_a_batch_shares_a_bias_at_a_share_of_a_pass() -> None:
    own = Problem(512, 512, 64, batch=64, epilogue=FOLLOWED)
    program = Epilogue(program=words.program(own))
    assert fused.pass_share(dataclasses.replace(own, epilogue=program)) == fused.SHARE


@pytest.mark.parametrize("reduces", [False, True])
def test_functions_that_reduce_were_not_measured(reduces: bool) -> None:
    def function(sums: jax.Array) -> Any:
        rounded = jax.nn.gelu(sums).astype(jnp.bfloat16)
        return (rounded, jnp.sum(sums, -1)) if reduces else rounded

    a, b = (jax.ShapeDtypeStruct(own, jnp.bfloat16) for own in ((8192, 128), (128, 4096)))
    with target("h200"):
        [own] = explain(functools.partial(gemm, epilogue=function), a, b).products
    assert own.problem.epilogue.program is not None
    assert written.is_large(own.problem) == (not reduces)
