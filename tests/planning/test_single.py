"""How long XLA takes for products of float32 with short sums, and for what follows them."""

import csv
import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import accelerate, explain, target
from pallas_gemm.device import H200
from pallas_gemm.planning.by_xla import fused, odd_sizes, xla_time
from pallas_gemm.problem import Epilogue, Problem

FILE = pathlib.Path(__file__).parents[2] / "bench" / "results" / "h200_single.csv"
SINGLE = np.dtype(np.float32)
FOLLOWS: Mapping[str, Epilogue] = {
    "none": Epilogue(),
    "relu": Epilogue(bias=True, activation=jax.nn.relu),
    "sin": Epilogue(bias=True, activation=jnp.sin),
    "gelu": Epilogue(bias=True, activation=jax.nn.gelu),
}


def _problem(m: int, n: int, k: int, layout: str = "NN", follows: str = "none") -> Problem:
    left, right = (letter == "T" for letter in layout)
    types = (SINGLE, SINGLE, SINGLE)
    return Problem(
        *(m, n, k, *types), transpose_a=left, transpose_b=right, epilogue=FOLLOWS[follows]
    )


def _errors(drawn: str, follows: str, change: Callable[[Problem], Problem] = lambda x: x) -> Any:
    """How far predictions of short sums in odd rows are off."""
    found = []
    with FILE.open() as file:
        for row in csv.DictReader(file):
            if (row["drawn"], row["function"]) == (drawn, follows):
                sizes = [int(row[name]) for name in "mnk"]
                own = _problem(*sizes, layout=row["layout"], follows=follows)
                bare = dataclasses.replace(own, epilogue=Epilogue())
                if odd_sizes.is_slow(bare) and odd_sizes._is_light(bare):
                    seconds = xla_time.seconds(change(own), H200)
                    assert seconds is not None
                    found.append(abs(np.log(seconds * 1e6 / float(row["xla_us"]))))
    return np.array(found)


@pytest.mark.parametrize(
    ("drawn", "follows", "number", "off"),
    [
        *(("chosen", "none", 15, 0.06), ("drawn", "none", 13, 0.2)),
        *(("chosen", "relu", 12, 0.12), ("drawn", "relu", 13, 0.17)),
        *(("chosen", "sin", 12, 0.1), ("drawn", "gelu", 13, 0.25)),
    ],
)
def test_half_of_the_predictions_are_as_near_as_is_said(
    drawn: str, follows: str, number: int, off: float
) -> None:
    errors = _errors(drawn, follows)
    assert len(errors) == number
    assert np.median(errors) < off


def test_a_pass_for_relu_would_be_predicted_to_take_longer() -> None:
    def of_a_pass(own: Problem) -> Problem:
        """Returns it with a function that reads a value twice."""
        return dataclasses.replace(own, epilogue=FOLLOWS["gelu"])

    assert np.median(_errors("drawn", "relu", of_a_pass)) > 0.6


@pytest.mark.parametrize(
    ("own", "share"),
    [
        (_problem(8192, 256, 64, follows="relu"), fused.SHARE),
        (_problem(8192, 256, 4096, follows="relu"), fused.SHARE),
        (_problem(8192, 256, 64, follows="sin"), fused.SHORT_SHARE),
        (_problem(8192, 256, 129, follows="sin"), 1),
        (_problem(8192, 256, 64, "TN", follows="sin"), 1),
        (_problem(8192, 256, 64, follows="gelu"), 1),
    ],
)
def test_what_xla_computes_with_a_product_of_float32(own: Problem, share: float) -> None:
    assert fused.pass_share(own) == share
    assert fused.pass_share(dataclasses.replace(own, out_dtype=jnp.bfloat16)) == 1


def test_a_pass_over_odd_rows_takes_longer() -> None:
    def of_gelu(n: int) -> float:
        each = [xla_time.seconds(_problem(8192, n, 8, follows=x), H200) for x in ("gelu", "none")]
        return (each[0] or 0) - (each[1] or 0)

    assert of_gelu(1022) > 2.4 * of_gelu(1024) > 0


@pytest.mark.parametrize(
    ("sizes", "function", "is_folded"),
    [
        # The first layers of models of coordinates: SIREN, and NeRF.
        ((262144, 256, 2), jnp.sin, False),
        ((131072, 256, 27), jax.nn.relu, False),
        ((65536, 256, 63), jax.nn.relu, True),
        ((35226, 626, 3), jax.nn.gelu, True),
        ((19314, 735, 256), jax.nn.relu, True),
    ],
)
def test_layers_are_computed_where_that_was_measured_to_be_faster(
    sizes: tuple[int, int, int], function: Callable[..., jax.Array], is_folded: bool
) -> None:
    m, n, k = sizes
    given = [jax.ShapeDtypeStruct(own, SINGLE) for own in ((m, k), (k, n), (n,))]
    with target("h200"):
        found = explain(accelerate(lambda x, w, b: function(x @ w + b[None])), *given)
    folded = [own for own in found.products if own.problem.epilogue.program is not None]
    assert (len(folded), len(found.products)) == (is_folded, is_folded)
