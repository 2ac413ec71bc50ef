"""The Hopper kernel: one warp-specialised GEMM from which every Hopper result comes.

    TMA ──▶ ring of slots in shared memory ──▶ WGMMA ──▶ registers ──▶ shared memory ──▶ TMA

Roles (in one CTA; a *thread* of Pallas is a warpgroup, 128 CUDA threads)
    warpgroup             role        does
    0 .. consumers-1      consumer    issues WGMMA, keeps the accumulator in registers, and stores
                                      finished tiles (the epilogue)
    consumers             producer    issues every TMA load; its first warp does, the other three
                                      sleep (all four walk along when tiles are claimed, but for
                                      groups), or send rows to other devices (`send_rows.py`), or
                                      one of them finds the pieces of groups (`told.py`)

    Cooperative consumers share each tile, by rows where it is tall enough, else by columns.
    Ping-pong consumers take every other tile: one runs its epilogue while the other multiplies.

Barriers (`protocol.py` derives the arrival counts)
    name          who arrives                                    who waits
    full[s]       the producer, once per TMA copy, and TMA       the consumers that read slot s
                  with the bytes of the copies
    empty[s]      one thread of each consumer that read slot     the producer, before it fills slot
                  s, in every CTA that it was multicast to       s again
    baton[w]      the other ping-pong consumer, when it has      ping-pong consumer w, before the
                  issued the last WGMMA of its tile              first WGMMA of its tile
    residual[x]   TMA with the bytes of a chunk of each          the consumer that owns store slot x
                  operand that is loaded for the epilogue
    masked        every consumer, when it has zeroed what is     every consumer, before its WGMMA of
                  no group's (`group_sums.py`): simulated        that step
    told, taken   see `told.py`: where there are groups; counted, `group_walk.py`: of rows; wanted,
                  `sum_walk.py`: of what is contracted

    Each ping-pong consumer has `full` and `empty` barriers of its own; `ring.py` says why.

Timeline (steps are numbered through all tiles, so that the loads of the next tile overlap the
epilogue of this one; nothing drains the ring before the last tile)
    producer    per tile: read the next tile's entry
                per k:    wait empty[s], unless the slot is new; TMA a, TMA b ──▶ full[s]; where
                          the operands are in pieces, of one piece after the other
                at exit:  wait for every slot, so that no peer arrives on a CTA that has left
    consumer    per tile: read the next tile's entry; zero the accumulator
                per k:    wait full[s]; WGMMA; wait until only that one is in flight; arrive
                          empty[s-1]; store a chunk of the previous tile, if it is stored late
                tile end: wait for the last WGMMA; arrive empty[s]; finish and round; store chunk by
                          chunk, if it is stored at once (`late_store.py`)
    a chunk     wait until its slot's last store has been read; registers ──▶ slot; TMA store
                (`store.py`); of a symmetric result, below the diagonal and, transposed, above it

Tiles that are cut along k (`join.py`)
    a piece     takes its own steps, and leaves its sum in global memory; another kernel joins them
    the last    if only the last tiles are cut, a kernel before these two stores the others
    a group     that is crowded is cut without another kernel: who is next adds (`relay.py`)

Several devices (`remote.py`)
    gathered    each CTA computes the tiles of its own device's rows first, then those of the next
                device, whose arrival the producer awaits
    scattered   the tiles of the next device's rows first, those of its own last; a chunk is stored
                in the memory of its rows' device, in steps spread over the next tile's k loop
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import joining, launch, tiles, words, work
from pallas_gemm.kernels.hardware import WGMMA_DEPTH, WGMMA_ROWS
from pallas_gemm.kernels.hopper import early_launch, ring
from pallas_gemm.kernels.hopper.along_k import join, relay
from pallas_gemm.kernels.hopper.cta import (
    CLUSTER,
    Barriers,
    Cta,
    Smem,
    scratch,
    tile_to_load,
    tile_to_store,
    views,
)
from pallas_gemm.kernels.hopper.dense import claims, late_store, load, part_panels, reduce, store
from pallas_gemm.kernels.hopper.devices import remote
from pallas_gemm.kernels.hopper.groups import (
    group_rows,
    group_sums,
    group_walk,
    short_step,
    sum_walk,
    table,
    told,
)
from pallas_gemm.kernels.hopper.plan import HopperPlan


def producer(cta: Cta, walk: tiles.Walk) -> None:
    """Fills the ring, tile after tile."""
    plan, barriers = cta.plan, cta.barriers
    stages = plan.config.stages

    def one_tile(turn: Any, piece: work.Piece, head: ring.Head) -> ring.Head:
        at = tile_to_load(cta, piece)
        reader = turn & 1
        cta.rows.await_rows(at)

        def one_step(factors: launch.Factors, before: int, k: Any, head: ring.Head) -> ring.Head:
            @pl.when(ring.filled(plan, turn, k + before if before else k, head) >= stages)
            def _until_free() -> None:
                last = ring.last_barrier(plan, head.slot, head.readers)
                plgpu.barrier_wait(barriers.empty.at[last])

            full = barriers.full.at[ring.barrier(plan, head.slot, reader)]
            k_start = k * plan.tile_k
            if piece.first_k is not None:
                k_start = work.aligned(piece.first_k) + k_start
            target = load.Target(at.batch, k_start, head.slot, full, plan.tile_k)
            if piece.end_k is None:
                load.step(cta, factors, at, target)
            else:
                deep = group_sums.parts(plan, piece.end_k - k_start) * WGMMA_DEPTH
                for depth in range(WGMMA_DEPTH, plan.tile_k + 1, WGMMA_DEPTH):
                    some = target._replace(depth=depth)
                    pl.when(deep == depth)(functools.partial(load.step, cta, factors, at, some))
            return ring.advance(plan, head, reader)

        before = 0
        for factors, steps in zip(cta.gmem.factors, plan.piece_steps, strict=True):
            first, end = _span(plan, piece, before, steps)
            head = lax.fori_loop(first, end, functools.partial(one_step, factors, before), head)
            before += steps
        return head

    turns, head = walk(one_tile, ring.start(plan))
    early_launch.end(plan)

    @pl.loop(0, lax.min(ring.filled(plan, turns, None, head), jnp.int32(stages)))
    def _drain(slot: Any) -> None:
        plgpu.barrier_wait(barriers.empty.at[ring.last_barrier(plan, slot, head.readers)])


def _span(plan: HopperPlan, piece: work.Piece, before: int, steps: int) -> tuple[Any, Any]:
    """Which steps a piece of work takes of an array with so many steps, after those `before` it."""
    if piece.steps is None:
        return 0, steps
    first, end = piece.first_step, piece.first_step + piece.steps
    if len(plan.piece_steps) == 1:
        return first, end
    return jnp.clip(first - before, 0, steps), jnp.clip(end - before, 0, steps)


class Progress(NamedTuple):
    """What a consumer hands on from tile to tile.

    Attributes:
        previous: What is left to be stored of the tile before; None if it is stored at once.
        slot: The slot of the next step, where it is counted from tile to tile, or None.
    """

    previous: store.Tile | None = None
    slot: Any = None


def consumer(cta: Cta, walk: tiles.Walk) -> None:
    """Multiplies what the producer loaded and stores the tiles."""
    plan, me = cta.plan, lax.axis_index(launch.WARPGROUP)

    def one_tile(turn: Any, piece: work.Piece, progress: Progress) -> Progress:
        at = relay.where(cta, piece, tile_to_store(cta, piece, me))
        if not plan.joins:
            store.fetch(cta, me, at, range(plan.config.store_slots))
        stores = late_store.stores(cta, me, turn, progress.previous)
        within = piece.first_k, piece.end_k
        divided = short_step.divided(plan, piece)
        done = _sum(cta, me, Steps(turn, progress.slot, divided.whole, within), stores)
        total, slot = short_step.add(cta, me, piece, divided, done)
        total = relay.run(cta, me, piece, total)
        if plan.joins:
            return Progress(join.hand_over(cta, me, piece, total), ring.upcoming(plan, slot))
        return Progress(late_store.take(cta, me, total, at), ring.upcoming(plan, slot))

    if plan.config.pingpong:
        _walk_alternately(cta, walk, one_tile)
    else:
        start = Progress(late_store.start(cta, me), ring.upcoming(plan))
        turns, end = walk(one_tile, start)
        late_store.end(cta, me, turns, end.previous)
    group_rows.zero_the_rest(cta, me)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _walk_alternately(cta: Cta, walk: tiles.Walk, one_tile: tiles.Compute) -> None:
    """Walks every other tile; the first baton is free, and the last one given is taken back."""
    me, consumers = lax.axis_index(launch.WARPGROUP), cta.plan.config.consumers
    baton = cta.barriers.baton

    @pl.when(me == 1)
    def _give_the_first_baton() -> None:
        plgpu.barrier_arrive(baton.at[0])

    turns, _ = walk(one_tile, Progress(), first=me, every=consumers)

    @pl.when(me == lax.rem(turns, jnp.int32(consumers)))
    def _take_back_the_last_baton() -> None:
        plgpu.barrier_wait(baton.at[me])


class Steps(NamedTuple):
    """The k loop of one tile.

    Attributes:
        turn: The number of the tile in its worker's sequence.
        slot: The slot of its first step; None if the turn says it.
        count: How many steps it takes; None for all of them. Over groups there may be none, besides
            a short one.
        within: The first contracted element that counts, and the one after the last; None for all.
    """

    turn: Any
    slot: Any = None
    count: Any = None
    within: tuple[Any, Any] = (None, None)


def _sum(cta: Cta, me: Any, steps: Steps, stores: late_store.Stores) -> tuple[Any, Any]:
    """Runs the k loop of one tile: part by part where that keeps the error small.

    Returns the sum, and the slot of the last step, as `multiply` does.
    """
    plan = cta.plan
    total, slot, parts = None, None, plan.config.partial_sums
    for part in range(parts):
        own = steps
        if parts > 1:
            count = jnp.int32(plan.k_steps) if steps.count is None else steps.count
            first, end = (lax.div(count * i, jnp.int32(parts)) for i in (part, part + 1))
            own = own._replace(count=end - first)
        if part:
            own, stores = own._replace(slot=ring.following(plan, slot)), []
        run = functools.partial(multiply, cta, me, own, stores)
        if plan.b.paneled:
            summand, slot = run(None)
        else:
            accumulator = plgpu.ACC(plan.config.consumer_tile, plan.problem.accumulator_dtype)
            summand, slot = pl.run_scoped(run, accumulator)
        total = summand if total is None else total + summand
    return total, slot


def multiply(
    cta: Cta, me: Any, steps: Steps, stores: late_store.Stores, acc: Any
) -> tuple[Any, Any]:
    """Runs the k loop of one tile, or a part of it, with stores in between.

    Takes the accumulator, unless the sum is carried from step to step (`part_panels.py`). Returns
    its value, and the slot of the last step unless it is found by dividing.
    """
    plan, barriers, turn = cta.plan, cta.barriers, steps.turn

    def issue(slot: Any, k: Any, total: Any) -> Any:
        plgpu.barrier_wait(barriers.full.at[ring.barrier(plan, slot, me)])
        group_sums.mask(cta, me, slot, k, steps.within)
        if plan.b.paneled:
            return part_panels.add(cta, me, slot, total)
        return _issue_wgmma(cta, me, acc, slot)

    def release(slot: Any) -> None:
        plgpu.barrier_arrive(barriers.empty.at[ring.barrier(plan, slot, me)])

    def if_any(do: Callable[[], Any]) -> Any:
        return do() if steps.within[0] is None else pl.when(steps.count > 0)(do)

    def advance(k: Any, done: tuple[Any, Any]) -> tuple[Any, Any]:
        kept, total = done
        before, slot = ring.step(plan, turn, k, kept)
        total = issue(slot, k, total)
        plgpu.wgmma_wait(plan.wgmmas_per_step)
        release(before)
        return ring.keep(plan, slot), total

    if plan.config.pingpong:
        plgpu.barrier_wait(barriers.baton.at[me])
    slot = ring.first_slot(plan, turn, steps.slot)
    total = part_panels.start(plan) if plan.b.paneled else None
    total = if_any(lambda: issue(slot, 0, total))
    done, issued = _store_between(stores, steps.count, advance, (ring.keep(plan, slot), total))
    end = plan.k_steps if steps.count is None else steps.count
    kept, total = lax.fori_loop(issued, end, advance, done)
    if plan.config.pingpong:
        plgpu.barrier_arrive(barriers.baton.at[1 - me])
    # Either waits for every WGMMA in flight.
    total = part_panels.finished(plan, total) if plan.b.paneled else acc[...]
    if_any(lambda: release(ring.last_slot(plan, turn, kept)))
    return total, kept


def _store_between(
    stores: late_store.Stores, count: Any, advance: Callable[[Any, Any], Any], done: Any
) -> tuple[Any, int]:
    """Advances from the second step on, and stores each chunk after the step that it says.

    Returns what was done, and how many steps have been issued, of all or of `count`.
    """
    issued = 1
    for k, store_chunk in stores:
        if count is not None and k >= issued:
            done = lax.fori_loop(issued, lax.min(k + 1, count), advance, done)
        elif k == issued:
            done = advance(jnp.int32(k), done)
        elif k > issued:
            done = lax.fori_loop(issued, k + 1, advance, done)
        store_chunk()
        issued = max(issued, k + 1)
    return done, issued


def _issue_wgmma(cta: Cta, me: Any, acc: Any, slot: Any) -> None:
    plan = cta.plan
    rows, cols = plan.config.consumer_tile
    shared = not plan.config.pingpong
    my_row = me * rows if shared and plan.config.split_rows else 0
    my_col = me * cols if shared and not plan.config.split_rows else 0
    # Stored [k, m], the left operand lies in panels of 64 rows, and a gated result has a right
    # operand in two parts: one WGMMA for each pair of them, on its own part of the accumulator.
    panels = rows // WGMMA_ROWS if plan.a.paneled else 1
    height, width = rows // panels, cols // plan.b.parts
    for panel, part in itertools.product(range(panels), range(plan.b.parts)):
        a, b, mine = cta.slots.a.tile, cta.slots.b.tile, pl.ds(my_col, width)
        if plan.b.k_major:
            b = b.at[part, slot, mine].transpose((1, 0))
        else:
            b = b.at[part, slot, :, mine]
        if plan.a.k_major:
            a = a.at[0, slot, pl.ds(my_row, rows)]
        else:
            a = a.at[0, slot, my_row // WGMMA_ROWS + panel].transpose((1, 0))
        if plan.wgmmas_per_step == 1:
            plgpu.wgmma(acc, a, b)
        else:
            plgpu.wgmma(acc.at[pl.ds(panel * height, height), pl.ds(part * width, width)], a, b)


def _walk(cta: Cta, *, producing: bool) -> tiles.Walk:
    """Where this cluster's tiles come from."""
    plan, order = cta.plan, cta.gmem.order
    if plan.problem.groups:
        return group_walk.share(cta, producing=producing).walk
    if plan.problem.ragged_k:
        return functools.partial(sum_walk.walk, cta, producing)
    worker = lax.axis_index(launch.WORKER)
    if not plan.claims_tiles:
        return tiles.share(plan.schedule, order, worker, plan.workers, plan.coding, plan.cut).walk
    claimant = None
    if producing:
        rank = lax.axis_index("cluster_row") + lax.axis_index("cluster_col")
        claimant = (rank == 0).astype(jnp.int32)
    return functools.partial(claims.walk, order, worker, plan.workers, plan.coding, claimant)


def _body(
    plan: HopperPlan,
    gmem: launch.Inputs,
    out: tuple[Any, ...],
    left: tuple[Any, ...],
    every: Any,
    summands: Any,
    buffers: Smem,
    barriers: Barriers,
) -> None:
    """What each warpgroup of a CTA does."""
    early_launch.begin(plan)
    rows, slots = remote.rows(plan, gmem, every), views(plan, buffers)
    cta = Cta(plan, gmem, out, left, rows, slots, barriers, summands)
    registers = plan.config.registers

    def produce() -> None:
        if registers:
            plgpu.set_max_registers(registers.producer, action="decrease")
        run = functools.partial(producer, cta, _walk(cta, producing=True))
        if plan.claims_tiles and not plan.problem.in_groups:
            run()
            return

        @plgpu.warp_map
        def _each_warp(warp: Any) -> None:
            pl.when(warp == 0)(run)
            cta.rows.send(warp)
            if plan.problem.in_groups:
                walk = group_walk if plan.problem.groups else sum_walk
                pl.when(warp == told.GUIDE)(functools.partial(walk.guide, cta))

    def consume() -> None:
        if registers:
            plgpu.set_max_registers(registers.consumer, action="increase")
        consumer(cta, _walk(cta, producing=False))

    # JAX lowers the branch for False twice, once to see what it returns: the shorter one.
    lax.cond(lax.axis_index(launch.WARPGROUP) != plan.config.consumers, consume, produce)


def _inputs(plan: HopperPlan, given: Sequence[jax.Array]) -> launch.Inputs:
    """Returns the operands as the kernel takes them."""
    operands, factors = list(given), plan.factors
    if plan.problem.a_dtype == jnp.float32:
        # The tensor cores cut off what tf32 does not hold; rounding errs half as much.
        rounded = functools.partial(lax.reduce_precision, exponent_bits=8, mantissa_bits=10)
        operands[:factors] = map(rounded, operands[:factors])
    if plan.config.mirrored:
        operands[:factors:2], operands[1:factors:2] = operands[1:factors:2], operands[:factors:2]
    if plan.problem.in_groups:
        order: Any = table.operand(plan, operands.pop(factors))
    elif plan.claims_tiles:
        schedule: Any = plan.schedule
        order = claims.order_operand(schedule, plan.workers)
    else:
        order = tiles.order_operand(plan.pieces, plan.workers, plan.spans)
    inputs = launch.inputs(plan.config, plan.problem, operands, order)
    return inputs._replace(sent=remote.counter(plan))


def build(plan: HopperPlan) -> Callable[..., Any]:
    """Returns the kernel of a plan: a function of a, b and what the epilogue takes.

    These are, in this order: a second b if the result is gated, the sizes of groups if there are
    any, then the operands of the epilogue's program; or a and b of each piece. It returns the
    result, or a list of the results that a function of the caller has; if rows are gathered, it
    returns them beside the result.
    """
    if plan.config.split_last and plan.computes == "all":
        return joining.last_cut(plan, build)
    cluster = dict(zip(CLUSTER, plan.config.cluster, strict=True))
    activations = 0 if plan.joins else plan.share(launch.transcendentals(plan.problem))
    kernel = launch.kernel(
        functools.partial(_body, plan),
        name="pallas_gemm_hopper",
        grid=launch.Grid(plan.workers, cluster, plan.config.consumers + 1),
        results=remote.results(plan),
        scratch=scratch(plan),
        operations=launch.Operations(plan.share(plan.problem.flops), activations),
        interpret=plan.interpret,
        approx_math=plan.approx_math,
    )
    joined = join.kernel(plan) if plan.joins else None

    def run(*given: jax.Array, result: Any = None) -> Any:
        inputs = _inputs(plan, given)
        out, left, every, summands = kernel(inputs)
        if joined:
            return joined(joining.inputs(plan, inputs, summands, result))
        if plan.problem.epilogue.program is not None:
            return words.arranged(plan.problem, out, reduce.finished(plan, left))
        return out[0] if every is None else (out[0], every)

    return run
