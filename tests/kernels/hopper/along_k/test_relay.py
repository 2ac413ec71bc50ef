"""Crowded groups: which are cut along k, what that takes, and where parts of sums go."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.device import H200
from pallas_gemm.kernels import place
from pallas_gemm.kernels.hopper import cta as ctas
from pallas_gemm.kernels.hopper.along_k import relay
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.devices import remote
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.problem import Epilogue, Problem

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
        parts = np.clip(np.ceil(steps / plan.relay.steps), 1, plan.relay.pieces)
        most_cut, most_rows = max(most_cut, (parts > 1).sum()), max(most_rows, (parts - 1).sum())
    assert (most_cut, most_rows) == (plan.relay.groups, plan.relay.rows)


@pytest.mark.parametrize(
    ("changes", "crowded"),
    [
        ({}, True),
        ({"batch": 128}, False),
        ({"k": 4096}, False),
        ({"n": 4096}, False),
        ({"batch": 1}, False),
        ({"m": 128, "n": 256, "k": 2**20, "batch": 2048}, True),
        ({"epilogue": Epilogue(alpha=2.0)}, False),
    ],
    ids=[
        "few tiles",
        "many groups",
        "few steps",
        "many tiles",
        "as many workers as tiles",
        "sizes that may add up to more than 32 bits hold",
        "an epilogue",
    ],
)
def test_groups_are_cut_where_a_crowd_would_keep_few_workers_busy(changes, crowded):
    problem = dataclasses.replace(LOCAL, **changes)
    assert bool(HopperPlan(problem, SHARED, H200).relay) == crowded
    dealt = dataclasses.replace(SHARED, persistence="static")
    assert HopperPlan(problem, dealt, H200).relay is None


def test_only_the_last_part_of_a_sum_is_stored_in_the_result():
    plan = HopperPlan(LOCAL, SHARED, H200)
    cta = ctas.Cta(plan, None, (), (), remote.Rows(), ctas.Smem(), ctas.Barriers())
    at = place.Where(3, jnp.int32(0), jnp.int32(256))
    for last in (True, False):
        piece = plan.coding.piece(0, 0)._replace(is_last=jnp.bool_(last))
        row = int(relay.where(cta, piece, at).row)
        assert row == 0 if last else row >= LOCAL.m
