"""The Blackwell kernel: one warp-specialised GEMM, each step of the B200 article a config of it.

    TMA ──▶ ring of slots in shared memory ──▶ MMA ──▶ tensor memory ──▶ registers
                                                   ──▶ shared memory ──▶ TMA

Roles (in one CTA; a *thread* of Pallas is a warpgroup, 128 CUDA threads)
    warpgroup   role         does
    0           loader       issues every TMA load, from its first warp
    1           multiplier   issues every MMA, from its first warp; in a pair of CTAs, that of the
                             first CTA, the *leader*, for both
    2           epilogue     reads finished sums from tensor memory, finishes and stores them, and
                             asks for the next tile (`launch_control.py`)

    Requests for tiles are made and read by whole warpgroups only, so each role has one of its own,
    and its other three warps walk along. Not specialised, warpgroup 0 issues loads and MMAs in turn
    (*issuer*) and warpgroup 1 is the epilogue.

    A pair multiplies 256 rows at a time: each CTA holds its own 128 rows of the left operand, one
    half of the columns of the right one, and its own rows of the sums.

Barriers (`protocol.py` derives the arrival counts)
    name          who arrives                                    who waits
    full[s]       the leader's loader, once per TMA copy, and    the leader's multiplier
                  TMA with the bytes of both CTAs' copies
    empty[s]      the tensor core, when the MMAs that read slot  the loader, before it fills slot s
                  s are done, in both CTAs                       again
    ready[x]      the tensor core, when all MMAs of a tile are   the epilogue
                  done, in both CTAs
    freed[x]      one thread of each CTA's epilogue, when        the leader's multiplier, before the
                  accumulator x has been read, in both CTAs;     next tile's first MMA in x; in the
                  of a wide tile, one for each half of it        other CTA the epilogue
    residual[x]   TMA with the residual's bytes                  the epilogue, which owns slot x
    answered[i]   the epilogue, and the hardware with the        every role
                  answer's bytes, in both CTAs
    read[i]       one thread of each role, in both CTAs          the epilogue, before it asks again

Timeline (steps are numbered through all tiles, so that the loads of the next tile overlap the MMAs
of this one, and its MMAs the epilogue of this one)
    loader      per k:    wait empty[s], unless the slot is new; TMA a, TMA b ──▶ full[s]
                at exit:  wait for every slot, so that no peer arrives on a CTA that has left
    multiplier  per tile: (all in the leader) wait freed[x], unless the accumulator is new
                per k:    wait full[s]; MMA; commit ──▶ empty[s]; of the first steps of a wide
                          tile, the MMAs of the first half, wait freed[x], those of the second
                tile end: commit ──▶ ready[x]
                at exit:  wait for every accumulator
    epilogue    per tile: wait ready[x]; not in the leader, wait freed[x] of the tile before in x
                per chunk of columns: tensor memory ──▶ registers; after the last, arrive freed[x];
                          finish and round; wait until the slot's last store has been read;
                          registers ──▶ slot; TMA store
                          of a piece of k: registers ──▶ a summand for another kernel (`join.py`)
    all         tile end: with dynamic persistence, wait answered[i], which says what comes after
                          the next tile; read it; arrive read[i]
                at exit:  the epilogue waits for read[i] of the last answers
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import joining, launch, place, tiles, work
from pallas_gemm.kernels.blackwell import issue, join, launch_control, store
from pallas_gemm.kernels.blackwell.cta import (
    Barriers,
    Cta,
    Smem,
    scratch,
    views,
)
from pallas_gemm.kernels.blackwell.plan import PAIR_AXIS, BlackwellPlan
from pallas_gemm.kernels.traced import Scalar


class Steps(NamedTuple):
    """The k loop of a piece of work.

    Attributes:
        before: Steps that its cluster has computed before it.
        count: How many it takes, one at least.
        first: The first of them in k.
        by_halves: How many at its start are multiplied half by half of a wide tile.
    """

    before: Any
    count: Any
    first: Any
    by_halves: Any

    @classmethod
    def start(cls, plan: BlackwellPlan) -> Any:
        """The steps before the first piece; None where the number of a turn says it."""
        return jnp.int32(0) if plan.joins else None

    @classmethod
    def of(cls, plan: BlackwellPlan, turn: Scalar, piece: work.Piece, before: Any) -> "Steps":
        """The steps of a piece, given what `start` or `before_next` returned."""
        by_halves = plan.steps_by_halves
        if before is None:
            return cls(turn * plan.k_steps, plan.k_steps, 0, by_halves)
        if by_halves:
            by_halves = lax.min(piece.steps, jnp.int32(by_halves))
        return cls(before, piece.steps, piece.first_step, by_halves)

    def before_next(self, before: Any) -> Any:
        """The steps before the next piece of the cluster."""
        return None if before is None else before + self.count


def loader(cta: Cta, walk: tiles.Walk) -> None:
    """Fills the ring, tile after tile."""
    plan = cta.plan

    def one_tile(turn: Scalar, piece: work.Piece, before: Any) -> Any:
        at = place.locate(plan.config, plan.problem, piece)
        steps = Steps.of(plan, turn, piece, before)

        @_in_one_warp
        def _load_tile() -> None:
            @pl.loop(0, steps.count)
            def _one_step(k: Scalar) -> None:
                step = steps.before + k
                pl.when(step >= plan.config.stages)(
                    functools.partial(issue.await_slot, cta, step - plan.config.stages)
                )
                issue.load_step(cta, at, steps.first + k, step)

        return steps.before_next(before)

    turns, counted = walk(one_tile, Steps.start(plan))
    steps = turns * plan.k_steps if counted is None else counted
    _in_one_warp(functools.partial(_drain_ring, cta, steps))


def multiplier(cta: Cta, walk: tiles.Walk) -> None:
    """Multiplies what the loader loaded, tile after tile."""
    plan = cta.plan

    def one_tile(turn: Scalar, piece: work.Piece, before: Any) -> Any:
        steps = Steps.of(plan, turn, piece, before)

        @_in_leaders_warp
        def _multiply_tile() -> None:
            for half in range(plan.halves):
                _await_reuse(cta, turn, half)
                _multiply_ahead(cta, turn, steps, half)

            @pl.loop(steps.by_halves, steps.count)
            def _one_step(k: Scalar) -> None:
                step = steps.before + k
                issue.await_operands(cta, step)
                issue.multiply_step(cta, turn, k, step)
                issue.free_slot(cta, step)

            issue.publish_sums(cta, turn)

        return steps.before_next(before)

    turns, _ = walk(one_tile, Steps.start(plan))
    _in_leaders_warp(functools.partial(_drain_accumulators, cta, turns))


def issuer(cta: Cta, walk: tiles.Walk) -> None:
    """Loads and multiplies in turn, all but one of the ring's slots ahead, without specialisation.

    Every MMA is waited for, so that the slot that is loaded next is free.
    """
    plan = cta.plan
    ahead = plan.config.stages - 1

    def one_tile(turn: Scalar, piece: work.Piece, _: None) -> None:
        at = place.locate(plan.config, plan.problem, piece)

        @_in_one_warp
        def _compute_tile() -> None:
            @pl.loop(0, min(ahead, plan.k_steps))
            def _load_ahead(k: Scalar) -> None:
                issue.load_step(cta, at, k, k)

            @pl.loop(0, plan.k_steps)
            def _one_step(k: Scalar) -> None:
                later = k + ahead
                load = functools.partial(issue.load_step, cta, at, later, later)
                pl.when(later < plan.k_steps)(load)

                @pl.when(_is_leader())
                def _multiply() -> None:
                    issue.await_operands(cta, k)
                    issue.multiply_step(cta, turn, k, k)
                    issue.free_slot(cta, k)

                issue.await_slot(cta, k)

            pl.when(_is_leader())(functools.partial(issue.publish_sums, cta, turn))

    turns, _ = walk(one_tile, None)
    _in_leaders_warp(functools.partial(_drain_accumulators, cta, turns))


def epilogue(cta: Cta, walk: tiles.Walk) -> None:
    """Finishes and stores what has been multiplied, tile after tile.

    The chunks of a tile are a loop of the program, because an activation makes it long. In the CTA
    that issues no MMA, the epilogue also follows the phases of `freed`. A role may wait for a phase
    only if the next one does not complete without it.
    """
    plan = cta.plan
    follows = plan.ctas_per_mma == 2

    def one_tile(turn: Scalar, piece: work.Piece, _: None) -> None:
        at = place.locate(plan.config, plan.problem, piece)
        at = at._replace(row=at.row + lax.axis_index(PAIR_AXIS) * plan.config.tile[0])
        if not plan.joins:
            store.fetch_residual(cta, at, turn, range(min(plan.config.store_slots, plan.chunks)))
        issue.await_sums(cta, turn)
        if follows:
            for half in range(plan.halves):
                pl.when(~_is_leader())(functools.partial(_await_reuse, cta, turn, half))
        if plan.joins:
            join.hand_over(cta, piece, turn)
            return

        @pl.loop(0, plan.chunks)
        def _one_chunk(chunk: Scalar) -> None:
            load = functools.partial(store.load_sums, cta, turn, chunk)
            store.store(cta, at, turn, chunk, store.finish(cta, at, turn, chunk, load))
            store.fetch_following(cta, at, turn, chunk)

    turns, _ = walk(one_tile, None)
    if follows:
        pl.when(~_is_leader())(functools.partial(_drain_accumulators, cta, turns))
    if not plan.config.direct_store and not plan.joins:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _await_reuse(cta: Cta, turn: Scalar, half: int) -> None:
    """Waits until the sums that half of a tile's accumulator held before have been read."""
    before = turn - jnp.int32(cta.plan.config.accumulators)
    pl.when(before >= 0)(functools.partial(issue.await_accumulator, cta, before, half))


def _multiply_ahead(cta: Cta, turn: Scalar, steps: Steps, half: int) -> None:
    """Multiplies the first steps of half of a wide tile, while the other half is still read."""
    plan = cta.plan
    if not plan.steps_by_halves:
        return

    @pl.loop(0, steps.by_halves)
    def _one_step(k: Scalar) -> None:
        step = steps.before + k
        if half == 0:
            issue.await_operands(cta, step)
        issue.multiply_step(cta, turn, k, step, half)
        if half == plan.halves - 1:
            issue.free_slot(cta, step)


def _drain_ring(cta: Cta, steps: Any) -> None:
    used = lax.min(steps, jnp.int32(cta.plan.config.stages))
    pl.loop(0, used)(lambda i: issue.await_slot(cta, steps - used + i))


def _drain_accumulators(cta: Cta, turns: Scalar) -> None:
    used = lax.min(turns, jnp.int32(cta.plan.config.accumulators))
    for half in range(cta.plan.halves):
        pl.loop(0, used)(lambda i, half=half: issue.await_accumulator(cta, turns - used + i, half))


def _in_one_warp(run: Callable[[], None]) -> None:
    """Runs in the first warp of a warpgroup; the others wait wherever the next barrier is."""
    plgpu.warp_map(lambda warp: pl.when(warp == 0)(run))


def _in_leaders_warp(run: Callable[[], None]) -> None:
    """Runs in that warp of the CTA that issues the MMAs."""
    plgpu.warp_map(lambda warp: pl.when((warp == 0) & _is_leader())(run))


def _is_leader() -> Any:
    return lax.axis_index(PAIR_AXIS) == 0


def _walk(
    plan: BlackwellPlan, order: Any, requests: launch_control.Requests | None, *, asks: bool
) -> tiles.Walk:
    """Where this cluster's tiles come from, given the order as the kernel's operand."""
    worker, coding = lax.axis_index(launch.WORKER), plan.coding
    if requests is None:
        return tiles.share(plan.schedule, order, worker, plan.launched, coding, plan.cut).walk
    return functools.partial(launch_control.walk, order, requests, worker, coding, asks, plan)


def _body(
    plan: BlackwellPlan,
    gmem: launch.Inputs,
    out: Any,
    buffers: Smem,
    sums_tmem: Any,
    barriers: Barriers,
    requests: launch_control.Requests | None,
) -> None:
    """Runs the role of each warpgroup of a CTA."""
    out, summands = (None, out) if plan.joins else (out, None)
    cta = Cta(plan, gmem, out, views(plan, buffers), sums_tmem, barriers, summands)
    registers = plan.config.registers

    def start(role: Callable[[Cta, tiles.Walk], None]) -> None:
        stores = role is epilogue
        if registers:
            plgpu.set_max_registers(
                registers.epilogue if stores else registers.issuing,
                action="increase" if stores else "decrease",
            )
        role(cta, _walk(plan, gmem.order, requests, asks=stores))

    issuing = (loader, multiplier) if plan.config.specialised else (issuer,)
    roles = [functools.partial(start, role) for role in (*issuing, epilogue)]
    lax.switch(lax.axis_index(launch.WARPGROUP), roles)


def build(plan: BlackwellPlan) -> Callable[..., Any]:
    """Returns the kernel of a plan: a function of a, b and what the epilogue takes.

    A second b follows b if the result is gated, and the others are in the order of its program.
    """
    if plan.config.split_last and plan.computes == "all":
        return joining.last_cut(plan, build)
    activations = 0 if plan.joins else plan.portion(launch.transcendentals(plan.problem))
    stored = jax.ShapeDtypeStruct(plan.stored.out_shape, plan.problem.out_dtype)
    kernel = launch.kernel(
        functools.partial(_body, plan),
        name="pallas_gemm_blackwell",
        workers=plan.launched,
        cluster={PAIR_AXIS: plan.ctas_per_mma},
        warpgroups=plan.roles,
        results=joining.summands(plan) or stored,
        scratch=scratch(plan),
        flops=plan.portion(plan.problem.flops),
        transcendentals=activations,
        interpret=plan.interpret,
    )
    joined = join.kernel(plan) if plan.joins else None

    def run(*given: jax.Array, results: Any = None) -> Any:
        schedule: Any = plan.schedule
        if plan.takes_over:
            order = launch_control.order_operand(schedule)
        else:
            order = tiles.order_operand(plan.pieces, plan.launched, plan.spans)
        inputs = launch.inputs(plan.config, plan.problem, given, order)
        stored = kernel(inputs)
        if joined:
            joined_results = joined(joining.inputs(plan, inputs, stored, results))
            if results is not None:
                return None
            (stored,) = joined_results
        return stored[..., : plan.problem.m, : plan.problem.n]

    return _unmapped(run) if plan.takes_over else run


def _unmapped(run: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Refuses `vmap`: as JAX maps a kernel, each product would take over the clusters of all."""
    guarded = jax.custom_batching.custom_vmap(run)

    @guarded.def_vmap
    def _refuse(*_: Any) -> Any:
        raise NotImplementedError(
            "a kernel whose clusters are taken over cannot be mapped: a batch is part of its"
            " problem, and then of its table of tiles"
        )

    return guarded
