"""Scales of blocks: what their shapes say.

A scale of `[m / r, k / g]` has a value for each block of r rows and g contracted elements.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from pallas_gemm.call import Operands
from pallas_gemm.op.contraction import Shape
from pallas_gemm.op.in_blocks import shaped
from pallas_gemm.op.mesh import typed
from pallas_gemm.problem import BLOCKS, SCALES

SHORTEST = 16
"""Contracted elements of a block, unless it is all of them. Shorter ones would mostly be scales of
the wrong side."""
OF_SCALES = dict(zip(SCALES, BLOCKS, strict=True))
"""The operand that a scale becomes if it has a dimension along k."""


class Factor(NamedTuple):
    """A factor of a product as a matrix, or several.

    Attributes:
        name: The caller's name for it.
        lead: Its leading dimensions.
        size: Its rows if it is the left one, its columns if it is the right one.
        k: Contracted elements.
        weights: It has few bits beside a wider factor. Then a scale with all dimensions is one of
            its blocks, whatever else the shape may mean.
    """

    name: str
    lead: Shape
    size: int
    k: int
    weights: bool = False


def checked(name: str, scale: Any, factor: Factor, *, left: bool) -> Any:
    """Checks a scale of blocks. Returns it without a last block that is a part of one.

    Args:
        name: The caller's name for it.
        scale: The scale: a floating-point array of two dimensions at least.
        factor: The factor that it scales.
        left: It is the left one.

    Raises:
        ValueError: Its shape matches no blocks.
    """
    *lead, first, second = scale.shape
    rows, deep = (first, second) if left else (second, first)
    wide, along = block(factor.size, rows), block(factor.k, deep, SHORTEST)
    fits = not lead or (
        len(lead) == len(factor.lead)
        and all(own in (1, size) for own, size in zip(lead, factor.lead, strict=True))
    )
    if wide and along and fits and factor.k % along == 0:
        if factor.size % wide:
            # The last block is a part of one: each row or column gets its own value.
            axis = scale.ndim - (2 if left else 1)
            scale = _repeated(scale, wide, axis, factor.size)
        return scale
    raise ValueError(_why(name, scale.shape, factor, (wide, along, fits), left=left))


def block(size: int, count: int, shortest: int = 1) -> int:
    """Returns the length of the blocks that a dimension is cut into, by their number; else 0.

    It is all of the dimension, or a power of two: no other may be meant by a number of blocks of
    which the last is a part of one.
    """
    if is_symbolic_dim(size) or is_symbolic_dim(count):
        return int(size == count)
    if count == 1:
        return max(size, 1)
    length = shortest
    while length < size and -(-size // length) > count:
        length *= 2
    return length if -(-size // length) == count else 0


def _why(
    name: str, shape: Shape, factor: Factor, found: tuple[int, int, bool], *, left: bool
) -> str:
    """Says why a shape matches no blocks, and which shape would."""
    wide, along, fits = found
    (*_, first, second) = shape
    side = ("m", "rows of a") if left else ("n", f"columns of {factor.name}")
    form = f"[{side[0]} / r, k / g]" if left else f"[k / g, {side[0]} / c]"
    if along and factor.k % along:
        whole = -(-factor.k // along) * along
        return (
            f"{name} of {list(shape)} says blocks of {along} along k, of which k={factor.k} is no"
            f" multiple: pad both operands with zeros to {whole}, or take shorter blocks"
        )
    if not fits:
        return (
            f"{name} of {list(shape)} must have nothing in front of {form}, or what"
            f" {factor.name} has there, {list(factor.lead)}"
        )
    flipped = (second, first) if left else (first, second)
    if block(factor.size, flipped[0]) and block(factor.k, flipped[1], SHORTEST):
        return (
            f"{name} must be {form}, one value for each block of {factor.name}, got {list(shape)};"
            " transposed it would fit"
        )
    near = [
        count if own else _nearest(size, count, shortest)
        for size, count, own, shortest in (
            (factor.size, (first if left else second), wide, 1),
            (factor.k, (second if left else first), along, SHORTEST),
        )
    ]
    nearest = near if left else near[::-1]
    return (
        f"{name} must be {form}, one value for each block of {factor.size} {side[1]} and"
        f" k={factor.k}, where r, c and g are powers of two or all, and g is {SHORTEST} at least;"
        f" got {list(shape)}, the nearest is {nearest}"
    )


def _nearest(size: int, count: int, shortest: int) -> int:
    """Returns into how many blocks a dimension can be cut, nearest to a number."""
    lengths = [shortest << i for i in range(max(1, size).bit_length())]
    counts = {-(-size // length) for length in lengths if size % length == 0} | {1}
    return min(counts, key=lambda own: abs(own - count))


def _repeated(scale: Any, times: int, axis: int, size: int) -> Any:
    """Repeats each value along an axis, up to a size."""
    if isinstance(scale, jax.ShapeDtypeStruct):
        return shaped(scale, (*scale.shape[:axis], size, *scale.shape[axis + 1 :]))
    whole = jnp.repeat(scale, times, axis, out_sharding=typed.sharding_of(scale))
    whole = typed.split_into(whole, axis, size)
    return jax.lax.slice_in_dim(whole, 0, size, axis=axis)


def as_vector(scale: Any, size: int, lead: Shape, *, left: bool) -> Any:
    """Returns the scales of blocks that are as long as k, as one for each row or column.

    Args:
        scale: The scale.
        size: How many rows or columns there are.
        lead: The leading dimensions of the result.
        left: It scales the left factor.
    """
    own = scale.shape[:-2]
    count = scale.shape[-2 if left else -1]
    front = (1,) * (len(lead) - len(own)) + own if own else ()
    if isinstance(scale, jax.ShapeDtypeStruct):
        return shaped(scale, (*front, size))
    vector = scale.reshape(*front, count)
    if count == size:
        return vector
    return jnp.repeat(vector, size // count, -1, out_sharding=typed.sharding_of(vector))


def alike(given: Operands) -> Operands:
    """Returns operands whose scales are all of blocks of the same length along k: the shortest."""
    axes = {name: -1 if name == BLOCKS[0] else -2 for name in BLOCKS}
    scales = {name: x for name in BLOCKS if (x := getattr(given, name)) is not None}
    counts = [x.shape[axes[name]] for name, x in scales.items()]
    # An empty k is one block, or none.
    most = min(counts) if 0 in counts else max(counts, default=1)
    found = {}
    for name, x in scales.items():
        axis = x.ndim + axes[name]
        count = x.shape[axis]
        found[name] = x if count == most else _repeated(x, max(1, most // count), axis, most)
    return given._replace(**found)
