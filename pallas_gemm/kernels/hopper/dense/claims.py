"""Dynamic persistence on Hopper: tiles are claimed from a counter in global memory.

One CTA of each cluster claims for all of it. At the start of each tile its producer adds one to the
counter, looks the number up in the table, and publishes the entry in the cluster's *mailbox*, a
ring of words in global memory that all roles of all CTAs of the cluster read a tile later:

    word = tag (6 bits) | row (13 bits) | col (13 bits)        row = col = all ones: no tile is left

A word is a whole message, so relaxed accesses are enough. Its tag says for which round through the
ring it was written: a reader that sees an older tag reads again. CTAs that share an operand are at
most a ring of operand slots apart, and any two CTAs of a cluster share one with a third: a writer
is at most twice the number of stages plus one ahead of a reader, in turns, and `CLAIM_SLOTS` is
more. So far apart are threads, too: all 128 of a producer read the words and arrive on each slot of
the ring, and one of them claims.

Mailboxes and counter are one array of a few kilobytes. One small kernel makes it of zeros for every
call, so that the call stays pure and can be replayed in a CUDA graph.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_gemm.kernels import tiles, work
from pallas_gemm.kernels.ptx import mailbox
from pallas_gemm.kernels.ptx.mailbox import END, PIECE_BITS
from pallas_gemm.kernels.traced import Scalar
from pallas_gemm.kernels.work import CLAIM_SLOTS
from schedules import Schedule

TAG_BITS = work.WORD_BITS - PIECE_BITS


class Claims(NamedTuple):
    """The operand by which a kernel is told which tiles to claim, and in which order.

    Attributes:
        table: Every tile in visiting order, `work.CLAIM_BITS` wide and without a tag.
        board: A row for each worker, the mailbox where its claims are published to its own roles.
            The last row begins with the counter: how many tiles have been claimed beyond the first
            of each worker.
    """

    table: Any
    board: Any


def order_operand(schedule: Schedule, workers: int) -> Claims:
    """Returns the operand; what tiles are claimed with starts as zeros."""
    return Claims(
        jnp.asarray(work.Coding(bits=work.CLAIM_BITS).pack(schedule)),
        jax.new_ref(jnp.zeros((workers + 1, CLAIM_SLOTS), jnp.int32)),
    )


def walk(
    claims: Claims,
    worker: Scalar,
    workers: int,
    coding: work.Coding,
    claimant: Any | None,
    compute: tiles.Compute,
    carry: Any,
) -> tuple[Any, Any]:
    """See `tiles.Walk`; the pieces go to whichever worker is free.

    One of the worker's CTAs is the `claimant`; it is None in roles that never claim.
    """
    table, board = claims

    def running(state: tuple[Any, Any, Any]) -> Any:
        return (state[1] & jnp.int32(END)) != jnp.int32(END)

    def step(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        turn, entry, carry = state
        upcoming = board.at[worker, slot(turn + 1)]
        if claimant is not None:
            shifted = tag(turn + 1) << jnp.int32(PIECE_BITS)
            mailbox.claim(board.at[workers, 0], table, upcoming, shifted, claimant, workers)
        peeked = mailbox.peek(upcoming)
        carry = compute(turn, coding.unpack(entry), carry)
        return turn + 1, mailbox.resolve(upcoming, tag(turn + 1), peeked), carry

    turns, _, carry = lax.while_loop(running, step, (jnp.int32(0), table[worker], carry))
    return turns, carry


def slot(turn: Scalar) -> Any:
    """The place of a turn's word in the mailbox."""
    return lax.rem(turn, jnp.int32(CLAIM_SLOTS))


def tag(turn: Scalar) -> Any:
    """The tag of a turn's word. Zero, which an unused word has, is the tag of no early turn."""
    return (lax.div(turn, jnp.int32(CLAIM_SLOTS)) + 1) & jnp.int32((1 << TAG_BITS) - 1)
