"""`QuantizePlan`: everything about the launch of the kernel that quantizes blocks of a matrix."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm.device import Device
from pallas_gemm.kernels.element_types import FLOATS_8, FLOATS_16, INT8
from pallas_gemm.kernels.quantize import ACROSS, ALONG, HEIGHT, Block, Quantization, Way
from pallas_gemm.problem import ROW_BYTES

TILE = HEIGHT
"""Rows and columns of a tile."""
BLOCKS = (*(Block(1, along) for along in (32, 64, TILE)), Block(TILE, TILE))
"""The blocks that a tile consists of."""
Shape = tuple[int, int, int]


def refusals(how: Quantization, shape: Shape, dtype: Any, groups: bool = False) -> Iterator[str]:
    """Yields every reason why the kernel cannot quantize a matrix, or several.

    Args:
        how: How it is quantized.
        shape: Batch, rows and columns.
        dtype: Its type.
        groups: Groups of rows are told apart.
    """
    if dtype not in FLOATS_16:
        yield f"the kernel quantizes bfloat16 and float16, got {dtype}"
    if how.dtype not in FLOATS_8 | {INT8}:
        names = ", ".join(sorted(map(str, FLOATS_8 | {INT8})))
        yield f"the kernel quantizes to {names}, got {how.dtype}"
    for way in how.ways:
        if way.block not in BLOCKS:
            legal = ", ".join(str(tuple(block)) for block in BLOCKS)
            yield f"the kernel takes blocks of {legal}, got {tuple(way.block)}"
        if groups and way.axis == ALONG and is_square(way):
            yield f"along rows, blocks of {tuple(way.block)} would have rows of several groups"
    if 0 in shape:
        yield f"there is nothing to quantize, got shape {list(shape[1:])}"
    names = [("columns", shape[2], np.dtype(dtype))]
    for way in how.ways:
        turned = way.axis == ACROSS
        if turned and groups:
            # They are filled up to whole tiles.
            continue
        names.append(("rows" if turned else "columns", shape[1 if turned else 2], how.dtype))
    for name, size, own in names:
        if size * own.itemsize % ROW_BYTES:
            needed = ROW_BYTES // own.itemsize
            yield f"the number of {name} must be a multiple of {needed} for {own}, got {size}"


def slots(how: Quantization) -> int:
    """Returns how many slots tiles are best loaded into: one where a tile is stored in both ways.

    Then 8 x 4096 x 14336 takes 505 us on an H200, and 523 with two slots.
    """
    return 1 if len(how.ways) > 1 else 2


@dataclasses.dataclass(frozen=True)
class QuantizePlan:
    """Everything about a launch.

    Attributes:
        how: How the matrix is quantized.
        shape: Batch, rows and columns.
        dtype: The type of the matrix, of 16 bits.
        device: The GPU.
        interpret: The simulator, or False.
        stages: Slots that tiles are loaded into.
        stores: Store slots of each way.
        resident: CTAs of an SM.
        band: Rows of tiles that are walked together.
        ctas: CTAs at most; None for those that run at the same time.
        groups: Rows of tiles, where groups of rows are told apart; else None.
    """

    how: Quantization
    shape: tuple[int, int, int]
    dtype: Any
    device: Device
    interpret: Any = False
    stages: int = 2
    stores: int = 1
    resident: int = 2
    band: int = 8
    ctas: int | None = None
    groups: int | None = None

    @property
    def simulated(self) -> bool:
        """Whether the kernel runs in the simulator."""
        return bool(self.interpret)

    @property
    def shares_words(self) -> bool:
        """Whether CTAs share words of global memory."""
        return False

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        return self.groups or -(-self.shape[1] // TILE), -(-self.shape[2] // TILE)

    @property
    def tiles(self) -> int:
        """How many tiles there are."""
        return self.shape[0] * math.prod(self.grid)

    @property
    def workers(self) -> int:
        """How many CTAs are launched."""
        return min(self.tiles, self.ctas or self.device.sms * self.resident)

    @property
    def squares(self) -> list[Way]:
        """The ways whose blocks are whole tiles."""
        return [way for way in self.how.ways if is_square(way)]

    @property
    def values(self) -> list[Any]:
        """The values of each way, k last."""
        shapes = map(self.whole, self.how.ways)
        turned = (way.axis == ACROSS for way in self.how.ways)
        return [
            jax.ShapeDtypeStruct((batch, *((cols, rows) if own else (rows, cols))), self.how.dtype)
            for (batch, rows, cols), own in zip(shapes, turned, strict=True)
        ]

    @property
    def scales(self) -> list[Any]:
        """The scales of whole tiles, those of lines that lie side by side next to each other.

        First are those of blocks that are whole tiles, the same along both axes.
        """
        batch, (down, along) = self.shape[0], self.grid
        shapes = [(down, along)] if self.squares else []
        for way in self.how.ways:
            if not is_square(way):
                # The last tile of a group reaches beyond it, even if there are no more rows.
                reach = -(-self.shape[1] // TILE) + 1 if self.groups else down
                one, other = (down, along) if way.axis == ACROSS else (along, reach)
                shapes.append((one * (TILE // way.block.along), other * TILE))
        return [jax.ShapeDtypeStruct((batch, *shape), jnp.float32) for shape in shapes]

    def whole(self, way: Way) -> Shape:
        """The shape of what is quantized in a way, groups filled up to whole tiles among it."""
        batch, rows, cols = self.shape
        return batch, self.groups * TILE if self.groups and way.axis == ACROSS else rows, cols

    def scales_of(self, number: int) -> int:
        """Which of the scales are those of a way."""
        if is_square(self.how.ways[number]):
            return 0
        before = sum(not is_square(way) for way in self.how.ways[:number])
        return bool(self.squares) + before


def is_square(way: Way) -> bool:
    """Whether a block is a whole tile."""
    return way.block.across > 1
