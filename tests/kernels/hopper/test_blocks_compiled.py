"""Kernels that add up blocks, compiled ahead of time: nothing is spilled or serialized."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from pallas_gemm import offline
from pallas_gemm.device import H200
from pallas_gemm.kernels.functions.activations import gelu_tanh
from pallas_gemm.kernels.hopper import kernel as hopper
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.planning.candidates.draft import finished
from pallas_gemm.planning.candidates.hopper import drafts
from pallas_gemm.problem import Blocks, Epilogue, Problem
from tests import summaries

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
PROBLEM = Problem(
    *(4096, 4096, 4096),
    *(E4M3, E4M3, jnp.bfloat16),
    transpose_b=True,
    blocks=Blocks(128, 1, 128),
)
PROBLEMS = {
    "1 x 128 by 128 x 128": PROBLEM,
    "1 x 128 by 128 x 1": dataclasses.replace(PROBLEM, blocks=Blocks(128, 1, 1), a_dtype=E5M2),
    "1 x 32 by 32 x 1": dataclasses.replace(PROBLEM, blocks=Blocks(32, 1, 1)),
    "float32": dataclasses.replace(PROBLEM, out_dtype=jnp.float32),
    "an epilogue": dataclasses.replace(
        PROBLEM, epilogue=Epilogue(bias=True, residual=True, activation=gelu_tanh)
    ),
    "gated": dataclasses.replace(PROBLEM, epilogue=Epilogue(gated=True, activation=jax.nn.silu)),
    "groups": dataclasses.replace(PROBLEM, groups=8),
    "sums over groups": dataclasses.replace(
        PROBLEM, blocks=Blocks(128, 1, 1), batch=8, shared_a=True, shared_b=True, ragged_k=True
    ),
    "few rows": dataclasses.replace(PROBLEM, m=60),
    "no scales": dataclasses.replace(PROBLEM, blocks=Blocks(128)),
    "no scales, groups": dataclasses.replace(PROBLEM, blocks=Blocks(128), groups=8),
}


def _operands(problem: Problem) -> list[jax.ShapeDtypeStruct]:
    assert problem.blocks is not None
    (g, r, c, *_), k = problem.blocks, problem.k
    arrays = [(problem.a_shape, problem.a_dtype)]
    arrays += [(problem.b_shape, problem.b_dtype)] * problem.sums
    lead = (problem.groups,) if problem.groups else ()
    sizes = (problem.batch,) if problem.ragged_k else lead
    arrays += [(sizes, jnp.int32)] * problem.in_groups
    arrays += [((math.ceil(problem.m / r), k // g), jnp.float32)] if r else []
    arrays += [((*lead, k // g, math.ceil(problem.n / c)), jnp.float32)] * problem.sums if c else []
    shapes = {"bias": (problem.n,), "residual": problem.residual_shape}
    arrays += [(shapes[name], problem.out_dtype) for name in problem.epilogue.operands]
    return [jax.ShapeDtypeStruct(*array) for array in arrays]


@functools.cache
def _candidates(name: str) -> list[HopperConfig]:
    problem = PROBLEMS[name]
    return [x for x in finished(drafts(problem, H200)) if not x.refusals(problem, H200)]


@pytest.mark.each_value
@pytest.mark.parametrize("third", [0, 1, 2])
@pytest.mark.parametrize("name", PROBLEMS)
def test_no_candidate_spills(name: str, third: int) -> None:
    configs = _candidates(name)
    assert configs
    for config in configs[third::3] or configs:
        kernel = hopper.build(HopperPlan(PROBLEMS[name], config, H200))
        (found,) = summaries.KEPT.of(kernel, *_operands(PROBLEMS[name]), target="h200")
        assert not found.spill_bytes, (config, found)
        assert not found.serialized, (config, found)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_scales_of_16_bits_are_lowered_as_those_of_32(dtype: jax.typing.DTypeLike) -> None:
    kernel = hopper.build(HopperPlan(PROBLEM, _candidates("1 x 128 by 128 x 128")[0], H200))
    *factors, row, col = _operands(PROBLEM)
    narrow = [jax.ShapeDtypeStruct(x.shape, dtype) for x in (row, col)]
    assert offline.exported(kernel, *factors, *narrow)


@pytest.mark.parametrize("name", ["1 x 128 by 128 x 1", "1 x 128 by 128 x 128"])
def test_scales_of_each_column_are_fetched_ahead(name: str) -> None:
    kernel = hopper.build(HopperPlan(PROBLEMS[name], _candidates(name)[0], H200))
    ptx = offline.compile_report(kernel, *_operands(PROBLEMS[name]), target="h200").ptx
    rows = re.findall(r"at, %r\d+, 4, at; prefetch.global.L1", ptx)
    columns = re.findall(r"at, column, 4, at; @inside prefetch.global.L1", ptx)
    assert bool(rows) == bool(columns) == name.endswith(" x 1")
