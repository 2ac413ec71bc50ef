"""Where in the result, and in the batch, a tile of the schedule lies."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_gemm.config import GemmConfig
from pallas_gemm.problem import Problem


class Where(NamedTuple):
    """Batch index (None without a batch), first row and first column."""

    batch: Any
    row: Any
    col: Any


def locate(config: GemmConfig, problem: Problem, row: Any, col: Any) -> Where:
    """Where the cluster tile (row, col) of the schedule begins."""
    batch = None
    if problem.batch > 1:
        rows, _ = config.grid(problem)
        batch, row = lax.div(row, jnp.int32(rows)), lax.rem(row, jnp.int32(rows))
    tile_rows, tile_cols = config.out_tile(problem)
    return Where(
        batch, row * (tile_rows * config.cluster[0]), col * (tile_cols * config.cluster[1])
    )


def matrix(gmem: Any, batch: Any) -> Any:
    """One matrix of an operand or of the result."""
    return gmem if batch is None else gmem.at[batch]
