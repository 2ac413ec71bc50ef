"""What a program computes of the sizes of groups: where they end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.kernels import groups
from tests.kernels import wrapping

HEIGHT = 128
BOUNDS = jax.jit(groups.bounds, static_argnums=(1, 2))
TILES = jax.jit(groups.tiles_of, static_argnums=1)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int32, jnp.uint32])
def test_sizes_of_any_type_of_integers_are_within_the_rows(dtype):
    found = BOUNDS(jnp.array([100, 0, 27], dtype), 1000, 8)
    expected = [[0, 100, 100], [100, 100, 127], [0, 13, 13], [13, 13, 17]]
    np.testing.assert_array_equal(found, expected)
    most = jnp.iinfo(dtype).max
    found = BOUNDS(jnp.array([most, most], dtype), 100, 8)
    np.testing.assert_array_equal(found, [[0, 100], [100, 200], [0, 13], [13, 26]])


@pytest.mark.parametrize("name", wrapping.SIZES)
def test_no_sum_of_sizes_wraps(name):
    limit, sizes = wrapping.SIZES[name]
    starts, ends = wrapping.spans(limit, sizes)
    found = BOUNDS(jnp.array(sizes, jnp.int32), limit, HEIGHT)
    high = -(-np.clip(sizes, 0, limit) // HEIGHT)
    tile_ends = np.cumsum(high)
    for of_groups, exact in zip(found, (starts, ends, tile_ends - high, tile_ends), strict=True):
        np.testing.assert_array_equal(of_groups, np.minimum(exact, groups.MOST))
    count = -(-limit // HEIGHT) + len(sizes)
    rows = np.unique([0, 1, count // 2, count - 1, *(tile_ends[tile_ends < count] - 1).clip(0)])
    tiles = TILES(found, HEIGHT, jnp.array(rows, jnp.int32))
    group = np.searchsorted(tile_ends, rows, side="right")
    there = group < len(sizes)
    own = group[there]
    first = starts[own] + (rows[there] - (tile_ends - high)[own]) * HEIGHT
    expected = own, first, np.minimum(ends[own], groups.MOST)
    np.testing.assert_array_equal(np.array(tiles)[:, there], expected)
    assert not np.array(tiles)[:, ~there].any()
