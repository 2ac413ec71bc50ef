"""Work along K as data: what a table of pieces accepts, and how tiles are cut."""

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import Pieces, build, split_k, unsplit

HALVES = [[0, 0, 0, 3], [0, 1, 0, 3], [0, 0, 3, 2], [0, 1, 3, 2]]


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 40), st.data())
def test_pieces_of_a_tile_follow_each_other_and_differ_by_a_step(rows, cols, steps, data):
    parts = data.draw(st.integers(1, steps))
    tiles = build("hilbert", rows, cols)
    last = data.draw(st.none() | st.integers(1, len(tiles)))
    pieces = split_k(tiles, steps, parts, last)
    whole, cut = np.split(tiles.order, [len(tiles) - (last or len(tiles))])
    # Whole tiles in their order, then all others in theirs, part after part.
    np.testing.assert_array_equal(pieces.order, [*whole, *np.tile(cut, (parts, 1))])
    assert pieces.spans[: len(whole)].tolist() == [[0, steps, 0]] * len(whole)
    first, length, summand = pieces.spans[len(whole) :].reshape(parts, len(cut), 3)[:, 0].T
    np.testing.assert_array_equal(summand, range(parts))
    np.testing.assert_array_equal(first, np.cumsum(length) - length)
    assert length.sum() == steps
    assert length.max() - length.min() <= 1
    # To cut all tiles is what no number says, too, and one piece is the whole tile.
    how = (1, None) if parts == 1 else (parts, None if last == len(tiles) else last)
    assert unsplit(pieces) == (tiles, *how)


def test_summands_are_numbered_by_their_steps_whatever_the_order():
    pieces = Pieces((1, 2), 5, np.array(HALVES)[[3, 0, 2, 1]])
    assert pieces.spans.tolist() == [[3, 2, 1], [0, 3, 0], [3, 2, 1], [0, 3, 0]]


@pytest.mark.parametrize(
    "table",
    [
        HALVES[::-1],
        [HALVES[i] for i in (0, 1, 3, 2)],
        [[0, 0, 0, 2], [0, 1, 0, 2], [0, 0, 2, 3], [0, 1, 2, 3]],
        [[0, 0, 0, 3], [0, 0, 3, 2], [0, 1, 0, 5]],
        [[0, 0, 0, 3], [0, 1, 0, 3], [0, 0, 3, 2], [0, 1, 3, 1], [0, 1, 4, 1]],
    ],
    ids=["backwards", "second parts swapped", "longer at the end", "the first tile", "by fives"],
)
def test_what_nobody_cuts_so_has_no_parts(table: Any):
    pieces = Pieces((1, 2), 5, table)
    with pytest.raises(ValueError, match=r"split_k\(..., steps=5, parts=\d, last=(None|1)\)"):
        unsplit(pieces)


def test_equal_pieces_are_one_key_and_nothing_in_them_can_be_changed():
    halves, again = Pieces((1, 2), 5, HALVES), split_k(build("raster", 1, 2), 5, 2)
    others = [split_k(build("raster", *grid), 5, 2) for grid in ((2, 1), (2, 2))]
    others += [Pieces((1, 2), 5, HALVES[::-1]), split_k(build("raster", 1, 2), 6, 2)]
    assert halves == again != "halves"
    assert len({halves, again, *others}) == 5
    for twin in (pickle.loads(pickle.dumps(halves)), copy.deepcopy(halves)):
        assert (twin, hash(twin)) == (halves, hash(halves))
        with pytest.raises(ValueError, match="WRITEABLE"):
            twin.table.setflags(write=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        halves.steps = 6  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (HALVES[:3], r"exactly once, got step 3 of tile \(0, 1\) 0 times"),
        ([*HALVES[:3], [0, 1, 4, 1]], r"exactly once, got step 3 of tile \(0, 1\) 0 times"),
        ([*HALVES[:3], [0, 1, 2, 3]], r"exactly once, got step 2 of tile \(0, 1\) 2 times"),
        ([*HALVES, [0, 0, 1, 1]], r"exactly once, got step 1 of tile \(0, 0\) 2 times"),
        ([*HALVES[:3], [0, 1, 3, 3]], r"inside grid=\(1, 2\) and steps=5, got \[0, 1, 3, 3\]"),
        ([*HALVES, [0, 1, 5, 0]], r"inside grid=\(1, 2\) and steps=5, got \[0, 1, 5, 0\]"),
        ([*HALVES[:3], [1, 1, 3, 2]], r"inside grid=\(1, 2\) and steps=5, got \[1, 1, 3, 2\]"),
        ([*HALVES[:3], [0, 2, 3, 2]], r"inside grid=\(1, 2\) and steps=5, got \[0, 2, 3, 2\]"),
        ([*HALVES[:3], [0, -1, 3, 2]], r"inside grid=\(1, 2\) and steps=5, got \[0, -1, 3, 2\]"),
        ([*HALVES[:3], [0, 1, 3, 1]], r"exactly once, got step 4 of tile \(0, 1\) 0 times"),
        (np.array(HALVES, float), "integer array .* first step, steps, got .* float64"),
        (np.array(HALVES)[:, :3], r"integer array \[pieces, 4\]"),
    ],
)
def test_refuses_tables_that_leave_out_a_piece_or_compute_it_twice(changes: Any, message: str):
    with pytest.raises(ValueError, match=message):
        Pieces((1, 2), 5, changes)


@pytest.mark.parametrize(
    ("steps", "parts", "last", "message"),
    [
        (5, 6, None, "parts must be at most the 5 steps of k, got 6"),
        (5, 0, None, "parts must be an integer of at least 1, got 0"),
        (0, 1, None, "steps must be an integer of at least 1, got 0"),
        (65_536, 1, None, "steps must be below 65536, got 65536"),
        (5, 2, 3, "last must be at most the 2 tiles, got 3"),
        (5, 2, 0, "last must be an integer of at least 1, got 0"),
    ],
)
def test_refuses_pieces_that_are_shorter_than_a_step(steps, parts, last, message):
    with pytest.raises(ValueError, match=message):
        split_k(build("raster", 1, 2), steps, parts, last)


def test_the_first_piece_that_is_elsewhere_is_named() -> None:
    table = split_k(build("raster", 1, 3), 4, 2).table
    with pytest.raises(ValueError, match=r"piece 4 of .* \[0, 1, 2, 2\], got \[0, 2, 2, 2\]"):
        unsplit(Pieces((1, 3), 4, table[[0, 1, 2, 3, 5, 4]]))
