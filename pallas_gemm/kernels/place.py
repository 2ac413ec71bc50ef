"""Where in global memory a tile of the schedule lies."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_gemm.config import GemmConfig
from pallas_gemm.kernels import work
from pallas_gemm.kernels.traced import Ref, Scalar
from pallas_gemm.problem import Problem
from pallas_gemm.program import ALL, FIRST, LAST, Operand


class Where(NamedTuple):
    """The place of a tile of the result.

    Attributes:
        batch: Batch index, None without one.
        row: First row; where a scattered result is stored, among those of the same device.
        col: First column.
        share: Which device's rows these are, counted in the order in which they are computed; None
            if none are exchanged.
        end: The row after the last one that is stored; None if the result ends there.
    """

    batch: Any
    row: Scalar
    col: Scalar
    share: Scalar = None
    end: Any = None


def locate(
    config: GemmConfig, problem: Problem, piece: work.Piece, axes: tuple[str, ...] = ()
) -> Where:
    """Where the cluster tile of a piece begins; given the axes of the cluster, this CTA's tile."""
    starts = []
    for axis, (index, tile) in enumerate(zip(piece[:2], config.out_tile(problem), strict=True)):
        if index is None:
            own = lax.axis_index(axes[axis]) * tile if axes else 0
            starts.append(piece.first_row + own)
            continue
        first = index * config.cluster[axis]
        starts.append((first + lax.axis_index(axes[axis]) if axes else first) * tile)
    return Where(piece.batch, *starts, end=piece.end_row)


def matrix(gmem: Ref, batch: Any) -> Any:
    """The matrix of one product: that of a batch, unless the whole batch shares one."""
    return gmem if batch is None or len(gmem.shape) == 2 else gmem.at[batch]


def loaded(gmem: Ref, operand: Operand, products: int, batch: Any) -> Any:
    """The matrix of an operand for one product of a batch of so many: several may share it."""
    if batch is not None and len(gmem.shape) == 3 and operand.batch != ALL:
        count = gmem.shape[0]
        of = {FIRST: (lax.div, products // count), LAST: (lax.rem, count)}
        divide, by = of[operand.batch]
        batch = divide(batch, jnp.int32(by))
    return matrix(gmem, batch)


def vector(gmem: Ref, batch: Any) -> Any:
    """The vector of one product, likewise."""
    return gmem if batch is None or len(gmem.shape) == 1 else gmem.at[batch]


def scalar(gmem: Ref, batch: Any) -> Any:
    """The number of one product, likewise; there may be one for all."""
    return gmem[0 if batch is None or gmem.shape[0] == 1 else batch]
