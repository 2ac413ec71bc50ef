"""How kernels are launched: what XLA is told of their time, and what a search for leaks finds."""

import dataclasses
import gc
import inspect
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend import core

from pallas_gemm.device import B200, H200
from pallas_gemm.kernels import launch
from pallas_gemm.kernels.blackwell.config import BlackwellConfig
from pallas_gemm.kernels.functions.activations import ACTIVATIONS
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.planning.architectures import architecture_of
from pallas_gemm.problem import Epilogue, Problem

HOPPER = HopperConfig(tile=(128, 128), schedule="raster", persistence="none")
PLAIN = Problem(256, 384, 512)
GELU = Problem(256, 384, 512, epilogue=Epilogue(bias=True, activation=ACTIVATIONS["gelu"]))
FACTORS = 2 * 512 * (256 + 384)


def traced(problem: Problem, config: Any, device: Any) -> Any:
    architecture = architecture_of(device)
    assert architecture is not None
    shapes = [(problem.a_shape, problem.a_dtype), (problem.b_shape, problem.b_dtype)]
    shapes += [((problem.n,), jnp.float32)] * problem.epilogue.bias
    operands = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    return jax.make_jaxpr(architecture.build(problem, config, device, False))(*operands)


def told(problem: Problem, config: Any, device: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a release of JAX is told that takes it."""
    found: list[Any] = []
    real: Any = plgpu.kernel

    def kernel(body: Any, *, cost_estimate: Any, **others: Any) -> Any:
        found.append(cost_estimate)
        return real(body, **others)

    with monkeypatch.context() as patched:
        patched.setattr(launch.plgpu, "kernel", kernel)
        traced(problem, config, device)
    return found


def test_a_product_is_its_operations_and_each_array_once(monkeypatch: pytest.MonkeyPatch) -> None:
    (cost,) = told(PLAIN, HOPPER, H200, monkeypatch)
    flops, result = 2 * 256 * 384 * 512, 2 * 256 * 384
    assert (cost.flops, cost.transcendentals) == (flops, 0)
    # The table of tiles is read, too.
    assert 0 <= cost.bytes_accessed - FACTORS - result < 200
    (cost,) = told(GELU, HOPPER, H200, monkeypatch)
    assert (cost.flops, cost.transcendentals) == (flops, 256 * 384)
    assert 0 <= cost.bytes_accessed - FACTORS - result - 4 * 384 < 200
    (cost,) = told(GELU, BlackwellConfig(tile=(128, 128), cluster=(1, 1)), B200, monkeypatch)
    assert (cost.flops, cost.transcendentals) == (flops, 256 * 384)


def test_what_is_cut_along_k_is_activated_where_it_is_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut = HopperConfig(tile=(128, 128), persistence="static", split_k=2)
    sums, joined = told(GELU, cut, H200, monkeypatch)
    assert (sums.flops, sums.transcendentals) == (2 * 256 * 384 * 512, 0)
    assert (joined.flops, joined.transcendentals) == (0, 256 * 384)
    summands = 2 * 4 * 256 * 384
    assert sums.bytes_accessed - FACTORS >= summands
    assert joined.bytes_accessed >= summands + 2 * 256 * 384


def test_kernels_of_whole_and_of_cut_tiles_share_the_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    last = HopperConfig(tile=(128, 128), split_k=2, split_last=2)
    costs = told(GELU, last, H200, monkeypatch)
    flops, activations = 2 * 256 * 384 * 512 // 3, 256 * 384 // 3
    assert [cost.flops for cost in costs] == [2 * flops, flops, 0]
    assert [cost.transcendentals for cost in costs] == [2 * activations, 0, activations]


def test_each_release_of_jax_is_told_what_it_takes() -> None:
    cost = next(estimates(traced(PLAIN, HOPPER, H200).jaxpr))
    if "cost_estimate" in inspect.signature(plgpu.kernel).parameters:
        assert isinstance(cost, pl.CostEstimate)
        assert cost.flops == PLAIN.flops
    else:
        assert cost is None


@pytest.mark.parametrize("problem", [PLAIN, GELU])
def test_a_search_for_leaked_tracers_finds_none(problem: Problem) -> None:
    # The search looks at every object, several times: those of other tests take it seconds.
    gc.freeze()
    with jax.checking_leaks():
        traced(problem, HOPPER, H200)
        traced(problem, BlackwellConfig(tile=(128, 128), cluster=(1, 1)), B200)


@pytest.mark.parametrize("function", [jnp.sin, jnp.cos])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_no_sine_of_the_compilers_is_in_a_kernel(function: Any, dtype: Any) -> None:
    epilogue = Epilogue(activation=function)
    problem = Problem(256, 384, 512, out_dtype=dtype, epilogue=epilogue)
    config = dataclasses.replace(HOPPER, store_columns=32, late_store=False)
    # In 16 bits that is wrong for large arguments, and slow in float32.
    assert not {"sin", "cos"} & names(traced(problem, config, H200).jaxpr)
    bare = dataclasses.replace(problem, epilogue=Epilogue(activation=jnp.square))
    assert "square" in names(traced(bare, config, H200).jaxpr)


def names(jaxpr: core.Jaxpr) -> set[str]:
    """The names of all operations in a program."""
    inner = (x for e in jaxpr.eqns for x in core.jaxprs_in_params(e.params))
    return {e.primitive.name for e in jaxpr.eqns}.union(*map(names, inner))


def estimates(jaxpr: core.Jaxpr) -> Iterator[Any]:
    """What the kernels of a program say of their time, from the outside in."""
    for equation in jaxpr.eqns:
        if "cost_estimate" in equation.params:
            yield equation.params["cost_estimate"]
        for inner in core.jaxprs_in_params(equation.params):
            yield from estimates(inner)


@pytest.mark.parametrize(
    ("shape", "dtype", "is_apart"),
    [
        # A slice of whole rows begins at a multiple of 256 bytes.
        ((8, 128), jnp.bfloat16, False),
        ((2, 3, 64), jnp.float32, False),
        ((128, 8), jnp.bfloat16, True),
        ((256, 129), jnp.int8, True),
        # A part of a row begins anywhere.
        ((1, 128), jnp.bfloat16, True),
        ((1, 1, 256), jnp.float32, True),
        ((256,), jnp.float32, True),
    ],
)
def test_what_may_be_a_slice_that_begins_anywhere_is_kept_apart(
    shape: tuple[int, ...], dtype: Any, is_apart: bool
) -> None:
    made = jax.make_jaxpr(launch.on_its_own)(jax.ShapeDtypeStruct(shape, dtype))
    names = [equation.primitive.name for equation in made.eqns]
    assert names == ["optimization_barrier"] * is_apart


@pytest.mark.parametrize(
    ("dtype", "columns", "given"),
    [
        (jnp.bfloat16, 384, jnp.bfloat16),
        (jnp.float16, 384, jnp.float16),
        (jnp.float32, 384, jnp.float32),
        (jnp.int8, 384, jnp.int32),
        # XLA copies what ends before the last tile.
        (jnp.bfloat16, 320, jnp.float32),
    ],
)
def test_vectors_of_16_bits_are_not_copied(dtype: Any, columns: int, given: Any) -> None:
    problem = dataclasses.replace(GELU, n=columns)
    x = jnp.arange(columns).astype(dtype)
    program = jax.make_jaxpr(lambda x: launch.inputs(HOPPER, problem, (x, x, x), None).operands)(x)
    out: Any = program.out_avals[0]
    assert (out.shape, out.dtype) == ((384,), given)
    if dtype == given and jnp.dtype(dtype).itemsize == 2:
        assert {e.primitive.name for e in program.eqns} == {"optimization_barrier"}
