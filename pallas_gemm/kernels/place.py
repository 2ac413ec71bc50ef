"""Where in global memory a tile of the schedule lies."""

from typing import Any, NamedTuple

from pallas_gemm.config import GemmConfig
from pallas_gemm.kernels import work
from pallas_gemm.problem import Problem


class Where(NamedTuple):
    """The place of a tile of the result.

    Attributes:
        batch: Batch index, None without one.
        row: First row; where a scattered result is stored, among those of the same device.
        col: First column.
        share: Which device's rows these are, counted in the order in which they are computed; None
            if none are exchanged.
    """

    batch: Any
    row: Any
    col: Any
    share: Any = None


def locate(
    config: GemmConfig, problem: Problem, piece: work.Piece, cta: tuple[Any, Any] = (0, 0)
) -> Where:
    """Where the tile of a CTA, given its place in the cluster, begins."""
    rows, cols = config.out_tile(problem)
    row = (piece.row * config.cluster[0] + cta[0]) * rows
    col = (piece.col * config.cluster[1] + cta[1]) * cols
    return Where(piece.batch, row, col)


def matrix(gmem: Any, batch: Any) -> Any:
    """One matrix of an operand or of the result."""
    return gmem if batch is None else gmem.at[batch]
