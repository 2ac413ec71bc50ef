"""Products whose factors have a scale for each block: each block's sum is scaled, then added.

Blocks without scales make short sums of 8-bit floats: the tensor cores keep 14 bits of a long one.

    per k    wait full[s]; per block: WGMMA into fresh registers; wait for it; multiply and add;
             arrive empty[s]

While one consumer multiplies and adds, the WGMMAs of the other run. Where each column has a scale,
they take turns (`ptx/turns.py`). Each thread loads the scales that it needs from global memory. It
does so for several steps at a time, while it computes the several before: the way from the L2 is
longer than a step. Where a block is longer than a step, its steps are scaled one by one.

Where each column has a scale, the producer fetches those of a step into the L1 when it loads the
operands of that step. 8192 cubed takes 1271 us so on an H200, and 1579 us without. Where 128
columns share one, it takes 878 us and 866.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import launch, place, work
from pallas_gemm.kernels.hopper import ring
from pallas_gemm.kernels.hopper.cta import Cta, first_of
from pallas_gemm.kernels.hopper.dense import late_store, multiply
from pallas_gemm.kernels.hopper.dense.load import Target
from pallas_gemm.kernels.hopper.dense.product import Product
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.kernels.ptx import arrays, prefetch, scaled, turns
from pallas_gemm.kernels.ptx.sums import LAYOUT
from pallas_gemm.kernels.traced import Scalar, Values

SECTOR_BYTES = 32
"""The part of a line that the L1 fetches."""


class Scales(NamedTuple):
    """The scales of a block of k: those of rows, and of each part's columns."""

    rows: Any
    columns: tuple[Any, ...]


Step = tuple[Scales, ...]
"""The scales of each block of a step."""


class InBlocks(Product):
    """Blocks of the factors have scales."""

    def begin(self, me: Scalar) -> None:
        """See `Product`."""
        if turn := _turn(self.plan, me):
            turns.begin(self.plan, turn.me, count=turn.count)

    def end(self, me: Scalar) -> None:
        """See `Product`."""
        super().end(me)
        if turn := _turn(self.plan, me):
            turns.end(self.plan, turn.me)

    def load(
        self, piece: work.Piece, factors: launch.Factors, at: place.Where, target: Target
    ) -> None:
        """See `Product`; it may fetch the scales of the step, too."""
        super().load(piece, factors, at, target)
        if self.plan.scales.apart and not self.plan.problem.in_groups:
            _fetch(self.cta, at, target.k_start)

    def add_up(
        self, me: Scalar, piece: work.Piece, steps: multiply.Steps, stores: late_store.Stores
    ) -> tuple[Any, Any]:
        """See `Product`."""
        return add_up(self.cta, me, self.place(piece, me), steps, stores)


def add_up(
    cta: Cta,
    me: Scalar,
    at: place.Where,
    steps: multiply.Steps,
    stores: late_store.Stores,
    begin: Any = 0,
) -> tuple[Any, Any]:
    """Runs the k loop of one tile, or of a piece of it that begins with some step.

    Returns the sum, and the slot of the last step.
    """
    plan, barriers = cta.plan, cta.barriers
    loop = _Loop(cta, me, at, steps, begin)
    if plan.config.pingpong:
        plgpu.barrier_wait(barriers.baton.at[me])
    zeros = arrays.in_registers(plan, jnp.zeros(plan.config.consumer_tile, jnp.float32), LAYOUT)
    slot = ring.first_slot(plan, steps.turn, steps.slot)
    first = jnp.int32(0)
    total, _ = loop.step(first, slot, (zeros, None), loop.load(first))
    done = _Done(ring.keep(plan, slot), total, loop.several(jnp.int32(1), 1))
    done, issued = multiply.store_between(stores, steps.count, loop.advance, done)
    kept, total, _ = loop.rest(issued, done)
    if plan.config.pingpong:
        plgpu.barrier_arrive(barriers.baton.at[1 - me])
    return total, kept


class _Done(NamedTuple):
    """The state that a step hands on.

    Attributes:
        kept: The slot, where it is counted from step to step, or None.
        total: The sum.
        scales: The scales of the next steps.
    """

    kept: Scalar | None
    total: Values
    scales: tuple[Step, ...]


class _Loop(NamedTuple):
    """The steps of one tile, or of a piece of it.

    Attributes:
        cta: The memory and the barriers of the CTA.
        me: Which consumer this is.
        at: Where its part of the tile lies.
        steps: The steps.
        begin: The first one, of those of the tile.
    """

    cta: Cta
    me: Scalar
    at: place.Where
    steps: multiply.Steps
    begin: Any

    @property
    def end(self) -> Any:
        """How many there are."""
        return self.cta.plan.k_steps if self.steps.count is None else self.steps.count

    def load(self, k: Scalar) -> Step:
        """Starts to load the scales of a step."""
        return load(self.cta, self.at, self.begin + k)

    def several(self, first: Scalar, count: int) -> tuple[Step, ...]:
        """Starts to load those of several steps, or of the last ones."""
        first = lax.min(first, jnp.int32(self.end - count))
        return tuple(self.load(first + number) for number in range(count))

    def step(self, k: Scalar, slot: Scalar, sums: tuple[Any, Any], scales: Step) -> Any:
        """Computes a step; returns the sum and the last product, whose registers may be taken.

        It is given both of the step before.
        """
        barriers, barrier = self.cta.barriers, ring.barrier(self.cta.plan, slot, self.me)
        plgpu.barrier_wait(barriers.full.at[barrier])
        if self.steps.mask:
            self.steps.mask(slot, k)
        total, product = _added(self.cta, self.me, slot, sums, scales)
        plgpu.barrier_arrive(barriers.empty.at[barrier])
        return total, product

    def compute(self, k: Scalar, done: _Done, loads: Sequence[int]) -> _Done:
        """Computes steps; `loads` says how many more scales are loaded before each of them."""
        plan, (kept, total, scales), product = self.cta.plan, done, None
        for number, count in enumerate(loads):
            if count:
                upcoming = self.several(k + number + len(scales), count)
                scales = (*scales, *upcoming)
            _, slot = ring.step(plan, self.steps.turn, k + number, kept)
            total, product = self.step(k + number, slot, (total, product), scales[0])
            kept, scales = ring.keep(plan, slot), scales[1:]
        return _Done(kept, total, scales)

    def advance(self, k: Scalar, done: _Done) -> _Done:
        """Computes one step, and loads the scales of the next one."""
        return self.compute(k, done, (1,))

    def rest(self, first: Any, done: _Done) -> _Done:
        """Computes all steps from one on."""
        scales, end = self.cta.plan.scales, self.end
        # How many steps a piece has is not known here.
        ahead = scales.ahead if self.steps.count is None else 1
        if ahead == 1:
            each = 2 if scales.in_pairs else 1
            count = (end - first) // each
            loads = (1,) * each
            done = lax.fori_loop(
                0, count, lambda i, done: self.compute(first + i * each, done, loads), done
            )
            return lax.fori_loop(first + count * each, end, self.advance, done)
        # Then there are so many left that several at a time are all of them.
        alone = first + (end - first) % ahead
        done = lax.fori_loop(first, alone, self.advance, done)
        if alone == end:
            return done
        loads = (ahead, *(0,) * (ahead - 1))
        return lax.fori_loop(
            0,
            (end - alone) // ahead,
            lambda i, done: self.compute(alone + i * ahead, done, loads),
            done._replace(scales=self.several(jnp.int32(alone), ahead)),
        )


def load(cta: Cta, at: place.Where, k: Scalar) -> Step:
    """Starts to load the scales of a step."""
    plan, blocks = cta.plan, cta.plan.scales.blocks
    first, found = lax.div(k * plan.tile_k, jnp.int32(blocks.k)), []
    for number in range(plan.scales.per_step):
        block = first + number
        if plan.problem.k % plan.tile_k or plan.problem.ragged_k:
            # Beyond the end of k there are zeros, whatever their scale.
            block = lax.min(block, jnp.int32(plan.problem.k // blocks.k - 1))
        found.append(Scales(_rows(cta, at, block), _columns(cta, at, block)))
    return tuple(found)


def _fetch(cta: Cta, at: place.Where, k_start: Scalar) -> None:
    """Fetches the scales of a step for all consumers."""
    plan, blocks = cta.plan, cta.plan.scales.blocks
    rows, columns = plan.config.out_tile(plan.problem)
    last = jnp.int32(plan.problem.k // blocks.k - 1)
    first = lax.min(lax.div(k_start, jnp.int32(blocks.k)), last)
    if blocks.rows:
        scales = place.matrix(cta.gmem.scales[0], at.batch)
        fetch = functools.partial(
            prefetch.rows, plan, scales, at.row, first, count=rows, each=blocks.rows
        )
        sector = SECTOR_BYTES // scales.dtype.itemsize
        if plan.scales.per_step == 1 and scales.shape[1] % sector == 0:
            pl.when(first % sector == 0)(fetch)
        else:
            fetch()
    for which in range(plan.problem.sums):
        scales = place.matrix(cta.gmem.scales[bool(blocks.rows) + which], at.batch)
        for number in range(plan.scales.per_step):
            block = lax.min(first + number, last)
            prefetch.columns(plan, scales, at.col, block, count=columns, each=blocks.columns)


def _rows(cta: Cta, at: place.Where, block: Scalar) -> Any:
    plan, each = cta.plan, cta.plan.scales.blocks.rows
    if not each:
        return None
    scales = place.matrix(cta.gmem.scales[0], at.batch)
    # Groups of rows begin and end anywhere.
    clipped = bool(plan.problem.groups) or plan.reach[0] != plan.problem.m
    how = {"count": plan.consumer_out_tile[0], "each": each, "clipped": clipped}
    return scaled.load(plan, scales, at.row, block, left=True, **how)


def _columns(cta: Cta, at: place.Where, block: Scalar) -> tuple[Any, ...]:
    plan, blocks, part = cta.plan, cta.plan.scales.blocks, cta.plan.scales.part
    if not blocks.columns:
        return ()
    found, clipped = [], plan.reach[1] != plan.problem.n
    for which in range(plan.problem.sums):
        scales = place.matrix(cta.gmem.scales[bool(blocks.rows) + which], at.batch)
        if plan.scales.staged:
            count = plan.consumer_out_tile[1]
            own = scales.at[block, pl.ds(at.col, count)]
            found.append(plgpu.load(own, layout=_a_thread_each(count), optimized=False))
            continue
        for start in range(0, plan.consumer_out_tile[1], part):
            if plan.scales.apart:
                how = {"count": part, "each": blocks.columns, "clipped": clipped}
                own = scaled.load(plan, scales, at.col + start, block, left=False, **how)
            else:
                place_ = lax.div(at.col + start, jnp.int32(blocks.columns))
                last = jnp.int32(scales.shape[1] - 1)
                own = scales[block, lax.min(place_, last) if clipped else place_]
            found.append(own)
    return tuple(found)


def _added(cta: Cta, me: Scalar, slot: Scalar, sums: tuple[Any, Any], scales: Step) -> Any:
    """Adds the products of a step's blocks: see `scaled.add_step`."""
    plan, part = cta.plan, cta.plan.scales.part
    rows, cols = plan.config.consumer_tile
    my_row, my_col = first_of(plan, me)
    a = cta.slots.a.tile.at[0, slot, pl.ds(my_row, rows)]
    b = [
        cta.slots.b.tile.at[which, slot, pl.ds(my_col + start, part)]
        for which in range(plan.b.parts)
        for start in range(0, cols // plan.b.parts, part)
    ]
    depth, staged = plan.tile_k // plan.scales.per_step, None
    if plan.scales.staged:
        (own,) = scales
        staged = scaled.Staged(plan.scales.early)
        scales = (own._replace(columns=_handed_round(cta, me, slot, own.columns)),)
    blocks = [
        scaled.Block(slice(number * depth, (number + 1) * depth), own.rows, own.columns, staged)
        for number, own in enumerate(scales)
    ]
    return scaled.add_step(plan, *sums, _turn(plan, me), a, b, blocks)


def _a_thread_each(count: int) -> Any:
    """How scales lie in registers that each thread loads some of."""
    return plgpu.Layout.WG_STRIDED((count,), 1)


def _handed_round(cta: Cta, me: Scalar, slot: Scalar, values: Sequence[Any]) -> tuple[Any, ...]:
    """Stores scales of columns for all threads; returns where those of each part are.

    All threads are done with the step before the last when they meet in the last one.
    """
    plan, part = cta.plan, cta.plan.scales.part
    number = lax.rem(slot, jnp.int32(cta.slots.scales.shape[1]))
    here = cta.slots.scales.at[me, number]
    for which, own in enumerate(values):
        here.at[which][...] = own
    scaled.meet(plan)
    columns = range(0, plan.consumer_out_tile[1], part)
    return tuple(here.at[i, pl.ds(start, part)] for i in range(len(values)) for start in columns)


def _turn(plan: HopperPlan, me: Scalar) -> turns.Turn | None:
    """The turn of a consumer, where several share a tile and each column has a scale."""
    shared = plan.config.consumers > 1 and not plan.config.pingpong
    return turns.Turn(me, plan.config.consumers) if shared and plan.scales.apart else None
