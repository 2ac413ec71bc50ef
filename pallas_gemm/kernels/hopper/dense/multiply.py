"""The k loop of a tile: what the ring brings is multiplied, with stores in between.

For each k: wait for `full[s]`; WGMMA; wait until only that one is in flight; arrive at
`empty[s - 1]`; store a chunk of the previous tile, if it is stored late.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels.hardware import WGMMA_ROWS
from pallas_gemm.kernels.hopper import ring
from pallas_gemm.kernels.hopper.cta import Cta, first_of
from pallas_gemm.kernels.hopper.dense.late_store import Stores
from pallas_gemm.kernels.ptx import arrays
from pallas_gemm.kernels.ptx.sums import LAYOUT
from pallas_gemm.kernels.traced import Scalar, Values, divided

Mask = Callable[[Any, Any], None]
"""`mask(slot, k)`: zeroes what a slot has for step k that must not be multiplied."""


class Steps(NamedTuple):
    """The k loop of one tile.

    Attributes:
        turn: The number of the tile in its worker's sequence.
        slot: The slot of its first step; None if the turn says it.
        count: How many steps it takes; None for all of them.
        mask: Zeroes the elements of a slot that are beyond a group; None without groups. Only
            groups may have no step.
        begins: The tile begins with them, for which consumers may wait for their turn.
        ends: It ends with them.
    """

    turn: Scalar
    slot: Scalar = None
    count: Any = None
    mask: Mask | None = None
    begins: bool = True
    ends: bool = True


class Apart(NamedTuple):
    """The parts of a piece of work, of a tile whose parts several pieces make.

    Attributes:
        first: The number of the first one, of those of the tile.
        leave: `leave(number, sum)` leaves the sum of a part of the piece that is not its last,
            where it must not be added to the next one.
        added: `added(sum, part)` adds the next part, or returns it where what was before is left.
    """

    first: Any
    leave: Callable[[Any, Any], None]
    added: Callable[[Any, Any], Any]


def add_up(
    cta: Cta,
    me: Scalar,
    steps: Steps,
    stores: Stores,
    before: Values | None = None,
    apart: Apart | None = None,
) -> tuple[Any, Any]:
    """Runs the k loop of one tile: part by part where that keeps the error small.

    Adds to what was summed up before, if anything was. Returns the sum, and the slot of the last
    step, as `_multiply` does.
    """
    plan, parts = cta.plan, cta.plan.config.partial_sums
    if parts == 1:
        return add_up_whole(cta, me, steps, stores, before)
    count = jnp.int32(plan.k_steps if steps.count is None else steps.count)
    # As `schedules.split_k` cuts tiles, so that either way makes the same sums.
    least, longer = divided(count, parts)
    if apart is not None:
        least, longer = map(jnp.int32, divmod(plan.k_steps, plan.config.split_k * parts))
        longer = longer - apart.first

    def part(number: Any, slot: Any) -> tuple[Any, Any]:
        own = least + (number < longer).astype(jnp.int32)
        return add_up_whole(cta, me, steps._replace(slot=slot, count=own), stores)

    def next_part(number: Any, done: tuple[Any, Any]) -> tuple[Any, Any]:
        total, slot = done
        if apart is not None:
            apart.leave(number - 1, total)
        summand, slot = part(number, ring.following(plan, slot))
        return total + summand if apart is None else apart.added(total, summand), slot

    if before is None:
        first, total, slot = (1, *part(jnp.int32(0), steps.slot))
    else:
        # Slot 0 follows -1, too.
        first, total, slot = 0, before, steps.slot - 1
    # In a loop: written out one after the other, four parts take more registers than there are, and
    # two parts do if something was summed up before.
    return lax.fori_loop(first, parts, next_part, (total, slot))


def add_up_whole(
    cta: Cta, me: Scalar, steps: Steps, stores: Stores, before: Values | None = None
) -> tuple[Any, Any]:
    """Does the same in one part.

    LLVM knows no wait for WGMMA. A fence keeps it from moving what computes with the sum before it.
    """
    plan = cta.plan
    if before is not None and not plan.simulated:

        def go_on(acc: Any) -> None:
            _multiply(cta, me, steps, stores, acc, _wait_for)

        total = pl.run_state(go_on)(plgpu.ACC.init(before))
        return arrays.fenced(plan, total, LAYOUT), None
    accumulator = plgpu.ACC(plan.config.consumer_tile, plan.problem.accumulator_dtype)
    total, slot = pl.run_scoped(
        lambda acc: _multiply(cta, me, steps, stores, acc, _read), accumulator
    )
    total = arrays.fenced(plan, total, LAYOUT)
    return (total if before is None else before + total), slot


def _read(acc: Any) -> Any:
    """Returns the sum in registers; to read it waits for every WGMMA."""
    return acc[...]


def _wait_for(acc: Any) -> None:
    """Waits for every WGMMA; Pallas returns the sum afterwards."""
    del acc
    plgpu.wgmma_wait(0)


def _multiply(
    cta: Cta,
    me: Scalar,
    steps: Steps,
    stores: Stores,
    acc: Any,
    finish: Callable[[Any], Any],
) -> tuple[Any, Any]:
    """Runs the k loop of one tile, or a part of it, with stores in between.

    Returns what `finish` makes of the sum, and the slot of the last step unless it is found by
    dividing.
    """
    plan, barriers, turn = cta.plan, cta.barriers, steps.turn

    def issue(slot: Scalar, k: Scalar) -> None:
        plgpu.barrier_wait(barriers.full.at[ring.barrier(plan, slot, me)])
        if steps.mask:
            steps.mask(slot, k)
        _issue_wgmma(cta, me, acc, slot)

    def release(slot: Scalar) -> None:
        plgpu.barrier_arrive(barriers.empty.at[ring.barrier(plan, slot, me)])

    def if_any(do: Callable[[], None]) -> None:
        pl.when(steps.count > 0)(do) if steps.mask else do()

    def advance(k: Scalar, kept: Any) -> Any:
        before, slot = ring.step(plan, turn, k, kept)
        issue(slot, k)
        plgpu.wgmma_wait(plan.wgmmas_per_step)
        release(before)
        return ring.keep(plan, slot)

    if plan.config.pingpong and steps.begins:
        plgpu.barrier_wait(barriers.baton.at[me])
    slot = ring.first_slot(plan, turn, steps.slot)
    if_any(lambda: issue(slot, 0))
    kept, issued = store_between(stores, steps.count, advance, ring.keep(plan, slot))
    end = plan.k_steps if steps.count is None else steps.count
    kept = lax.fori_loop(issued, end, advance, kept)
    if plan.config.pingpong and steps.ends:
        plgpu.barrier_arrive(barriers.baton.at[1 - me])
    total = finish(acc)
    if_any(lambda: release(ring.last_slot(plan, turn, kept)))
    return total, kept


def store_between(
    stores: Stores, count: Any, advance: Callable[[Any, Any], Any], done: Any
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


def _issue_wgmma(cta: Cta, me: Scalar, acc: Any, slot: Scalar) -> None:
    plan = cta.plan
    rows, cols = plan.config.consumer_tile
    my_row, my_col = first_of(plan, me)
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
