"""Vectors of an epilogue are fetched into the L1 before a tile is added up."""

import dataclasses
import re
from types import SimpleNamespace

import pytest

from pallas_gemm import offline
from pallas_gemm.device import H200
from pallas_gemm.kernels import epilogue, launch
from pallas_gemm.kernels.functions.activations import gelu_tanh
from pallas_gemm.kernels.hopper import kernel as hopper
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.problem import Epilogue, Problem
from tests.kernels.hopper.test_hopper_compiled import operands

M, N, K = 1920, 1536, 512
BATCH = 3
AT_ONCE = HopperConfig(tile=(128, 192), late_store=False)
LATE = HopperConfig(tile=(128, 192), late_store=True)
TURNED = dataclasses.replace(AT_ONCE, mirrored=True)
BIAS = Epilogue(bias=True, activation=gelu_tanh)
SCALED = Epilogue(bias=True, row_scale=True)

FETCH = re.compile(
    r"setp\.lt\.u32 inside, own, (\d+); mad\.lo\.u32 value, own, 32, %r\d+;"
    r" min\.u32 value, value, (\d+);"
)


def fetched(config: HopperConfig, follows: Epilogue, batch: int = 1) -> list[list[int]]:
    """Returns of each fetch of a kernel how many lines it is of, and the last value of all."""
    problem = Problem(M, N, K, batch=batch, epilogue=follows)
    kernel = hopper.build(HopperPlan(problem, config, H200))
    ptx = offline.compile_report(kernel, *operands(problem), target="h200").ptx
    first_product = ptx.index("wgmma.mma_async")
    assert ptx.count("prefetch.global.L1", first_product) == 0
    found = [list(map(int, fetch)) for fetch in FETCH.findall(ptx)]
    assert len(found) == ptx.count("prefetch.global.L1")
    return found


@pytest.mark.parametrize(
    ("config", "batch"), [(AT_ONCE, 1), (LATE, BATCH)], ids=["at once", "late"]
)
def test_a_consumer_fetches_the_lines_of_its_own_tile(config, batch):
    # 192 columns are 6 lines, 64 rows are 2; a tile may begin within a line.
    assert fetched(config, BIAS, batch) == [[7, N - 1]]


def test_rows_of_the_result_and_its_columns():
    order = [{"bias": [7, N - 1], "row_scale": [3, M - 1]}[name] for name in SCALED.operands]
    assert fetched(AT_ONCE, SCALED) == order


def test_a_transposed_result():
    assert fetched(TURNED, BIAS) == [[3, N - 1]]


class Vectors:
    """A vector for each product of a batch."""

    shape = (BATCH, N)

    def __init__(self, name: str) -> None:
        self.at = [f"{name} of product {product}" for product in range(BATCH)]


@pytest.mark.parametrize("mirrored", [False, True])
def test_each_vector_is_fetched_from_where_the_tile_begins(monkeypatch, mirrored):
    problem = Problem(M, N, K, batch=BATCH, epilogue=SCALED)
    problem = dataclasses.replace(AT_ONCE, mirrored=mirrored).as_computed(problem)
    given = launch.Inputs((), tuple(map(Vectors, SCALED.operands)), None)
    found = {}

    def note(plan, vector, first, *, count):
        found[vector] = first, count

    monkeypatch.setattr(epilogue.prefetch, "vector", note)
    tile = epilogue.Strip(2, ("first row", 64), ("first column", 192), None)
    epilogue.expect(SimpleNamespace(problem=problem), given, tile)
    rows, columns = ("first row", 64), ("first column", 192)
    assert found == {
        "bias of product 2": rows if mirrored else columns,
        "row_scale of product 2": columns if mirrored else rows,
    }


def test_a_product_without_vectors():
    assert fetched(AT_ONCE, Epilogue(activation=gelu_tanh)) == []
