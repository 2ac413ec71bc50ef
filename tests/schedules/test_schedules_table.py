"""`Schedule` as data: what it accepts, what it gives out, and that nobody can change it."""

import copy
import dataclasses
import functools
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import PADDING, Schedule, hilbert, raster, swizzle

SQUARE: Any = [[0, 0], [0, 1], [1, 1], [1, 0]]


def test_accepts_lists_tuples_and_any_integer_dtype() -> None:
    from_list = Schedule((2, 2), SQUARE, "mine")
    small_integers: Any = np.array(SQUARE, np.uint8)
    from_array = Schedule(grid=(2, 2), order=small_integers, name="mine")
    assert from_list == from_array
    assert from_list.order.dtype == np.int32
    assert (from_list.rows, from_list.cols, len(from_list), from_list.name) == (2, 2, 4, "mine")
    assert repr(from_list) == "Schedule(grid=(2, 2), name='mine')"


@pytest.mark.parametrize(
    ("grid", "order", "message"),
    [
        ((2, 2), SQUARE[:3], r"order must be .* shape \(4, 2\) .* got shape \(3, 2\)"),
        ((2, 2), np.array(SQUARE, float), "order must be an integer array .* float64"),
        ((2, 2), [[0, 0], [0, 1], [1, 1], [1]], "order must be an integer array"),
        ((2, 2), [*SQUARE[:3], [0, 0]], r"exactly once, got tile \(0, 0\) 2 times"),
        ((2, 2), [*SQUARE[:3], [1, 2]], r"inside grid=\(2, 2\), got tile \(1, 2\)"),
        ((2, 2), [*SQUARE[:3], [-1, 0]], r"inside grid=\(2, 2\), got tile \(-1, 0\)"),
        ((4, 1), SQUARE, r"inside grid=\(4, 1\), got tile \(0, 1\)"),
        ((0, 2), [], "rows must be an integer of at least 1, got 0"),
        ((2, 2.0), SQUARE, r"cols must be an integer of at least 1, got 2\.0"),
        ((True, 4), SQUARE, "rows must be an integer of at least 1, got True"),
        ((65_536, 1), [], "rows must be at most 65535, got 65536"),
        ((1, 65_536), [], "cols must be at most 65535, got 65536"),
        ((65_535, 65_535), [], r"rows x cols must be below 2147483648 tiles"),
        (4, SQUARE, r"grid must be a pair \(rows, cols\), got 4"),
        ((2, 2, 1), SQUARE, r"grid must be a pair \(rows, cols\), got \(2, 2, 1\)"),
    ],
)
def test_refuses_what_is_no_order_of_the_grid(grid: Any, order: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(grid, order)


def test_refuses_a_name_that_is_no_string() -> None:
    name: Any = 3
    with pytest.raises(ValueError, match="name must be a string, got 3"):
        Schedule((2, 2), SQUARE, name)


def test_nothing_in_it_can_be_changed() -> None:
    given_order = np.array(SQUARE, np.int32)
    schedule = Schedule((2, 2), given_order)
    given_order[0] = 7
    assert schedule.order.tolist() == SQUARE
    for array in (schedule.order, schedule.packed(), schedule.deal(3)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.setflags(write=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.grid = (4, 1)  # type: ignore[misc]


def test_equal_and_hashed_by_what_is_visited_when() -> None:
    same = Schedule((8, 8), hilbert(8, 8).order, "another name")
    assert same == hilbert(8, 8)
    assert hash(same) == hash(hilbert(8, 8))
    assert hilbert(8, 8) != raster(8, 8)
    assert raster(1, 4) != raster(4, 1)
    assert raster(2, 3) != "raster"
    assert (
        len({raster(1, 4), raster(4, 1), swizzle(4, 4, group=4), raster(4, 4, along="cols")}) == 3
    )


def test_serves_as_the_key_of_a_cache() -> None:
    calls = []

    @functools.cache
    def compile_for(schedule: Schedule) -> int:
        calls.append(schedule)
        return len(schedule)

    assert compile_for(hilbert(4, 4)) == compile_for(hilbert(4, 4)) == 16
    assert len(calls) == 1


def test_copies_and_pickles_are_equal_and_still_frozen() -> None:
    schedule = hilbert(5, 7)
    hash(schedule)
    for twin in (
        pickle.loads(pickle.dumps(schedule)),
        copy.copy(schedule),
        copy.deepcopy(schedule),
    ):
        assert twin == schedule
        assert hash(twin) == hash(schedule)
        assert twin.name == "hilbert"
        assert not twin.order.flags.writeable


def test_a_pickle_does_not_carry_the_hash_of_another_process() -> None:
    schedule = hilbert(5, 7)
    hash(schedule)
    code = (
        "import pickle, sys, schedules; schedule = pickle.load(sys.stdin.buffer);"
        "print(schedule in {schedules.hilbert(5, 7)})"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(schedule), capture_output=True, check=True
    )
    assert found.stdout.strip() == b"True"


def test_packed_puts_the_row_above_the_column() -> None:
    packed = raster(3, 4).packed()
    assert packed.dtype == np.int32
    assert packed.tolist() == [row << 16 | col for row in range(3) for col in range(4)]


def test_no_packed_entry_of_the_longest_grids_is_the_padding() -> None:
    for schedule in (raster(65_535, 1), raster(1, 65_535)):
        packed = schedule.packed()
        assert not np.any(packed == PADDING)
        assert np.array_equal(packed >> 16 & 0xFFFF, schedule.order[:, 0])
        assert np.array_equal(packed & 0xFFFF, schedule.order[:, 1])


def test_positions_invert_the_order() -> None:
    schedule = hilbert(6, 9)
    positions = schedule.positions()
    assert positions.shape == (6, 9)
    assert [positions[row, col] for row, col in schedule.order.tolist()] == list(range(54))


def test_round_robin_over_74_clusters_is_the_deal_of_the_b200_article() -> None:
    schedule = hilbert(32, 32)
    table = schedule.deal(74, how="round_robin")
    assert table.shape == (74, 14)
    expected = [[] for _ in range(74)]
    for tile, entry in enumerate(schedule.packed().tolist()):
        expected[tile % 74].append(entry)
    assert table.tolist() == [share + [-1] * (14 - len(share)) for share in expected]


@given(rows=st.integers(1, 20), cols=st.integers(1, 20), workers=st.integers(1, 500))
def test_shares_are_balanced_and_hold_every_tile_once(rows: int, cols: int, workers: int) -> None:
    schedule = hilbert(rows, cols)
    for how in ("round_robin", "contiguous"):
        table = schedule.deal(workers, how=how)
        assert table.dtype == np.int32
        assert table.shape == (workers, -(-rows * cols // workers))
        work = table != PADDING
        # Padding only ever follows the work of a row.
        assert np.array_equal(work, np.sort(work, axis=1)[:, ::-1])
        sizes = work.sum(axis=1)
        assert sizes.max() - sizes.min() <= 1
        visited = table[work] if how == "contiguous" else table.T[work.T]
        assert np.array_equal(visited, schedule.packed())


@pytest.mark.parametrize("workers", [0, -1, 1.5, "4", None, True, 2**20 + 1])
def test_deal_refuses_a_number_of_workers_that_is_none(workers: Any) -> None:
    with pytest.raises(ValueError, match=r"workers must be .*, got "):
        raster(2, 2).deal(workers)


def test_deal_refuses_another_way_of_dealing() -> None:
    how: Any = "random"
    with pytest.raises(ValueError, match="how must be 'round_robin' or 'contiguous', got 'random'"):
        raster(2, 2).deal(2, how=how)
