"""What lowers kernels quickly lowers them to what JAX does, byte by byte."""

import jax
import jax.numpy as jnp
import pytest

from pallas_gemm import offline
from pallas_gemm.device import H200
from pallas_gemm.kernels.hopper import kernel
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.problem import Epilogue, Problem
from tests.quick.lowering import install


def test_a_module_is_jaxs_own(quick_lowering: pytest.MonkeyPatch) -> None:
    problem = Problem(256, 256, 256, epilogue=Epilogue(activation=jax.nn.silu))
    plan = HopperPlan(problem, HopperConfig(tile=(128, 128), stages=2), H200)
    operand = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)

    modules = []
    # From one line: a module names those that it comes from. Each from a kernel of its own, so that
    # it is lowered anew.
    for change in (lambda: None, quick_lowering.undo):
        change()
        modules.append(offline.exported(kernel.build(plan), operand, operand))
    install(quick_lowering)
    assert modules[0] == modules[1]
