"""Bias and relu, which XLA computes with a product: how long they take."""

import csv
import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.device import H200
from pallas_gemm.planning.by_xla import fused, xla_time
from pallas_gemm.problem import Epilogue, Problem

FILE = pathlib.Path(__file__).parents[2] / "bench" / "results" / "h200_large_results.csv"
FOLLOWED = Epilogue(bias=True, activation=jax.nn.relu)
LAYER = Problem(8192, 4096, 1024, epilogue=FOLLOWED)


@pytest.mark.parametrize(("drawn", "number"), [("seed501", 38), ("seed502", 31)])
def test_predictions_are_near_what_bias_and_relu_take(drawn: str, number: int) -> None:
    with FILE.open() as file:
        rows = [row for row in csv.DictReader(file) if row["drawn"] == drawn]
    errors, of_passes = [], []
    for row in rows:
        if row["epilogue"] == "relu":
            left, right = (letter == "T" for letter in row["layout"])
            sizes = [int(row[name]) for name in "mnk"]
            own = Problem(*sizes, transpose_a=left, transpose_b=right, epilogue=FOLLOWED)
            taken = float(row["xla_us"]) * 1e-6
            errors.append(abs(np.log((xla_time.seconds(own, H200) or 0) / taken)))
            moved = xla_time._epilogue_bytes(own)
            bare = dataclasses.replace(own, epilogue=Epilogue())
            passed = (xla_time.seconds(bare, H200) or 0) + xla_time.pass_seconds(moved, H200)
            of_passes.append(np.log(passed / taken))
    assert len(errors) == number
    assert np.median(errors) < 0.1
    # With a pass, nearly twice as much would be predicted.
    assert np.median(of_passes) > 0.5


@pytest.mark.parametrize(
    "change",
    [
        {"epilogue": Epilogue(bias=True, activation=jax.nn.gelu)},
        {"epilogue": Epilogue(bias=True, residual=True)},
        {"epilogue": Epilogue(bias=True, col_scale=True)},
        {"epilogue": Epilogue(bias=True, activation=jax.lax.lgamma)},
        {"epilogue": Epilogue(alpha=0.5)},
        {"out_dtype": jnp.float32},
        {"a_dtype": jnp.float32, "b_dtype": jnp.float32},
        {"a_dtype": "float8_e4m3fn", "b_dtype": "float8_e4m3fn"},
        {"batch": 2},
        {"groups": 2},
        {"n": 4095},
    ],
)
def test_all_else_takes_a_pass(change: dict[str, Any]) -> None:
    assert fused.pass_share(LAYER) == fused.SHARE
    assert fused.pass_share(dataclasses.replace(LAYER, **change)) == 1
