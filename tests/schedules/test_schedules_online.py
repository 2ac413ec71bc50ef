"""The arithmetic twins give the table's tiles, for ints, arrays and traced values alike."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import OnlineSchedule, Schedule, online_raster, online_swizzle, raster, swizzle
from schedules.raster import Along

sides = st.integers(1, 30)
along = st.sampled_from(["rows", "cols"])
pairs = st.one_of(
    st.builds(
        lambda r, c, a: (online_raster(r, c, along=a), raster(r, c, along=a)), sides, sides, along
    ),
    st.builds(
        lambda r, c, g, a, s: (
            online_swizzle(r, c, group=g, along=a, serpentine=s),
            swizzle(r, c, group=g, along=a, serpentine=s),
        ),
        sides, sides, st.integers(1, 40), along, st.booleans(),
    ),
)  # fmt: skip


@given(pair=pairs)
def test_arrays_keep_their_dtype(pair: tuple[OnlineSchedule, Schedule]) -> None:
    online, table = pair
    tiles = online(np.arange(len(table), dtype=np.int32))
    assert [part.dtype for part in tiles] == [np.int32, np.int32]
    assert np.array_equal(np.stack(tiles, axis=1), table.order)


@given(pair=pairs)
def test_element_by_element_equal_to_the_table(pair: tuple[OnlineSchedule, Schedule]) -> None:
    online, table = pair
    assert len(online) == len(table)
    assert online.grid == table.grid
    assert online.name == table.name
    assert [list(online(index)) for index in range(len(table))] == table.order.tolist()
    assert online.table() == table
    assert online.table().name == table.name


@pytest.mark.parametrize(("rows", "cols", "group"), [(8, 8, 4), (10, 7, 4), (3, 5, 8), (5, 6, 1)])
@pytest.mark.parametrize("along", ["rows", "cols"])
def test_traced_int32_stays_int32_and_gives_the_same_tiles(
    rows: int, cols: int, group: int, along: Along
) -> None:
    for online in (
        online_raster(rows, cols, along=along),
        online_swizzle(rows, cols, group=group, along=along),
        online_swizzle(rows, cols, group=group, along=along, serpentine=False),
    ):
        one = jax.jit(online)(jnp.int32(rows * cols - 1))
        assert [part.dtype for part in one] == [jnp.int32, jnp.int32]
        assert [part.shape for part in one] == [(), ()]
        with jax.numpy_dtype_promotion("strict"):
            every = jax.jit(jax.vmap(online))(jnp.arange(rows * cols, dtype=jnp.int32))
        assert np.array_equal(np.stack(every, axis=1), online.table().order)


def test_the_largest_index_does_not_overflow_int32() -> None:
    online = online_swizzle(46_340, 46_340, group=12)
    last = 46_340**2 - 1
    expected = online(last)
    assert tuple(int(part) for part in jax.jit(online)(jnp.int32(last))) == expected
    assert expected == (46_339, 0)


def test_a_side_may_be_longer_than_that_of_a_table() -> None:
    for grid in ((100_000, 3), (3, 100_000)):
        tiles = np.stack(online_swizzle(*grid, group=4)(np.arange(300_000)), axis=1)
        assert tiles.min() == 0
        assert tuple(tiles.max(0) + 1) == grid
        assert len(np.unique(tiles, axis=0)) == 300_000
    with pytest.raises(ValueError, match="rows must be at most 65535, got 100000"):
        online_raster(100_000, 3).table()


def test_hashable_so_that_a_kernel_can_take_it_as_a_static_argument() -> None:
    assert online_swizzle(8, 8, group=3) == online_swizzle(8, 8, group=3)
    assert (
        len({online_swizzle(8, 8, group=3), online_swizzle(8, 8, group=3), online_raster(8, 8)})
        == 2
    )
    traced = jax.jit(lambda index, online: online(index), static_argnums=1)
    assert tuple(map(int, traced(10, online_swizzle(8, 8, group=3)))) == (1, 3)


@pytest.mark.parametrize(
    ("builder", "grid", "options", "message"),
    [
        (online_raster, (0, 4), {}, "rows must be an integer of at least 1, got 0"),
        (online_raster, (4, 4), {"along": "x"}, "along must be 'rows' or 'cols', got 'x'"),
        (online_swizzle, (4, 2**31), {}, "cols must be at most 2147483647, got 2147483648"),
        (online_swizzle, (2**16, 2**15), {}, "rows x cols must be below 2147483648 tiles"),
        (online_swizzle, (4, 4), {"group": 0}, "group must be an integer of at least 1, got 0"),
        (online_swizzle, (4, 4), {"along": "x"}, "along must be 'rows' or 'cols', got 'x'"),
        (online_swizzle, (4, 4), {"serpentine": 1}, "serpentine must be True or False, got 1"),
    ],
)
def test_refuses_what_the_table_builders_refuse(
    builder: Callable[..., OnlineSchedule],
    grid: tuple[int, int],
    options: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        builder(*grid, **options)


@given(
    *(sides, sides, st.integers(1, 40), along, st.booleans(), st.integers(0, 30)),
)
def test_of_fewer_rows_the_order_is_theirs(rows, cols, group, along, serpentine, more):
    whole = online_swizzle(rows + more, cols, group=group, along=along, serpentine=serpentine)
    fewer = swizzle(rows, cols, group=group, along=along, serpentine=serpentine)
    found = whole(np.arange(rows * cols), np.int32(rows))
    assert np.array_equal(np.stack(found, axis=1), fewer.order)
