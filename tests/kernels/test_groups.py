"""What the program computes of the sizes of groups: where they end, and the pieces of sums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.device import H200
from pallas_gemm.kernels import groups, work
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.problem import Problem

HEIGHT = 128


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int32, jnp.uint32])
def test_sizes_of_any_type_of_integers_are_within_the_rows(dtype):
    found = groups.bounds(jnp.array([100, 0, 27], dtype), 1000, 8)
    np.testing.assert_array_equal(found[:3], [[100, 100, 127], [100, 0, 27], [13, 13, 17]])
    np.testing.assert_array_equal(found[3:], [[0, 2, 1], 3 * [127], 3 * [17]])
    most = jnp.iinfo(dtype).max
    found = groups.bounds(jnp.array([most, most], dtype), 100, 8)
    np.testing.assert_array_equal(found[:3], [[100, 200], [100, 100], [13, 26]])


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint32])
def test_a_kernel_takes_sizes_in_int32_as_they_are_and_others_within_the_rows(dtype):
    problem = Problem(1000, 64, 64, groups=2)
    most = jnp.iinfo(dtype).max
    taken = groups.sizes_operand(problem, jnp.array([most, 3], dtype))
    assert taken.dtype == jnp.int32
    assert taken.tolist() == [min(most, 1000), 3]
    as_is = jax.make_jaxpr(functools.partial(groups.sizes_operand, problem))(jnp.arange(2))
    assert [equation.primitive.name for equation in as_is.eqns] == ["optimization_barrier"]


def test_the_grid_has_room_for_the_worst_sizes():
    problem = Problem(700, 320, 64, transpose_b=True, groups=5)
    sizes = np.array([1, 129, 1, 129, 440])
    assert (-(-sizes // HEIGHT)).sum() == HopperConfig(tile=(HEIGHT, 64)).grid(problem)[0]


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
