"""CTAs that share words of global memory, and sleep before they say or take anything, on a GPU.

The simulator has random delays (`test_between_ctas.py`). Here warps sleep for as long as a few
bits of the clock say, up to 8 microseconds, before each release and each claim; alone, and beside
a kernel of another stream that keeps most SMs for itself.
"""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import offline
from pallas_gemm.computer import occupancy
from pallas_gemm.device import H200
from pallas_gemm.kernels.hopper import kernel as hopper
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.kernels.ptx import mailbox, words
from pallas_gemm.problem import Problem
from pallas_gemm.proving import neighbour, products
from tests import group_products

NAP = """
    .reg .u32 nap;
    mov.u32 nap, %clock;
    mul.lo.u32 nap, nap, 2654435769;
    shr.u32 nap, nap, 19;
    nanosleep.u32 nap;
"""

HOLDING = b"""
.version 7.8
.target sm_90
.address_size 64
.visible .entry fill() {
    .reg .pred early; .reg .u64 start, now;
    mov.u64 start, %globaltimer;
    AGAIN:
    mov.u64 now, %globaltimer;
    sub.u64 now, now, start;
    setp.lt.u64 early, now, 200000;
    @early bra AGAIN;
    ret;
}
"""
"""A kernel of which each block keeps its SM for 200 microseconds."""
LEFT = 5
"""SMs that it leaves to ours: fewer than there are workers that wait for each other."""

CLAIMED = HopperConfig(tile=(128, 256), stages=4, persistence="dynamic")
TILES = Problem(3001, 2752, 520)
SIZES = (4001, 3, 4100, 88)
GROUPS = Problem(
    *(256, 512, sum(SIZES)),
    transpose_a=True,
    batch=len(SIZES),
    shared_a=True,
    shared_b=True,
    ragged_k=True,
)
CASES = {
    "claimed": (TILES, CLAIMED),
    "claimed in clusters": (TILES, dataclasses.replace(CLAIMED, cluster=(2, 1))),
    "relayed": (GROUPS, CLAIMED),
}


def put_naps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has warps sleep before each release and each claim."""
    arrive = f"{{ {NAP} {words.ARRIVE.text} }}"
    claim = words.CLAIM.text.replace("@first atom", f"{NAP} @first atom")
    from_table = mailbox.CLAIM.replace("@mine atom", f"{NAP} @mine atom")
    monkeypatch.setattr(words, "ARRIVE", words.ARRIVE._replace(text=arrive))
    monkeypatch.setattr(words, "CLAIM", words.CLAIM._replace(text=claim))
    monkeypatch.setattr(mailbox, "CLAIM", from_table)


def shapes(problem: Problem) -> list[jax.ShapeDtypeStruct]:
    """Returns what the kernel takes."""
    given = [
        jax.ShapeDtypeStruct(problem.a_shape, problem.a_dtype),
        jax.ShapeDtypeStruct(problem.b_shape, problem.b_dtype),
    ]
    if problem.ragged_k:
        given.append(jax.ShapeDtypeStruct((len(SIZES),), jnp.int32))
    return given


@pytest.mark.parametrize(("name", "naps"), [("claimed", 1), ("relayed", 3)])
def test_warps_sleep_before_they_release_and_claim(name, naps, monkeypatch):
    put_naps(monkeypatch)
    plan = HopperPlan(*CASES[name], H200)
    assert plan.claims_tiles
    assert bool(plan.relay) == (name == "relayed")
    report = offline.compile_report(hopper.build(plan), *shapes(plan.problem), target="h200")
    assert report.ptx.count("nanosleep") == naps
    assert report.spill_bytes == 0


@pytest.mark.gpu("hopper")
@pytest.mark.parametrize("crowded", [False, True], ids=["alone", "beside a kernel"])
@pytest.mark.parametrize("name", CASES)
def test_a_thousand_runs_of_sleepers_give_the_same_bits(name, crowded, rng, monkeypatch):
    put_naps(monkeypatch)
    problem, config = CASES[name]
    plan = HopperPlan(problem, config, H200)
    operands = products.small_integers(problem, rng)
    arrays = [*operands[:2], *([jnp.array(SIZES)] if problem.ragged_k else [])]
    if problem.ragged_k:
        exact = group_products.exact(problem, SIZES, *operands[:2])
    else:
        exact = products.exact(problem, operands)
    kernel = jax.jit(hopper.build(plan))
    first = kernel(*arrays)
    np.testing.assert_array_equal(
        np.asarray(first).astype(np.float64), products.rounded(problem, exact)
    )
    monkeypatch.setattr(occupancy, "_PTX", HOLDING)
    monkeypatch.setattr(neighbour, "BLOCKS", jax.devices()[0].core_count - LEFT)
    same = jax.jit(lambda x, y: jnp.all(x.view(jnp.int16) == y.view(jnp.int16)))
    beside = neighbour.beside(jax.devices()[0].local_hardware_id or 0)
    with beside if crowded else contextlib.nullcontext():
        results = [same(kernel(*arrays), first) for _ in range(1000)]
        assert all(map(bool, results))
