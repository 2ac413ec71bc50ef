"""Sums over groups: which piece of work comes next, the longest first.

    sizes ──▶ the program: groups by size ──▶ the guide ──▶ words in shared memory ──▶ all roles

Pieces are every tile of every group, the largest group first, and are numbered in this order. With
`persistence="dynamic"` a worker claims the next number when its producer comes to the piece before,
or to the one before that if the piece is short: a worker that has had long ones takes fewer. Else
numbers are dealt in turn, as in the simulator, which knows no atomics. The guide (`told.py`) reads
of which group a number is, and where that begins and ends.

    barrier      who arrives                                who waits
    wanted[s]    the producer, when it comes to a piece     the guide, before it claims the next
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import launch, tiles, work
from pallas_gemm.kernels.hopper.cta import Cta
from pallas_gemm.kernels.hopper.groups import table, told, warp_loop
from pallas_gemm.kernels.hopper.tiling import TOLD_HEADER
from pallas_gemm.kernels.ptx import words

SHORT_STEPS = 8
"""The most steps of a piece that may end before the next one is found, which is claimed earlier."""

PRODUCERS_WORD, GUIDES_WORD = range(TOLD_HEADER)
"""The words before those of all slots: one of each warp that loops (`warp_loop.py`)."""


def walk(cta: Cta, producing: bool, compute: tiles.Compute, carry: Any) -> tuple[Any, Any]:
    """See `tiles.Walk`."""
    coding: Any = cta.plan.coding

    def is_any(state: tuple[Any, tuple[Any, ...], Any]) -> Any:
        return coding.is_any(*state[1])

    def step(state: tuple[Any, tuple[Any, ...], Any]) -> tuple[Any, Any, Any]:
        turn, words, carry = state
        if producing:
            plgpu.barrier_arrive(cta.barriers.wanted.at[told.slot(turn)])
        carry = compute(turn, coding.unpack(*words), carry)
        return turn + 1, told.take(cta, turn + 1), carry

    first = jnp.int32(0)
    loop = _loop_of_a_warp(cta, PRODUCERS_WORD) if producing else lax.while_loop
    turns, _, carry = loop(is_any, step, (first, told.take(cta, first), carry))
    return turns, carry


def guide(cta: Cta) -> None:
    """Finds the pieces of this CTA's worker, and tells the roles of each, and of the end."""
    plan, ranks = cta.plan, cta.gmem.order
    coding: Any = plan.coding
    order: Any = plan.schedule
    height, width = plan.config.grid(plan.problem)
    tiles = jnp.int32(height * width)
    # Where no group is cut, each is a row.
    rows = table.read(plan, ranks, 0).rows if plan.relay else jnp.int32(plan.problem.batch)
    pieces = rows * tiles

    def found(number: Any) -> tuple[Any, tuple[Any, ...]]:
        row, tile = lax.div(number, tiles), lax.rem(number, tiles)
        here = order(tile.astype(jnp.uint32), jnp.uint32(height))
        own, leg = table.read(plan, ranks, row), jnp.int32(work.WHOLE_LEG)
        if plan.relay:
            rank, piece, is_last = work.unpack_leg(own.leg)
            leg = work.pack_leg(rank * tiles + tile, piece, is_last)
        row, col = (x.astype(jnp.int32) for x in here)
        return own.end - own.first, coding.pack_sum(row, col, own.group, (own.first, own.end), leg)

    def step(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        turn, number, awaited = state
        elements, words = found(number)
        told.tell(cta, turn, words)
        ahead = (elements <= SHORT_STEPS * plan.tile_k).astype(jnp.int32)
        come_to = lax.max(turn + 1 - ahead, awaited)
        _await(cta, awaited, come_to)
        return turn + 1, _following(cta, number), come_to

    def is_any(state: tuple[Any, Any, Any]) -> Any:
        return state[1] < pieces

    start = jnp.int32(0), _first(cta), jnp.int32(0)
    turns, _, awaited = _loop_of_a_warp(cta, GUIDES_WORD)(is_any, step, start)
    told.tell(cta, turns, coding.no_sum())
    _await(cta, awaited, turns)
    told.until_all_are_taken(cta, turns + 1)


def _await(cta: Cta, first: Any, end: Any) -> None:
    """Waits until the producer has come to pieces of these turns."""
    pl.loop(first, end)(lambda turn: plgpu.barrier_wait(cta.barriers.wanted.at[told.slot(turn)]))


def _first(cta: Cta) -> Any:
    """The number of the worker's first piece."""
    if cta.plan.relay and cta.plan.claims_tiles:
        # Who waits for a sum waits for a worker that runs: none has a piece before it does.
        return words.claim(cta.gmem.order.at[table.CLAIMED])
    return lax.axis_index(launch.WORKER)


def _following(cta: Cta, number: Any) -> Any:
    """The number of the worker's next piece, after one of a number."""
    plan = cta.plan
    if not plan.claims_tiles:
        return number + plan.workers
    claimed = words.claim(cta.gmem.order.at[table.CLAIMED])
    return claimed if plan.relay else claimed + plan.workers


def _loop_of_a_warp(cta: Cta, word: int) -> Callable[..., Any]:
    """Returns `lax.while_loop` for one warp."""
    plan = cta.plan
    pieces = table.length(plan) * math.prod(plan.config.grid(plan.problem))
    return functools.partial(warp_loop.run, cta, word, pieces)
