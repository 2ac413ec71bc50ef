"""A piece of work: what an entry of a table tells a worker to compute next.

    an entry of a table    row (16 bits) | col (16 bits)
    a claimed entry        tag (6 bits) | row (13 bits) | col (13 bits)     see `hopper/claims.py`

Entries are packed and unpacked here, and nowhere else. A schedule stacks a batch along its rows;
here the batch is split off again. Roles hand a piece on as a whole, so that what a table comes to
say besides, such as a range of k steps or what becomes of the sum, is a field of `Piece` and a
column of the table, which no other module has to know.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gemm.config import GemmConfig
from pallas_gemm.problem import Problem
from schedules import PADDING, Schedule

WORD_BITS = 32
TABLE_BITS = 16
CLAIM_BITS = 13


class Piece(NamedTuple):
    """What a worker computes at a time.

    Attributes:
        row: Row of the cluster tile, in the grid of one product.
        col: Column of the cluster tile.
        batch: Which product of the batch; None without one.
    """

    row: Any
    col: Any
    batch: Any = None


@dataclasses.dataclass(frozen=True)
class Coding:
    """How pieces are written as integers.

    Attributes:
        rows: Rows of cluster tiles of each product of a batch; None without one.
        bits: Bits of a row, and of a column. What they leave of a word is for a tag.
    """

    rows: int | None = None
    bits: int = TABLE_BITS

    def pack(self, schedule: Schedule) -> np.ndarray:
        """Returns every piece in visiting order, int32 `[tiles]`, with a tag of zero."""
        rows, cols = schedule.order.astype(np.uint32).T
        return (rows << self.bits | cols).view(np.int32)

    def unpack(self, entry: Any) -> Piece:
        """The piece of an entry, whatever its tag."""
        mask = jnp.int32((1 << self.bits) - 1)
        row = lax.shift_right_logical(entry, jnp.int32(self.bits))
        return self.piece(row & mask if 2 * self.bits < WORD_BITS else row, entry & mask)

    def piece(self, row: Any, col: Any) -> Piece:
        """The piece at (row, col) of the grid of a schedule."""
        if self.rows is None:
            return Piece(row, col)
        rows = jnp.int32(self.rows)
        batch = lax.div(row, rows)
        return Piece(lax.rem(row, rows), col, batch)


def coding(config: GemmConfig, problem: Problem, bits: int = TABLE_BITS) -> Coding:
    """How the pieces of a problem are written."""
    return Coding(config.grid(problem)[0] if problem.batch > 1 else None, bits)


def deal(entries: np.ndarray, workers: int) -> np.ndarray:
    """Deals entries to workers in turn: int32 `[workers, longest share]`, filled up with padding.

    Entries that follow each other are then computed at the same time.
    """
    longest = -(-len(entries) // workers)
    dealt = np.full(longest * workers, PADDING, np.int32)
    dealt[: len(entries)] = entries
    return dealt.reshape(longest, workers).T
