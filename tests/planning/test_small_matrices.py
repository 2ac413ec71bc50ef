"""Batches of many small matrices: what was measured of them, and that each has a config."""

import csv
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_gemm import accelerate, explain, target
from pallas_gemm.device import H200
from pallas_gemm.planning import heuristics
from pallas_gemm.planning.architectures import ARCHITECTURES
from pallas_gemm.planning.by_xla import xla_faster
from pallas_gemm.problem import Problem

FILE = pathlib.Path(__file__).parents[2] / "bench" / "results" / "h200_small_matrices.csv"
JUDGE = "6"
HOPPER = ARCHITECTURES[0]


def _problem(m: int, n: int, k: int, layout: str, batch: int) -> Problem:
    turned = (own == "T" for own in layout)
    names = zip(("transpose_a", "transpose_b"), turned, strict=True)
    return Problem(m, n, k, batch=batch, **dict(names))


def _measured(*seeds: str) -> Iterator[tuple[Problem, dict[str, str]]]:
    with FILE.open() as file:
        for row in csv.DictReader(file):
            if row["seed"] in seeds:
                m, n, k, batch = (int(row[name]) for name in ("m", "n", "k", "batch"))
                yield _problem(m, n, k, row["layout"], batch), row


def _mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


@pytest.mark.parametrize(("seeds", "count", "mean"), [(("4", "5"), 66, 0.91), ((JUDGE,), 27, 0.8)])
def test_bare_products_are_xlas(seeds: tuple[str, ...], count: int, mean: float) -> None:
    small = [
        float(row["xla_us"]) / float(row["kernel_us"])
        for own, row in _measured(*seeds)
        if max(own.m, own.n) <= xla_faster.SMALL and row["kernel_us"] and _is_whole(own)
        if xla_faster.large(own)
    ]
    assert len(small) == count
    assert _mean(small) == pytest.approx(mean, abs=0.01)


def _is_whole(own: Problem) -> bool:
    """Whether no rows have to be padded."""
    return not any(size % 8 for size in (own.m, own.n, own.k))


def test_functions_of_them_are_those_of_kernels() -> None:
    ours = [row for _, row in _measured(JUDGE) if row["gelu_by"] == "hopper"]
    assert len(ours) == 23
    assert _mean([float(own["xla_gelu_us"]) / float(own["gelu_us"]) for own in ours]) > 1.6

    def f(a: Any, b: Any, c: Any) -> Any:
        return jax.nn.gelu(jnp.matmul(a, b.mT) + c)

    shapes = (8192, 64, 64), (8192, 64, 64), (64,)
    given = (jax.ShapeDtypeStruct(own, jnp.bfloat16) for own in shapes)
    with target("h200"), jax.numpy_rank_promotion("allow"):
        (found,) = explain(accelerate(f), *given).products
    assert found.implementation == "hopper"


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("n", [16, 24, 32, 40, 48, 64, 88, 128])
def test_each_has_a_config(n: int, layout: str) -> None:
    m = 64
    for size, batch in ((m, 4096), (m * 2048, 1)):
        own = _problem(size, n, 64, layout, batch)
        has_panels = layout[1] == "T" or n % 64 == 0
        config = heuristics.best(own, H200, HOPPER)
        assert config is not None or not has_panels
        narrowest = 16 if n > 16 else 0
        assert config is None or batch == 1 or config.tile[1] > narrowest
