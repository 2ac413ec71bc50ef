"""How the sum of a tile that is cut along k is joined (`HopperConfig.split_k`): in a second kernel.

    kernel        who                       does
    the first     each consumer, for each   registers ──▶ a summand of the tile's sum in global
                  piece of work             memory, float32; so few that they stay in the L2
    the second    a warpgroup for each      adds up the summands of its chunk in the order of
                  chunk of the result       their steps; finishes, rounds and stores it

Where only the last tiles are cut (`HopperConfig.split_last`), a kernel for the others comes first,
and the last one stores beside what that one has stored.

Results are the same in every run, whichever piece is computed first. Had the clusters of one kernel
to await each other instead, they would count arrivals from zero, and it takes a kernel to make that
zero: on an H200, 512 x 512 x 16384 takes as long.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import launch, place, work
from pallas_gemm.kernels.hopper import remote, store
from pallas_gemm.kernels.hopper.config import WARPGROUP
from pallas_gemm.kernels.hopper.cta import (
    CLUSTER,
    Barriers,
    Cta,
    Smem,
    part_of_tile,
    store_scratch,
    views,
)
from pallas_gemm.kernels.hopper.plan import BLOCK, HopperPlan

LOADED_REGISTERS = 128
"""Of a thread, for summands that it loads at the same time: each load takes most of a microsecond.
"""


def hand_over(cta: Cta, me: Any, piece: work.Piece, total: Any) -> None:
    """Stores a consumer's part of the sum of a piece as a summand."""
    plan = cta.plan
    rows, cols = plan.config.grid(plan.problem)
    tile = piece.cut_tile
    if tile is None:
        row = piece.row if piece.batch is None else piece.batch * rows + piece.row
        tile = row * cols + piece.col
    rank = lax.axis_index(CLUSTER[0]) * plan.config.cluster[1] + lax.axis_index(CLUSTER[1])
    whose = tile, piece.summand, rank
    corner, size = _corner(plan, me), plan.config.consumer_tile
    _write(plan, _blocks(cta, whose, *zip(corner, size, strict=True)), total)


def kernel(plan: HopperPlan) -> Callable[[launch.Inputs], Any]:
    """Returns the kernel that joins what the kernel of a plan has handed over.

    It returns the result, unless it is given one whose other tiles have been stored.
    """
    others = plan.computes == "cut"
    ctas = math.prod(_counts(plan)) // plan.config.consumers
    buffers, residual = store_scratch(plan)
    return launch.kernel(
        functools.partial(_store_into if others else _body, plan),
        name="pallas_gemm_hopper_join",
        grid=launch.Grid(ctas, dict.fromkeys(CLUSTER, 1), plan.config.consumers),
        results=() if others else jax.ShapeDtypeStruct(plan.out_shape, plan.problem.out_dtype),
        scratch=(buffers, Barriers(residual=residual)),
        operations=launch.Operations(0, plan.share(launch.activations(plan.problem))),
        interpret=plan.interpret,
        approx_math=plan.approx_math,
    )


def inputs(plan: HopperPlan, given: launch.Inputs, summands: Any, result: Any) -> launch.Inputs:
    """Returns what `kernel` is given, of what the kernel was that has left the summands."""
    order = None
    if isinstance(plan.pieces, work.Listed):
        # The first pieces of all tiles that are cut come first.
        first = work.Listed(plan.pieces.order[: plan.cut_tiles])
        order = jnp.asarray(work.Coding().pack(first))
    return given._replace(factors=(), order=order, summands=summands, result=result)


def _store_into(plan: HopperPlan, gmem: launch.Inputs, buffers: Smem, barriers: Barriers) -> None:
    """Joins the tiles that are cut, into the result that has the others."""
    _body(plan, gmem, gmem.result, buffers, barriers)


def _body(
    plan: HopperPlan, gmem: launch.Inputs, out: Any, buffers: Smem, barriers: Barriers
) -> None:
    """What each warpgroup of a CTA does: it joins one chunk."""
    slots, me = views(plan, buffers), lax.axis_index(launch.WARPGROUP)
    cta = Cta(plan, gmem, out, remote.Rows(), slots, barriers, gmem.summands)
    chunks, consumers, ctas, _ = _counts(plan)
    number = lax.axis_index(launch.WORKER) * plan.config.consumers + me
    rest, number = _divided(number, chunks)
    rest, consumer = _divided(rest, consumers)
    tile, rank = _divided(rest, ctas)
    at, corner = _place(cta, tile, rank, consumer), _corner(plan, consumer)

    def join_one_of(alike: range) -> None:
        # One part of the program is for all of them: the first one, moved to where it is.
        first = plan.chunks[alike.start]
        across, down = _divided(number - alike.start, plan.consumer_out_tile[0] // first.rows)
        down, across = down * first.rows, across * first.cols
        here = at._replace(row=at.row + down, col=at.col + across)
        sums = Summands(cta, (tile, rank), (corner[0] + down, corner[1] + across))
        store.fetch_residual(cta, me, here, (alike.start,))
        store.store_chunk(cta, me, store.Tile(sums, here), alike.start)

    for alike in _alike(plan):
        here = (number >= alike.start) & (number < alike.stop)
        pl.when(here)(functools.partial(join_one_of, alike))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@dataclasses.dataclass(frozen=True)
class Summands:
    """A part of a tile, of which each element's sum is made when it is asked for.

    Attributes:
        cta: All that the CTA knows.
        tile: Number of the cluster tile, and whose tile it is of the CTAs of the cluster.
        corner: Row and column of the part in that tile.
    """

    cta: Cta
    tile: tuple[Any, Any]
    corner: tuple[Any, Any]

    def __getitem__(self, index: tuple[slice, slice]) -> Any:
        """Adds up the summands of some rows and columns, in the order of their steps."""
        plan, (tile, rank) = self.cta.plan, self.tile
        sizes = [part.stop - part.start for part in index]
        starts = [corner + part.start for corner, part in zip(self.corner, index, strict=True)]

        def load(summand: Any) -> Any:
            whose = tile, summand, rank
            return _read(plan, _blocks(self.cta, whose, *zip(starts, sizes, strict=True)))

        def add(first: Any, together: int, total: Any) -> Any:
            for part in [load(first + summand) for summand in range(together)]:
                total = total + part
            return total

        others = plan.config.split_k - 1
        most = max(1, LOADED_REGISTERS * WARPGROUP // math.prod(sizes))
        together = -(-others // -(-others // most))
        whole, rest = divmod(others, together)
        total = load(0)
        if whole == 1:
            total = add(1, together, total)
        else:
            total = lax.fori_loop(0, whole, lambda i, t: add(1 + i * together, together, t), total)
        return add(1 + whole * together, rest, total)


def _counts(plan: HopperPlan) -> tuple[int, int, int, int]:
    """Chunks of a consumer's part of a tile, consumers, CTAs of a cluster, and cut tiles."""
    config = plan.config
    return len(plan.chunks), config.consumers, config.cluster_size, plan.cut_tiles


def _alike(plan: HopperPlan) -> list[range]:
    """Chunks that follow each other and differ only in where they lie.

    What threads store is clipped at the end of the lines, for each chunk elsewhere.
    """
    chunks = range(len(plan.chunks))
    if not plan.stored_by_tma:
        return [range(chunk, chunk + 1) for chunk in chunks]
    firsts = [n for n in chunks if not n or plan.chunks[n].cols != plan.chunks[n - 1].cols]
    return list(itertools.starmap(range, itertools.pairwise([*firsts, len(chunks)])))


def _place(cta: Cta, tile: Any, rank: Any, consumer: Any) -> place.Where:
    """Where in the result a consumer's part of a CTA's tile lies."""
    plan = cta.plan
    if cta.gmem.order is None:
        piece = plan.coding.piece(*_divided(tile, plan.config.stacked_grid(plan.problem)[1]))
    else:
        piece = dataclasses.replace(plan.coding, words=1).unpack(cta.gmem.order[tile])
    at = place.locate(plan.config, plan.problem, piece)
    rows, columns = plan.config.out_tile(plan.problem)
    down, along = _divided(rank, plan.config.cluster[1])
    at = at._replace(row=at.row + down * rows, col=at.col + along * columns)
    return part_of_tile(plan, at, consumer)


def _corner(plan: HopperPlan, consumer: Any) -> tuple[Any, Any]:
    """Row and column of a consumer's part of a CTA's sums."""
    rows, cols = plan.config.consumer_tile
    return (consumer * rows, 0) if plan.config.split_rows else (0, consumer * cols)


def _blocks(cta: Cta, whose: tuple[Any, ...], rows: tuple[Any, int], cols: tuple[Any, int]) -> Any:
    """The part of a summand that begins at a row and a column, and has so many."""
    summand = cta.summands.at[whose]
    if cta.plan.simulated:
        return summand.at[pl.ds(*rows), pl.ds(*cols)]
    down, along = (pl.ds(start // BLOCK, size // BLOCK) for start, size in (rows, cols))
    return summand.at[down, along]


def _write(plan: HopperPlan, blocks: Any, values: Any) -> None:
    """Stores a part of a summand."""
    if plan.simulated:
        blocks[...] = values
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def emit(_: Any, blocks: Any, values: Any) -> None:
        values.store_tiled(blocks, swizzle=16, optimized=False)

    emit(blocks, values)


def _read(plan: HopperPlan, blocks: Any) -> Any:
    """Loads a part of a summand."""
    if plan.simulated:
        return plgpu.load(blocks, layout=plgpu.Layout.WGMMA, optimized=False)
    dtype, shape = plan.problem.accumulator_dtype, tuple(n * BLOCK for n in blocks.shape[:2])
    signed = True if jnp.issubdtype(dtype, jnp.integer) else None

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=plgpu.Layout.WGMMA),
    )
    def emit(_: Any, blocks: Any) -> Any:
        return mgpu.FragmentedArray.load_tiled(
            blocks, swizzle=16, is_signed=signed, layout=mgpu.WGMMA_LAYOUT, optimized=False
        )

    return emit(blocks)


def _divided(dividend: Any, divisor: int) -> tuple[Any, Any]:
    """Divides what is not negative, and known only to the running program."""
    by = jnp.int32(divisor)
    return lax.div(dividend, by), lax.rem(dividend, by)
