"""The order of accesses of memory in what is compiled, which other CTAs and devices rely on.

A program's text is in the order of the blocks that it runs but for loops; each of these orders is
within one block, or follows from the block that all others come after.
"""

import dataclasses
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from pallas_gemm import offline
from pallas_gemm.device import H200
from pallas_gemm.kernels.hopper import kernel as hopper
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.problem import Problem

LATE = HopperConfig(tile=(128, 128), stages=4)
CLAIMED = dataclasses.replace(LATE, persistence="dynamic")
CROWDED = Problem(
    *(512, 512, 8192),
    transpose_a=True,
    batch=8,
    shared_a=True,
    shared_b=True,
    ragged_k=True,
)
SQUARE = Problem(4096, 4096, 4096)
ODD = Problem(1024, 1023, 1024, transpose_b=True)
EARLY = {
    "claimed in clusters": (SQUARE, dataclasses.replace(CLAIMED, cluster=(2, 1))),
    "stored by threads": (ODD, dataclasses.replace(LATE, store_slots=1)),
    "whole, cut and joined": (
        Problem(1024, 1024, 1024),
        HopperConfig(tile=(128, 128), split_k=3, split_last=11),
    ),
    "relayed": (CROWDED, CLAIMED),
}
MEMORY = re.compile(r"\b(?:ld|st|atom|red)\.(?!param)\S+|\bcp\.async\.bulk\.tensor\S*")
"""Accesses of memory, of which some are of shared memory."""
FENCES = re.compile(r"\b(?:fence\.(?:proxy\.async|acquire\.sys)|bar\.warp\.sync|griddepcontrol)\S*")


def ptx_of(problem: Problem, config: HopperConfig) -> list[str]:
    """Compiles the kernels of a product."""
    plan = HopperPlan(problem, config, H200)
    assert bool(plan.relay) == (problem == CROWDED)
    arrays = [(problem.a_shape, jnp.bfloat16), (problem.b_shape, jnp.bfloat16)]
    arrays += [((problem.batch,), jnp.int32)] * problem.ragged_k
    operands = [jax.ShapeDtypeStruct(*array) for array in arrays]
    reports = offline.compile_reports(hopper.build(plan), *operands, target="h200")
    assert not any(report.spill_bytes or report.serialized for report in reports)
    return [report.ptx for report in reports]


def done(ptx: str) -> list[str]:
    """Returns what is done to memory, and the fences, in the order of the text."""
    found = [(m.start(), m[0]) for each in (MEMORY, FENCES) for m in each.finditer(ptx)]
    return [name.rstrip(";") for _, name in sorted(found) if "shared.b" not in name]


@pytest.fixture(scope="module")
def relayed() -> str:
    """The PTX of a kernel that hands on sums."""
    (ptx,) = ptx_of(CROWDED, CLAIMED)
    return ptx


def test_sums_are_released_after_the_last_is_stored_and_acquired_before_the_first_is_loaded(
    relayed,
):
    # Two words of each sum at once, of half of the accumulators: there are as many threads again.
    sums = CLAIMED.accumulator_registers // 2
    steps = [name for name in done(relayed) if not name.startswith("ld.global")]
    acquire, release = (
        next(at for at, name in enumerate(steps) if name.startswith(begin))
        for begin in ("ld.acquire", "red.release")
    )
    assert steps[acquire] == "ld.acquire.gpu.global.u32"
    assert steps[release] == "red.release.gpu.global.add.u32"
    loads = [at for at, name in enumerate(steps) if name == "ld.v2.b32"]
    stores = [at for at, name in enumerate(steps) if name == "st.v2.b32"]
    assert loads == list(range(acquire + 1, acquire + 1 + sums))
    assert stores == list(range(release - sums, release))
    assert acquire < release


def test_nothing_is_loaded_past_what_others_store(relayed):
    """By instructions for what no kernel writes, which may give what was there before."""
    assert not re.search(r"ld\.\S*(?:\.nc|\.weak|ldu)", relayed)


@pytest.mark.parametrize("name", EARLY)
def test_no_memory_is_touched_before_the_kernel_before_has_ended(name):
    problem, config = EARLY[name]
    for ptx in ptx_of(problem, dataclasses.replace(config, early_launch=True)):
        steps = done(ptx)
        assert steps.count("griddepcontrol.wait") == 1
        before = steps[: steps.index("griddepcontrol.wait")]
        assert not [step for step in before if not step.startswith(("fence", "bar"))]
        assert [step for step in steps if "tensor" in step or "global" in step]


@pytest.fixture(scope="module")
def gathered() -> list[str]:
    """What a kernel does that gathers rows, all in one warp or another."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "0",
        "MOSAIC_GPU_DUMP_PTX": "1",
    }
    command = [sys.executable, "-m", "tests.kernels.hopper.gathered_ptx"]
    return done(
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    )


def test_rows_are_sent_before_it_is_said_that_they_are(gathered):
    signals = [at for at, name in enumerate(gathered) if name.startswith("red.release.sys")]
    # To each of the other devices.
    assert len(signals) == 3
    for at in signals:
        fenced = [name for name in gathered[:at] if not name.startswith("ld.global")][-2:]
        assert fenced == ["fence.proxy.async", "bar.warp.sync"]


def test_rows_are_loaded_when_it_has_been_said_and_past_a_fence(gathered):
    waits = [at for at, name in enumerate(gathered) if name == "ld.relaxed.sys.global.b32"]
    assert waits
    for at in waits:
        after = gathered[at + 1 : at + 5]
        assert after[:3] == ["fence.acquire.sys", "bar.warp.sync", "fence.proxy.async"]
        assert not any(name.startswith("cp.async") for name in after[:3])
