"""A piece of work: what an entry of a table tells a worker to compute next.

    an entry of a table    row (16 bits) | col (16 bits)
    its second word        first k step (16 bits) | k steps (16 bits)       where they differ
    its third word         which summand of its tile's sum a piece makes    where there are several
    its fourth word        which of the cut tiles it belongs to             where others are whole
    of rows in groups      group | col, first row, end of the group     see `groups/group_walk.py`
    of sums over groups    row | col, group, first contracted element, end,
                           tile among those that are cut | which of its pieces | the last one
    a claimed entry        tag (6 bits) | row (13 bits) | col (13 bits)     see `dense/claims.py`

Entries are packed and unpacked here, and nowhere else. A schedule stacks a batch along its rows;
here the batch is split off again. Roles hand a piece on as a whole. To say more in a table takes a
field of `Piece` and a word of its entries, and no other module has to know it.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gemm.config import GemmConfig
from pallas_gemm.kernels.traced import Scalar, divided
from pallas_gemm.problem import Problem
from schedules import PADDING, Pieces, Schedule

WORD_BITS = 32
TABLE_BITS = 16
CLAIM_BITS = 13
ROWS_READ = 8
"""The contracted elements that are read of an operand stored [k, m] at a time."""
CLAIM_SLOTS = 64
"""Words of a cluster's mailbox, each of which is that of a tile it has claimed."""


class Piece(NamedTuple):
    """The work that a worker does at a time.

    Attributes:
        row: Row of the cluster tile, in the grid of one product.
        col: Column of the cluster tile.
        batch: Which product of the batch; None without one.
        first_step: The first step of k that goes into the sum; None if all do.
        steps: How many do, one at least. Past the end of k there are zeros.
        summand: Which summand of its tile's sum it makes; None if it makes the sum. Over groups
            always a number.
        cut_tile: Which of the tiles that are cut it belongs to; None if all are cut, or none. Over
            groups always a number, which says nothing where the tile is whole.
        first_row: The first row of the tile, where rows are in groups; None if its number says it.
        end_row: The row after the last one of its group.
        first_k: The first contracted element of the piece's group, or of its piece of one, where
            those are in groups.
        end_k: The one after its last.
        is_last: Whether the sum of its tile is complete with it, where a group is cut along k.
    """

    row: Scalar
    col: Scalar
    batch: Any = None
    first_step: Any = None
    steps: Any = None
    summand: Any = None
    cut_tile: Any = None
    first_row: Scalar = None
    end_row: Scalar = None
    first_k: Any = None
    end_k: Any = None
    is_last: Any = None


@dataclasses.dataclass(frozen=True)
class Listed:
    """Some of the pieces of a table, in its order.

    Attributes:
        order: The (row, col) of the tile of each.
        spans: The rest that `Coding.pack` takes of each.
    """

    order: np.ndarray
    spans: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.order)


class Cut(NamedTuple):
    """How the k loop of every tile is cut into pieces: the arithmetic of `schedules.split_k`.

    Attributes:
        pieces: Into how many.
        steps: Steps of the whole loop.
        parts: How many parts follow each other in a piece, which begins and ends where they do.
    """

    pieces: int
    steps: int
    parts: int = 1

    def piece(self, tile: Piece, number: Any) -> Piece:
        """One of the pieces of a tile."""
        least, longer = divmod(self.steps, self.pieces * self.parts)
        part = number * self.parts if self.parts > 1 else number
        first = part * least + lax.min(part, jnp.int32(longer))
        steps = least + (number < longer).astype(jnp.int32)
        if self.parts > 1:
            steps = self.parts * least + jnp.clip(longer - part, 0, self.parts)
        return tile._replace(first_step=first, steps=steps, summand=number)


@dataclasses.dataclass(frozen=True)
class Coding:
    """How pieces are written as integers.

    Attributes:
        rows: Rows of cluster tiles of each product of a batch; None without one.
        bits: Bits of a row, and of a column. The bits left in a word are for a tag.
        words: Words of an entry, of the table above.
    """

    rows: int | None = None
    bits: int = TABLE_BITS
    words: int = 1

    def pack(
        self, pieces: Schedule | Pieces | Listed, spans: np.ndarray | None = None
    ) -> np.ndarray:
        """Returns every piece in visiting order, int32 `[pieces]`, with a tag of zero.

        The spans are `[pieces, 2 to 4]`: the first step and the steps of each piece, its summand
        where there are several, and its cut tile where others are whole. Given them, the words of
        an entry are a last axis.
        """
        tiles = _joined(pieces.order, self.bits)
        if spans is None:
            return tiles
        return np.stack([tiles, _joined(spans[:, :2], TABLE_BITS), *spans[:, 2:].T], axis=1)

    def unpack(self, *entry: Any) -> Piece:
        """The piece of an entry, given each of its words, whatever its tag."""
        piece = self.piece(*_halves(entry[0], self.bits))
        if self.words == 1:
            return piece
        first_step, steps = _halves(entry[1], TABLE_BITS)
        summand, cut_tile = (*entry, None, None)[2:4]
        return piece._replace(
            first_step=first_step, steps=steps, summand=summand, cut_tile=cut_tile
        )

    def piece(self, row: Scalar, col: Scalar) -> Piece:
        """The piece at (row, col) of the grid of a schedule."""
        if self.rows is None:
            return Piece(row, col)
        batch, row = divided(row, self.rows)
        return Piece(row, col, batch)


def _joined(pairs: np.ndarray, bits: int) -> np.ndarray:
    """Makes a word of each pair of numbers of `bits` bits."""
    high, low = pairs.astype(np.uint32).T
    return (high << bits | low).view(np.int32)


@dataclasses.dataclass(frozen=True)
class GroupCoding(Coding):
    """How pieces are written whose rows are those of a group."""

    words: int = 3

    def pack_group(
        self, group: Scalar, col: Scalar, first_row: Scalar, end_row: Scalar
    ) -> tuple[Any, ...]:
        """Returns the words of pieces."""
        return group << self.bits | col, first_row, end_row

    def unpack(self, *entry: Any) -> Piece:
        """See `Coding`."""
        which, first_row, end_row = entry
        group, col = _halves(which, self.bits)
        return Piece(None, col, group, first_row=first_row, end_row=end_row)

    def piece(self, row: Scalar, col: Scalar) -> Piece:
        """A piece of no rows."""
        return Piece(None, col, row, first_row=row, end_row=row)


@dataclasses.dataclass(frozen=True)
class SumCoding(Coding):
    """How pieces are written that are sums over a group.

    Attributes:
        tile_k: Contracted elements per step.
        multiple: The number whose multiples the loads of a group begin with.
    """

    words: int = 5
    tile_k: int = 64
    multiple: int = ROWS_READ

    def pack_sum(
        self, row: Scalar, col: Scalar, group: Scalar, span: tuple[Any, Any], leg: Any
    ) -> tuple[Any, ...]:
        """Returns the words of pieces, given the first contracted element, and the one after."""
        return row << self.bits | col, group, *span, leg

    def no_sum(self) -> tuple[Any, ...]:
        """Returns the words that say that there is no piece any more."""
        return tuple(map(jnp.int32, (0, -1, 0, 0, 0)))

    def is_any(self, *entry: Any) -> Any:
        """Whether the words are those of a piece."""
        return entry[1] >= 0

    def unpack(self, *entry: Any) -> Piece:
        """See `Coding`; a group without elements takes a step, of which nothing counts."""
        which, group, first, end, leg = entry
        row, col = _halves(which, self.bits)
        tile, number, is_last = unpack_leg(leg)
        elements = end - aligned(first, self.multiple)
        steps = lax.div(elements + (self.tile_k - 1), jnp.int32(self.tile_k))
        steps = lax.max(steps, jnp.int32(1))
        return Piece(
            *(row, col, group),
            first_step=jnp.int32(0),
            steps=steps,
            summand=number,
            cut_tile=tile,
            first_k=first,
            end_k=end,
            is_last=is_last,
        )

    def piece(self, row: Scalar, col: Scalar) -> Piece:
        """A piece of the first group."""
        return Piece(row, col, jnp.int32(0), is_last=jnp.bool_(True))


LEG_BITS = 9
"""Of a word: which piece of a sum it is, and whether it is the last one."""

WHOLE_LEG = 1
"""The word of a sum that is not cut."""


def pack_leg(tile: Any, piece: Any, is_last: Any) -> Any:
    """Returns the word of a piece of a sum, of a tile of those that are cut."""
    return tile << LEG_BITS | piece << 1 | is_last.astype(jnp.int32)


def unpack_leg(word: Any) -> tuple[Any, Any, Any]:
    """Returns the tile, the piece, and whether it is the last one."""
    shift, mask = jnp.int32(LEG_BITS), jnp.int32((1 << LEG_BITS) - 1)
    tile = lax.shift_right_logical(word, shift)
    return tile, lax.shift_right_logical(word & mask, jnp.int32(1)), (word & 1) > 0


def aligned(first_k: Any, multiple: int = ROWS_READ) -> Any:
    """Where the loads of a group begin, at a multiple of a power of two."""
    return first_k & jnp.int32(-multiple)


def _halves(word: Any, bits: int) -> tuple[Any, Any]:
    """Takes a word apart into two numbers of `bits` bits."""
    mask = jnp.int32((1 << bits) - 1)
    high = lax.shift_right_logical(word, jnp.int32(bits))
    return high & mask if 2 * bits < WORD_BITS else high, word & mask


def coding(config: GemmConfig, problem: Problem, bits: int = TABLE_BITS) -> Coding:
    """How the pieces of a problem are written."""
    if problem.groups:
        return GroupCoding()
    if problem.ragged_k:
        return SumCoding(tile_k=config.tile_k(problem), multiple=sums_begin(config, problem))
    return Coding(config.grid(problem)[0] if problem.batch > 1 else None, bits)


def sums_last(problem: Problem) -> bool:
    """Whether sums over groups are of operands stored with the contracted dimension last."""
    return problem.ragged_k and not problem.transpose_a


def sums_begin(config: GemmConfig, problem: Problem) -> int:
    """Returns the number whose multiples the loads of a group begin with, where it is summed over.

    Where the contracted dimension is stored last, each step begins with a multiple of its length.
    So steps begin with a block, because the blocks are those of all groups.
    """
    return config.tile_k(problem) if sums_last(problem) else ROWS_READ


def deal(entries: np.ndarray, workers: int) -> np.ndarray:
    """Deals entries to workers in turn: int32 `[workers, longest share]`, filled up with padding.

    Entries that follow each other are then computed at the same time. Where an entry has several
    words, they are a last axis.
    """
    longest = -(-len(entries) // workers)
    dealt = np.full((longest * workers, *entries.shape[1:]), PADDING, np.int32)
    dealt[: len(entries)] = entries
    return dealt.reshape(longest, workers, *entries.shape[1:]).swapaxes(0, 1)
