"""The Hopper kernel: one warp-specialised GEMM from which every Hopper result comes.

    TMA ──▶ ring of slots in shared memory ──▶ WGMMA ──▶ registers ──▶ shared memory ──▶ TMA

Roles (in one CTA; a *thread* of Pallas is a warpgroup, 128 CUDA threads)
    warpgroup             role        does
    0 .. consumers-1      consumer    issues WGMMA, keeps the accumulator in registers, and stores
                                      finished tiles (the epilogue)
    consumers             producer    its first warp issues every TMA load; the other three sleep

    The other warps of the producer have work in three cases. They send rows to other devices
    (`send_rows.py`). One of them finds the pieces of groups (`told.py`). And where tiles are
    claimed, but for groups, all four walk along.

    Cooperative consumers share each tile, by rows where it is tall enough, else by columns.
    Ping-pong consumers take every other tile: one runs its epilogue while the other multiplies.

    A `Product` (`dense/product.py`) says how they compute a tile: the plain one, or another kind.

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
                per k:    wait empty[s], unless the slot is new; TMA a, TMA b ──▶ full[s]; for a
                          sum of products, of one product after the other
                at exit:  wait for every slot, so that no peer arrives on a CTA that has left
    consumer    per tile: read the next tile's entry; zero the accumulator
                per k:    wait full[s]; WGMMA; wait until only that one is in flight; arrive
                          empty[s-1]; store a chunk of the previous tile, if it is stored late
                tile end: wait for the last WGMMA; arrive empty[s]; finish and round; store chunk by
                          chunk, if it is stored at once (`late_store.py`)
    a chunk     wait until its slot's last store has been read; registers ──▶ slot; TMA store
                (`store.py`); of a symmetric result, below the diagonal and, transposed, above it

Tiles that are cut along k (`along_k/product.py`)
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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import joining, launch, tiles, windows, work
from pallas_gemm.kernels.functions import words
from pallas_gemm.kernels.hopper import early_launch, ring
from pallas_gemm.kernels.hopper.along_k import join
from pallas_gemm.kernels.hopper.along_k.product import (
    CutAlongK,
    CutAlongKInBlocks,
    Relayed,
    RelayedInBlocks,
    RelayedLast,
)
from pallas_gemm.kernels.hopper.cta import (
    CLUSTER,
    Barriers,
    Cta,
    Smem,
    scratch,
    tile_to_load,
    views,
)
from pallas_gemm.kernels.hopper.dense import claims, load, multiply, reduce, store
from pallas_gemm.kernels.hopper.dense.in_blocks import InBlocks
from pallas_gemm.kernels.hopper.dense.product import Product
from pallas_gemm.kernels.hopper.dense.summed_operands import SummedOperands
from pallas_gemm.kernels.hopper.devices import remote
from pallas_gemm.kernels.hopper.groups import table
from pallas_gemm.kernels.hopper.groups.product import (
    RowsInGroups,
    RowsInGroupsInBlocks,
    SumsOverGroups,
    SumsOverGroupsInBlocks,
    SumsOverLast,
)
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.kernels.ptx import tf32
from pallas_gemm.kernels.traced import Scalar


def product_of(plan: HopperPlan) -> type[Product]:
    """Which kind of product a kernel is built for."""
    plain, in_blocks = Product, InBlocks
    if plan.problem.groups:
        plain, in_blocks = RowsInGroups, RowsInGroupsInBlocks
    elif plan.relay:
        plain = RelayedLast if work.sums_last(plan.problem) else Relayed
        in_blocks = RelayedInBlocks
    elif plan.problem.ragged_k:
        plain = SumsOverLast if work.sums_last(plan.problem) else SumsOverGroups
        in_blocks = SumsOverGroupsInBlocks
    elif plan.joins:
        plain, in_blocks = CutAlongK, CutAlongKInBlocks
    elif plan.problem.arrays:
        plain = SummedOperands
    return plain if plan.problem.blocks is None else in_blocks


def producer(product: Product, walk: tiles.Walk) -> None:
    """Fills the ring, tile after tile."""
    cta, plan, barriers = product.cta, product.plan, product.cta.barriers
    stages = plan.config.stages

    def one_tile(turn: Scalar, piece: work.Piece, head: ring.Head) -> ring.Head:
        at = tile_to_load(cta, piece)
        reader = turn & 1
        cta.rows.await_rows(at)

        def one_step(factors: launch.Factors, before: int, k: Scalar, head: ring.Head) -> ring.Head:
            @pl.when(ring.filled(plan, turn, k + before if before else k, head) >= stages)
            def _until_free() -> None:
                last = ring.last_barrier(plan, head.slot, head.readers)
                plgpu.barrier_wait(barriers.empty.at[last])

            full = barriers.full.at[ring.barrier(plan, head.slot, reader)]
            target = load.Target(at.batch, k * plan.tile_k, head.slot, full, plan.tile_k)
            product.load(piece, factors, at, target)
            return ring.advance(plan, head, reader)

        before = 0
        for factors, steps in zip(product.factors, plan.term_steps, strict=True):
            first, end = product.span(piece, before, steps)
            head = lax.fori_loop(first, end, functools.partial(one_step, factors, before), head)
            before += steps
        return head

    turns, head = walk(one_tile, ring.start(plan))
    early_launch.end(plan)

    @pl.loop(0, lax.min(ring.filled(plan, turns, None, head), jnp.int32(stages)))
    def _drain(slot: Scalar) -> None:
        plgpu.barrier_wait(barriers.empty.at[ring.last_barrier(plan, slot, head.readers)])


class Progress(NamedTuple):
    """The state that a consumer hands on from tile to tile.

    Attributes:
        previous: The rest of the tile before that must be stored; None if it is stored at once.
        slot: The slot of the next step, where it is counted from tile to tile, or None.
    """

    previous: store.Tile | None = None
    slot: Scalar = None


def consumer(product: Product, walk: tiles.Walk) -> None:
    """Multiplies what the producer loaded and stores the tiles."""
    plan, me = product.plan, lax.axis_index(launch.WARPGROUP)
    ending = product.ending(me)

    def one_tile(turn: Scalar, piece: work.Piece, progress: Progress) -> Progress:
        at = product.place(piece, me)
        ending.expect(at)
        stores = ending.between(turn, progress.previous)
        total, slot = product.add_up(me, piece, multiply.Steps(turn, progress.slot), stores)
        return Progress(ending.take(piece, total, at), ring.upcoming(plan, slot))

    if plan.config.pingpong:
        walk = functools.partial(_walk_alternately, product.cta, walk)
    product.begin(me)
    turns, end = walk(one_tile, Progress(ending.start(), ring.upcoming(plan)))
    ending.end(turns, end.previous)
    product.end(me)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _walk_alternately(
    cta: Cta, walk: tiles.Walk, one_tile: tiles.Compute, start: Any
) -> tuple[Any, Any]:
    """Walks every other tile; the first baton is free, and the last one given is taken back."""
    me, consumers = lax.axis_index(launch.WARPGROUP), cta.plan.config.consumers
    baton = cta.barriers.baton

    @pl.when(me == 1)
    def _give_the_first_baton() -> None:
        plgpu.barrier_arrive(baton.at[0])

    turns, end = walk(one_tile, start, first=me, every=consumers)

    @pl.when(me == lax.rem(turns, jnp.int32(consumers)))
    def _take_back_the_last_baton() -> None:
        plgpu.barrier_wait(baton.at[me])

    return turns, end


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
    """Runs the role of each warpgroup of a CTA."""
    early_launch.begin(plan)
    whole = gmem.factors
    gmem, out = windows.within(plan.window, plan.problem, gmem, out)
    rows, slots = remote.rows(plan, gmem, every), views(plan, buffers)
    cta = Cta(plan, gmem, out, left, rows, slots, barriers, summands)
    product, registers = product_of(plan)(cta), plan.config.registers_of(plan.problem)

    def produce() -> None:
        if registers:
            plgpu.set_max_registers(registers.producer, action="decrease")
        run = functools.partial(producer, product, product.walk(producing=True))
        if product.all_warps_walk:
            run()
            return

        @plgpu.warp_map
        def _each_warp(warp: Scalar) -> None:
            pl.when(warp == 0)(run)
            product.assist(warp)

    def consume() -> None:
        if registers:
            plgpu.set_max_registers(registers.consumer, action="increase")
        consumer(product, product.walk(producing=False))

    # JAX lowers the branch for False twice, once to see what it returns: the shorter one.
    lax.cond(lax.axis_index(launch.WARPGROUP) != plan.config.consumers, consume, produce)
    if plan.rounds_loads:
        factors = [x for a, b in whole for x in (a, *b)]
        tf32.round_loads([*factors, every] if plan.gathers else factors)


def _inputs(plan: HopperPlan, given: Sequence[jax.Array]) -> launch.Inputs:
    """Returns the operands as the kernel takes them."""
    operands, factors = list(given), plan.factors
    if plan.problem.a_dtype == jnp.float32 and not plan.rounds_loads:
        operands[:factors] = map(tf32.rounded, operands[:factors])
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
    scales = tuple(scale.astype(jnp.float32) for scale in inputs.scales)
    if plan.problem.blocks is not None and plan.scales.staged:
        of_rows, beyond = bool(plan.problem.blocks.rows), plan.reach[1] - plan.problem.n
        longer = (launch.longer(x, beyond) if beyond else x for x in scales[of_rows:])
        scales = (*scales[:of_rows], *longer)
    return inputs._replace(scales=scales, sent=remote.counter(plan))


def _answer(plan: HopperPlan, out: Any, left: Any, every: Any = None) -> Any:
    """Returns the results, from what the kernel stores and what its tiles leave."""
    if plan.problem.epilogue.program is not None:
        return words.arranged(plan.problem, out, reduce.finished(plan, left))
    return out[0] if every is None else (out[0], every)


def build(plan: HopperPlan) -> Callable[..., Any]:
    """Returns the kernel of a plan: a function of a, b and what the epilogue takes.

    These are, in this order: a second b if the result is gated, the sizes of groups if there are
    any, then the operands of the epilogue's program; or a and b of each piece. It returns the
    result, or a list of the results that a function of the caller has; if rows are gathered, it
    returns them beside the result.

    If it takes parts of arrays (`windows.py`) that begin anywhere, the first operand says where,
    `[1]`. An array to write into takes the place of the residual, or comes last.
    """
    if plan.config.split_last and plan.computes == "all":
        return joining.last_cut(plan, build)
    activations = 0 if plan.joins else plan.portion(launch.transcendentals(plan.problem))
    kernel = launch.kernel(
        functools.partial(_body, plan),
        name="pallas_gemm_hopper",
        workers=plan.workers,
        cluster=dict(zip(CLUSTER, plan.config.cluster, strict=True)),
        warpgroups=plan.config.consumers + 1,
        results=remote.results(plan),
        scratch=scratch(plan),
        flops=plan.portion(plan.problem.flops),
        transcendentals=activations,
        interpret=plan.interpret,
        approx_math=plan.approx_math,
    )
    joined = join.kernel(plan) if plan.joins else None

    def of_parts(first: jax.Array, *given: jax.Array) -> Any:
        if not plan.window.writes:
            return run(*given, first=first)
        *others, result = given
        into = jax.new_ref(result)
        last = [None] if plan.window.in_place else []
        left = run(*others, *last, first=first, results=(into,))
        return _answer(plan, (jax.freeze(into),), left)

    def run(*given: Any, results: Any = None, first: Any = None) -> Any:
        inputs = _inputs(plan, given)._replace(first=first)
        if plan.window.writes:
            return kernel(inputs._replace(results=results)).left
        out, left, every, summands = kernel(inputs)
        if joined:
            out = joined(joining.inputs(plan, inputs, summands, results))
        if results is not None:
            return None
        return _answer(plan, out, left, every)

    return of_parts if plan.window.moves else run
