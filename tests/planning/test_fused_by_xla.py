"""Bias and relu, which XLA computes with a product: how long they take."""

import csv
import dataclasses
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import accelerate, explain, target
from pallas_gemm.device import H200
from pallas_gemm.kernels.functions import words
from pallas_gemm.planning import prediction
from pallas_gemm.planning.by_xla import copies, fused, xla_time
from pallas_gemm.problem import Epilogue, Problem

FILE = pathlib.Path(__file__).parents[2] / "bench" / "results" / "h200_large_results.csv"
FOLLOWED = Epilogue(bias=True, activation=jax.nn.relu)


def as_program(problem: Problem) -> Problem:
    """Returns a problem as a program has it: with its words as a function."""
    epilogue = Epilogue(program=words.program(problem))
    return dataclasses.replace(problem, epilogue=epilogue)


WORDS = Problem(8192, 4096, 1024, epilogue=FOLLOWED)
LAYER = as_program(WORDS)


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
            bare = dataclasses.replace(own, epilogue=Epilogue())
            alone = xla_time.seconds(bare, H200) or 0
            whole = prediction.pass_seconds(xla_time._epilogue_bytes(own), H200)
            share = fused.pass_share(as_program(own))
            errors.append(abs(np.log((alone + share * whole) / taken)))
            of_passes.append(np.log((alone + whole) / taken))
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
        {"epilogue": Epilogue(alpha=0.5)},
        {"a_dtype": jnp.float32, "b_dtype": jnp.float32},
        {"a_dtype": "float8_e4m3fn", "b_dtype": "float8_e4m3fn"},
        {"groups": 2},
        {"n": 4095},
    ],
)
def test_all_else_takes_a_pass(change: dict[str, Any]) -> None:
    other = dataclasses.replace(WORDS, **change)
    program = as_program(dataclasses.replace(WORDS, epilogue=other.epilogue))
    assert fused.pass_share(LAYER) == fused.SHARE
    assert fused.pass_share(dataclasses.replace(other, epilogue=program.epilogue)) == 1


GELU_WORDS = Epilogue(bias=True, activation=jax.nn.gelu)
GELU = as_program(dataclasses.replace(WORDS, epilogue=GELU_WORDS))


@pytest.mark.parametrize(
    ("change", "share"),
    [
        ({"m": 64, "n": 512}, fused.SHARE),
        ({"m": 64, "n": 509}, fused.SHARE),
        ({"m": 64, "n": 512, "a_dtype": jnp.float32, "b_dtype": jnp.float32}, fused.SHARE),
        ({}, 1),
        ({"m": 64, "n": 512, "groups": 2}, 1),
        ({"m": 512, "n": 512, "k": 256}, 1),
    ],
)
def test_what_follows_sums_that_are_cut_is_computed_as_they_are_joined(
    change: dict[str, Any], share: float
) -> None:
    assert fused.pass_share(dataclasses.replace(GELU, **change)) == share


def test_gates_and_reductions_take_a_pass_even_of_sums_that_are_cut() -> None:
    own = dataclasses.replace(GELU, m=64, n=512)
    gated = dataclasses.replace(own.epilogue, gated=True)
    program = own.epilogue.program
    assert program is not None
    (result,) = program.results
    sums = result._replace(kind="m", reduction="sum")
    rows = dataclasses.replace(program, results=(sums,))
    assert fused.pass_share(own) == fused.SHARE
    for other in (gated, dataclasses.replace(own.epilogue, program=rows)):
        assert fused.pass_share(dataclasses.replace(own, epilogue=other)) == 1


def test_functions_of_long_sums_are_predicted_as_is_said() -> None:
    with (FILE.parent / "h200_long_functions.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["dtype"] != "float32"]
    errors = []
    for row in rows:
        if row["follows"] in ("bias and gelu", "bias and relu"):
            left, right = (letter == "T" for letter in row["layout"])
            epilogue = FOLLOWED if row["follows"] == "bias and relu" else GELU_WORDS
            sizes = [int(row[name]) for name in "mnk"]
            own = as_program(
                Problem(*sizes, transpose_a=left, transpose_b=right, epilogue=epilogue)
            )
            if copies.pieces(own) > 1:
                predicted = (xla_time.seconds_as_written(own, H200) or 0) * 1e6
                errors.append(abs(np.log(predicted / float(row["stock_us"]))))
    assert len(errors) > 30
    assert np.median(errors) < 0.06


def test_words_and_float32_results_take_a_pass() -> None:
    assert fused.pass_share(WORDS) == 1
    assert fused.pass_share(as_program(dataclasses.replace(WORDS, out_dtype=jnp.float32))) == 1


def test_explain_counts_what_a_program_rounds_first_at_its_share() -> None:
    def layer(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ w + bias[None])

    with target("h200"):
        given = [jax.ShapeDtypeStruct(own, jnp.bfloat16) for own in ((8192, 1024), (1024, 4096))]
        found = explain(accelerate(layer), *given, jax.ShapeDtypeStruct((4096,), jnp.bfloat16))
    said = re.search(r"XLA +(\d+) us", str(found))
    whole = prediction.pass_seconds(xla_time._epilogue_bytes(WORDS), H200)
    alone = xla_time.seconds(dataclasses.replace(WORDS, epilogue=Epilogue()), H200)
    assert said is not None
    assert alone is not None
    assert int(said[1]) == pytest.approx((alone + fused.SHARE * whole) * 1e6, abs=1)
    assert xla_time.seconds(WORDS, H200) == pytest.approx(alone + whole)
