"""What is in global memory, and where in it a tile of the schedule lies."""

from typing import Any, NamedTuple

from pallas_gemm.config import GemmConfig
from pallas_gemm.kernels import work
from pallas_gemm.problem import Problem


class Gmem(NamedTuple):
    """The operands and the result in global memory; None for what a problem has not.

    Attributes:
        a: The left operand, or its pieces.
        b: The right operand, both if the result is gated, or its pieces.
        bias: What is added to each row.
        residual: What is added to the result.
        out: The result.
        rank: This device's place among those that exchange rows; None without any.
        owners: The number in the mesh of the device whose rows are computed at each turn.
        every: The gathered rows of the left operand.
        arrived: A semaphore for each device: how much of its rows is there.
    """

    a: tuple[Any, ...]
    b: tuple[Any, ...]
    bias: Any
    residual: Any
    out: Any
    rank: Any = None
    owners: tuple[Any, ...] = ()
    every: Any = None
    arrived: Any = None


class Where(NamedTuple):
    """The place of a tile of the result.

    Attributes:
        batch: Batch index, None without one.
        row: First row; where a scattered result is stored, among those of the same device.
        col: First column.
        turn: Which device's rows these are, counted in the order in which they are computed; None
            if none are exchanged.
    """

    batch: Any
    row: Any
    col: Any
    turn: Any = None


def locate(config: GemmConfig, problem: Problem, piece: work.Piece) -> Where:
    """Where the cluster tile of a piece begins."""
    rows, cols = config.out_tile(problem)
    row, col = piece.row * (rows * config.cluster[0]), piece.col * (cols * config.cluster[1])
    return Where(piece.batch, row, col)


def matrix(gmem: Any, batch: Any) -> Any:
    """One matrix of an operand or of the result."""
    return gmem if batch is None else gmem.at[batch]
