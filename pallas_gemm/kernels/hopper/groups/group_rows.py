"""Stores of rows in groups: each tile up to the end of its group, and zeros past the last group.

    whole        one TMA store, as everywhere
    cut          TMA stores of 8 rows each, which are an atom of the slot, and one of what is left

A chunk is one group of stores, however many it takes and even if it takes none, so that they can be
counted.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import launch, place, smem
from pallas_gemm.kernels.hopper.cta import CLUSTER, Cta
from pallas_gemm.kernels.hopper.groups import group_walk
from pallas_gemm.kernels.hopper.plan import Chunk
from pallas_gemm.kernels.smem import ATOM_ROWS
from pallas_gemm.kernels.traced import Ref, Scalar, divided


class Place(NamedTuple):
    """A chunk of a consumer's part of a tile."""

    chunk: Chunk
    at: place.Where


def store(box: Ref, out: Any, where: Place) -> None:
    """Stores the rows of a chunk that are in the tile's group."""
    chunk, at = where
    first, cols = at.row + chunk.row, pl.ds(at.col + chunk.col, chunk.cols)
    left = at.end - first

    def copy(row: Scalar, rows: int) -> None:
        source, target = box.at[pl.ds(row, rows)], out.at[pl.ds(first + row, rows), cols]
        plgpu.copy_smem_to_gmem(source, target, commit_group=False)

    @pl.when(left >= chunk.rows)
    def _whole() -> None:
        copy(0, chunk.rows)

    @pl.when((left > 0) & (left < chunk.rows))
    def _cut() -> None:
        atoms = lax.div(left, jnp.int32(ATOM_ROWS))
        pl.loop(0, atoms)(lambda atom: copy(atom * ATOM_ROWS, ATOM_ROWS))
        rest = lax.rem(left, jnp.int32(ATOM_ROWS))
        for rows in range(1, ATOM_ROWS):
            pl.when(rest == rows)(lambda rows=rows: copy(atoms * ATOM_ROWS, rows))

    plgpu.commit_smem_to_gmem_group()


def zero_the_rest(cta: Cta, me: Scalar) -> None:
    """Stores zeros past the last group: all consumers of all CTAs do, a slot at a time."""
    plan = cta.plan
    (rows, cols), (_, height, _, width) = plan.out_shape, plan.chunks[0]
    end = group_walk.last_row(cta)
    across = -(-cols // width)
    blocks = lax.div(rows - end + height - 1, jnp.int32(height)) * across
    consumer = lax.axis_index(launch.WORKER)
    for axis, size in zip(CLUSTER, plan.config.cluster, strict=True):
        consumer = consumer * size + lax.axis_index(axis)
    consumer = consumer * plan.config.consumers + me
    consumers = plan.workers * plan.config.cluster_size * plan.config.consumers

    @pl.when(consumer < blocks)
    def _zero() -> None:
        views = [own[plan.store_widths.index(width)] for own in cta.slots.out]
        slots = [smem.Boxed(*(one.at[me, 0] for one in view)) for view in views]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for slot, dtype in zip(slots, plan.problem.result_dtypes, strict=True):
            nothing = jnp.zeros((height, width), dtype)
            slot.tile[...] = plgpu.layout_cast(nothing, plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        mine = lax.div(blocks - consumer + consumers - 1, jnp.int32(consumers))

        @pl.loop(0, mine)
        def _each(i: Any) -> None:
            block = consumer + i * consumers
            row, col = divided(block, across)
            here = pl.ds(end + row * height, height), pl.ds(col * width, width)
            for slot, out in zip(slots, cta.out, strict=True):
                plgpu.copy_smem_to_gmem(slot.box, out.at[here])
