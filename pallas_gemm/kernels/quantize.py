"""What it is to quantize blocks of a matrix: the scale of a block, and its values in 8 bits."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gemm.kernels import groups

ALONG, ACROSS = -1, -2
"""The axes whose elements blocks may follow."""
INT8_MAX = 127
"""The largest magnitude, the same for both signs."""
SMALLEST = float(np.finfo(np.float32).tiny)
"""The smallest scale, whose reciprocal is a number, too."""
HEIGHT = 128
"""Rows of a tile at least: where groups of rows are told apart, each begins with one."""
INFINITE = 0x7F800000
MANTISSA = 0x7FFFFF


class Block(NamedTuple):
    """The elements that share a scale.

    Attributes:
        across: How many lie side by side, along the axis that is kept.
        along: How many follow each other, along the axis that a product contracts.
    """

    across: int
    along: int


class Way(NamedTuple):
    """A way to quantize a matrix.

    Attributes:
        axis: The axis along which blocks follow each other: -1 or -2.
        block: The elements that share a scale.
    """

    axis: int
    block: Block

    @property
    def lying(self) -> tuple[int, int]:
        """Rows and columns of a block, as the matrix lies."""
        return self.block[::-1] if self.axis == ACROSS else self.block

    def blocks(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns how many blocks a matrix has, down and along its rows."""
        rows, cols = (-(-size // own) for size, own in zip(shape[-2:], self.lying, strict=True))
        return rows, cols


@dataclasses.dataclass(frozen=True)
class Quantization:
    """How a matrix is quantized.

    Attributes:
        dtype: The type of the values, of 8 bits.
        ways: In which ways: values and scales for each.
        power_of_two: Each scale is a power of two.
    """

    dtype: np.dtype
    ways: tuple[Way, ...]
    power_of_two: bool = False

    def __str__(self) -> str:
        names, lines = {ALONG: "rows", ACROSS: "columns"}, dict[Block, list[str]]()
        for own in self.ways:
            lines.setdefault(own.block, []).append(names[own.axis])
        blocks = (
            f"{' x '.join(map(str, block))} along {' and '.join(own)}"
            for block, own in lines.items()
        )
        return f"to {self.dtype} in blocks of {' and '.join(blocks)}"

    @property
    def height(self) -> int:
        """Rows of a tile where groups are told apart: the first whole blocks that are enough."""
        along = next((way.block.along for way in self.ways if way.axis == ACROSS), HEIGHT)
        return filled_up(HEIGHT, along)

    @property
    def largest(self) -> float:
        """The largest magnitude of a value."""
        if jnp.issubdtype(self.dtype, jnp.integer):
            return INT8_MAX
        return float(jnp.finfo(self.dtype).max)


class Scales(NamedTuple):
    """Scales of blocks, in float32, and their reciprocals."""

    scale: Any
    reciprocal: Any


def scales_of(amax: jax.Array, how: Quantization) -> Scales:
    """Returns the scales of blocks from their largest magnitudes.

    The scale of zeros is 1. A block with an infinity has an infinite one, a block with a NaN a NaN.
    """
    wide = amax.astype(jnp.float32)
    if how.power_of_two:
        found = _powers_of_two(wide, how.largest)
    else:
        scale = jnp.maximum(wide * jnp.float32(1 / how.largest), jnp.float32(SMALLEST))
        found = Scales(scale, 1 / scale)
    ones = jnp.ones_like(wide)
    return Scales(*(jnp.where(wide == 0, ones, x) for x in found))


def _powers_of_two(amax: jax.Array, largest: float) -> Scales:
    """Returns the smallest powers of two by which no value is too large, without a division."""
    one, most = (int(np.float32(x).view(np.int32)) for x in (1, largest))
    least = jnp.float32(SMALLEST * largest)
    bits = lax.bitcast_convert_type(jnp.maximum(amax, least), jnp.int32)
    bits = (bits + jnp.int32(one - most + MANTISSA)) & jnp.int32(INFINITE)
    found = (bits, jnp.int32(2 * one) - bits)
    scale, reciprocal = (lax.bitcast_convert_type(x, jnp.float32) for x in found)
    finite = amax < jnp.float32(math.inf)
    return Scales(jnp.where(finite, scale, amax), jnp.where(finite, reciprocal, 1 / amax))


def values_of(x: jax.Array, reciprocal: jax.Array, how: Quantization) -> jax.Array:
    """Returns the values of blocks, from the reciprocals of their scales."""
    values = x.astype(jnp.float32) * reciprocal
    if not jnp.issubdtype(how.dtype, jnp.integer):
        return values.astype(how.dtype)
    values = jnp.clip(jnp.round(values), -how.largest, how.largest)
    return jnp.where(jnp.isnan(values), 0, values).astype(how.dtype)


def filled_up(sizes: Any, height: int) -> Any:
    """Returns how many rows groups of these sizes have when they are filled up to whole tiles."""
    return (sizes + (height - 1)) // height * height


def tiles_of_groups(sizes: jax.Array, rows: int, height: int) -> jax.Array:
    """Returns the first row of each tile, and the one after the last of its group: `[tiles, 2]`.

    Rows in no group are those of one more. There is room for groups of all sizes: the tiles that
    are left have no rows.
    """
    sizes = groups.within(sizes, rows)
    # What is left, if sizes say no more than there is.
    others = groups.sums(sizes[None])[0]
    every = jnp.concatenate([sizes, jnp.maximum(rows - others, 0)])
    count = (rows + every.shape[0] * (height - 1)) // height
    number = lax.iota(jnp.int32, count)
    _, first, end = groups.tiles_of(groups.bounds(every, rows, height), height, number)
    end = jnp.minimum(end, rows)
    return jnp.stack([jnp.where(first < end, x, 0) for x in (first, end)], axis=1)


def by_xla(x: jax.Array, *tiles: jax.Array, how: Quantization) -> list[Any]:
    """Computes what is asked for: values, then scales, of each way.

    Args:
        x: The matrix, or several.
        *tiles: Its tiles, where groups of rows are told apart.
        how: How it is quantized.
    """
    apart = _in_tiles(x, tiles[0], how.height) if tiles else x
    found: list[Any] = []
    for way in how.ways:
        found += _in_way(apart if way.axis == ACROSS else x, how, way)
    return found


def _in_tiles(x: jax.Array, tiles: jax.Array, height: int) -> jax.Array:
    """Returns the rows of tiles, and zeros in place of those that are not of a tile's group."""
    first, end = (lax.broadcast_in_dim(own, (tiles.shape[0], height), (0,)) for own in tiles.T)
    row = first + lax.broadcasted_iota(jnp.int32, first.shape, 1)
    places = jnp.where(row < end, row, x.shape[0]).reshape(-1)
    if x.shape[0] == 0:
        return jnp.zeros((*places.shape, *x.shape[1:]), x.dtype)
    return x.at[places].get(mode="fill", fill_value=0)


def _in_way(x: jax.Array, how: Quantization, way: Way) -> tuple[jax.Array, jax.Array]:
    """Quantizes blocks in one way; returns the values, k last, and the scales as `x` lies."""
    block, counts = way.lying, way.blocks(x.shape)
    *lead, rows, cols = x.shape
    padding = [
        (0, n * length - size) for n, length, size in zip(counts, block, (rows, cols), strict=True)
    ]
    whole = jnp.pad(x, [(0, 0)] * len(lead) + padding)
    tiles = whole.reshape(*lead, counts[0], block[0], counts[1], block[1])
    scale, reciprocal = scales_of(jnp.max(jnp.abs(tiles), axis=(-3, -1)), how)
    values = values_of(tiles, reciprocal[..., :, None, :, None], how)
    values = values.reshape(whole.shape)[..., :rows, :cols]
    return jnp.swapaxes(values, -1, -2) if way.axis == ACROSS else values, scale
