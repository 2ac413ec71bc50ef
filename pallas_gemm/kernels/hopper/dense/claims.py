"""Dynamic persistence on Hopper: tiles are claimed from a counter in global memory.

One CTA of each cluster claims for all of it. At the start of each tile its producer adds one to the
counter, looks the number up in the table, and publishes the entry in the cluster's *mailbox*, a
ring of words in global memory that all roles of all CTAs of the cluster read a tile later:

    word = tag (6 bits) | row (13 bits) | col (13 bits)        row = col = all ones: no tile is left

A word is a whole message, so relaxed accesses are enough. Its tag says for which round through the
ring it was written: a reader that sees an older tag reads again. CTAs that share an operand are at
most a ring of operand slots apart, and any two CTAs of a cluster share one with a third: a writer
is at most twice as many turns ahead of a reader as there are stages, plus one, and `SLOTS` is more.

Mailboxes and counter are one array, made of zeros for every call (a few kilobytes) by one small
kernel, so that the call stays pure and can be replayed in a CUDA graph.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import tiles, work
from schedules import Schedule

SLOTS = 64
PIECE_BITS = 2 * work.CLAIM_BITS
TAG_BITS = work.WORD_BITS - PIECE_BITS
END = (1 << PIECE_BITS) - 1

_CLAIM = f"""{{
    .reg .pred idle, inside; .reg .u32 number, word; .reg .u64 entry;
    setp.eq.u32 idle, $5, 0;
    @idle bra CLAIMED;
    atom.relaxed.gpu.global.add.u32 number, [$0], 1;
    add.u32 number, number, $4;
    mov.u32 word, {END};
    setp.lt.u32 inside, number, $6;
    mad.wide.u32 entry, number, 4, $1;
    @inside ld.global.b32 word, [entry];
    or.b32 word, word, $3;
    st.relaxed.gpu.global.b32 [$2], word;
    CLAIMED:
}}"""

_RESOLVE = f"""{{
    .reg .pred old; .reg .u32 tag;
    mov.u32 $0, $2;
    RESOLVE:
    shr.u32 tag, $0, {PIECE_BITS};
    setp.eq.u32 old, tag, $3;
    @old bra RESOLVED;
    ld.relaxed.gpu.global.b32 $0, [$1];
    bra RESOLVE;
    RESOLVED:
}}"""

_PEEK = "ld.relaxed.gpu.global.b32 $0, [$1];"

_INT32 = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=plgpu.Layout.WG_SPLAT)


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
        jax.new_ref(jnp.zeros((workers + 1, SLOTS), jnp.int32)),
    )


def walk(
    claims: Claims,
    worker: Any,
    workers: int,
    coding: work.Coding,
    claimant: Any | None,
    compute: tiles.Compute,
    carry: Any,
) -> tuple[Any, Any]:
    """See `tiles.Walk`; the pieces go to whichever worker is free.

    One of the worker's thread blocks is the `claimant`; it is None in roles that never claim.
    """
    table, board = claims

    def running(state: tuple[Any, Any, Any]) -> Any:
        return (state[1] & jnp.int32(END)) != jnp.int32(END)

    def step(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        turn, entry, carry = state
        upcoming = board.at[worker, slot(turn + 1)]
        if claimant is not None:
            claim(board.at[workers, 0], table, upcoming, turn + 1, workers, claimant)
        peeked = peek(upcoming)
        carry = compute(turn, coding.unpack(entry), carry)
        return turn + 1, resolve(upcoming, turn + 1, peeked), carry

    turns, _, carry = lax.while_loop(running, step, (jnp.int32(0), table[worker], carry))
    return turns, carry


def slot(turn: Any) -> Any:
    """The place of a turn's word in the mailbox."""
    return lax.rem(turn, jnp.int32(SLOTS))


def tag(turn: Any) -> Any:
    """The tag of a turn's word. Zero, which an unused word has, is the tag of no early turn."""
    return (lax.div(turn, jnp.int32(SLOTS)) + 1) & jnp.int32((1 << TAG_BITS) - 1)


def claim(counter: Any, table: Any, mailbox: Any, turn: Any, workers: int, claimant: Any) -> None:
    """Claims the next tile and publishes it for `turn`, if `claimant` is not zero."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),) * 3 + (plgpu.Layout.WG_SPLAT,) * 2,
    )
    def inline(_: Any, counter: Any, table: Any, mailbox: Any, tag: Any, claimant: Any) -> None:
        int32 = utils.ir.IntegerType.get_signless(32)
        tiles = utils.ir.MemRefType(table.type).shape[0]
        one_thread = utils.arith.extui(
            int32, utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)
        )
        utils.inline_ptx(
            _CLAIM,
            *(utils.memref_ptr(ref) for ref in (counter, table, mailbox)),
            _word(tag),
            utils.c(workers, int32),
            utils.arith.muli(_word(claimant), one_thread),
            utils.c(tiles, int32),
            has_side_effects=True,
        )

    shifted = tag(turn) << jnp.int32(PIECE_BITS)
    inline(counter, table, mailbox, shifted, claimant)


def peek(mailbox: Any) -> Any:
    """Starts to read the word of a turn, which may not have been written yet."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_INT32)
    def inline(_: Any, mailbox: Any) -> Any:
        return _scalar(_PEEK, utils.memref_ptr(mailbox))

    return inline(mailbox)


def resolve(mailbox: Any, turn: Any, peeked: Any) -> Any:
    """Returns the word of a turn: the one that was `peeked`, or else as soon as it is written."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT, plgpu.Layout.WG_SPLAT),
        return_type=_INT32,
    )
    def inline(_: Any, mailbox: Any, peeked: Any, tag: Any) -> Any:
        return _scalar(_RESOLVE, utils.memref_ptr(mailbox), _word(peeked), _word(tag))

    return inline(mailbox, peeked, tag(turn))


def _word(value: Any) -> Any:
    return value.registers.item()


def _scalar(ptx: str, *args: Any) -> Any:
    int32 = utils.ir.IntegerType.get_signless(32)
    word = utils.inline_ptx(ptx, *args, result_types=int32, has_side_effects=True)
    return mgpu.FragmentedArray.splat(word, (), is_signed=True)
