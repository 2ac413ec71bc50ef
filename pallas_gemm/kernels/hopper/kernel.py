"""The Hopper kernel: one warp-specialised GEMM from which every Hopper result comes.

    TMA ──▶ ring of slots in shared memory ──▶ WGMMA ──▶ registers ──▶ shared memory ──▶ TMA

Roles (in one CTA; a *thread* of Pallas is a warpgroup, 128 CUDA threads)
    warpgroup             role        does
    0 .. consumers-1      consumer    issues WGMMA, keeps the accumulator in registers, and stores
                                      finished tiles (the epilogue)
    consumers             producer    issues every TMA load; its first warp does, the other three
                                      sleep (all four walk along when tiles are claimed), or send
                                      rows to other devices (`carrier.py`)

    Cooperative consumers share each tile, by rows where it is tall enough, else by columns.
    Ping-pong consumers take whole tiles in turn: one runs its epilogue while the other multiplies.

Barriers (`protocol.py` derives the arrival counts)
    name          who arrives                                    who waits
    full[s]       the producer, once per TMA copy, and TMA       the consumers that read slot s
                  with the bytes of the copies
    empty[s]      one thread of each consumer that read slot     the producer, before it fills slot
                  s, in every CTA that it was multicast to       s again
    turn[w]       the other ping-pong consumer, when it has      ping-pong consumer w, before the
                  issued the last WGMMA of its tile              first WGMMA of its tile
    residual[x]   TMA with the residual's bytes                  the consumer that owns store slot x

    Each ping-pong consumer has `full` and `empty` barriers of its own; `ring.py` says why.

Timeline (steps are numbered through all tiles, so that the loads of the next tile overlap the
epilogue of this one; nothing drains the ring before the last tile)
    producer    per tile: read the next tile's entry
                per k:    wait empty[s], unless the slot is new; TMA a, TMA b ──▶ full[s]; where
                          the operands are in pieces, of one piece after the other
                at exit:  wait for every slot, so that no peer arrives on a CTA that has left
    consumer    per tile: read the next tile's entry; zero the accumulator
                per k:    wait full[s]; WGMMA; wait until only that one is in flight; arrive
                          empty[s-1]; with `late_store`, in the first k steps: store one chunk of
                          the previous tile while the WGMMA runs
                tile end: wait for the last WGMMA; arrive empty[s]; finish and round; without
                          `late_store`: store chunk by chunk
    a chunk     wait until its slot's last store has been read; registers ──▶ slot; TMA store

Several devices (`exchange.py`)
    gathered    each CTA computes the tiles of its own device's rows first, then those of the next
                device, whose arrival the producer awaits; a tile's rows come from `every`
    scattered   the tiles of the next device's rows first, those of its own last; a chunk is stored
                in the memory of its rows' device, in steps spread over the next tile's k loop
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import epilogue, place, smem, tiles, work
from pallas_gemm.kernels.hopper import carrier, claims, exchange, lines, ring
from pallas_gemm.kernels.hopper.config import WGMMA_ROWS
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.kernels.operand import OperandPlan


class Smem(NamedTuple):
    """The ring of operand slots, and the store slots of the epilogue.

    Attributes:
        a: Slots of the left operand.
        b: Slots of the right operand.
        out: Store slots for TMA, for each width of a chunk; none if threads store the result and
            no residual is loaded.
        lines: Store slots for threads, or None.
        simulated: Whether the kernel runs in the simulator.
    """

    a: smem.Boxed
    b: smem.Boxed
    out: tuple[smem.Boxed, ...]
    lines: Any
    simulated: bool


class Barriers(NamedTuple):
    """See the table in the module's docstring; None for what a kernel has not."""

    full: Any
    empty: Any
    turn: Any
    residual: Any


class Tile(NamedTuple):
    """A part of the result in registers: the sum, or what is stored late, finished and rounded."""

    values: Any
    at: place.Where


def producer(
    plan: HopperPlan, source: tiles.TileSource, gmem: place.Gmem, slots: Smem, barriers: Barriers
) -> None:
    """Fills the ring, tile after tile."""
    stages = plan.config.stages

    def one_tile(turn: Any, piece: work.Piece, head: ring.Head) -> ring.Head:
        at = _place(plan, piece, gmem.rank)
        reader = turn & 1
        if plan.gathers:
            pl.when(at.turn > 0)(functools.partial(_await_rows, plan, gmem, at))

        def one_step(part: place.Gmem, before: int, k: Any, head: ring.Head) -> ring.Head:
            @pl.when(turn * plan.k_steps + (k + before if before else k) >= stages)
            def _until_free() -> None:
                plgpu.barrier_wait(barriers.empty.at[ring.last_barrier(plan, *head)])

            full = barriers.full.at[ring.barrier(plan, head.slot, reader)]
            k_start = k * plan.tile_k
            _load_left(plan, part, at, k_start, slots.a, head.slot, full)
            _load_operand(plan.b, part.b, at.batch, at.col, k_start, slots.b, head.slot, full)
            return ring.advance(plan, head, reader)

        before = 0
        for part, steps in zip(_pieces(plan, gmem), plan.piece_steps, strict=True):
            head = lax.fori_loop(0, steps, functools.partial(one_step, part, before), head)
            before += steps
        return head

    turns, head = source.walk(one_tile, ring.start(plan))

    @pl.loop(0, lax.min(turns * plan.k_steps, jnp.int32(stages)))
    def _drain(slot: Any) -> None:
        plgpu.barrier_wait(barriers.empty.at[ring.last_barrier(plan, slot, head.readers)])


def consumer(
    plan: HopperPlan, source: tiles.TileSource, gmem: place.Gmem, slots: Smem, barriers: Barriers
) -> None:
    """Multiplies what the producer loaded and stores the tiles."""
    me = lax.axis_index("warpgroup")
    chunks = range(len(plan.chunks))

    def one_tile(turn: Any, piece: work.Piece, previous: Tile | None) -> Tile | None:
        at = _place(plan, piece, gmem.rank, me)

        def store_previous(chunk: int) -> None:
            if previous is not None:
                run = functools.partial(store, plan, me, previous, chunk, gmem, slots, barriers)
                pl.when(turn > 0)(run)

        fetch_residual(plan, me, at, range(plan.config.store_slots), gmem, slots, barriers)
        total = pl.run_scoped(
            lambda acc: multiply(plan, me, turn, acc, slots, barriers, store_previous),
            plgpu.ACC(plan.config.consumer_tile, plan.problem.accumulator_dtype),
        )
        if plan.config.late_store:
            return Tile(_finish_all(plan, total, at, gmem), at)
        for chunk in chunks:
            store(plan, me, Tile(total, at), chunk, gmem, slots, barriers)
        return None

    if plan.config.pingpong:
        _take_turns(plan, source, one_tile, barriers)
    elif plan.config.late_store:
        nothing = jnp.zeros(plan.out_tile, plan.problem.out_dtype)
        nothing = plgpu.layout_cast(nothing, plgpu.Layout.WGMMA)
        nowhere = _place(plan, _coding(plan).piece(jnp.int32(0), jnp.int32(0)), gmem.rank, me)
        turns, last = source.walk(one_tile, Tile(nothing, nowhere))

        @pl.when(turns > 0)
        def _store_the_last() -> None:
            for chunk in chunks:
                store(plan, me, last, chunk, gmem, slots, barriers)

    else:
        source.walk(one_tile, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _take_turns(
    plan: HopperPlan, source: tiles.TileSource, one_tile: tiles.Compute, barriers: Barriers
) -> None:
    """Walks every other tile; the first turn is free, and the last one given is taken back."""
    me = lax.axis_index("warpgroup")

    @pl.when(me == 1)
    def _give_the_first_turn() -> None:
        plgpu.barrier_arrive(barriers.turn.at[0])

    turns, _ = source.walk(one_tile, None, first=me, every=plan.config.consumers)

    @pl.when(me == lax.rem(turns, jnp.int32(plan.config.consumers)))
    def _take_back_the_last_turn() -> None:
        plgpu.barrier_wait(barriers.turn.at[me])


def multiply(
    plan: HopperPlan,
    me: Any,
    turn: Any,
    acc: Any,
    slots: Smem,
    barriers: Barriers,
    store_previous: Callable[[int], None],
) -> Any:
    """Runs the k loop of one tile and returns the accumulator's value.

    While the first WGMMAs run, the previous tile is stored, one chunk per step.
    """
    chunks = len(plan.chunks) if plan.config.late_store else 0

    def issue(slot: Any) -> None:
        plgpu.barrier_wait(barriers.full.at[ring.barrier(plan, slot, me)])
        _issue_wgmma(plan, me, acc, slots, slot)

    def release(slot: Any) -> None:
        plgpu.barrier_arrive(barriers.empty.at[ring.barrier(plan, slot, me)])

    def advance(k: Any, reached: ring.Reached) -> ring.Reached:
        before, slot = ring.step(plan, turn, k, reached)
        issue(slot)
        plgpu.wgmma_wait(plan.wgmmas_per_step)
        release(before)
        return ring.reached(plan, slot)

    if plan.config.pingpong:
        plgpu.barrier_wait(barriers.turn.at[me])
    slot = ring.first_slot(plan, turn)
    issue(slot)
    reached, issued = ring.reached(plan, slot), 1
    for chunk, k in enumerate(plan.store_steps):
        if k == issued:
            reached = advance(jnp.int32(k), reached)
        elif k > issued:
            reached = lax.fori_loop(issued, k + 1, advance, reached)
        store_previous(chunk)
        issued = k + 1
    reached = lax.fori_loop(issued, plan.k_steps, advance, reached)
    for chunk in range(len(plan.store_steps), chunks):
        store_previous(chunk)
    if plan.config.pingpong:
        plgpu.barrier_arrive(barriers.turn.at[1 - me])
    total = acc[...]  # Waits for every WGMMA in flight.
    release(ring.last_slot(plan, turn, reached))
    return total


def finish(
    plan: HopperPlan, total: Any, at: place.Where, rows: slice, cols: slice, gmem: place.Gmem
) -> Any:
    """Applies the epilogue to some of the sums of a tile."""
    up, bias, axis = None, None, 0 if plan.problem.transpose_out else 1
    if plan.problem.epilogue.gated:
        beyond = plan.out_tile[1]
        up = total[rows, cols.start + beyond : cols.stop + beyond]
    if plan.problem.epilogue.bias:
        here, part = ((at.row, rows), (at.col, cols))[axis]
        bias = gmem.bias.at[pl.ds(here + part.start, part.stop - part.start)]
        # The layout that a sum over the other axis would have.
        bias = plgpu.load(bias, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)
    return epilogue.finish(plan.problem, total[rows, cols], up, bias, axis)


def _finish_all(plan: HopperPlan, total: Any, at: place.Where, gmem: place.Gmem) -> Any:
    """Finishes a whole tile, some columns at a time where the epilogue takes registers."""
    if plan.problem.epilogue.is_identity:
        return total.astype(plan.problem.out_dtype)
    rows = slice(0, plan.out_tile[0])
    strips = [finish(plan, total, at, rows, cols, gmem) for cols in plan.strips(plan.out_tile[1])]
    return lax.concatenate(strips, 1)


def store(
    plan: HopperPlan,
    me: Any,
    tile: Tile,
    number: int,
    gmem: place.Gmem,
    slots: Smem,
    barriers: Barriers,
) -> None:
    """Stores one chunk of a consumer's tile, through shared memory.

    Unless it is stored late, the chunk is finished here, because the registers that its epilogue
    needs are free only a chunk at a time.
    """
    config = plan.config
    if config.late_store:
        chunk = plan.chunks[number]
        rows = slice(chunk.row, chunk.row + chunk.rows)
        values = tile.values[rows, chunk.col : chunk.col + chunk.cols]
    else:
        values = _finish_chunk(plan, me, tile, number, gmem, slots, barriers)
    if plan.stored_by_tma:
        _store_by_tma(plan, me, tile.at, values, number, gmem, slots)
    else:
        _store_by_threads(plan, me, tile.at, values, number, gmem, slots)
    following = number + config.store_slots
    if following < len(plan.chunks):
        fetch_residual(plan, me, tile.at, (following,), gmem, slots, barriers)


def _finish_chunk(
    plan: HopperPlan,
    me: Any,
    tile: Tile,
    number: int,
    gmem: place.Gmem,
    slots: Smem,
    barriers: Barriers,
) -> Any:
    """Finishes one chunk of a tile's sums, with its residual."""
    chunk = plan.chunks[number]
    rows = slice(chunk.row, chunk.row + chunk.rows)
    finished, residual = [], None
    for strip in plan.strips(chunk.cols):
        cols = slice(chunk.col + strip.start, chunk.col + strip.stop)
        values = finish(plan, tile.values, tile.at, rows, cols, gmem)
        if plan.problem.epilogue.residual:
            if residual is None:
                plgpu.barrier_wait(barriers.residual.at[_residual_barrier(plan, me, number)])
                residual = _view(plan, slots, me, number).tile[...]
            values = epilogue.add_residual(plan.problem, values, residual[:, strip])
        finished.append(values)
    return finished[0] if len(finished) == 1 else lax.concatenate(finished, 1)


def _store_by_tma(
    plan: HopperPlan,
    me: Any,
    at: place.Where,
    values: Any,
    number: int,
    gmem: place.Gmem,
    slots: Smem,
) -> None:
    if not plan.problem.epilogue.residual:
        plgpu.wait_smem_to_gmem(plan.stores_in_flight(number), wait_read_only=True)
    view = _view(plan, slots, me, number)
    target = view.tile.transpose((1, 0)) if plan.problem.transpose_out else view.tile
    target[...] = values
    plgpu.commit_smem()
    if not plan.scatters:
        plgpu.copy_smem_to_gmem(view.box, _chunk(plan, gmem.out, at, number))
        return
    # A descriptor of TMA is for the memory of one device.
    for turn, owner in enumerate(gmem.owners):

        @pl.when(at.turn == turn)
        def _to_its_owner(owner: Any = owner) -> None:
            there = exchange.on_device(gmem.out, owner).at[gmem.rank]
            plgpu.copy_smem_to_gmem(view.box, _chunk(plan, there, at, number))


def _store_by_threads(
    plan: HopperPlan,
    me: Any,
    at: place.Where,
    values: Any,
    number: int,
    gmem: place.Gmem,
    slots: Smem,
) -> None:
    """Here, `commit_smem` is a barrier of the consumer's threads.

    A thread that is through the barrier of one chunk has read all that it stores of the chunk
    before, whose slot may then be used again.
    """
    chunk = plan.chunks[number]
    rows, cols = at.row + chunk.row, at.col + chunk.col
    first, shape = (rows, cols), (chunk.rows, chunk.cols)
    if plan.problem.transpose_out:
        first, shape = first[::-1], shape[::-1]
    slot = slots.lines.at[me, number % plan.config.store_slots, : shape[0], : shape[1]]
    if plan.stores_in_flight(number) == 0:
        plgpu.commit_smem()
    simulated = slots.simulated
    lines.write(slot, values, transposed=plan.problem.transpose_out, simulated=simulated)
    plgpu.commit_smem()
    result = place.matrix(gmem.out, at.batch)
    lines.store(slot, result, first, plan.rest(number), simulated=simulated)


def _view(plan: HopperPlan, slots: Smem, me: Any, number: int) -> smem.Boxed:
    """Both views of a chunk's slot."""
    views = slots.out[plan.store_widths.index(plan.chunks[number].cols)]
    return smem.Boxed(*(view.at[me, plan.store_slot(number)] for view in views))


def fetch_residual(
    plan: HopperPlan,
    me: Any,
    at: place.Where,
    chunks: Iterable[int],
    gmem: place.Gmem,
    slots: Smem,
    barriers: Barriers,
) -> None:
    """Starts to load chunks of the residual into the store slots that will hold their sums."""
    if not plan.problem.epilogue.residual:
        return
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for chunk in chunks:
        if chunk < len(plan.chunks):
            plgpu.copy_gmem_to_smem(
                _chunk(plan, gmem.residual, at, chunk),
                _view(plan, slots, me, chunk).box,
                barriers.residual.at[_residual_barrier(plan, me, chunk)],
            )


def _residual_barrier(plan: HopperPlan, me: Any, chunk: int) -> Any:
    return me * plan.config.store_slots + chunk % plan.config.store_slots


def _chunk(plan: HopperPlan, gmem: Any, at: place.Where, number: int) -> Any:
    """The part of the result, or of the residual, that a chunk of a consumer's tile covers."""
    chunk = plan.chunks[number]
    rows, cols = pl.ds(at.row + chunk.row, chunk.rows), pl.ds(at.col + chunk.col, chunk.cols)
    here = (cols, rows) if plan.problem.transpose_out else (rows, cols)
    return place.matrix(gmem, at.batch).at[here]


def _issue_wgmma(plan: HopperPlan, me: Any, acc: Any, slots: Smem, slot: Any) -> None:
    rows, cols = plan.config.consumer_tile
    shared = not plan.config.pingpong
    my_row = me * rows if shared and plan.config.split_rows else 0
    my_col = me * cols if shared and not plan.config.split_rows else 0
    # Stored [k, m], the left operand lies in panels of 64 rows, and a gated result has a right
    # operand in two parts: one WGMMA for each pair of them, on its own part of the accumulator.
    panels = rows // WGMMA_ROWS if plan.a.paneled else 1
    height, width = rows // panels, cols // plan.b.parts
    for panel, part in itertools.product(range(panels), range(plan.b.parts)):
        b = slots.b.tile.at[part, slot]
        if plan.b.k_major:
            b = b.at[pl.ds(my_col, width)].transpose((1, 0))
        else:
            b = b.at[:, pl.ds(my_col, width)]
        a = slots.a.tile.at[0, slot]
        if plan.a.k_major:
            a = a.at[pl.ds(my_row, rows)]
        else:
            a = a.at[my_row // WGMMA_ROWS + panel].transpose((1, 0))
        if plan.wgmmas_per_step == 1:
            plgpu.wgmma(acc, a, b)
        else:
            plgpu.wgmma(acc.at[pl.ds(panel * height, height), pl.ds(part * width, width)], a, b)


def _await_rows(plan: HopperPlan, gmem: place.Gmem, at: place.Where) -> None:
    """Waits until the rows of the device whose turn it is are here."""
    sent = carrier.loads(plan.exchanged_rows * plan.problem.k * plan.a.dtype.itemsize)
    owner = plan.exchange.owner(gmem.rank, at.turn)
    pl.semaphore_wait(gmem.arrived.at[owner], sent, decrement=False)


def _load_left(
    plan: HopperPlan,
    gmem: place.Gmem,
    at: place.Where,
    k_start: Any,
    ring: smem.Boxed,
    slot: Any,
    full: Any,
) -> None:
    """Loads a part of the left operand: this device's rows from where they are."""
    load = functools.partial(_load_operand, plan.a)
    if not plan.gathers:
        load(gmem.a, at.batch, at.row, k_start, ring, slot, full)
        return
    own = lax.rem(at.row, jnp.int32(plan.exchanged_rows))
    pl.when(at.turn == 0)(lambda: load(gmem.a, None, own, k_start, ring, slot, full))
    pl.when(at.turn > 0)(lambda: load((gmem.every,), None, at.row, k_start, ring, slot, full))


def _load_operand(
    operand: OperandPlan,
    gmem: tuple[Any, ...],
    batch: Any,
    start: Any,
    k_start: Any,
    ring: smem.Boxed,
    slot: Any,
    full: Any,
) -> None:
    along, deep = pl.ds(start, operand.tile), pl.ds(k_start, operand.tile_k)
    copy = functools.partial(plgpu.copy_gmem_to_smem, collective_axes=operand.multicast_axis)
    for part, whole in enumerate(gmem):
        source, target = place.matrix(whole, batch), ring.box.at[part, slot]
        if operand.k_major:
            copy(source.at[along, deep], target, full)
        elif not operand.paneled:
            copy(source.at[deep, along], target, full)
        else:
            for panel in range(operand.tile // WGMMA_ROWS):
                columns = pl.ds(start + panel * WGMMA_ROWS, WGMMA_ROWS)
                copy(source.at[deep, columns], target.at[panel], full)


def _place(plan: HopperPlan, piece: work.Piece, rank: Any, consumer: Any = None) -> place.Where:
    """Where this CTA's tile lies, or the part of it that a consumer holds, in the result."""
    config = plan.config
    (row, col, batch), turn = piece, None
    if plan.exchange.size > 1:
        rows = jnp.int32(config.grid(plan.problem)[0] // plan.exchange.size)
        turn, row = lax.div(row, rows), lax.rem(row, rows)
        if consumer is None or plan.gathers:
            row = plan.exchange.owner(rank, turn) * rows + row
    tile_rows, tile_cols = config.out_tile(plan.problem)
    row = (row * config.cluster[0] + lax.axis_index("cluster_row")) * tile_rows
    col = (col * config.cluster[1] + lax.axis_index("cluster_col")) * tile_cols
    if consumer is not None and not config.pingpong:
        if config.split_rows:
            row = row + consumer * plan.out_tile[0]
        else:
            col = col + consumer * plan.out_tile[1]
    return place.Where(batch, row, col, turn)


def _scratch(plan: HopperPlan, simulated: bool) -> list[Any]:
    """The buffers and barriers of one CTA, in the order in which the kernel's body takes them."""
    config = plan.config

    by_tma = plan.stored_by_tma or plan.problem.epilogue.residual
    stores = [plan.store_shape(width) for width in plan.store_widths if by_tma]
    out_dtype = plan.problem.out_dtype
    barriers = Barriers(
        full=plgpu.Barrier(num_arrivals=plan.full_arrivals, num_barriers=config.ring_barriers),
        empty=plgpu.ClusterBarrier(
            collective_axes=("cluster_row", "cluster_col"),
            num_arrivals=plan.empty_arrivals,
            num_barriers=config.ring_barriers,
        ),
        turn=plgpu.Barrier(num_barriers=config.consumers) if config.pingpong else None,
        residual=plgpu.Barrier(num_barriers=config.consumers * config.store_slots)
        if plan.problem.epilogue.residual
        else None,
    )
    return [
        tuple(x.ring(config.stages, simulated=simulated) for x in (plan.a, plan.b)),
        (
            smem.shared(stores, out_dtype, simulated=simulated) if stores else None,
            None if plan.stored_by_tma else plgpu.SMEM(plan.line_slots_shape, out_dtype),
        ),
        barriers,
    ]


def _slots(plan: HopperPlan, ring: Any, stores: Any, simulated: bool) -> Smem:
    """Both views of every buffer."""
    a, b = (
        operand.views(ref, simulated=simulated)
        for operand, ref in zip((plan.a, plan.b), ring, strict=True)
    )
    boxes, lines_smem = stores
    out = () if boxes is None else smem.shared_views(boxes, simulated=simulated)
    return Smem(a, b, out, lines_smem, simulated)


def _coding(plan: HopperPlan, bits: int = work.TABLE_BITS) -> work.Coding:
    return work.coding(plan.config, plan.problem, bits)


def _source(plan: HopperPlan, order: Any, producing: bool) -> tiles.TileSource:
    """Where this cluster's tiles come from, given the operand that `_order_operand` made."""
    worker = lax.axis_index("worker")
    if not isinstance(order, claims.Claims):
        return tiles.dealt_source(plan.schedule, order, worker, plan.workers, _coding(plan))
    claimant = None
    if producing:
        rank = lax.axis_index("cluster_row") + lax.axis_index("cluster_col")
        claimant = (rank == 0).astype(jnp.int32)
    coding = _coding(plan, work.CLAIM_BITS)
    return claims.ClaimedSource(order, worker, plan.workers, coding, claimant)


def _order_operand(plan: HopperPlan, claimed: bool) -> Any:
    """The schedule as the kernel's operand, None if it is computed."""
    schedule: Any = plan.schedule
    return (claims if claimed else tiles).order_operand(schedule, plan.workers)


def _pieces(plan: HopperPlan, gmem: place.Gmem) -> list[place.Gmem]:
    """What is in global memory for each piece of the operands."""
    if not plan.problem.pieces:
        return [gmem]
    return [gmem._replace(a=(a,), b=(b,)) for a, b in zip(gmem.a, gmem.b, strict=True)]


def _gmem(plan: HopperPlan, operands: list[Any], results: list[Any]) -> place.Gmem:
    """Names what is in global memory; takes what it names from `operands`."""
    asked = plan.problem.epilogue
    if plan.problem.pieces:
        both = [operands.pop(0) for _ in range(plan.factors)]
        a, b = tuple(both[::2]), tuple(both[1::2])
    else:
        a, b = (operands.pop(0),), tuple(operands.pop(0) for _ in range(plan.b.parts))
    bias = operands.pop(0) if asked.bias else None
    residual = operands.pop(0) if asked.residual else None
    gmem = place.Gmem(a, b, bias, residual, *results[:1])
    if plan.exchange.size == 1:
        return gmem
    rank = plan.exchange.rank()
    turns = range(plan.exchange.size)
    owners = tuple(plan.exchange.device(plan.exchange.owner(rank, turn)) for turn in turns)
    gmem = gmem._replace(rank=rank, owners=owners)
    if not plan.gathers:
        return gmem
    arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((plan.exchange.size,)))
    return gmem._replace(every=results[1], arrived=arrived)


def _out_type(plan: HopperPlan) -> Any:
    out = jax.ShapeDtypeStruct(plan.out_shape, plan.problem.out_dtype)
    if not plan.gathers:
        return out
    return out, jax.ShapeDtypeStruct((plan.problem.m, plan.problem.k), plan.problem.a_dtype)


def _ready_operands(plan: HopperPlan, given: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the operands as the kernel takes them."""
    operands = list(given)
    if plan.problem.a_dtype == jnp.float32:
        # The tensor cores cut off what tf32 does not hold; rounding errs half as much.
        rounded = functools.partial(lax.reduce_precision, exponent_bits=8, mantissa_bits=10)
        operands[: plan.factors] = map(rounded, operands[: plan.factors])
    if plan.config.mirrored:
        for first in range(0, plan.factors, 2):
            operands[first : first + 2] = operands[first + 1], operands[first]
    if plan.problem.epilogue.bias:
        # Loaded without a mask, so it has to reach to the end of the last tile.
        axis = 0 if plan.problem.transpose_out else 1
        tiles_along = plan.config.grid(plan.problem)[axis] * plan.config.cluster[axis]
        reach = tiles_along * plan.config.out_tile(plan.problem)[axis]
        bias = operands[plan.factors].astype(jnp.float32)
        operands[plan.factors] = jnp.pad(bias, (0, reach - bias.size))
    return operands


def _roles(plan: HopperPlan, simulated: bool, *refs: Any) -> None:
    """What each warpgroup of a CTA does, given references to all that there is."""
    *given, ring, stores, barriers = refs
    registers = plan.config.registers
    results = [given.pop() for _ in range(2 if plan.gathers else 1)][::-1]
    counter = given.pop() if plan.gathers else None
    gmem = _gmem(plan, given, results)
    (order,) = given
    slots = _slots(plan, ring, stores, simulated)

    def produce() -> None:
        if registers:
            plgpu.set_max_registers(registers.producer, action="decrease")
        run = functools.partial(producer, plan, _source(plan, order, True), gmem, slots, barriers)
        if _is_claimed(plan, simulated):
            run()
            return

        @plgpu.warp_map
        def _each_warp(warp: Any) -> None:
            pl.when(warp == 0)(run)
            if plan.gathers:
                pl.when(warp > 0)(lambda: carrier.carry(plan.exchange, gmem, counter))

    def consume() -> None:
        if registers:
            plgpu.set_max_registers(registers.consumer, action="increase")
        consumer(plan, _source(plan, order, False), gmem, slots, barriers)

    lax.cond(lax.axis_index("warpgroup") == plan.config.consumers, produce, consume)


def _is_claimed(plan: HopperPlan, simulated: bool) -> bool:
    """Whether clusters claim their tiles; the simulator, which has no atomics, deals them."""
    return plan.config.persistence == "dynamic" and not simulated


def build(plan: HopperPlan, *, interpret: Any = False) -> Callable[..., Any]:
    """Returns the kernel of a plan: a function of a, b and what the epilogue takes.

    These are, in this order: a second b if the result is gated, then bias, then residual; or a and
    b of each piece. If rows are gathered, it returns them beside the result.

    Args:
        plan: What to run.
        interpret: False for the GPU, or parameters of the GPU simulator. The simulator knows
            neither atomics nor two views of one buffer: tiles that would be claimed are dealt.
    """
    simulated = bool(interpret)
    kernel = plgpu.kernel(
        functools.partial(_roles, plan, simulated),
        out_type=_out_type(plan),
        grid=(plan.workers,),
        grid_names=("worker",),
        cluster=plan.config.cluster,
        cluster_names=("cluster_row", "cluster_col"),
        num_threads=plan.config.consumers + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(plan, simulated),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,
            # The instructions for exp and tanh err by less than rounding to 16 bits does.
            approx_math=plan.problem.out_dtype.itemsize <= 2,
        ),
        kernel_name="pallas_gemm_hopper",
        interpret=interpret,
    )

    def run(*given: jax.Array) -> Any:
        order = _order_operand(plan, _is_claimed(plan, simulated))
        operands = [*_ready_operands(plan, given), order]
        if plan.gathers:
            operands.append(jax.new_ref(jnp.zeros(plan.exchange.size, jnp.int32)))
        return kernel(*operands)

    return run
