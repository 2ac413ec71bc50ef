"""How the epilogue finishes the sums of a tile and stores them, chunk by chunk.

    tensor memory ──▶ registers ──▶ store slot in shared memory ──▶ TMA ──▶ the result

A chunk waits until its slot's last store has been read. A residual is loaded by TMA into the slot
that its sum will take, or, of another type than the result, into one of its own. A chunk of a
symmetric result is written and stored twice (`mirror.py`).
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import epilogue, place
from pallas_gemm.kernels.blackwell import mirror
from pallas_gemm.kernels.blackwell.cta import Cta, freed_of, sums_of
from pallas_gemm.kernels.blackwell.plan import BlackwellPlan
from pallas_gemm.kernels.ptx import arrays
from pallas_gemm.kernels.traced import Ref, Scalar, Values, divided

LoadSums = Callable[[int, int], tuple[Any, ...]]
"""`load(first, width)`: some columns of a chunk, of each of the sums of a tile."""


def finish(cta: Cta, at: place.Where, turn: Scalar, chunk: Scalar, load: LoadSums) -> Any:
    """Reads the sums of a chunk of columns and finishes them, a few columns at a time."""
    plan = cta.plan
    width, step = plan.config.store_columns, plan.config.read_columns(plan.problem)
    residual: list[Any] = []

    def read(within: int, _: int) -> Any:
        if not residual:
            slot = _store_slot(plan, turn, chunk)
            plgpu.barrier_wait(cta.barriers.residual.at[slot])
            residual.append((cta.slots.residual or cta.slots.out).tile[slot])
        return residual[0] if step == width else residual[0][:, within : within + step]

    strips = []
    for within in range(0, width, step):
        first = chunk * width + within
        sums = load(within, step)
        rows, cols = (at.row, plan.config.tile[0]), (at.col + first, step)
        strip = epilogue.Strip(at.batch, rows, cols, plgpu.Layout.TCGEN05)
        own = functools.partial(read, within)
        strips += epilogue.finish(plan, cta.gmem, strip, sums, own)
    return strips[0] if len(strips) == 1 else lax.concatenate(strips, 1)


def load_sums(cta: Cta, turn: Scalar, chunk: Scalar, first: int, width: int) -> tuple[Any, ...]:
    """Reads some columns of a chunk, of each part of the sums of a tile."""
    plan = cta.plan
    columns, within = plan.config.out_tile(plan.problem)[1], plan.config.store_columns
    sums = tuple(
        plgpu.async_load_tmem(sums_of(cta, turn, part * columns + (chunk * within + first), width))
        for part in range(plan.problem.sums)
    )
    if first + width == within:
        free_when_read(cta, turn, chunk, plan.chunks)
    return sums


def free_when_read(cta: Cta, turn: Scalar, chunk: Scalar, chunks: int) -> None:
    """Frees a half of an accumulator with the last of its chunks; a tile has `chunks` of them."""
    per_half = chunks // cta.plan.halves
    half, nth = divided(chunk, per_half)
    is_last = nth == per_half - 1
    pl.when(is_last)(functools.partial(free_accumulator, cta, turn, half))


def free_accumulator(cta: Cta, turn: Scalar, half: Scalar) -> None:
    """Lets the multiplier overwrite half of an accumulator, once its last columns are read."""
    plgpu.wait_load_tmem()
    plgpu.barrier_arrive(freed_of(cta, turn, half))


def store(cta: Cta, at: place.Where, turn: Scalar, chunk: Scalar, values: Values) -> None:
    """Stores a finished chunk of columns, through shared memory unless told otherwise."""
    plan, out = cta.plan, place.matrix(cta.out, at.batch)
    if plan.config.direct_store:
        arrays.write_directly(plan, _chunk(plan, out, at, chunk), values, plgpu.Layout.TCGEN05)
        return
    slot = _store_slot(plan, turn, chunk)
    if not plan.problem.epilogue.residual:
        await_store_slot(plan)
    cta.slots.out.tile.at[slot][...] = values
    if plan.problem.symmetric:
        arrays.write_squares(plan, cta.slots.mirrored.tile.at[slot], values)
    plgpu.commit_smem()
    here = cta.slots.out.box.at[slot]
    if plan.problem.symmetric:
        first = at.col + chunk * plan.config.store_columns
        mirror.copy(cta, at, first, here, cta.slots.mirrored.box.at[slot])
    else:
        plgpu.copy_smem_to_gmem(here, _chunk(plan, out, at, chunk))


def fetch_following(cta: Cta, at: place.Where, turn: Scalar, chunk: Scalar) -> None:
    """Starts to load the residual of the chunk that takes the slot of one that is on its way."""
    if not cta.plan.problem.epilogue.residual:
        return
    following = chunk + cta.plan.config.store_slots
    fetch = functools.partial(fetch_residual, cta, at, turn, (following,))
    pl.when(following < cta.plan.chunks)(fetch)


def fetch_residual(cta: Cta, at: place.Where, turn: Scalar, chunks: Iterable[Any]) -> None:
    """Starts to load chunks of the residual, into the slots that wait for their sums."""
    plan = cta.plan
    if not plan.problem.epilogue.residual:
        return
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    (residual,) = cta.gmem.loaded(plan.problem, at.batch)
    for chunk in chunks:
        slot = _store_slot(plan, turn, chunk)
        plgpu.copy_gmem_to_smem(
            _chunk(plan, residual, at, chunk),
            (cta.slots.residual or cta.slots.out).box.at[slot],
            cta.barriers.residual.at[slot],
        )


def await_store_slot(plan: BlackwellPlan) -> None:
    """Waits until the store before last, or however many slots ago, has been read."""
    # The simulator counts stores, and knows no groups of them, of which some may not be made.
    in_groups = plan.simulated and plan.problem.symmetric
    in_flight = 0 if in_groups else plan.config.store_slots - 1
    plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)


def _store_slot(plan: BlackwellPlan, turn: Scalar, chunk: Scalar) -> Any:
    """The store slot of a chunk: the chunks of all tiles take the slots in turn."""
    return lax.rem(turn * plan.chunks + chunk, jnp.int32(plan.config.store_slots))


def _chunk(plan: BlackwellPlan, matrix: Ref, at: place.Where, chunk: Scalar) -> Any:
    """The part of the result, or of the residual, that a chunk of this CTA's tile covers."""
    width = plan.config.store_columns
    rows = pl.ds(at.row, plan.config.tile[0])
    return matrix.at[rows, pl.ds(at.col + chunk * width, width)]
