"""`quantize`: blocks of a matrix in 8 bits, with the scales that products take."""

import operator
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm.api import arguments
from pallas_gemm.api.eager import compiled
from pallas_gemm.api.groups import groups
from pallas_gemm.kernels.element_types import FROM_16_BITS
from pallas_gemm.kernels.quantize import ACROSS, ALONG, Block, Quantization, Way, tiles_of_groups
from pallas_gemm.op.quantize import quantize as bound

BOTH = "both"
DTYPES = tuple(map(np.dtype, (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8)))
"""The types of values."""


class Quantized(NamedTuple):
    """A matrix in 8 bits, or several: a value stands for itself times the scale of its block.

    >>> values, scale = quantize(x)

    Attributes:
        values: The values. The axis that a product contracts is the last one.
        scale: A scale for each block, in float32. Its two axes are those of what was quantized.
    """

    values: jax.Array
    scale: jax.Array


jax.export.register_namedtuple_serialization(Quantized, serialized_name="pallas_gemm.Quantized")


def _check_started(given: Any) -> None:
    if given.get("group_sizes") is not None:
        groups.check_values(given["group_sizes"], given["x"].shape[0])


@compiled("x", "group_sizes", check=_check_started)
def quantize(
    x: jax.Array,
    *,
    group_sizes: jax.Array | None = None,
    block: Sequence[Any] = (1, 128),
    dtype: Any = jnp.float8_e4m3fn,
    axis: int | Literal["both"] = -1,
    power_of_two: bool = False,
    implementation: str | None = None,
) -> Any:
    """Quantizes blocks of a matrix to 8 bits. The largest element of a block is the largest value.

    >>> rows = quantize(x)  # [m, k], scales [m, k / 128]
    >>> columns = quantize(w, block=(128, 128), axis=-2)  # [n, k], scales [k / 128, n / 128]
    >>> result = gemm(
    ...     *(rows.values, columns.values),
    ...     transpose_b=True,
    ...     row_scale=rows.scale,
    ...     col_scale=columns.scale,
    ...     preferred_element_type=jnp.bfloat16,
    ... )

    The axis is the one that a product contracts. Kernels multiply operands of 8 bits that are
    stored with it last, so that values along axis -2 are transposed. With `axis="both"` a kernel
    reads `x` once and writes both. The last block of an axis is shorter where the size is no
    multiple of the block.

    A block of zeros has the scale 1. A block that holds an infinity has an infinite scale, one that
    holds a NaN has a NaN: all that such a block stands for is NaN, and so is what it is multiplied
    to. A scale is at least 2**-126.

    Args:
        x: A matrix in bfloat16, float16 or float32, or several: leading dimensions are those of a
            batch.
        group_sizes: How many rows each group has, if groups are told apart along axis -2: rows of
            of zeros follow those of each group, up to a multiple of 128. So no block along that
            axis has rows of two groups, and `group_sums` takes the sizes rounded up. There is room
            for groups of any sizes; rows in no group are those of one more. If 128 rows are no
            whole blocks, the next number of rows that are takes its place.
        block: The elements that share a scale: how many lie side by side, and how many follow each
            other along the axis. `(1, 128)` suits activations, `(128, 128)` weights. With
            `axis="both"`, two blocks may be given: `((1, 128), (128, 128))`.
        dtype: The type of the values: float8_e4m3fn, float8_e5m2 or int8.
        axis: -1: for a left operand, whose scales are a `row_scale`. -2: for a right operand, whose
            scales are a `col_scale`. "both": returns both, in this order.
        power_of_two: Rounds each scale up to a power of two. `float8_e8m0fnu` (UE8M0) holds such
            scales exactly.
        implementation: As for `gemm`.

    Returns:
        A `Quantized`, or two of them. It has no derivative.

    Raises:
        ValueError: The block is none, or the axis is none that a product contracts. Or a kernel is
            named that cannot do it.
        TypeError: A type is not one of these.
    """
    x = arguments.array("x", x)
    if np.dtype(x.dtype) not in FROM_16_BITS:
        raise TypeError(f"x must be bfloat16, float16 or float32, got {x.dtype}; cast it")
    if x.ndim < 2:
        raise ValueError(
            f"x must be a matrix, or several, got shape {list(x.shape)}; a vector is x[None]"
        )
    ways = _ways(block, _axes(axis, x.ndim))
    how = Quantization(_dtype(dtype), ways, arguments.flag("power_of_two", power_of_two))
    tiles = [] if group_sizes is None else _tiles(x, group_sizes, how)
    named = arguments.options(implementation, None, None).implementation
    found = bound(x, *tiles, how=how, implementation=named)
    pairs = [Quantized(*found[i : i + 2]) for i in range(0, len(found), 2)]
    return tuple(pairs) if axis == BOTH else pairs[0]


def _tiles(x: jax.Array, group_sizes: Any, how: Quantization) -> list[jax.Array]:
    """Returns the tiles of groups of rows, where these are told apart.

    Raises:
        ValueError: There are several matrices, or sizes are none.
    """
    sizes = arguments.array("group_sizes", group_sizes)
    if x.ndim != 2 or sizes.ndim != 1 or not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise ValueError(
            "group_sizes must be integers, how many rows of a matrix each group has, got"
            f" {sizes.dtype}{list(sizes.shape)} beside x of shape {list(x.shape)}"
        )
    groups.check_values(group_sizes, x.shape[0])
    if all(way.axis == ALONG for way in how.ways):
        return []
    return [tiles_of_groups(sizes, x.shape[0], how.height)]


def checked_block(value: Any, name: str = "block") -> tuple[int, int]:
    """Returns the sizes of a block.

    Raises:
        ValueError: It is none.
    """
    try:
        across, along = map(operator.index, value)
    except (TypeError, ValueError):
        across = along = 0
    if min(across, along) < 1:
        raise ValueError(
            f"{name} must be two positive integers, how many elements lie side by side and how many"
            f" follow each other along the axis, such as (1, 128), got {value!r:.80}"
        )
    return across, along


def _ways(block: Any, axes: tuple[int, ...]) -> tuple[Way, ...]:
    """Returns the ways that a block for all axes, or one for each, stands for."""
    for_each = isinstance(block, Sequence) and any(isinstance(own, Sequence) for own in block)
    blocks = block if for_each and len(axes) > 1 else [block] * len(axes)
    if len(blocks) != len(axes):
        raise ValueError(f"block must be one block, or one for each axis, got {block!r:.80}")
    return tuple(
        Way(axis, Block(*checked_block(own))) for axis, own in zip(axes, blocks, strict=True)
    )


def _dtype(value: Any) -> np.dtype:
    """Returns the type of values."""
    found = arguments.number_type("dtype", value)
    if found not in DTYPES:
        names = ", ".join(map(str, DTYPES))
        raise TypeError(f"dtype must be one of {names}, got {found}")
    return found


def _axes(value: Any, ndim: int) -> tuple[int, ...]:
    """Returns the axes along which blocks follow each other."""
    if value == BOTH:
        return ALONG, ACROSS
    if isinstance(value, int) and value in (ALONG, ACROSS, ndim - 1, ndim - 2):
        return (value - ndim if value >= 0 else value,)
    raise ValueError(
        f"axis must be -1, -2 or 'both', for a matrix is contracted along one of its last two axes,"
        f" got {value!r:.80}"
    )
