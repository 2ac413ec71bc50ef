"""Rows in groups: which piece of work comes next, found while those before it are computed.

    sizes in global memory ──▶ the guide ──▶ words in shared memory ──▶ producer and consumers

The guide (`told.py`) adds up the sizes of the groups, from which follows how many pieces there
are. Then it finds its worker's, one after another: the order says in which row of tiles a piece is,
and from the group of the piece before, the guide goes on, or back, to the group that has this row.
It is up to `TOLD_SLOTS` pieces ahead of those who compute them, so that only the first one is
waited for. Each CTA of a cluster has its own guide, and all of them find the same.

    barrier     who arrives                                      who waits
    counted     the guide, when it knows how many pieces         each role that computes pieces

A tile has rows of one group alone. Negative sizes are those of empty groups. Sizes may say more
than there are rows: then groups end past the last one, where nothing is read or stored.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import groups, launch, tiles, work
from pallas_gemm.kernels.hopper.config import TOLD_HEADER
from pallas_gemm.kernels.hopper.cta import Cta
from pallas_gemm.kernels.hopper.groups import told
from pallas_gemm.kernels.hopper.plan import HopperPlan

PIECES, LAST_ROW = range(TOLD_HEADER)
"""The words before those of all slots: how many pieces there are, and the row after all groups."""
CODING = work.GroupCoding()
BEYOND = groups.MOST
"""A row of tiles that no group has."""
LOW = 64
"""Rows of a tile that multiplies a matrix in less time than memory has it."""

_INT32 = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=plgpu.Layout.WG_SPLAT)


class At(NamedTuple):
    """Where the guide is.

    Attributes:
        group: The group.
        row: Its first row.
        tile: Its first row of tiles.
        rows: How many rows it has.
    """

    group: Any
    row: Any
    tile: Any
    rows: Any


def share(cta: Cta, *, producing: bool) -> tiles.Share:
    """The pieces of this CTA's worker, for a role that computes them."""
    return _share_of_producer(cta) if producing else _share_of_consumer(cta)


def _share_of_producer(cta: Cta) -> tiles.Share:
    """It is told of a piece when it comes to it: the loads of the first await no second one."""

    def take(turn: Any) -> work.Piece:
        return CODING.unpack(*told.take(cta, turn))

    return tiles.Share(lambda: _count(cta), lambda turn: (turn,), take)


def _share_of_consumer(cta: Cta) -> tiles.Share:
    """It is told of a piece before it computes the one before, and waits for no word of it."""
    turns, every = _count(cta), cta.plan.config.ring_readers

    def load(turn: Any) -> tuple[Any, ...]:
        @pl.when(turn >= every)
        def _take_the_one_before() -> None:
            plgpu.barrier_arrive(cta.barriers.taken.at[told.slot(turn - every)])

        # Past the last piece nobody is told anything, and nobody looks at the words.
        @pl.when(turn < turns)
        def _until_told() -> None:
            plgpu.barrier_wait(cta.barriers.told.at[told.slot(turn)])

        return told.words(cta, turn)

    return tiles.Share(lambda: turns, load, CODING.unpack)


def _count(cta: Cta) -> Any:
    """How many pieces the worker has."""
    plgpu.barrier_wait(cta.barriers.counted)
    return told.read(cta, PIECES)


def last_row(cta: Cta) -> Any:
    """The row after all groups, for roles that know how many pieces they have."""
    return told.read(cta, LAST_ROW)


def guide(cta: Cta) -> None:
    """Finds the pieces of this CTA's worker, and tells the roles of each."""
    plan = cta.plan
    order: Any = plan.schedule
    worker = lax.axis_index(launch.WORKER)
    limit, height = jnp.int32(plan.problem.m), _height(plan)
    start = At(*(jnp.int32(0),) * 4)
    end = _find(cta, start, jnp.int32(BEYOND))
    rows = lax.min(end.tile, jnp.int32(order.grid[0]))
    sharing = _sharing(plan, rows)
    pieces = _up(rows * order.grid[1] - worker, sharing)
    pieces = lax.select(worker < sharing, pieces, jnp.int32(0))
    told.write(cta, PIECES, pieces)
    told.write(cta, LAST_ROW, lax.min(end.row, limit))
    plgpu.barrier_arrive(cta.barriers.counted)

    def tell(turn: Any, at: At) -> At:
        place = (worker + turn * sharing).astype(jnp.uint32)
        tile, col = (x.astype(jnp.int32) for x in order(place, rows.astype(jnp.uint32)))
        at = _find(cta, at, tile)
        first_row = at.row + (tile - at.tile) * height
        end_row = lax.min(at.row + at.rows, limit)
        told.tell(cta, turn, CODING.pack_group(at.group, col, first_row, end_row))
        return at

    lax.fori_loop(0, pieces, tell, start)
    told.until_all_are_taken(cta, pieces)


def _sharing(plan: HopperPlan, rows: Any) -> Any:
    """Returns how many workers share the pieces of these rows of tiles.

    No more than it takes for none of them to have a piece more, in whole rows of tiles: who
    computes a row at one time reads it once. Where tiles are low, it is memory that they wait for,
    and all are needed to keep it busy.
    """
    workers, columns = plan.workers, plan.schedule.grid[1]
    if _height(plan) <= LOW:
        return jnp.int32(workers)
    pieces = lax.max(rows, jnp.int32(1)) * columns
    turns = _up(pieces, workers)
    return lax.min(_up(_up(pieces, turns), columns) * columns, jnp.int32(workers))


def _up(number: Any, divisor: Any) -> Any:
    """Divides, and rounds up."""
    divisor = jnp.asarray(divisor, jnp.int32)
    return lax.div(number + (divisor - 1), divisor)


def _find(cta: Cta, at: At, tile: Any) -> At:
    """Returns the group that has a row of tiles; where all groups end, if there is no such row."""
    plan, sizes = cta.plan, cta.gmem.order
    if plan.simulated:
        return _find_one_by_one(plan, sizes, at, tile)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *(plgpu.Layout.WG_SPLAT,) * 4), return_type=[_INT32] * 4
    )
    def inline(_: Any, sizes: Any, *values: Any) -> list[Any]:
        int32 = utils.ir.IntegerType.get_signless(32)
        found = utils.inline_ptx(
            find_ptx(plan.problem.groups, plan.problem.m, _height(plan)),
            utils.memref_ptr(sizes),
            *(value.registers.item() for value in values),
            result_types=[int32] * 4,
            has_side_effects=True,
            convergent=True,
        )
        return [mgpu.FragmentedArray.splat(word, (), is_signed=True) for word in found]

    return At(*inline(sizes, *at[:3], tile))


def _find_one_by_one(plan: HopperPlan, sizes: Any, at: At, tile: Any) -> At:
    """See `_find`: what the lanes of a warp do together, for the simulator."""
    count = plan.problem.groups

    def size(group: Any) -> Any:
        return jnp.clip(sizes[lax.min(group, jnp.int32(count - 1))], 0, plan.problem.m)

    def end(at: At) -> Any:
        return groups.added(at.tile, groups.tiles(at.rows, _height(plan)))

    def is_before(at: At) -> Any:
        return (at.group < count) & (end(at) <= tile)

    def following(at: At) -> At:
        rows = lax.select(at.group + 1 < count, size(at.group + 1), jnp.int32(0))
        return At(at.group + 1, groups.added(at.row, at.rows), end(at), rows)

    back = tile < at.tile
    group, row, first = (lax.select(back, jnp.int32(0), x) for x in at[:3])
    return lax.while_loop(is_before, following, At(group, row, first, size(group)))


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


def find_ptx(groups: int, limit: int, height: int) -> str:
    """Returns what a warp finds a group by, 32 at a time: each lane reads the size of one.

    The sums of all sizes up to each lane's take five steps, in which a lane adds what one has that
    is 1, 2, 4, 8 and 16 before it. The first lane whose sum is beyond the row of tiles has the
    group, which begins where the one before it ends. Sums that are carried on are `BEYOND` at most.
    Those of 32 sizes are no larger: an order has fewer than 2^16 rows of tiles.
    """
    numbers = {"groups": groups, "limit": limit, "height": height, "rounded": height - 1}
    return _FIND.format(**numbers, scan=_SCAN, beyond=BEYOND)


def _height(plan: HopperPlan) -> int:
    """Rows of a cluster's tile."""
    return plan.config.out_tile(plan.problem)[0] * plan.config.cluster[0]
