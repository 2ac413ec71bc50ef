"""The pieces of groups, computed from their sizes: each row of a group in one tile of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.device import H200
from pallas_gemm.kernels import groups, work
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.problem import Problem

ROWS, HEIGHT = 700, 128
PROBLEM = Problem(ROWS, 320, 64, transpose_b=True, groups=5)

SIZES = {
    "uneven": (130, 0, 400, 1, 169),
    "whole tiles": (128, 256, 0, 128, 188),
    "one": (0, 0, 700, 0, 0),
    "none": (0, 0, 0, 0, 0),
    "fewer": (3, 5, 7, 0, 11),
    "too many": (300, 300, 300, 300, 300),
    "negative": (200, -7, 300, 10, 20),
}


@pytest.mark.parametrize("order", ["swizzle:2", "swizzle:8:cols", "raster", "swizzle:3:straight"])
def test_each_row_is_in_one_tile_of_each_column(order):
    config = HopperConfig(tile=(HEIGHT, 64), schedule=order, ctas=7)
    grid, workers = config.grid(PROBLEM), config.workers(PROBLEM, H200)
    schedule = config.resolve_schedule(PROBLEM)

    @jax.jit
    def operand(sizes: jax.Array) -> jax.Array:
        return groups.order_operand(config, PROBLEM, schedule, workers, sizes)

    for name, sizes in SIZES.items():
        ends = np.minimum(np.cumsum(np.maximum(sizes, 0)), ROWS)
        starts = np.concatenate([[0], ends[:-1]])
        table = np.asarray(operand(jnp.array(sizes)))
        seen = np.zeros((ROWS, grid[1]), int)
        for row in table:
            for words in row[1:-1].reshape(-1, 3)[: row[0]]:
                piece = work.GroupCoding().unpack(*map(jnp.int32, words))
                group, first = int(piece.batch), int(piece.first_row)
                if name == "too many" and first >= ROWS:
                    continue
                assert starts[group] <= first < ends[group] == piece.end_row
                assert (first - starts[group]) % HEIGHT == 0
                seen[first : min(first + HEIGHT, ends[group]), piece.col] += 1
        assert (seen[: ends[-1]] == 1).all(), name
        assert not seen[ends[-1] :].any(), name
        assert (table[:, -1] == ends[-1]).all()
        # Dealt in turn: no worker has two pieces more than another.
        assert np.ptp(table[:, 0]) <= 1


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int32, jnp.uint32])
def test_sizes_of_any_type_of_integers_are_within_the_rows(dtype):
    found = groups.bounds(jnp.array([100, 0, 27], dtype), 1000, 8)
    np.testing.assert_array_equal(found[:3], [[100, 100, 127], [100, 0, 27], [13, 13, 17]])
    np.testing.assert_array_equal(found[3:], [[0, 2, 1], 3 * [127], 3 * [17]])
    most = jnp.iinfo(dtype).max
    found = groups.bounds(jnp.array([most, most], dtype), 100, 8)
    np.testing.assert_array_equal(found[:3], [[100, 200], [100, 100], [13, 26]])


def test_the_grid_has_room_for_the_worst_sizes():
    config = HopperConfig(tile=(HEIGHT, 64))
    sizes = np.array([1, 129, 1, 129, 440])
    assert (-(-sizes // HEIGHT)).sum() == config.grid(PROBLEM)[0]


@pytest.mark.parametrize("sizes", [(13, 0, 257), (20, -7, 400)], ids=["fewer", "too many"])
def test_sums_are_dealt_with_the_largest_group_first_and_end_with_the_rows(sizes):
    problem = Problem(
        *(200, 128, 300), transpose_a=True, batch=3, shared_a=True, shared_b=True, ragged_k=True
    )
    config = HopperConfig(tile=(HEIGHT, 64), schedule="swizzle:2", late_store=False, ctas=5)
    workers = config.workers(problem, H200)
    schedule = config.resolve_schedule(problem)
    table = groups.order_operand(config, problem, schedule, workers, jnp.array(sizes))
    ends = np.minimum(np.cumsum(np.maximum(sizes, 0)), problem.k)
    starts = np.append(0, ends[:-1])
    found = []
    for row in np.asarray(table):
        for turn, words in enumerate(row[1:-1].reshape(-1, 4)[: row[0]]):
            piece = work.SumCoding().unpack(*map(jnp.int32, words))
            group = int(piece.batch)
            assert (piece.first_k, piece.end_k) == (starts[group], ends[group])
            # Loads begin with a row of 8, and the last step reaches the end.
            reach = int(work.aligned(piece.first_k) + piece.steps * 64)
            assert piece.end_k <= reach
            assert piece.steps == 1 or reach - 64 < piece.end_k
            found.append((turn, group, int(piece.row), int(piece.col)))
    assert len(found) == len({tile[1:] for tile in found}) == len(schedule)
    turns = {group: [turn for turn, own, *_ in found if own == group] for group in range(3)}
    assert max(turns[2]) <= min(turns[0])
    assert max(turns[0]) <= min(turns[1])
