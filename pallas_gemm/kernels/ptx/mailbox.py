"""Tiles that one thread claims for a cluster, by words in global memory (`dense/claims.py`).

Nothing simulated claims, unless the simulator is taught to (`tests/ptx_simulator.py`).
"""

from typing import Any

from pallas_gemm.kernels import work
from pallas_gemm.kernels.hardware import WARPGROUP_THREADS
from pallas_gemm.kernels.ptx.operation import Ptx
from pallas_gemm.kernels.traced import Ref

PIECE_BITS = 2 * work.CLAIM_BITS
END = (1 << PIECE_BITS) - 1
"""Says that no tile is left."""

CLAIM = f"""{{{{
    .reg .pred mine, inside; .reg .u32 thread, number, word; .reg .u64 entry;
    mov.u32 thread, %tid.x;
    and.b32 thread, thread, {WARPGROUP_THREADS - 1};
    setp.eq.u32 mine, thread, 0;
    setp.ne.and.u32 mine, $4, 0, mine;
    mov.u32 number, 0;
    @mine atom.relaxed.gpu.global.add.u32 number, [$0], 1;
    add.u32 number, number, {{workers}};
    mov.u32 word, {END};
    setp.lt.u32 inside, number, {{tiles}};
    and.pred inside, inside, mine;
    mad.wide.u32 entry, number, 4, $1;
    @inside ld.global.b32 word, [entry];
    or.b32 word, word, $3;
    @mine st.relaxed.gpu.global.b32 [$2], word;
}}}}"""
"""The part of the first thread of a warpgroup; there are `workers` and `tiles`."""

RESOLVE = Ptx(
    f"""{{
        .reg .pred old; .reg .u32 tag;
        mov.u32 $0, $2;
        RESOLVE:
        shr.u32 tag, $0, {PIECE_BITS};
        setp.eq.u32 old, tag, $3;
        @old bra RESOLVED;
        ld.relaxed.gpu.global.b32 $0, [$1];
        bra RESOLVE;
        RESOLVED:
    }}""",
    results=1,
)

PEEK = Ptx("ld.relaxed.gpu.global.b32 $0, [$1];", results=1)


def claim(counter: Any, table: Any, mailbox: Ref, tag: Any, claimant: Any, workers: int) -> None:
    """Claims the next tile and publishes it with a tag, if `claimant` is not zero."""
    text = CLAIM.format(workers=workers, tiles=table.shape[0])
    Ptx(text)([counter, table, mailbox], [tag, claimant])


def peek(mailbox: Ref) -> Any:
    """Starts to read the word of a turn, which may not have been written yet."""
    return PEEK([mailbox])[0]


def resolve(mailbox: Ref, tag: Any, peeked: Any) -> Any:
    """Returns the word with a tag: the one that was `peeked`, or else as soon as it is written."""
    return RESOLVE([mailbox], [peeked, tag])[0]
