"""The pieces of rows in groups, found in the kernel: each row of a group in one tile of its own."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.config import CLUSTERS
from pallas_gemm.device import H200
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.groups import group_walk
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.kernels.hopper.tiling import TOLD_SLOTS
from pallas_gemm.kernels.ptx import find_group
from pallas_gemm.problem import Problem
from tests import warp_ptx
from tests.kernels import wrapping
from tests.kernels.hopper.groups import told_pieces

PROBLEM = Problem(400, 192, 64, transpose_b=True, groups=5)
SMALL = HopperConfig(tile=(64, 64), consumers=1, stages=2, late_store=False, ctas=2)
CONFIGS = {
    "bands of rows": dataclasses.replace(SMALL, schedule="swizzle:2"),
    "columns, in turns": dataclasses.replace(
        SMALL, schedule="swizzle:8:cols", consumers=2, pingpong=True
    ),
    "high tiles, more CTAs than needed": dataclasses.replace(
        SMALL, tile=(128, 64), consumers=2, schedule="swizzle:2", ctas=7
    ),
}
SIZES = {
    "uneven": (70, 0, 200, 1, 99),
    "whole tiles": (64, 128, 0, 64, 144),
    "one": (0, 0, 400, 0, 0),
    "none": (0, 0, 0, 0, 0),
    "fewer": (3, 5, 7, 0, 11),
    "too many": (150, 150, 150, 150, 150),
    "negative": (100, -7, 200, 10, 20),
    "far too many": (2**31 - 1, 2**31 - 1, -(2**31), 1, 2**31 - 1),
}
FIELDS = ("batch", "col", "first_row", "end_row")


def check_rows(
    plan: HopperPlan, sizes: Sequence[int], pieces: np.ndarray, ends: np.ndarray
) -> None:
    """Checks what all roles were told of groups of these sizes."""
    rows, height = plan.problem.m, plan.config.tile[0] * plan.config.cluster[0]
    group_ends = np.minimum(np.cumsum(np.clip(np.array(sizes, np.int64), 0, rows)), rows)
    starts = np.append(0, group_ends[:-1])
    assert (ends[..., 1] == group_ends[-1]).all()
    # All roles of a worker see as many, and no worker has more than it takes.
    assert (ends[..., 0] == ends[:, :1, 0]).all()
    most, columns = plan.config.grid(plan.problem)
    tiles = min(int(-(-np.clip(np.array(sizes, np.int64), 0, rows) // height).sum()), most)
    turns, sharing = -(-tiles * columns // plan.workers), int((ends[:, 0, 0] > 0).sum())
    assert ends[..., 0].max() == turns
    assert sharing == plan.workers or sharing % columns == 0
    # A row of tiles fewer at a time, and somebody would have a piece more.
    fewer = max(sharing - 1, 0) // columns * columns
    assert height <= group_walk.LOW or fewer * turns < max(tiles * columns, 1)
    seen = np.zeros((rows, plan.config.grid(plan.problem)[1]), int)
    roles = ends.shape[1]
    for of_worker, (count, _) in zip(pieces, ends[:, -1], strict=True):
        for turn in range(count):
            who = [turn % 2] if plan.config.pingpong else range(roles - 1)
            group, col, first, end = of_worker[-1, turn]
            assert all((of_worker[role, turn] == of_worker[-1, turn]).all() for role in who)
            if first >= rows:
                continue
            assert starts[group] <= first < group_ends[group] == end
            assert (first - starts[group]) % height == 0
            seen[first : min(first + height, end), col] += 1
    assert (seen[: group_ends[-1]] == 1).all()
    assert not seen[group_ends[-1] :].any()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_each_row_is_in_one_tile_of_each_column(config):
    simulator = plgpu.InterpretGPUParams(detect_races=True)
    plan = HopperPlan(PROBLEM, config, H200, interpret=simulator)
    find = told_pieces.of(plan, FIELDS)
    for name, sizes in SIZES.items():
        pieces, ends = find(jnp.array(sizes, jnp.int32))
        check_rows(plan, sizes, pieces, ends)
        # Slots are used again.
        if name == "one" and config.ctas == SMALL.ctas:
            assert (ends[..., 0] > TOLD_SLOTS).all()


def test_a_warp_finds_groups_as_the_simulator_does():
    rng = np.random.default_rng(0)
    for groups in (1, 31, 32, 33, 100):
        rows, height = int(rng.integers(1, 5000)), int(rng.choice([64, 192, 256]))
        ptx = find_group.find_ptx(groups, rows, height)
        for sizes in (
            rng.multinomial(rows, rng.dirichlet(np.full(groups, 0.2))),
            rng.integers(-50, 600, groups),
            rng.choice([2**31 - 1, -(2**31), 0, 1, rows], groups),
        ):
            there = np.clip(sizes, 0, rows)
            tiles = -(-there // height)
            row_ends, tile_ends = np.cumsum(there), np.cumsum(tiles)
            memory, at = sizes.astype(np.int32), [0, 0, 0]
            group, *totals = warp_ptx.run(ptx, 4, memory, *at, find_group.BEYOND)
            assert group >= groups
            assert totals == [*np.minimum([row_ends[-1], tile_ends[-1]], find_group.BEYOND), 0]
            for tile in rng.integers(tile_ends[-1], size=5) if tile_ends[-1] else ():
                found = warp_ptx.run(ptx, 4, memory, *at, int(tile))
                at = found[:3]
                own = int(np.searchsorted(tile_ends, tile, side="right"))
                first = row_ends[own] - there[own], tile_ends[own] - tiles[own]
                assert found == [own, *first, there[own]]


HIGHEST = dataclasses.replace(SMALL, tile=(256, 64), consumers=2)


@pytest.mark.parametrize(
    "name", [name for name, (rows, _) in wrapping.SIZES.items() if rows <= 2**23]
)
def test_no_sum_of_sizes_wraps(name):
    limit, sizes = wrapping.SIZES[name]
    height, _ = HIGHEST.tile
    starts, ends = wrapping.spans(limit, sizes)
    tiles = -(-np.clip(sizes, 0, limit) // height)
    tile_ends = np.cumsum(tiles)
    ptx = find_group.find_ptx(len(sizes), limit, height)
    memory, at = sizes.astype(np.int32), (0, 0, 0)
    problem = Problem(limit, 64, 64, groups=len(sizes))
    plan = HopperPlan(problem, HIGHEST, H200)
    known = find_group.Groups(len(sizes), limit, height)
    one_by_one = jax.jit(functools.partial(find_group.find_one_by_one, known=known))
    start = find_group.At(*(jnp.int32(0),) * 4)

    def found(at: Sequence[int], tile: int) -> list[int]:
        by_warp, by_thread = (
            [min(int(group), len(sizes)), *map(int, place)]
            for group, *place in (
                warp_ptx.run(ptx, 4, memory, *at, tile),
                one_by_one(jnp.array(memory), start, jnp.int32(tile)),
            )
        )
        assert by_warp == by_thread
        return by_warp

    totals = np.minimum([ends[-1], tile_ends[-1]], find_group.BEYOND)
    assert found(at, find_group.BEYOND) == [len(sizes), *totals, 0]
    # As far as there are rows of tiles in the grid, forward and back.
    most = min(plan.config.grid(problem)[0], tile_ends[-1])
    for tile in (0, 1, most // 3, most - 1, most // 2, 0):
        own = int(np.searchsorted(tile_ends, tile, side="right"))
        state = found(at, int(tile))
        assert state == [own, starts[own], tile_ends[own] - tiles[own], min(sizes[own], limit)]
        at = tuple(state[:3])


def test_no_sum_of_sizes_wraps_of_as_many_rows_as_an_order_can_have():
    height = max(rows for rows, _ in CLUSTERS) * HIGHEST.tile[0]
    limit = (2**16 - 1) * height
    ptx = find_group.find_ptx(100, limit, height)
    memory = np.full(100, 2**31 - 1, np.int32)
    for tile, expected in ((0, [0, 0, 0, limit]), (2**16 - 1, [1, limit, 2**16 - 1, limit])):
        assert warp_ptx.run(ptx, 4, memory, 0, 0, 0, tile) == expected
    _, row, tile, _ = warp_ptx.run(ptx, 4, memory, 0, 0, 0, find_group.BEYOND)
    assert (row, tile) == (find_group.BEYOND, 100 * (2**16 - 1))
