"""The group that a row of tiles is in: the lanes of a warp find it together."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_gemm.kernels import groups
from pallas_gemm.kernels.ptx.operation import Operation, Ptx
from pallas_gemm.kernels.traced import Scalar

BEYOND = groups.MOST
"""A row of tiles that no group has."""

_SCAN = "\n".join(
    f"shfl.sync.up.b32 other|has, {sums}, {distance}, 0, 0xffffffff;"
    f" @has add.u32 {sums}, {sums}, other;"
    for distance in (1, 2, 4, 8, 16)
    for sums in ("rows", "tiles")
)

_FIND = """{{
    .reg .pred back, inside, has, any; .reg .u64 place;
    .reg .u32 lane, group, row, tile, own, size, high, rows, tiles, other, who;
    mov.u32 lane, %laneid;
    setp.lt.s32 back, $8, $7;
    selp.u32 group, 0, $5, back;
    selp.u32 row, 0, $6, back;
    selp.u32 tile, 0, $7, back;
    NEXT:
    add.u32 own, group, lane;
    setp.lt.u32 inside, own, {groups};
    mad.wide.u32 place, own, 4, $4;
    mov.u32 size, 0;
    @inside ld.global.b32 size, [place];
    max.s32 size, size, 0;
    min.s32 size, size, {limit};
    add.u32 high, size, {rounded};
    div.u32 high, high, {height};
    mov.u32 rows, size;
    mov.u32 tiles, high;
    {scan}
    add.u32 rows, rows, row;
    min.u32 rows, rows, {beyond};
    add.u32 tiles, tiles, tile;
    min.u32 tiles, tiles, {beyond};
    setp.gt.s32 has, tiles, $8;
    vote.sync.ballot.b32 who, has, 0xffffffff;
    setp.ne.u32 any, who, 0;
    @any bra FOUND;
    shfl.sync.idx.b32 row, rows, 31, 31, 0xffffffff;
    shfl.sync.idx.b32 tile, tiles, 31, 31, 0xffffffff;
    add.u32 group, group, 32;
    setp.lt.u32 any, group, {groups};
    @any bra NEXT;
    mov.u32 size, 0;
    bra END;
    FOUND:
    brev.b32 who, who;
    clz.b32 who, who;
    shfl.sync.idx.b32 size, size, who, 31, 0xffffffff;
    add.u32 group, group, who;
    setp.ne.u32 has, who, 0;
    sub.u32 who, who, 1;
    shfl.sync.idx.b32 other, rows, who, 31, 0xffffffff;
    @has mov.u32 row, other;
    shfl.sync.idx.b32 other, tiles, who, 31, 0xffffffff;
    @has mov.u32 tile, other;
    END:
    mov.u32 $0, group;
    mov.u32 $1, row;
    mov.u32 $2, tile;
    mov.u32 $3, size;
}}"""


class Groups(NamedTuple):
    """The facts about groups that are known before a kernel runs.

    Attributes:
        count: How many there are.
        limit: Rows of all of them.
        height: Rows of a tile.
    """

    count: int
    limit: int
    height: int


class At(NamedTuple):
    """A group that was found, and where it begins.

    Attributes:
        group: The group.
        row: Its first row.
        tile: Its first row of tiles.
        rows: How many rows it has.
    """

    group: Scalar
    row: Scalar
    tile: Any
    rows: Any


@Operation
def find(sizes: Any, at: At, tile: Any, known: Groups) -> At:
    """Returns the group that has a row of tiles; where all groups end, if there is no such row."""
    return At(*Ptx(find_ptx(*known), results=4, convergent=True)([sizes], [*at[:3], tile]))


def find_one_by_one(sizes: Any, at: At, tile: Any, known: Groups) -> At:
    """See `find`: what the lanes of a warp do together."""
    count, limit, height = known

    def size(group: Scalar) -> Any:
        return jnp.clip(sizes[lax.min(group, jnp.int32(count - 1))], 0, limit)

    def end(at: At) -> Any:
        return groups.added(at.tile, groups.tiles(at.rows, height))

    def is_before(at: At) -> Any:
        return (at.group < count) & (end(at) <= tile)

    def following(at: At) -> At:
        rows = lax.select(at.group + 1 < count, size(at.group + 1), jnp.int32(0))
        return At(at.group + 1, groups.added(at.row, at.rows), end(at), rows)

    back = tile < at.tile
    group, row, first = (lax.select(back, jnp.int32(0), x) for x in at[:3])
    return lax.while_loop(is_before, following, At(group, row, first, size(group)))


find.meaning(find_one_by_one)


def find_ptx(groups: int, limit: int, height: int) -> str:
    """Returns what a warp finds a group by, 32 at a time: each lane reads the size of one.

    The sums of all sizes up to each lane's take five steps, in which a lane adds what one has that
    is 1, 2, 4, 8 and 16 before it. The first lane whose sum is beyond the row of tiles has the
    group, which begins where the one before it ends. Sums that are carried on are `BEYOND` at most.
    Those of 32 sizes are no larger: an order has fewer than 2^16 rows of tiles.
    """
    numbers = {"groups": groups, "limit": limit, "height": height, "rounded": height - 1}
    return _FIND.format(**numbers, scan=_SCAN, beyond=BEYOND)
