"""Which tile a worker computes next: from a dealt table, by arithmetic, or claimed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedules
from pallas_gemm.kernels import tiles, work
from pallas_gemm.kernels.hopper.config import CLAIM_LIMIT, CLAIM_SLOTS
from pallas_gemm.kernels.hopper.dense import claims
from schedules import Schedule, build, online_raster, resolve

grids = st.tuples(st.integers(1, 12), st.integers(1, 12))
workers = st.integers(1, 20)
CLAIMS = work.Coding(bits=work.CLAIM_BITS)


def visited(share: tiles.Share, first: int = 0, every: int = 1) -> list[tuple[int, int]]:
    """Walks, after checking how many turns there were, returns (row, col) of each."""
    turns: list[int] = []
    visits: list[tuple[int, int]] = []

    def compute(turn: Any, piece: work.Piece, carry: Any) -> Any:
        turns.append(int(turn))
        visits.append((int(piece.row), int(piece.col)))
        return carry

    # Without jit, the loop is one of Python.
    with jax.disable_jit():
        count, _ = share.walk(compute, None, first=jnp.int32(first), every=every)
    assert turns == list(range(first, int(count), every))
    return visits


def table_share(schedule: Schedule, workers: int, worker: int) -> tiles.Share:
    # A table of NumPy: JAX would compile a program for each shape, and read beyond the end.
    return tiles.read(tiles.dealt_table(schedule, workers), np.int32(worker), work.Coding())


@given(grids, workers)
def test_a_dealt_table_is_a_count_then_the_tiles_then_room_for_two_reads(grid, workers):
    schedule = schedules.build("hilbert", *grid)
    table = tiles.dealt_table(schedule, workers)
    dealt = schedule.deal(workers)
    assert table.dtype == np.int32
    assert table.shape == (workers, 1 + dealt.shape[1] + 2)
    np.testing.assert_array_equal(table[:, 1:-2], dealt)
    assert (table[:, -2:] == schedules.PADDING).all()
    for worker in range(workers):
        assert table[worker, 0] == len(range(worker, len(schedule), workers))


@pytest.mark.parametrize("grid", [(1, 1), (5, 7), (4, 4)])
@pytest.mark.parametrize("workers", [1, 3, 20])
def test_workers_walk_the_schedule_between_them(grid, workers):
    schedule = schedules.build("swizzle:2", *grid)
    for worker in range(workers):
        visits = visited(table_share(schedule, workers, worker))
        assert visits == list(map(tuple, schedule.order[worker::workers].tolist()))


@pytest.mark.parametrize("tiles_of_worker", [0, 1, 2, 7, 8])
@pytest.mark.parametrize("every", [1, 2])
def test_turns_can_be_shared(tiles_of_worker, every):
    # One more worker than tiles, where there are none: the last worker has an empty row.
    schedule = schedules.build("raster", 1, max(tiles_of_worker, 1))
    workers, worker = (2, 1) if tiles_of_worker == 0 else (1, 0)
    share = table_share(schedule, workers, worker)
    shares = [visited(share, first, every) for first in range(every)]
    assert shares == [
        [(0, turn) for turn in range(first, tiles_of_worker, every)] for first in range(every)
    ]


@given(grids, workers, st.randoms())
def test_the_words_of_a_dealt_entry_stay_together(grid, workers, random):
    schedule = schedules.build("hilbert", *grid)
    spans = np.array(
        [[random.randrange(1 << 16), random.randrange(1, 1 << 16)] for _ in schedule.order]
    )
    # An array of NumPy, or each shape of a table would be compiled.
    table = tiles.dealt_table(schedule, workers, spans)
    coding = work.Coding(words=2)
    for worker in range(workers):
        share = tiles.read(table, np.int32(worker), coding)
        walked = share.piece(*share.load(np.arange(int(share.count()))))
        read = np.stack([walked.row, walked.col, walked.first_step, walked.steps], axis=1)
        expected = np.concatenate([schedule.order, spans], axis=1)[worker::workers]
        np.testing.assert_array_equal(read, expected)


def test_rows_beyond_32767_survive_the_packing():
    rows = np.array([[row, 0] for row in range(40_000)])
    share = table_share(Schedule((40_000, 1), rows), 20_000, 19_999)
    assert visited(share) == [(19_999, 0), (39_999, 0)]


@pytest.mark.parametrize("bits", [work.TABLE_BITS, work.CLAIM_BITS])
def test_an_entry_names_the_product_of_the_batch_that_its_row_belongs_to(bits):
    schedule = schedules.build("hilbert", 3 * 5, 7)
    coding = work.Coding(rows=5, bits=bits)
    row, col, batch = map(np.asarray, coding.unpack(jnp.asarray(coding.pack(schedule)))[:3])
    np.testing.assert_array_equal(np.stack([5 * batch + row, col], axis=1), schedule.order)
    assert set(row) == set(range(5))
    assert set(batch) == set(range(3))


def test_entries_are_those_that_the_schedule_itself_packs():
    schedule = Schedule((40_000, 1), np.array([[row, 0] for row in range(40_000)]))
    np.testing.assert_array_equal(work.Coding().pack(schedule), schedule.packed())


@pytest.mark.parametrize("name", ["raster", "swizzle:3", "swizzle:2:cols"])
@pytest.mark.parametrize("workers", [1, 4, 40])
@pytest.mark.parametrize("every", [1, 2])
def test_an_order_that_is_computed_is_walked_like_its_table(name, workers, every):
    online, table = resolve(f"online_{name}", 5, 7), build(name, 5, 7)
    for worker in {0, 1 % workers, workers - 1}:
        computed = tiles.computed(online, jnp.int32(worker), workers, work.Coding())
        read = table_share(table, workers, worker)
        for first in range(every):
            assert visited(computed, first, every) == visited(read, first, every)


@pytest.mark.parametrize("parts", [1, 3, 7])
@pytest.mark.parametrize("workers", [1, 5, 40])
def test_pieces_that_are_computed_are_those_of_the_table(parts, workers):
    order, steps = resolve("online_swizzle:2", 3, 2), 7
    table = schedules.split_k(build("swizzle:2", 3, 2), steps, parts)
    dealt = jnp.asarray(tiles.dealt_table(table, workers, table.spans))
    for worker in {0, 4 % workers, workers - 1}:
        read = tiles.read(dealt, jnp.int32(worker), work.Coding(words=3))
        cut = work.Cut(parts, steps)
        computed = tiles.computed(order, jnp.int32(worker), workers, work.Coding(), cut)
        assert int(read.count()) == int(computed.count())
        for turn in map(jnp.int32, range(int(read.count()))):
            pieces = [share.piece(*share.load(turn)) for share in (read, computed)]
            named = [{f: int(v) for f, v in p._asdict().items() if v is not None} for p in pieces]
            assert named[0] == named[1]
            assert named[0].keys() == {"row", "col", "first_step", "steps", "summand"}


def test_the_next_entry_is_read_before_the_work_on_this_one():
    order: list[str] = []

    share = tiles.computed(online_raster(2, 2), jnp.int32(0), 1, work.Coding())

    def load(turn):
        order.append("load")
        return share.load(turn)

    def compute(turn, piece, carry):
        order.append("compute")
        return carry

    jax.make_jaxpr(lambda: share._replace(load=load).walk(compute, jnp.int32(0)))()
    # Traced once before the loop and once in it.
    assert order[:3] == ["load", "load", "compute"]


@pytest.mark.parametrize("tag", [0, 1, 31, 32, 63])
def test_a_claim_names_its_tile_whatever_its_tag(tag):
    schedule = schedules.build("hilbert", 91, 90)
    tagged = CLAIMS.pack(schedule).view(np.uint32) | np.uint32(tag << 26)
    row, col, batch, *_ = CLAIMS.unpack(jnp.asarray(tagged.view(np.int32)))
    np.testing.assert_array_equal(np.stack([row, col], axis=1), schedule.order)
    assert batch is None


def test_the_largest_legal_grid_leaves_a_word_that_says_that_none_is_left():
    for grid in ((CLAIM_LIMIT - 1, 1), (1, CLAIM_LIMIT - 1)):
        words = CLAIMS.pack(schedules.build("raster", *grid))
        assert len(set(words.tolist())) == CLAIM_LIMIT - 1
        assert words.max() < claims.END
        assert words.min() >= 0
    # Nor do the largest row and column together make that word, and its tag can be added.
    largest = (CLAIM_LIMIT - 2) << work.CLAIM_BITS | (CLAIM_LIMIT - 2)
    assert largest < claims.END
    assert claims.END < 1 << 32 - claims.TAG_BITS


def test_a_reader_never_takes_an_old_word_for_a_new_one():
    turns = jnp.arange(1, 5000, dtype=jnp.int32)
    slots, tags = np.asarray(claims.slot(turns)), np.asarray(claims.tag(turns))
    mailbox = np.zeros(CLAIM_SLOTS, np.int32)  # As the memory is made: no word, and so tag 0.
    for slot, tag in zip(slots, tags, strict=True):
        assert mailbox[slot] != tag
        mailbox[slot] = tag
    assert set(slots) == set(range(CLAIM_SLOTS))
    assert tags.min() >= 0
    assert tags.max() < 1 << claims.TAG_BITS


def test_the_tag_of_an_unused_word_first_comes_up_when_every_word_was_used():
    turns = np.arange(1, 5000, dtype=np.int32)
    zero = turns[np.asarray(claims.tag(turns)) == 0]
    assert zero[0] > CLAIM_SLOTS
    # A round later than its predecessor, every turn has another tag.
    later = np.asarray(claims.tag(turns + np.int32(CLAIM_SLOTS)))
    assert (later != np.asarray(claims.tag(turns))).all()
