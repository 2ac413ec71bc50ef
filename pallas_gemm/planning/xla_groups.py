"""Products of groups by XLA: tile after tile of rows of one group.

XLA's own expands an operand to a copy for each group, or computes each row with every group's
operand; here each row is multiplied once. It is what the program does where no kernel takes it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim

from pallas_gemm.kernels.groups import Tiles, bounds, tiles_of
from pallas_gemm.planning import xla
from pallas_gemm.planning.call import GroupedCall

SHORTEST, LONGEST = 128, 1024
"""Rows of a tile: about as many as a group has, if it is as long as others."""
ROWS = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
TRANSPOSED = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
CONTRACTED = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


def numbers(contracted: bool, transpose_b: bool) -> lax.RaggedDotDimensionNumbers:
    """Returns what JAX's own function is told of the dimensions."""
    if contracted:
        return CONTRACTED
    return TRANSPOSED if transpose_b else ROWS


def by_jax(call: GroupedCall, a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
    """Computes a call by JAX's own function."""
    return lax.ragged_dot_general(
        *(a, b, sizes, numbers(call.contracted, call.transpose_b)),
        precision=call.precision,
        preferred_element_type=call.out_dtype,
    )


def by_tiles(call: GroupedCall, a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
    """Computes a call tile by tile."""
    if any(is_symbolic_dim(size) for size in (*a.shape, *b.shape)):
        return by_jax(call, a, b, sizes)
    problem = call.problem(((a.shape, a.dtype), (b.shape, b.dtype), (sizes.shape, sizes.dtype)))
    wide = xla.wide_dtype(a.dtype, b.dtype, call.out_dtype)
    result = jnp.zeros(problem.out_shape, wide if call.contracted else call.out_dtype)
    if 0 in (*a.shape, *b.shape, *sizes.shape):
        return result.astype(call.out_dtype)
    rows, groups = a.shape[0], sizes.shape[0]
    usual = -(-rows // (groups * SHORTEST)) * SHORTEST
    height = min(max(SHORTEST, min(usual, LONGEST)), rows)
    count = (rows + (height - 1) * groups) // height
    tiles = tiles_of(bounds(sizes, rows, height), height, lax.iota(jnp.int32, count))
    one = functools.partial(_sum_tile if call.contracted else _rows_tile, call, height, a, b, tiles)
    return lax.fori_loop(0, count, one, result).astype(call.out_dtype)


def _rows_tile(
    call: GroupedCall, height: int, a: jax.Array, b: jax.Array, tiles: Tiles, i: Any, out: Any
) -> jax.Array:
    start, own = _rows_of(tiles, i, height, a.shape[0])
    rows = lax.dynamic_slice_in_dim(a, start, height)
    product = lax.dot_general(
        rows,
        lax.dynamic_index_in_dim(b, tiles.group[i], keepdims=False),
        (((1,), (1 if call.transpose_b else 0,)), ((), ())),
        precision=call.precision,
        preferred_element_type=call.out_dtype,
    )
    others = lax.dynamic_slice_in_dim(out, start, height)
    return lax.dynamic_update_slice_in_dim(out, jnp.where(own, product, others), start, 0)


def _sum_tile(
    call: GroupedCall, height: int, a: jax.Array, b: jax.Array, tiles: Tiles, i: Any, out: Any
) -> jax.Array:
    start, own = _rows_of(tiles, i, height, a.shape[0])
    parts = (lax.dynamic_slice_in_dim(x, start, height) for x in (a, b))
    left, right = (jnp.where(own, part, jnp.zeros_like(part)) for part in parts)
    product = lax.dot_general(
        *(left, right),
        (((0,), (0,)), ((), ())),
        precision=call.precision,
        preferred_element_type=out.dtype,
    )
    group = tiles.group[i]
    total = lax.dynamic_index_in_dim(out, group, keepdims=False) + product
    return lax.dynamic_update_index_in_dim(out, total, group, 0)


def _rows_of(tiles: Tiles, i: Any, height: int, rows: int) -> tuple[Any, jax.Array]:
    """Returns the first of so many rows that are there, and which of them are a tile's own."""
    start = jnp.minimum(tiles.first[i], rows - height)
    here = start + lax.broadcasted_iota(jnp.int32, (height, 1), 0)
    return start, (tiles.first[i] <= here) & (here < tiles.end[i])
