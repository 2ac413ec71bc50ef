"""The pieces of sums over groups, told in the kernel: each tile of each group once."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.device import H200
from pallas_gemm.kernels import work
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.kernels.hopper.tiling import TOLD_SLOTS
from pallas_gemm.problem import Problem
from tests.kernels.hopper.groups import told_pieces

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
