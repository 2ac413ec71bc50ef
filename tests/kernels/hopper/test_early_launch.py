"""Kernels that begin while the one before ends: each waits first, and lets the next one begin."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.device import H200
from pallas_gemm.kernels.exchange import Exchange
from pallas_gemm.kernels.hopper import kernel as hopper
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.problem import Problem

PROBLEM = Problem(1024, 1024, 1024)
EARLY = HopperConfig(tile=(128, 128), early_launch=True)
KINDS = {
    "dealt": EARLY,
    "claimed in clusters": dataclasses.replace(EARLY, persistence="dynamic", cluster=(2, 1)),
    "in turns": dataclasses.replace(EARLY, pingpong=True, late_store=False),
    "whole, cut and joined": dataclasses.replace(EARLY, split_k=3, split_last=11),
}
WAIT, LAUNCH = "griddepcontrol_wait", "griddepcontrol_launch_dependents"


def inner(equation: Any) -> list[Any]:
    leaves = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns"))
    return [getattr(x, "jaxpr", x) for x in leaves if hasattr(x, "eqns")]


def names(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for part in inner(equation):
            yield from names(part)


def bodies(jaxpr: Any) -> Iterator[Any]:
    """What each kernel of a program does once its barriers are made."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "run_scoped":
            yield inner(equation)[0]
        else:
            for part in inner(equation):
                yield from bodies(part)


def traced(config: HopperConfig) -> list[Any]:
    plan = HopperPlan(PROBLEM, config, H200)
    operand = jax.ShapeDtypeStruct((1024, 1024), PROBLEM.a_dtype)
    return list(bodies(jax.make_jaxpr(hopper.build(plan))(operand, operand).jaxpr))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kernel_waits_first_and_lets_the_next_begin_after_its_last_loads(kind):
    kernels = traced(KINDS[kind])
    assert len(kernels) == (3 if kind == "whole, cut and joined" else 1)
    for body in kernels:
        done = list(names(body))
        assert done[0] == WAIT
        assert done.count(WAIT) == done.count(LAUNCH) == 1
        loads = [at for at, name in enumerate(done) if name == "copy_gmem_to_smem"]
        if loads:
            assert done.index(LAUNCH) > loads[-1]
            assert "barrier_wait" in done[done.index(LAUNCH) :]  # For the loads that are under way.
        else:
            assert done[1] == LAUNCH


def test_kernels_neither_wait_nor_let_begin_unless_asked_and_never_in_the_simulator():
    (body,) = traced(dataclasses.replace(EARLY, early_launch=False))
    assert not {WAIT, LAUNCH} & set(names(body))
    simulated = HopperPlan(PROBLEM, EARLY, H200, interpret=plgpu.InterpretGPUParams())
    assert not simulated.launched_early


def test_devices_that_exchange_rows_refuse_it():
    exchange = Exchange((("model", 4),), ("model",), gathers=True)
    with pytest.raises(ValueError, match="early_launch must be False where devices exchange rows"):
        HopperPlan(PROBLEM, EARLY, H200, exchange)
