"""The table of groups by size that a program makes for a kernel."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_gemm.device import H200
from pallas_gemm.kernels import work
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.groups import table
from pallas_gemm.kernels.hopper.plan import HopperPlan, Relay
from pallas_gemm.problem import Problem
from tests.kernels import wrapping

HEIGHT = 128


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint32])
def test_a_kernel_takes_sizes_in_int32_as_they_are_and_others_within_the_rows(dtype):
    problem = Problem(1000, 64, 64, groups=2)
    most = jnp.iinfo(dtype).max
    plan = HopperPlan(problem, HopperConfig(tile=(HEIGHT, 64), late_store=False), H200)
    taken = table.operand(plan, jnp.array([most, 3], dtype))
    assert taken.dtype == jnp.int32
    assert taken.tolist() == [min(most, 1000), 3]
    as_is = jax.make_jaxpr(functools.partial(table.operand, plan))(jnp.arange(2))
    assert [equation.primitive.name for equation in as_is.eqns] == ["optimization_barrier"]


@pytest.mark.parametrize(
    ("persistence", "made"), [("dynamic", "new_ref"), ("static", "optimization_barrier")]
)
def test_each_call_has_a_counter_of_its_own_to_claim_from(persistence, made):
    shared = {"batch": 4, "shared_a": True, "shared_b": True}
    problem = Problem(256, 128, 1000, transpose_a=True, ragged_k=True, **shared)
    config = HopperConfig(tile=(HEIGHT, 64), persistence=persistence)
    plan = HopperPlan(problem, config, H200)
    jaxpr = jax.make_jaxpr(lambda sizes: table.operand(plan, sizes)[...])(jnp.arange(4))
    assert made in [equation.primitive.name for equation in jaxpr.eqns]


def test_the_grid_has_room_for_the_worst_sizes():
    problem = Problem(700, 320, 64, transpose_b=True, groups=5)
    sizes = np.array([1, 129, 1, 129, 440])
    assert (-(-sizes // HEIGHT)).sum() == HopperConfig(tile=(HEIGHT, 64)).grid(problem)[0]


@pytest.mark.parametrize("sizes", [(13, 0, 257, 257), (20, -7, 400, 9)], ids=["fewer", "too many"])
def test_sums_are_told_of_the_largest_group_first_and_end_with_the_elements(sizes):
    ends = np.minimum(np.cumsum(np.maximum(sizes, 0)), 600)
    starts = np.append(0, ends[:-1])
    largest_first = sorted(range(4), key=lambda group: -min(max(sizes[group], 0), 600))
    found = table.ranked(jnp.array(sizes), 600, 5, None)
    for row, group in zip(found, largest_first, strict=False):
        assert row.tolist() == [group, starts[group], ends[group], 0]
    assert not found[4:].any()


RELAY = Relay(groups=2, pieces=3, rows=3, steps=2, tile_k=64)
TOLD = jax.jit(functools.partial(table.ranked, elements=2400, most_rows=20, relay=RELAY))


@given(st.lists(st.integers(0, 400), min_size=6, max_size=6))
def test_crowded_groups_are_told_in_parts_that_follow_each_other(sizes):
    cut = [min(max(math.ceil(math.ceil(size / 64) / 2), 1), 3) for size in sizes]
    found = iter(np.asarray(TOLD(jnp.array(sizes))))
    starts = np.cumsum(sizes) - sizes
    for rank, group in enumerate(sorted(range(6), key=lambda group: -sizes[group])):
        at = starts[group]
        for part in range(cut[group]):
            own, first, end, counter, leg, rows = next(found)
            assert (own, first, rows, counter) == (group, at, sum(cut), 0)
            assert work.unpack_leg(jnp.int32(leg)) == (rank, part, part == cut[group] - 1)
            # Parts after the first begin where a step does, whose loads begin with a row of 8.
            assert part == 0 or (first - starts[group] // 8 * 8) % 64 == 0
            at = end
        assert at == starts[group] + sizes[group]
    assert not any(row.any() for row in found)


@pytest.mark.parametrize("relay", [None, RELAY], ids=["whole", "cut"])
@pytest.mark.parametrize("name", wrapping.SIZES)
def test_no_group_begins_among_the_elements_because_a_sum_wrapped(name, relay):
    limit, sizes = wrapping.SIZES[name]
    starts, ends = (np.minimum(x, limit) for x in wrapping.spans(limit, sizes))
    count = len(sizes)
    ranked = jax.jit(lambda sizes: table.ranked(sizes, limit, count + 3, relay))
    found = np.asarray(ranked(jnp.array(sizes, jnp.int32)))
    order = np.argsort(-np.clip(sizes, 0, limit), kind="stable")
    expected = np.stack([order, starts[order], ends[order]], axis=1)
    np.testing.assert_array_equal(found[:count, :3], expected)
    assert not found[count:].any()


def test_no_group_is_cut_where_sizes_say_more_than_there_is():
    found = table.ranked(jnp.array([900, 900]), 1000, 5, RELAY)
    assert found[:2, 1:3].tolist() == [[0, 900], [900, 1000]]
    assert found[0, 5] == 2
    assert not found[2:].any()
