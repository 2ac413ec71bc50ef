"""What follows from a config: the order in which chunks take store slots."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.device import H200
from pallas_gemm.kernels import joining, launch, work
from pallas_gemm.kernels.exchange import Exchange
from pallas_gemm.kernels.hopper import ring
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.problem import Problem
from schedules import Pieces


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize("columns", [64, 128, 192, 256])
def test_a_store_slot_is_free_when_its_next_chunk_takes_it(slots, columns):
    config = HopperConfig(tile=(128, columns), store_slots=slots, stages=2, late_store=False)
    plan = HopperPlan(Problem(512, 512, 512), config, H200)
    issued: list[int] = []
    for chunk in itertools.islice(itertools.cycle(range(len(plan.chunks))), 40):
        slot = plan.store_slot(chunk)
        done = issued[: max(len(issued) - plan.stores_in_flight(chunk), 0)]
        # No store of the same slot is among those that may still be read.
        assert slot not in issued[len(done) :]
        issued.append(slot)
    # Not more waiting than needed: some chunk may overlap as many stores as there are other slots.
    most = max(plan.stores_in_flight(chunk) for chunk in range(len(plan.chunks)))
    assert most >= min(slots, len(plan.chunks)) - 1


def test_narrow_chunks_begin_where_wide_ones_would():
    config = HopperConfig(tile=(128, 208), store_columns=64, stages=2, late_store=False)
    plan = HopperPlan(Problem(512, 512, 512, transpose_b=True), config, H200)
    widths = [(chunk.col, chunk.cols) for chunk in plan.chunks]
    assert widths == [(0, 64), (64, 64), (128, 64), (192, 16)]
    assert [plan.store_slot(chunk) for chunk in range(4)] == [0, 1, 0, 4]
    assert plan.store_shape(16, transposed=False) == (2, 8, 64, 16)


@pytest.mark.parametrize("k_steps", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("mode", ["late", "early", "pingpong"])
def test_producer_and_consumers_agree_about_slots(mode, k_steps):
    config = HopperConfig(
        tile=(64, 128), stages=3, pingpong=mode == "pingpong", late_store=mode == "late"
    )
    plan = HopperPlan(Problem(512, 512, 64 * k_steps), config, H200)
    head = ring.start(plan)
    readers: dict[int, int] = {}
    for turn in map(jnp.int32, range(5)):
        reader = turn & 1
        kept, expected = None, -1
        for k in map(jnp.int32, range(k_steps)):
            if k == 0:
                slot = ring.first_slot(plan, turn, None)
            else:
                before, slot = ring.step(plan, turn, k, kept)
                assert before == expected
            expected = (int(turn) * k_steps + int(k)) % 3
            assert slot == head.slot == expected
            assert ring.last_barrier(plan, head.slot, head.readers) == readers.get(
                expected, expected
            )
            readers[expected] = int(ring.barrier(plan, slot, reader))
            kept = ring.keep(plan, slot)
            head = ring.advance(plan, head, reader)
        assert ring.last_slot(plan, turn, kept) == expected
    assert set(readers.values()) <= set(range(config.ring_barriers))


@pytest.mark.parametrize(("last", "cluster"), [(1, (1, 1)), (31, (1, 1)), (5, (2, 1))])
def test_two_kernels_take_every_step_of_every_tile_once_where_the_last_are_cut(last, cluster):
    config = HopperConfig(
        tile=(128, 64), cluster=cluster, ctas=4, schedule="hilbert", split_k=3, split_last=last
    )
    plan = HopperPlan(Problem(500, 200, 504, transpose_b=True, batch=2), config, H200)
    whole, cut = plan.only("whole"), plan.only("cut")
    assert isinstance(whole.pieces, work.Listed)
    assert isinstance(cut.pieces, work.Listed)
    assert isinstance(cut.spans, np.ndarray)
    assert whole.spans is None
    steps = np.tile([0, 8], (len(whole.pieces), 1))
    table = [
        *np.hstack([whole.pieces.order, steps]),
        *np.hstack([cut.pieces.order, cut.spans])[:, :4],
    ]
    pieces = Pieces(config.stacked_grid(plan.problem), 8, np.array(table, np.int32))
    assert len(pieces) == config.pieces(plan.problem) == len(table)
    # Every tile has a place of its own for its summands, where the joining kernel looks for them.
    listed = joining.inputs(cut, launch.Inputs((), (), None), None, None).order
    number, summand = cut.spans[:, 3], cut.spans[:, 2]
    assert len({*zip(number, summand, strict=True)}) == np.prod(cut.summands_shape[:2])
    np.testing.assert_array_equal(work.Coding().pack(cut.pieces), np.asarray(listed)[number])
    # The first kernel may store late, what hands over summands has no room for it.
    assert (whole.config.late_store, cut.config.late_store) == (True, False)
    assert whole.workers == min(4 // config.cluster_size, len(whole.pieces))


@pytest.mark.parametrize("persistence", ["dynamic", "none"])
def test_devices_that_gather_rows_refuse_workers_that_might_not_run(persistence):
    config, problem = HopperConfig(persistence=persistence), Problem(1024, 1024, 1024)
    exchange = Exchange((("model", 4),), ("model",), gathers=True)
    with pytest.raises(ValueError, match="persistence must be 'static' where rows are gathered"):
        HopperPlan(problem, config, H200, exchange)
    HopperPlan(problem, config, H200, dataclasses.replace(exchange, gathers=False))


@pytest.mark.parametrize(
    ("rows", "columns", "ends"), [(4096, 4096, (0, 0)), (4100, 4104, (4, 8)), (64, 4224, (0, 128))]
)
def test_a_result_ends_in_one_place_of_all_tiles(rows: int, columns: int, ends: tuple[int, int]):
    # Two consumers share a tile of 128 rows. Clusters of two may lie beyond the result in part.
    config = HopperConfig(tile=(128, 256), cluster=(1, 2), late_store=False)
    plan = HopperPlan(Problem(rows, columns, 4096, transpose_b=True), config, H200)
    assert plan.ends == ends
