"""The pieces of sums over groups, told in the kernel: each tile of each group once."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.device import H200
from pallas_gemm.kernels import work
from pallas_gemm.kernels.hopper.config import TOLD_SLOTS, HopperConfig
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.problem import Problem
from tests.kernels.hopper import told_pieces

PROBLEM = Problem(
    *(256, 128, 304), transpose_a=True, batch=5, shared_a=True, shared_b=True, ragged_k=True
)
FIELDS = ("batch", "row", "col", "first_k", "end_k", "steps")
SIZES = {
    "uneven": (70, 0, 129, 1, 99),
    "one": (0, 0, 300, 0, 0),
    "none": (0, 0, 0, 0, 0),
    "too many": (150, 150, -7, 150, 150),
}


@pytest.mark.parametrize("tile", [(128, 64), (64, 64)], ids=str)
def test_each_tile_of_each_group_is_told_once(tile):
    config = HopperConfig(
        *(tile, 2), consumers=tile[0] // 64, schedule="swizzle:2", late_store=False, ctas=2
    )
    plan = HopperPlan(PROBLEM, config, H200, interpret=plgpu.InterpretGPUParams(detect_races=True))
    rows, cols = config.grid(PROBLEM)
    find = told_pieces.of(plan, FIELDS)
    for sizes in SIZES.values():
        pieces, ends = find(jnp.array(sizes, jnp.int32))
        group_ends = np.minimum(np.cumsum(np.maximum(sizes, 0)), PROBLEM.k)
        starts = np.append(0, group_ends[:-1])
        # All roles of a worker see as many, and slots are used again.
        assert (ends[..., 0] == ends[:, :1, 0]).all()
        assert ends[..., 0].min() > TOLD_SLOTS
        seen = np.zeros((PROBLEM.batch, rows, cols), int)
        turns = {}
        for of_worker, (count, _) in zip(pieces, ends[:, -1], strict=True):
            assert (of_worker[:, :count] == of_worker[-1, :count]).all()
            for turn, (group, row, col, first, end, steps) in enumerate(of_worker[-1, :count]):
                assert (first, end) == (starts[group], group_ends[group])
                # Loads begin with a row of 8, and the last step reaches the end.
                reach = int(work.aligned(first)) + steps * 64
                assert end <= reach
                assert steps == 1 or reach - 64 < end
                seen[group, row, col] += 1
                turns.setdefault(end - first, []).append(turn)
        assert (seen == 1).all()
        longest_first = sorted(turns, reverse=True)
        for longer, shorter in itertools.pairwise(longest_first):
            assert max(turns[longer]) <= min(turns[shorter])


LOCAL = Problem(
    *(2048, 768, 32768), transpose_a=True, batch=8, shared_a=True, shared_b=True, ragged_k=True
)
SHARED = HopperConfig(tile=(128, 256), stages=4, persistence="dynamic")


def test_the_table_has_room_for_all_parts_of_crowded_groups(rng):
    plan = HopperPlan(LOCAL, SHARED, H200)
    assert plan.relay
    most_cut = most_rows = 0
    for shares in rng.dirichlet(np.full(LOCAL.batch, 0.2), 500):
        sizes = (shares * LOCAL.k).astype(int)
        steps = np.ceil(sizes / plan.tile_k)
        parts = np.clip(np.ceil(steps / plan.relay.steps), 1, plan.relay.parts)
        most_cut, most_rows = max(most_cut, (parts > 1).sum()), max(most_rows, (parts - 1).sum())
    assert (most_cut, most_rows) == (plan.relay.groups, plan.relay.rows)


@pytest.mark.parametrize(
    ("changes", "crowded"),
    [
        ({}, True),
        ({"batch": 128}, False),
        ({"k": 4096}, False),
        ({"n": 4096}, False),
    ],
    ids=["few tiles", "many groups", "few steps", "many tiles"],
)
def test_groups_are_cut_where_a_crowd_would_keep_few_workers_busy(changes, crowded):
    problem = dataclasses.replace(LOCAL, **changes)
    assert bool(HopperPlan(problem, SHARED, H200).relay) == crowded
    dealt = dataclasses.replace(SHARED, persistence="static")
    assert HopperPlan(problem, dealt, H200).relay is None
