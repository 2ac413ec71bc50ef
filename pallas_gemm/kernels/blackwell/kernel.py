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
    freed[x]      one thread of each CTA's epilogue, when        the multiplier, before the next
                  accumulator x has been read, in both CTAs      tile's first MMA in accumulator x
    residual[x]   TMA with the residual's bytes                  the epilogue, which owns slot x
    answered[i]   the epilogue, and the hardware with the        every role
                  answer's bytes, in both CTAs
    read[i]       one thread of each role, in both CTAs          the epilogue, before it asks again

Timeline (steps are numbered through all tiles, so that the loads of the next tile overlap the MMAs
of this one, and its MMAs the epilogue of this one)
    loader      per k:    wait empty[s], unless the slot is new; TMA a, TMA b ──▶ full[s]
                at exit:  wait for every slot, so that no peer arrives on a CTA that has left
    multiplier  per tile: wait freed[x], unless the accumulator is new
                per k:    wait full[s]; MMA; commit ──▶ empty[s]
                tile end: commit ──▶ ready[x]
                at exit:  wait for every accumulator
    epilogue    per tile: wait ready[x]
                per chunk of columns: tensor memory ──▶ registers; after the last, arrive freed[x];
                          finish and round; wait until the slot's last store has been read;
                          registers ──▶ slot; TMA store
    all         tile end: with dynamic persistence, wait answered[i]; read it; arrive read[i]
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import epilogue as arithmetic
from pallas_gemm.kernels import place, protocol, smem, tiles, work
from pallas_gemm.kernels.blackwell import launch_control
from pallas_gemm.kernels.blackwell.plan import BlackwellPlan

WORKER = "worker"
"""The axis of the grid."""
PAIR = "pair"
"""The axis of the cluster, of one CTA or two."""


class Smem(NamedTuple):
    """The ring of operand slots, and the store slots of the epilogue if it has any."""

    a: smem.Boxed
    b: smem.Boxed
    out: Any


class Barriers(NamedTuple):
    """See the table in the module's docstring; None for what a kernel has not."""

    full: Any
    empty: Any
    ready: Any
    freed: Any
    residual: Any


class Cta(NamedTuple):
    """What the roles of one CTA share; the accumulators lie side by side in tensor memory."""

    gmem: place.Gmem
    slots: Smem
    sums_tmem: Any
    barriers: Barriers
    simulated: bool


def loader(plan: BlackwellPlan, source: tiles.TileSource, cta: Cta) -> None:
    """Fills the ring, tile after tile."""

    def one_tile(turn: Any, piece: work.Piece, _: None) -> None:
        at = place.locate(plan.config, plan.problem, piece)

        @_in_one_warp
        def _load_tile() -> None:
            @pl.loop(0, plan.k_steps)
            def _one_step(k: Any) -> None:
                step = turn * plan.k_steps + k
                pl.when(step >= plan.config.stages)(
                    functools.partial(await_slot, plan, cta, step - plan.config.stages)
                )
                load_step(plan, cta, at, k, step)

    turns, _ = source.walk(one_tile, None)
    _in_one_warp(functools.partial(_drain_ring, plan, cta, turns * plan.k_steps))


def multiplier(plan: BlackwellPlan, source: tiles.TileSource, cta: Cta) -> None:
    """Multiplies what the loader loaded, tile after tile."""

    def one_tile(turn: Any, _piece: work.Piece, _: None) -> None:
        @_in_one_warp
        def _multiply_tile() -> None:
            pl.when(turn >= plan.config.accumulators)(
                functools.partial(
                    await_accumulator, plan, cta, turn - jnp.int32(plan.config.accumulators)
                )
            )

            @pl.when(_is_leader())
            def _issue() -> None:
                @pl.loop(0, plan.k_steps)
                def _one_step(k: Any) -> None:
                    step = turn * plan.k_steps + k
                    await_operands(plan, cta, step)
                    multiply_step(plan, cta, turn, k, step)

                publish_sums(plan, cta, turn)

    turns, _ = source.walk(one_tile, None)
    _in_one_warp(functools.partial(_drain_accumulators, plan, cta, turns))


def issuer(plan: BlackwellPlan, source: tiles.TileSource, cta: Cta) -> None:
    """Loads and multiplies in turn, all but one of the ring's slots ahead, without specialisation.

    Every MMA is waited for, so that the slot that is loaded next is free.
    """
    ahead = plan.config.stages - 1

    def one_tile(turn: Any, piece: work.Piece, _: None) -> None:
        at = place.locate(plan.config, plan.problem, piece)

        @_in_one_warp
        def _compute_tile() -> None:
            @pl.loop(0, min(ahead, plan.k_steps))
            def _load_ahead(k: Any) -> None:
                load_step(plan, cta, at, k, k)

            @pl.loop(0, plan.k_steps)
            def _one_step(k: Any) -> None:
                later = k + ahead
                pl.when(later < plan.k_steps)(
                    functools.partial(load_step, plan, cta, at, later, later)
                )

                @pl.when(_is_leader())
                def _multiply() -> None:
                    await_operands(plan, cta, k)
                    multiply_step(plan, cta, turn, k, k)

                await_slot(plan, cta, k)

            pl.when(_is_leader())(functools.partial(publish_sums, plan, cta, turn))

    turns, _ = source.walk(one_tile, None)
    _in_one_warp(functools.partial(_drain_accumulators, plan, cta, turns))


def epilogue(plan: BlackwellPlan, source: tiles.TileSource, cta: Cta) -> None:
    """Finishes and stores what has been multiplied, tile after tile.

    The chunks of a tile are a loop of the program, because an activation makes it long.
    """

    def one_tile(turn: Any, piece: work.Piece, _: None) -> None:
        at = place.locate(plan.config, plan.problem, piece)
        at = at._replace(row=at.row + lax.axis_index(PAIR) * plan.config.tile[0])
        fetch_residual(plan, cta, at, turn, range(min(plan.config.store_slots, plan.chunks)))
        await_sums(plan, cta, turn)

        @pl.loop(0, plan.chunks)
        def _one_chunk(chunk: Any) -> None:
            store(plan, cta, at, turn, chunk, finish(plan, cta, at, turn, chunk))

    source.walk(one_tile, None)
    if not plan.config.direct_store:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def load_step(plan: BlackwellPlan, cta: Cta, at: place.Where, k: Any, step: Any) -> None:
    """Starts the loads of one step, each CTA those of its own part."""
    slot, k_start = _slot(plan, step), k * plan.tile_k
    full = cta.barriers.full.at[slot]
    for operand, gmem, ring, start in (
        (plan.a, cta.gmem.a, cta.slots.a, at.row),
        (plan.b, cta.gmem.b, cta.slots.b, at.col),
    ):
        along = pl.ds(start, operand.tile * plan.ctas)
        deep = pl.ds(k_start, operand.tile_k)
        window = (along, deep) if operand.k_major else (deep, along)
        # In a pair, the window is that of both: each loads its half along what is not contracted.
        half = plgpu.CopyPartition.PARTITIONED(0 if operand.k_major else 1)
        for part, whole in enumerate(gmem):
            plgpu.copy_gmem_to_smem(
                place.matrix(whole, at.batch).at[window],
                ring.box.at[part, slot],
                full,
                collective_axes=_pair_axis(plan),
                leader_tracked=half if plan.ctas == 2 else None,
            )


def multiply_step(plan: BlackwellPlan, cta: Cta, turn: Any, k: Any, step: Any) -> None:
    """Issues the MMAs of one step, and has the tensor core free its slot when they are done."""
    slot = _slot(plan, step)
    a = cta.slots.a.tile.at[0, slot]
    a = a if plan.a.k_major else a.transpose((1, 0))
    width = plan.config.out_tile(plan.problem)[1]
    for part in range(plan.b.parts):
        b = cta.slots.b.tile.at[part, slot]
        plgpu.tcgen05_mma(
            _sums(plan, cta, turn, part * width, width),
            a,
            b.transpose((1, 0)) if plan.b.k_major else b,
            accumulate=k > 0,
            collective_axis=_pair_axis(plan),
        )
    plgpu.tcgen05_commit_arrive(cta.barriers.empty.at[slot], collective_axis=_pair_axis(plan))


def publish_sums(plan: BlackwellPlan, cta: Cta, turn: Any) -> None:
    """Has the tensor core announce the sums of a tile when its last MMA is done."""
    plgpu.tcgen05_commit_arrive(
        cta.barriers.ready.at[_accumulator(plan, turn)], collective_axis=_pair_axis(plan)
    )


def finish(plan: BlackwellPlan, cta: Cta, at: place.Where, turn: Any, chunk: Any) -> Any:
    """Reads the sums of a chunk of columns and finishes them, a few columns at a time."""
    width, step = plan.config.store_columns, plan.config.read_columns(plan.problem)
    parts = []
    for within in range(0, width, step):
        first = chunk * width + within
        sums = load_sums(plan, cta, turn, first, step)
        if within + step == width:
            pl.when(chunk == plan.chunks - 1)(functools.partial(free_accumulator, plan, cta, turn))
        bias = None
        if plan.problem.epilogue.bias:
            here = cta.gmem.bias.at[pl.ds(at.col + first, step)]
            bias = plgpu.load(here, layout=plgpu.Layout.TCGEN05.reduce(0), optimized=False)
        parts.append(arithmetic.finish(plan.problem, *sums, bias=bias))
    return parts[0] if len(parts) == 1 else lax.concatenate(parts, 1)


def load_sums(plan: BlackwellPlan, cta: Cta, turn: Any, first: Any, width: int) -> tuple[Any, ...]:
    """Reads some columns of each part of the sums of a tile."""
    columns = plan.config.out_tile(plan.problem)[1]
    return tuple(
        plgpu.async_load_tmem(_sums(plan, cta, turn, part * columns + first, width))
        for part in range(plan.b.parts)
    )


def free_accumulator(plan: BlackwellPlan, cta: Cta, turn: Any) -> None:
    """Lets the multiplier overwrite an accumulator, once its last columns are in registers."""
    plgpu.wait_load_tmem()
    plgpu.barrier_arrive(cta.barriers.freed.at[_accumulator(plan, turn)])


def store(
    plan: BlackwellPlan, cta: Cta, at: place.Where, turn: Any, chunk: Any, values: Any
) -> None:
    """Stores a finished chunk of columns, through shared memory unless told otherwise."""
    if plan.config.direct_store:
        _store_directly(_chunk(plan, cta.gmem.out, at, chunk), values, simulated=cta.simulated)
        return
    slot = _store_slot(plan, turn, chunk)
    if plan.problem.epilogue.residual:
        plgpu.barrier_wait(cta.barriers.residual.at[slot])
        values = arithmetic.add_residual(plan.problem, values, cta.slots.out.tile[slot])
    else:
        await_store_slot(plan)
    cta.slots.out.tile.at[slot][...] = values
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(cta.slots.out.box.at[slot], _chunk(plan, cta.gmem.out, at, chunk))
    following = chunk + plan.config.store_slots
    pl.when(following < plan.chunks)(
        functools.partial(fetch_residual, plan, cta, at, turn, (following,))
    )


def _store_directly(out: Any, values: Any, *, simulated: bool) -> None:
    """Stores from registers; from where the sums lie, that is half a sector of each row at a time.

    An assignment to global memory is refused for that by some releases, and means no more.
    """
    if simulated:
        out[...] = values
        return

    def emit(_: Any, out: Any, values: Any) -> None:
        values.store_untiled(out, optimized=False)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.TCGEN05))(emit)(out, values)


def fetch_residual(
    plan: BlackwellPlan, cta: Cta, at: place.Where, turn: Any, chunks: Iterable[Any]
) -> None:
    """Starts to load chunks of the residual into the store slots that will hold their sums."""
    if not plan.problem.epilogue.residual:
        return
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for chunk in chunks:
        slot = _store_slot(plan, turn, chunk)
        plgpu.copy_gmem_to_smem(
            _chunk(plan, cta.gmem.residual, at, chunk),
            cta.slots.out.box.at[slot],
            cta.barriers.residual.at[slot],
        )


def await_slot(plan: BlackwellPlan, cta: Cta, step: Any) -> None:
    """Waits until the MMAs of a step are done and its slot can be filled again."""
    plgpu.barrier_wait(cta.barriers.empty.at[_slot(plan, step)])


def await_operands(plan: BlackwellPlan, cta: Cta, step: Any) -> None:
    """Waits until the operands of a step have been loaded, in both CTAs."""
    plgpu.barrier_wait(cta.barriers.full.at[_slot(plan, step)])


def await_accumulator(plan: BlackwellPlan, cta: Cta, turn: Any) -> None:
    """Waits until the sums of a tile have been read, in both CTAs."""
    plgpu.barrier_wait(cta.barriers.freed.at[_accumulator(plan, turn)])


def await_sums(plan: BlackwellPlan, cta: Cta, turn: Any) -> None:
    """Waits until the sums of a tile are complete."""
    plgpu.barrier_wait(cta.barriers.ready.at[_accumulator(plan, turn)])


def await_store_slot(plan: BlackwellPlan) -> None:
    """Waits until the store before last, or however many slots ago, has been read."""
    plgpu.wait_smem_to_gmem(plan.config.store_slots - 1, wait_read_only=True)


def _drain_ring(plan: BlackwellPlan, cta: Cta, steps: Any) -> None:
    used = lax.min(steps, jnp.int32(plan.config.stages))
    pl.loop(0, used)(lambda i: await_slot(plan, cta, steps - used + i))


def _drain_accumulators(plan: BlackwellPlan, cta: Cta, turns: Any) -> None:
    used = lax.min(turns, jnp.int32(plan.config.accumulators))
    pl.loop(0, used)(lambda i: await_accumulator(plan, cta, turns - used + i))


def _in_one_warp(run: Callable[[], None]) -> None:
    """Runs in the first warp of a warpgroup; the others wait wherever the next barrier is."""
    plgpu.warp_map(lambda warp: pl.when(warp == 0)(run))


def _is_leader() -> Any:
    return lax.axis_index(PAIR) == 0


def _pair_axis(plan: BlackwellPlan) -> str | None:
    return PAIR if plan.ctas == 2 else None


def _slot(plan: BlackwellPlan, step: Any) -> Any:
    """The slot of the ring that a step of the whole walk uses."""
    return lax.rem(step, jnp.int32(plan.config.stages))


def _accumulator(plan: BlackwellPlan, turn: Any) -> Any:
    return lax.rem(turn, jnp.int32(plan.config.accumulators))


def _sums(plan: BlackwellPlan, cta: Cta, turn: Any, start: Any, width: int) -> Any:
    """Some columns of the accumulator of a tile."""
    first = _accumulator(plan, turn) * plan.config.tile[1] + start
    return cta.sums_tmem.at[:, pl.ds(first, width)]


def _store_slot(plan: BlackwellPlan, turn: Any, chunk: Any) -> Any:
    """The store slot of a chunk: the chunks of all tiles take the slots in turn."""
    return lax.rem(turn * plan.chunks + chunk, jnp.int32(plan.config.store_slots))


def _chunk(plan: BlackwellPlan, gmem: Any, at: place.Where, chunk: Any) -> Any:
    """The part of the result, or of the residual, that a chunk of this CTA's tile covers."""
    width = plan.config.store_columns
    rows = pl.ds(at.row, plan.config.tile[0])
    return place.matrix(gmem, at.batch).at[rows, pl.ds(at.col + chunk * width, width)]


def _scratch(plan: BlackwellPlan, simulated: bool) -> list[Any]:
    """The buffers and barriers of one CTA, in the order in which the kernel's body takes them."""
    config, problem = plan.config, plan.problem

    store_slots = (config.store_slots, config.tile[0], config.store_columns)
    by_tensor_core = functools.partial(
        plgpu.Barrier, num_arrivals=protocol.commit_arrivals(), orders_tensor_core=True
    )
    barriers = Barriers(
        full=plgpu.Barrier(num_arrivals=plan.full_arrivals, num_barriers=config.stages),
        empty=by_tensor_core(num_barriers=config.stages),
        ready=by_tensor_core(num_barriers=config.accumulators),
        freed=plgpu.ClusterBarrier(
            collective_axes=(PAIR,),
            num_arrivals=protocol.freed_arrivals(),
            num_barriers=config.accumulators,
            orders_tensor_core=True,
        ),
        residual=plgpu.Barrier(num_barriers=config.store_slots)
        if problem.epilogue.residual
        else None,
    )
    return [
        tuple(x.ring(config.stages, simulated=simulated) for x in (plan.a, plan.b)),
        None
        if config.direct_store
        else smem.boxed(store_slots, problem.out_dtype, simulated=simulated),
        plgpu.TMEM(
            (config.tile[0], config.accumulators * config.tile[1]),
            problem.accumulator_dtype,
            collective=plan.ctas == 2,
        ),
        barriers,
        _requests(plan) if config.persistence == "dynamic" else None,
    ]


def _requests(plan: BlackwellPlan) -> launch_control.Requests:
    return launch_control.Requests(
        answers=plgpu.TryClusterCancelResult(launch_control.IN_FLIGHT),
        answered=plgpu.Barrier(
            num_arrivals=protocol.answer_arrivals(), num_barriers=launch_control.IN_FLIGHT
        ),
        # Ordering the tensor core is not what it is for: such a barrier also makes the four warps
        # of a role wait for each other before one thread of them arrives.
        read=plgpu.ClusterBarrier(
            collective_axes=(PAIR,),
            num_arrivals=protocol.read_arrivals(plan.roles),
            num_barriers=launch_control.IN_FLIGHT,
            orders_tensor_core=True,
        ),
    )


def _slots(plan: BlackwellPlan, ring: Any, stores: Any, simulated: bool) -> Smem:
    """Both views of every buffer."""
    a, b = (
        operand.views(ref, simulated=simulated)
        for operand, ref in zip((plan.a, plan.b), ring, strict=True)
    )
    return Smem(a, b, None if stores is None else smem.views(stores, simulated=simulated))


def _source(
    plan: BlackwellPlan, order: Any, requests: Any, asks: bool, simulated: bool
) -> tiles.TileSource:
    """Where this cluster's tiles come from, given the operand that `_order_operand` made."""
    worker, coding = lax.axis_index(WORKER), work.coding(plan.config, plan.problem)
    if requests is None:
        return tiles.dealt_source(plan.schedule, order, worker, plan.launched, coding)
    return launch_control.LaunchedSource(
        order, requests, worker, coding, asks, (WORKER, PAIR), simulated
    )


def _order_operand(plan: BlackwellPlan) -> Any:
    """The schedule as the kernel's operand, None if it is computed."""
    if plan.config.persistence == "dynamic":
        table: Any = plan.schedule
        return jnp.asarray(work.Coding().pack(table))
    return tiles.order_operand(plan.schedule, plan.launched)


def build(plan: BlackwellPlan, *, interpret: Any = False) -> Callable[..., jax.Array]:
    """Returns the kernel of a plan: a function of a, b and what the epilogue takes.

    These are, in this order: a second b if the result is gated, then bias, then residual.

    Args:
        plan: What to run.
        interpret: False for the GPU, or parameters of the GPU simulator. The simulator knows no two
            views of one buffer and no pairs of CTAs, and refuses every request for a tile.
    """
    simulated = bool(interpret)
    options = plan.problem.epilogue

    def body(*refs: Any) -> None:
        *operands, out, ring, stores, sums_tmem, barriers, requests = refs
        a, *operands = operands
        b = [operands.pop(0) for _ in range(plan.b.parts)]
        bias = operands.pop(0) if options.bias else None
        residual = operands.pop(0) if options.residual else None
        (order,) = operands
        gmem = place.Gmem((a,), tuple(b), bias, residual, out)
        cta = Cta(gmem, _slots(plan, ring, stores, simulated), sums_tmem, barriers, simulated)

        def role(run: Callable[..., None]) -> Callable[[], None]:
            def start() -> None:
                stores = run is epilogue
                if plan.config.registers:
                    plgpu.set_max_registers(
                        plan.config.registers.epilogue if stores else plan.config.registers.issuing,
                        action="increase" if stores else "decrease",
                    )
                run(plan, _source(plan, order, requests, stores, simulated), cta)

            return start

        issuing = (loader, multiplier) if plan.config.specialised else (issuer,)
        lax.switch(lax.axis_index("warpgroup"), [role(run) for run in (*issuing, epilogue)])

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(plan.stored.out_shape, plan.problem.out_dtype),
        grid=(plan.launched,),
        grid_names=(WORKER,),
        cluster=(plan.ctas,),
        cluster_names=(PAIR,),
        num_threads=plan.roles,
        thread_name="warpgroup",
        scratch_types=_scratch(plan, simulated),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name="pallas_gemm_blackwell",
        interpret=interpret,
    )

    def run(a: jax.Array, *rest: jax.Array) -> jax.Array:
        operands = list(rest)
        if options.bias:
            # Loaded without a mask, so it has to reach to the end of the last tile.
            _, cols = plan.config.grid(plan.problem)
            reach = cols * plan.config.out_tile(plan.problem)[1]
            bias = operands[plan.b.parts].astype(jnp.float32)
            operands[plan.b.parts] = jnp.pad(bias, (0, reach - plan.problem.n))
        stored = kernel(a, *operands, _order_operand(plan))
        return stored[..., : plan.problem.m, : plan.problem.n]

    return _unmapped(run) if plan.config.persistence == "dynamic" else run


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
