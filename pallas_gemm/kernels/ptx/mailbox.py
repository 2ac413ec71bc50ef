"""Tiles that one thread claims for a cluster, by words in global memory (`dense/claims.py`).

Nothing simulated claims.
"""

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import work
from pallas_gemm.kernels.ptx.operation import INT32, NUMBER, REF, number_by, word_of

PIECE_BITS = 2 * work.CLAIM_BITS
END = (1 << PIECE_BITS) - 1
"""Says that no tile is left."""

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


def claim(counter: Any, table: Any, mailbox: Any, tag: Any, claimant: Any, workers: int) -> None:
    """Claims the next tile and publishes it with a tag, if `claimant` is not zero."""

    @plgpu.inline_mgpu(
        arg_types=(REF,) * 3 + (NUMBER,) * 2,
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
            word_of(tag),
            utils.c(workers, int32),
            utils.arith.muli(word_of(claimant), one_thread),
            utils.c(tiles, int32),
            has_side_effects=True,
        )

    inline(counter, table, mailbox, tag, claimant)


def peek(mailbox: Any) -> Any:
    """Starts to read the word of a turn, which may not have been written yet."""

    @plgpu.inline_mgpu(arg_types=(REF,), return_type=INT32)
    def inline(_: Any, mailbox: Any) -> Any:
        return number_by(_PEEK, utils.memref_ptr(mailbox))

    return inline(mailbox)


def resolve(mailbox: Any, tag: Any, peeked: Any) -> Any:
    """Returns the word with a tag: the one that was `peeked`, or else as soon as it is written."""

    @plgpu.inline_mgpu(
        arg_types=(REF, NUMBER, NUMBER),
        return_type=INT32,
    )
    def inline(_: Any, mailbox: Any, peeked: Any, tag: Any) -> Any:
        return number_by(_RESOLVE, utils.memref_ptr(mailbox), word_of(peeked), word_of(tag))

    return inline(mailbox, peeked, tag)
