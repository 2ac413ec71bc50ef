"""The kernel that quantizes blocks of a matrix on Hopper, along both axes from one read.

    TMA ──▶ ring of slots ──▶ registers ──▶ a store slot for each way ──▶ TMA

A CTA is one warpgroup, which takes tile after tile of 128 x 128; several share an SM. It loads a
tile once for each way into registers, as it lies or transposed. A thread then holds elements of a
few lines: it reduces them, and the three threads beside it do with it what is left.

Timeline
    before      TMA loads the first tiles, one into each slot
    per tile    wait for its slot; for each way and half of the lines: registers, largest
                magnitudes, scales ──▶ memory, values ──▶ store slot; commit; TMA stores it
                when all threads have read the slot, TMA loads the tile after next into it

Where groups of rows are told apart, a tile has rows of one group, and begins with any row. Along
rows, those of its group are quantized and stored. Zeros take the place of the others before it is
quantized along columns.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import launch, place, smem
from pallas_gemm.kernels.hopper.groups import group_rows
from pallas_gemm.kernels.hopper.plan import Chunk
from pallas_gemm.kernels.hopper.quantize.plan import TILE, QuantizePlan, is_square
from pallas_gemm.kernels.ptx import arrays
from pallas_gemm.kernels.quantize import ACROSS, ALONG, Scales, Way, scales_of, values_of
from pallas_gemm.kernels.traced import Ref, Scalar, Values, divided

HALF = 64
"""Rows and columns of what a warpgroup holds in registers at a time, side by side."""
WGMMA = plgpu.Layout.WGMMA
LINES = WGMMA.reduce(1)


class Tile(NamedTuple):
    """Where a tile lies: the product of a batch, its row and column of tiles."""

    batch: Scalar
    row: Scalar
    col: Scalar


class Rows(NamedTuple):
    """The rows of a tile: the first, and the one after the last of its group, if there are any."""

    first: Scalar
    end: Any = None

    @property
    def left(self) -> Any:
        """How many there are of the group, from the first one on; they may be more than a tile."""
        return self.end - self.first


class Given(NamedTuple):
    """The array, and its tiles, where groups of rows are told apart; else None."""

    x: Any
    tiles: Any = None

    def rows(self, at: Tile) -> Rows:
        """The rows of a tile."""
        if self.tiles is None:
            return Rows(at.row * TILE)
        return Rows(*(self.tiles[at.row, word] for word in (0, 1)))


def tile_at(plan: QuantizePlan, index: Scalar) -> Tile:
    """The tile of a number: bands of rows, walked column by column."""
    rows, cols = plan.grid
    batch, index = divided(index, rows * cols)
    band, within = divided(index, plan.band * cols)
    height = lax.min(jnp.int32(plan.band), jnp.int32(rows) - band * plan.band)
    col, row = lax.div(within, height), lax.rem(within, height)
    return Tile(batch, band * plan.band + row, col)


class Smem(NamedTuple):
    """Slots of tiles, and a store slot for each way."""

    tiles: Any
    out: Any


def scratch(plan: QuantizePlan) -> Sequence[Any]:
    """The buffers and the barriers of a CTA."""
    tile = (plan.stages, TILE // HALF, TILE, HALF)
    boxed = functools.partial(smem.boxed, simulated=plan.simulated)
    out = tuple(boxed([(plan.stores, TILE, TILE)], plan.how.dtype) for _ in plan.how.ways)
    full = plgpu.Barrier(num_arrivals=TILE // HALF, num_barriers=plan.stages)
    return Smem(boxed([tile], plan.dtype), out), full


class Results(NamedTuple):
    """What a kernel computes: see `QuantizePlan`."""

    values: Sequence[Any]
    scales: Sequence[Any]


def _body(
    plan: QuantizePlan, given: Given, values: Any, scales: Any, buffers: Smem, full: Ref
) -> None:
    """Runs the warpgroup of a CTA."""
    views = functools.partial(smem.views, simulated=plan.simulated)
    (tiles,) = views(buffers.tiles)
    slots = [views(slot)[0] for slot in buffers.out]
    worker = lax.axis_index(launch.WORKER)
    count = lax.div(jnp.int32(plan.tiles - 1) - worker, jnp.int32(plan.workers)) + 1

    def fetch(turn: Scalar) -> None:
        at = tile_at(plan, worker + turn * plan.workers)
        slot, first = lax.rem(turn, jnp.int32(plan.stages)), given.rows(at).first
        for half in range(TILE // HALF):
            here = pl.ds(first, TILE), pl.ds(at.col * TILE + half * HALF, HALF)
            box = tiles.box.at[slot, half]
            plgpu.copy_gmem_to_smem(given.x.at[at.batch].at[here], box, full.at[slot])

    for turn in range(plan.stages):
        pl.when(turn < count)(functools.partial(fetch, jnp.int32(turn)))

    @pl.loop(0, count)
    def _one_tile(turn: Scalar) -> None:
        at = tile_at(plan, worker + turn * plan.workers)
        slot, rows = lax.rem(turn, jnp.int32(plan.stages)), given.rows(at)
        plgpu.barrier_wait(full.at[slot])
        in_flight = (plan.stores - 1) * len(slots)
        plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
        plgpu.commit_smem()
        mine = lax.rem(turn, jnp.int32(plan.stores))
        stored = [slot.tile.at[mine] for slot in slots]
        _quantize(plan, tiles.tile.at[slot], (at, rows), stored, scales)
        plgpu.commit_smem()

        @pl.when(turn + plan.stages < count)
        def _next() -> None:
            fetch(turn + plan.stages)

        for way, store, target in zip(plan.how.ways, slots, values, strict=True):
            box, own = store.box.at[mine], target.at[at.batch]
            places = pl.ds(at.row * TILE, TILE), pl.ds(at.col * TILE, TILE)
            if way.axis == ALONG and plan.groups:
                where = place.Where(None, rows.first, at.col * TILE, end=rows.end)
                group_rows.store(box, own, group_rows.Place(Chunk(0, TILE, 0, TILE), where))
                continue
            here = places[::-1] if way.axis == ACROSS else places
            plgpu.copy_smem_to_gmem(box, own.at[here])

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _quantize(
    plan: QuantizePlan,
    tile: Ref,
    place: tuple[Tile, Rows],
    stored: Sequence[Ref],
    scales: Sequence[Ref],
) -> None:
    """Quantizes a tile in each way: values to store slots, scales to memory."""
    whole, (at, rows) = None, place
    along = [number for number, way in enumerate(plan.how.ways) if way.axis == ALONG]
    across = [number for number, way in enumerate(plan.how.ways) if way.axis == ACROSS]
    for number in (*along, *across):
        way, store = plan.how.ways[number], stored[number]
        if plan.groups and across and number == across[0]:
            pl.when(rows.left < TILE)(functools.partial(_zero_the_rest, tile, rows.left))
        if is_square(way) and whole is None:
            whole = _quantize_whole(plan, tile, at, scales[0])
        for half in range(TILE // HALF):
            lines = [_square(tile, way.axis, half, other) for other in range(TILE // HALF)]
            if is_square(way):
                assert whole is not None
                values = [values_of(x, whole, plan.how) for x in lines]
            else:
                own = scales[plan.scales_of(number)]
                values = _quantize_lines(plan, lines, _Place(at, rows, way, half), own)
            store.at[half * HALF : (half + 1) * HALF, :][...] = lax.concatenate(values, 1)


def _zero_the_rest(tile: Ref, rows: Scalar) -> None:
    """Zeroes the rows of a tile after the last one of its group."""
    for half in range(TILE // HALF):
        for other in range(TILE // HALF):
            square = tile.at[other, half * HALF : (half + 1) * HALF, :]
            # Each thread stores what it has read before, along rows.
            x = plgpu.load(square, layout=WGMMA, optimized=False)
            row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=WGMMA) + half * HALF
            square[...] = jnp.where(row < rows, x, jnp.zeros_like(x))
    plgpu.commit_smem()


def _quantize_whole(plan: QuantizePlan, tile: Ref, at: Tile, scales: Ref) -> Scalar:
    """Stores the scale of a tile that is a block; returns its reciprocal."""
    squares = [_square(tile, ALONG, half, other) for half in (0, 1) for other in (0, 1)]
    lines = _largest(squares)
    whole = jnp.max(lines, axis=0)
    if plan.how.power_of_two:
        # Mosaic cannot look at the bits of a single number: all lines have the same.
        found = Scales(*(jnp.max(x) for x in scales_of(jnp.maximum(lines, whole), plan.how)))
    else:
        found = scales_of(whole, plan.how)
    scales.at[at.batch, at.row, at.col][...] = found.scale
    return found.reciprocal


class _Place(NamedTuple):
    """Half of the lines of a tile in one way."""

    at: Tile
    rows: Rows
    way: Way
    half: int


def _quantize_lines(
    plan: QuantizePlan, lines: Sequence[Values], place: _Place, scales: Ref
) -> list[Values]:
    """Quantizes lines block by block: returns their values, and stores their scales."""
    at, width, values = place.at, place.way.block.along, []
    turned = place.way.axis == ACROSS
    line, first = (at.col * TILE, at.row) if turned else (place.rows.first, at.col)
    line += place.half * HALF
    for number, block in enumerate(_blocks(plan, lines, width)):
        found = scales_of(_largest(block), plan.how)
        mine = scales.at[at.batch, first * (TILE // width) + number]
        here = mine.at[pl.ds(line, HALF)]
        if plan.groups and not turned:
            arrays.write_first(plan, here, found.scale, place.rows.end - line, LINES)
        else:
            arrays.write_directly(plan, here, found.scale, LINES)
        values += [values_of(x, _beside(found.reciprocal, x), plan.how) for x in block]
    return values


def _largest(squares: Sequence[Values]) -> Values:
    """The largest magnitude of each line of what lies side by side."""
    return jnp.max(functools.reduce(jnp.maximum, map(jnp.abs, squares)), axis=1)


def _beside(lines: Values, x: Values) -> Values:
    """A value for each line, for each element of it."""
    return lax.broadcast_in_dim(lines, x.shape, (0,))


def _square(tile: Ref, axis: int, half: int, other: int) -> Values:
    """A square of a tile in registers, whose rows are lines along an axis."""
    if axis == ACROSS:
        square = tile.at[half, other * HALF : (other + 1) * HALF, :].transpose((1, 0))
    else:
        square = tile.at[other, half * HALF : (half + 1) * HALF, :]
    return plgpu.load(square, layout=WGMMA, optimized=False)


def _blocks(plan: QuantizePlan, squares: Sequence[Values], width: int) -> list[list[Values]]:
    """The squares that share scales, or parts of them: those of each block."""
    if width >= HALF:
        each = width // HALF
        return [list(squares[i : i + each]) for i in range(0, len(squares), each)]
    places = [(slice(0, HALF), slice(i, i + width)) for i in range(0, HALF, width)]
    taken = [arrays.taken_apart(plan, square, places, WGMMA) for square in squares]
    return [[x] for strips in taken for x in strips]


def build(plan: QuantizePlan) -> Callable[[jax.Array], Results]:
    """Returns the kernel of a plan: a function of a batch of matrices, and of tiles of groups."""
    has_squares = any(map(is_square, plan.how.ways))
    kernel = launch.kernel(
        functools.partial(_body, plan),
        name="pallas_gemm_quantize",
        workers=plan.workers,
        cluster={"cta": 1},
        warpgroups=1,
        results=(plan.values, plan.scales),
        scratch=scratch(plan),
        flops=math.prod(plan.shape) * 2 * len(plan.how.ways),
        interpret=plan.interpret,
        # Four warps reduce a tile that is a block three times: to its largest, and to both scales.
        reduction_scratch_bytes=3 * 4 * 4 if plan.how.power_of_two and has_squares else 0,
    )

    def run(*given: jax.Array) -> Results:
        return Results(*kernel(Given(*map(launch.on_its_own, given))))

    return run
