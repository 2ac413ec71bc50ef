"""Products of groups by XLA: tile after tile of rows of one group.

XLA's own expands an operand to a copy for each group, or computes each row with every group's
operand; here each row is multiplied once. It is what the program does where no kernel takes it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim
from jax.lax import ragged_dot_general
from jax.numpy import matmul

from pallas_gemm.call import DIMENSIONS, GroupedCall, Operands
from pallas_gemm.kernels.groups import Tiles, bounds, tiles_of
from pallas_gemm.planning.by_xla import xla
from pallas_gemm.planning.by_xla.precise import dot_general, enough
from pallas_gemm.problem import KINDS, OF_FACTORS

Products = Callable[..., jax.Array]
"""Takes a call without an epilogue, a, b and the sizes."""

SHORTEST, LONGEST = 128, 1024
"""Rows of a tile: about those of a group, if it is as long as others."""
ROWS = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
TRANSPOSED = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
CONTRACTED = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


def numbers(contracted: bool, transpose_b: bool) -> lax.RaggedDotDimensionNumbers:
    """Returns what JAX's own function is told of the dimensions."""
    if contracted:
        return CONTRACTED
    return TRANSPOSED if transpose_b else ROWS


def by_jax(call: GroupedCall, *operands: jax.Array) -> jax.Array:
    """Computes a call by JAX's own function."""
    return finished(call, _by_jax, *operands)


def by_tiles(call: GroupedCall, *operands: jax.Array) -> jax.Array:
    """Computes a call tile by tile."""
    return finished(call, _by_tiles, *operands)


def finished(
    call: GroupedCall, products: Products, *operands: jax.Array, dtype: Any = None
) -> jax.Array:
    """Computes a call from products without an epilogue, which one pass over them applies.

    Args:
        call: The call.
        products: Computes a call without an epilogue from a, b and the sizes.
        *operands: Its operands.
        dtype: Type of the products; None for that of sums.
    """
    is_bare = call.epilogue.is_identity
    call, operands = as_matrices(call, *operands)
    if is_bare:
        return products(call, *operands)
    given, sizes = call.unpack(operands), call.sizes(operands)
    wide = xla.wide_dtype(given.a.dtype, given.b.dtype, call.out_dtype)
    plain = call.sums(wide if dtype is None else dtype)
    sums = [products(plain, given.a, b, sizes) for b in (given.b, given.up) if b is not None]
    if call.contracted:
        return sums[0].astype(call.out_dtype)
    return applied(call, sums, given, sizes)


def as_matrices(
    call: GroupedCall, *operands: jax.Array
) -> tuple[GroupedCall, tuple[jax.Array, ...]]:
    """Returns a call of factors that stand for themselves, and its operands.

    Blocks of factors are scaled, and weights of few bits get the type of the rows. The contracted
    elements of groups come first.
    """
    given, sizes = call.unpack(operands), call.sizes(operands)
    if call.epilogue.blocks:
        call, given = xla.without_blocks(call, given)
    elif not call.contracted:
        given = xla.widened(given)
    if call.contracted and call.transpose_b:
        call = dataclasses.replace(call, transpose_b=False)
        given = given._replace(a=given.a.T, b=given.b.T)
    return call, call.packed(given, sizes)


def applied(
    call: GroupedCall, sums: list[jax.Array], given: Operands, sizes: jax.Array
) -> jax.Array:
    """Applies the epilogue of a call to sums, but for the scales of blocks."""
    epilogue = call.epilogue.of_whole_sums
    (rows, _), (groups,) = sums[0].shape, sizes.shape
    if groups == 0:
        # Rows are in none, and have none to take a bias of.
        return sums[0].astype(call.out_dtype)
    group = group_of_rows(sizes, rows)
    extras = {name: getattr(given, name) for name in epilogue.operands}

    # So that reverse mode keeps the products alone, and not what is made of them in float32.
    @jax.checkpoint
    def finish(sums: list[jax.Array], extras: dict[str, jax.Array]) -> jax.Array:
        own = _of_rows(Operands(None, None, **extras), jnp.minimum(group, groups - 1))
        each = {name: xla.aligned(name, getattr(own, name), 2) for name in extras}
        each = {name: jnp.broadcast_to(x, (rows, x.shape[1])) for name, x in each.items()}
        own = own._replace(**{name: held(x, group < groups) for name, x in each.items()})
        values = xla.finish(epilogue, [held(x, group < groups) for x in sums], own)
        return of_rows_in_groups(values, group < groups).astype(call.out_dtype)

    return finish(sums, extras)


def held(x: jax.Array, is_in_group: jax.Array) -> jax.Array:
    """Returns rows; those in no group do not move, so that no derivative of theirs counts.

    A function may have no finite derivative where they are.
    """
    own = lax.broadcast_in_dim(is_in_group, x.shape, (0,))
    return jnp.where(own, x, lax.stop_gradient(x))


def of_rows_in_groups(x: jax.Array, is_in_group: jax.Array) -> jax.Array:
    """Returns an array with zeros for rows in no group."""
    own = lax.broadcast_in_dim(is_in_group, x.shape, (0,))
    return jnp.where(own, x, jnp.zeros_like(x))


def group_of_rows(sizes: jax.Array, rows: int) -> jax.Array:
    """Returns the group that each row is in; of rows in none, the number of groups."""
    (groups,) = sizes.shape
    ends = lax.broadcast_in_dim(bounds(sizes, rows, 1).end, (rows, groups), (1,))
    is_before = ends <= lax.broadcasted_iota(jnp.int32, (rows, groups), 0)
    return is_before.sum(axis=1, dtype=jnp.int32)


def _of_rows(given: Operands, group: jax.Array) -> Operands:
    """Returns operands with what each group has of its own as what its rows have."""
    found = {}
    for name in KINDS:
        x = getattr(given, name)
        if name not in OF_FACTORS and x is not None and x.ndim > len(DIMENSIONS[name]):
            of_row = taken(x, group)
            found[name] = of_row if of_row.ndim == 2 else lax.expand_dims(of_row, (1,))
    return given._replace(**found)


@jax.custom_jvp
def taken(x: jax.Array, group: jax.Array) -> jax.Array:
    """Returns what the group of each row has.

    As a derivative it is a product, for the other way round it is a sum: rows would be added up one
    by one.
    """
    return x[group]


@taken.defjvp
def _taken_change(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x, group), (change, _) = primals, tangents
    is_own = jax.nn.one_hot(group, x.shape[0], dtype=change.dtype)
    return taken(x, group), matmul(is_own, change, precision="highest")


def _by_jax(call: GroupedCall, a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
    rows = a.shape[1 if call.contracted else 0]
    columns = b.shape[-2 if call.transpose_b else -1]
    return ragged_dot_general(
        *(a, b, sizes, numbers(call.contracted, call.transpose_b)),
        precision=enough(call.precision, is_vector=1 in (rows, columns)),
        preferred_element_type=call.out_dtype,
    )


def _by_tiles(call: GroupedCall, a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
    if any(is_symbolic_dim(size) for size in (*a.shape, *b.shape)):
        return _by_jax(call, a, b, sizes)
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
    product = dot_general(
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
    product = dot_general(
        *(left, right),
        (((0,), (0,)), ((), ())),
        precision=call.precision,
        preferred_element_type=out.dtype,
    )
    group = tiles.group[i]
    total = lax.dynamic_index_in_dim(out, group, keepdims=False) + product
    return lax.dynamic_update_index_in_dim(out, total, group, 0)


def _rows_of(tiles: Tiles, i: Any, height: int, rows: int) -> tuple[Any, jax.Array]:
    """Returns the first of `height` rows that are there, and which of them are a tile's own."""
    start = jnp.minimum(tiles.first[i], rows - height)
    here = start + lax.broadcasted_iota(jnp.int32, (height, 1), 0)
    return start, (tiles.first[i] <= here) & (here < tiles.end[i])
