"""Products whose weights go through registers: of few bits, or float32 stored [k, n].

    TMA ──▶ ring of slots ──▶ registers: weights become 16 bits ──▶ WGMMA ◀── slots of the other
    operand

WGMMA takes its left operand from registers, and only that. So the transposed product is computed,
whose left operand the weights are, and rows of its sums are columns of the result. Float32 stays
what it is there: WGMMA reads TF32 in shared memory only if k comes last, and else in registers.

Roles (in one CTA)
    warpgroup                       role        does
    0 .. consumers * along_k - 1    consumer    of those that share the columns, one; of those that
                                                take the steps in turns, one
    the last                        producer    issues every TMA load, by two of its warps

Barriers
    name         who arrives                                     who waits
    full[s]      the producer, once per TMA copy, and TMA        the consumers whose step it is
    empty[s]     one thread of each of them                      the producer
    joined[c]    each consumer that shares columns with c and    that one, which adds up and stores
                 took other steps, when its sums are written
    taken[c]     that one, when it has read them                 the others, before those of the
                                                                 next tile, and at the end
    arrivals[c]  each sum that another CTA of the cluster sends  c, before it adds them

A CTA computes one tile, or several: then the ring runs on. CTAs of a cluster share the steps of its
tiles, see `shares.py`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import launch, place, smem
from pallas_gemm.kernels.element_types import BITS, SINGLE, bits
from pallas_gemm.kernels.hardware import WGMMA_ROWS
from pallas_gemm.kernels.hopper.groups import table
from pallas_gemm.kernels.hopper.widened import finish, walk
from pallas_gemm.kernels.hopper.widened.plan import WidenedPlan
from pallas_gemm.kernels.ptx import arrays, cluster, fences, fragments, tf32
from pallas_gemm.kernels.ptx.sums import LAYOUT
from pallas_gemm.kernels.traced import Ref, Scalar, Values


class Slots(NamedTuple):
    """Shared memory: the ring, what sums are handed over in, and the slots of what is stored."""

    w: Ref
    x: Ref
    scales: Any
    zeros: Any
    joined: Any
    apart: Any
    arrivals: Any
    scratch: Any
    out: Any
    loaded: Any


class Barriers(NamedTuple):
    """See the table above."""

    full: Any
    empty: Any
    joined: Any
    taken: Any
    loaded: Any


class Cta(NamedTuple):
    """All that the roles know: rows and columns are those of the transposed product."""

    plan: WidenedPlan
    gmem: launch.Inputs
    out: tuple[Ref, ...]
    slots: Slots
    barriers: Barriers
    at: walk.Tile
    rank: Scalar


def _span(cta: Cta) -> tuple[Scalar, Scalar]:
    """The first step of this CTA, and how many it takes."""
    piece, empty = cta.at.piece, cta.at.empty
    first, own = (jnp.int32(0), jnp.int32(cta.plan.k_steps)) if piece is None else piece[1:3]
    return first, own if empty is None else jnp.where(empty, 0, own)


def _load_weights(cta: Cta, step: Scalar, slot: Scalar) -> None:
    """Starts the loads of weights of a step."""
    plan, form, at, full = cta.plan, cta.plan.form, cta.at, cta.barriers.full.at[slot]
    weights = [place.matrix(own, at.product) for own in cta.gmem.factors[0].b]
    if form.k_last:
        for panel, part in plan.panel_parts:
            first = step * (form.depth * form.bits // 8) + panel * form.line
            there = pl.ds(at.row + part.source, part.rows), pl.ds(first, form.line)
            own = cta.slots.w.at[slot, panel, pl.ds(part.first, part.rows)]
            plgpu.copy_gmem_to_smem(weights[part.array].at[there], own, full)
    else:
        for panel, part in enumerate(plan.parts(8 * form.line // form.bits)):
            first = lax.div((at.row + part.source) * form.bits, jnp.int32(8 * form.unit))
            there = pl.ds(step * form.depth, form.depth), pl.ds(first, form.line // form.unit)
            own = cta.slots.w.at[slot, panel]
            plgpu.copy_gmem_to_smem(weights[part.array].at[there], own, full)


def _load_others(cta: Cta, step: Scalar, slot: Scalar) -> None:
    """Starts the loads of the other operand and of scales of a step."""
    plan, form, full = cta.plan, cta.plan.form, cta.barriers.full.at[slot]
    at, k = cta.at, step * form.depth
    x = place.matrix(cta.gmem.factors[0].a, at.product)
    for panel in range(plan.x_panels):
        there = pl.ds(at.col, form.cols), pl.ds(k + panel * form.panel, form.panel)
        plgpu.copy_gmem_to_smem(x.at[there], cta.slots.x.at[slot, panel], full)
    if not form.group:
        return
    first = lax.div(k, jnp.int32(form.group))
    own_groups = pl.ds(first, plan.scales_of_step)
    for part, groups in plan.scale_parts:
        own = cta.slots.scales.at[slot, groups, pl.ds(part.first, part.rows)]
        scales = place.matrix(cta.gmem.scales[part.array], at.product)
        from_groups = own_groups if isinstance(groups, slice) else first + groups
        there = from_groups, pl.ds(at.row + part.source, part.rows)
        plgpu.copy_gmem_to_smem(scales.at[there], own, full)
    if plan.has_zeros:
        _load_zeros(cta, own_groups, slot)


def _load_zeros(cta: Cta, groups: Any, slot: Scalar) -> None:
    """Starts the loads of the zero points of a step: a block of each array and consumer."""
    plan, form, at = cta.plan, cta.plan.form, cta.at
    each, (_, _, rows) = bits(form.zeros), form.zeros_of_part
    in_bytes = form.zeros in BITS
    for block in range(plan.blocks_of_zeros):
        consumer, array = divmod(block, form.sums)
        first, width = at.row + consumer * rows, rows
        if in_bytes:
            first, width = lax.div(first * each, jnp.int32(8)), rows * each // 8
        zeros = place.matrix(cta.gmem.scales[form.sums + array], at.product)
        own = cta.slots.zeros.at[slot, block, pl.ds(0, plan.scales_of_step)]
        there = groups, pl.ds(first, width)
        plgpu.copy_gmem_to_smem(zeros.at[there], own, cta.barriers.full.at[slot])


LOADS = (_load_weights, _load_others)
"""Each by a warp of its own: copies that a warp issues follow each other slowly."""


def _each_tile(cta: Cta, compute: Callable[[Cta, Scalar], None]) -> Scalar:
    """Goes through the tiles of a CTA; returns how many steps they take.

    Args:
        cta: The CTA.
        compute: Computes a tile, or loads it: given how many steps those before took.
    """
    share, none = walk.share(cta.plan, cta.gmem), jnp.int32(0)

    def one(turn: Scalar, before: Scalar) -> Scalar:
        own = cta._replace(at=share.tile(turn))
        compute(own, before)
        return before + _span(own)[1]

    return one(none, none) if share.count is None else lax.fori_loop(0, share.count, one, none)


def _further(slot: Scalar, by: int, stages: int) -> Scalar:
    """The slot that is so many further: a division would take a tenth of a step."""
    after = slot + by
    return jnp.where(after >= stages, after - stages, after)


def _producer(cta: Cta, start: Callable[[Cta, Scalar, Scalar], None]) -> None:
    """Fills its part of the ring, and waits until all of it has been read."""
    stages = jnp.int32(cta.plan.config.stages)

    def load(cta: Cta, before: Scalar) -> None:
        first, steps = _span(cta)

        def one_step(i: Scalar, slot: Scalar) -> Scalar:
            again = before + i >= stages
            pl.when(again)(lambda: plgpu.barrier_wait(cta.barriers.empty.at[slot]))
            start(cta, first + i, slot)
            return _further(slot, 1, cta.plan.config.stages)

        lax.fori_loop(0, steps, one_step, lax.rem(before, stages))

    steps = _each_tile(cta, load)

    @pl.loop(lax.max(steps - stages, jnp.int32(0)), steps)
    def _drain(i: Scalar) -> None:
        plgpu.barrier_wait(cta.barriers.empty.at[lax.rem(i, stages)])


def _consumer(cta: Cta) -> None:
    """Computes its part of each tile."""
    consumers = jnp.int32(cta.plan.config.consumers)
    warpgroup = lax.axis_index(launch.WARPGROUP)
    me, part = lax.rem(warpgroup, consumers), lax.div(warpgroup, consumers)

    def compute(cta: Cta, before: Scalar) -> None:
        multiply = functools.partial(_multiply, cta, me, part, before)
        if cta.at.empty is None:
            multiply()
        else:
            stores = cta.at.empty & finish.is_stored(cta, part)
            pl.when(stores)(lambda: finish.store_zeros(cta, me))
            pl.when(~cta.at.empty)(multiply)

    steps = _each_tile(cta, compute)
    if cta.barriers.taken is not None:
        is_read = (part > 0) & (steps > 0)
        pl.when(is_read)(lambda: plgpu.barrier_wait(cta.barriers.taken.at[me]))


def _multiply(cta: Cta, me: Scalar, part: Scalar, before: Scalar) -> None:
    """Multiplies what is loaded of a tile, and hands over its sums or stores them.

    Args:
        cta: The CTA.
        me: Which of the consumers this is that share the columns.
        part: Which of those that take the steps in turns: the same slots are always its.
        before: The steps of the tiles before.
    """
    plan, config, form = cta.plan, cta.plan.config, cta.plan.form
    stages, parts = jnp.int32(config.stages), jnp.int32(config.along_k)
    _, steps = _span(cta)
    if plan.problem.loaded_dtypes:
        stores = finish.is_stored(cta, part)
        pl.when(stores)(lambda: finish.fetch_first(cta, me))
    zeros = jnp.zeros((form.rows, form.cols), jnp.float32)
    total = arrays.in_registers(plan, zeros, LAYOUT)
    total = arrays.fenced(plan, total, LAYOUT)
    first = lax.rem(part + parts - lax.rem(before, parts), parts)
    own = fragments.places(plan, me, form)

    def one_step(i: Scalar, carried: tuple[Values, Scalar, Scalar]) -> Any:
        total, slot, last = carried
        plgpu.barrier_wait(cta.barriers.full.at[slot])
        scales = [x.at[slot] for x in cta.slots[2:4] if x is not None]
        w, x = cta.slots.w.at[slot], cta.slots.x.at[slot]
        total = fragments.add_step(plan, total, w, x, scales, me, own, form)
        fences.after_loads(plan)
        if form.scales_sums:
            plgpu.barrier_arrive(cta.barriers.empty.at[slot])
        else:
            # WGMMAs of the step before have ended with the first of this one's.
            pl.when(i > 0)(lambda: plgpu.barrier_arrive(cta.barriers.empty.at[last]))
        return total, _further(slot, config.along_k, config.stages), slot

    count = lax.div(steps - first + (config.along_k - 1), parts)
    begin = lax.rem(before + first, stages)
    total, _, last = lax.fori_loop(0, count, one_step, (total, begin, begin))
    plgpu.wgmma_wait(0)
    total = arrays.fenced(plan, total, LAYOUT)
    total = total * float(form.part) if form.part > 1 else total
    if not form.scales_sums:
        free = functools.partial(plgpu.barrier_arrive, cta.barriers.empty.at[last])
        # A piece of a tile may have fewer steps than there are parts.
        has_pieces = plan.has_several_tiles and (config.shares_all or config.ctas_along_k > 1)
        pl.when(count > 0)(free) if has_pieces else free()
    finish.join_and_store(cta, me, part, before, total)


def _body(plan: WidenedPlan, gmem: launch.Inputs, *rest: Any) -> None:
    """Gives each warpgroup of a CTA its role."""
    *out, slots, barriers = rest
    if plan.config.shares_all:
        gmem = gmem._replace(summands=out.pop())
    nowhere = walk.Tile(None, None)
    cta = Cta(plan, gmem, tuple(out), slots, barriers, nowhere, walk.rank(plan))
    registers = plan.config.registers
    if slots.arrivals is not None:
        cluster.begin(plan, slots.arrivals)

    def await_cluster() -> None:
        if slots.arrivals is not None:
            cluster.begun(plan)

    def produce() -> None:
        if registers:
            plgpu.set_max_registers(registers.producer, action="decrease")

        @plgpu.warp_map
        def _each_warp(warp: Scalar) -> None:
            for number, start in enumerate(LOADS):
                pl.when(warp == number)(functools.partial(_producer, cta, start))

        await_cluster()

    def consume() -> None:
        if registers:
            plgpu.set_max_registers(registers.consumer, action="increase")
        # While the first operands are on their way.
        await_cluster()
        _consumer(cta)

    # JAX lowers the branch for False twice, once to see what it returns: the shorter one.
    lax.cond(lax.axis_index(launch.WARPGROUP) != plan.config.warpgroups, consume, produce)
    if plan.rounds_loads:
        tf32.round_loads([gmem.factors[0].a, *gmem.factors[0].b])


def _slots(plan: WidenedPlan) -> Slots:
    """The buffers of a CTA."""
    config, form, stages = plan.config, plan.form, plan.config.stages
    sums = plan.in_blocks(form.rows, form.cols)
    boxes = [
        (config.consumers, config.store_slots * (config.store_columns // width), width, WGMMA_ROWS)
        for width in finish.widths(plan)
    ]
    lead, whole = (config.consumers, config.store_slots), (config.store_columns, WGMMA_ROWS)
    return Slots(
        w=plgpu.SMEM(
            (stages, form.panels, form.lines, form.line // form.unit),
            jnp.int8 if form.kind in BITS else form.kind,
            transforms=(plgpu.SwizzleTransform(form.line),),
        ),
        x=plgpu.SMEM(
            (stages, plan.x_panels, form.cols, form.panel),
            form.to,
            transforms=(plgpu.SwizzleTransform(smem.ATOM_BYTES),),
        ),
        scales=plgpu.SMEM((stages, plan.scales_of_step, form.all_rows), plan.scales)
        if form.group
        else None,
        zeros=_slots_of_zeros(plan) if plan.has_zeros else None,
        joined=plgpu.SMEM((config.along_k - 1, config.consumers, *sums), jnp.float32)
        if config.along_k > 1
        else None,
        apart=plgpu.SMEM(finish.apart_shape(plan), jnp.float32)
        if config.ctas_along_k > 1
        else None,
        arrivals=plgpu.SMEM((config.consumers, cluster.BARRIER_WORDS), jnp.int32)
        if config.ctas_along_k > 1
        else None,
        scratch=plgpu.SMEM((config.consumers, form.scratch), jnp.float32)
        if form.crosses_warps
        else None,
        out=tuple(
            smem.boxed(boxes, dtype, simulated=plan.simulated)
            if dtype.itemsize == 2
            else _slots_of_panels((*lead, finish.panels(dtype)), whole, dtype)
            for dtype in plan.problem.result_dtypes
        ),
        loaded=tuple(plgpu.SMEM((*lead, *whole), dtype) for dtype in plan.problem.loaded_dtypes),
    )


def _slots_of_panels(lead: tuple[int, ...], whole: tuple[int, int], dtype: Any) -> Any:
    cols, rows = whole
    transforms = (plgpu.SwizzleTransform(smem.ATOM_BYTES),)
    return plgpu.SMEM((*lead, cols, rows // lead[-1]), dtype, transforms=transforms)


def _slots_of_zeros(plan: WidenedPlan) -> Any:
    form = plan.form
    lines, line, rows = form.zeros_of_part
    kind, length = (jnp.int8, line) if form.zeros in BITS else (form.zeros, rows)
    return plgpu.SMEM((plan.config.stages, plan.blocks_of_zeros, lines, length), kind)


def _barriers(plan: WidenedPlan) -> Barriers:
    """The barriers of a CTA."""
    config, stages, loaded = plan.config, plan.config.stages, len(plan.problem.loaded_dtypes)
    return Barriers(
        full=plgpu.Barrier(num_arrivals=plan.copies, num_barriers=stages),
        empty=plgpu.Barrier(num_arrivals=config.consumers, num_barriers=stages),
        joined=plgpu.Barrier(num_arrivals=config.along_k - 1, num_barriers=config.consumers)
        if config.along_k > 1
        else None,
        loaded=plgpu.Barrier(
            num_arrivals=loaded, num_barriers=config.consumers * config.store_slots
        )
        if loaded
        else None,
        taken=plgpu.Barrier(num_arrivals=1, num_barriers=config.consumers)
        if config.along_k > 1 and plan.has_several_tiles
        else None,
    )


def in_bytes(w: jax.Array) -> jax.Array:
    """The bytes that hold numbers of few bits: the array itself, in memory. Others as they are."""
    if w.dtype not in BITS:
        return w
    if bits(w.dtype) == 4:
        w = w.reshape(*w.shape[:-1], w.shape[-1] // 2, 2)
    return lax.bitcast_convert_type(w, jnp.int8)


def _of_one_type(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Returns what both weights of a gated product have in the type of slots, float32 for two."""
    if len({x.dtype for x in arrays}) < 2:
        return arrays
    return [x.astype(jnp.float32) for x in arrays]


def build(plan: WidenedPlan) -> Callable[..., Any]:
    """Returns the kernel of a plan: a function of a, b, scales, and what the epilogue takes.

    A second b follows the first. Where rows are in groups, their sizes come next.
    """

    def run(a: jax.Array, b: jax.Array, *rest: jax.Array) -> Any:
        ups, rest = rest[: plan.problem.sums - 1], rest[plan.problem.sums - 1 :]
        sizes = None
        if plan.problem.groups:
            sizes, rest = table.of_rows(rest[0], plan.problem.n), rest[1:]
        scales, others = rest[: plan.problem.scales], rest[plan.problem.scales :]
        sums = plan.problem.sums
        scales = [*_of_one_type(scales[:sums]), *_of_one_type(scales[sums:])]
        scales = list(map(launch.in_whole_rows, scales))
        own = plan.typed(scales)
        factors = [a, b, *ups]
        if plan.problem.a_dtype == SINGLE and not plan.rounds_loads:
            factors = map(tf32.rounded, factors)
        operands = [*(in_bytes(x) for x in (*factors, *scales)), *others]
        inputs = launch.inputs(plan.config, plan.problem, operands, sizes)
        left = plan.left_sums
        if left:
            arrived = jnp.zeros(left[0].shape[:2], jnp.int32)
            inputs = inputs._replace(sent=jax.new_ref(arrived))
        kernel = launch.kernel(
            functools.partial(_body, own),
            name="pallas_gemm_widened",
            workers=plan.workers,
            cluster={walk.ALONG_K: plan.config.ctas_along_k},
            warpgroups=plan.config.warpgroups + 1,
            results=launch.results(plan.problem, plan.problem.out_shape) + left,
            scratch=(_slots(own), _barriers(own)),
            flops=plan.problem.flops,
            transcendentals=launch.transcendentals(plan.problem),
            interpret=plan.interpret,
            approx_math=plan.approx_math,
        )
        results = kernel(inputs)
        results = results[: len(plan.problem.result_dtypes)]
        return results if plan.problem.epilogue.program is not None else results[0]

    return run
