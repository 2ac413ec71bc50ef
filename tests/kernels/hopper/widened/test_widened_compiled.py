"""Weights of few bits, compiled for an H200: nothing is spilled, and no WGMMA waits for another."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_gemm import QuantizedWeight, explain, gated_gemm, gemm, offline, target
from pallas_gemm.device import H200
from pallas_gemm.kernels.hopper.widened import kernel, problems
from pallas_gemm.kernels.hopper.widened.config import WidenedConfig
from pallas_gemm.kernels.hopper.widened.plan import WidenedPlan
from pallas_gemm.planning import heuristics
from pallas_gemm.planning.architectures import WIDENED
from pallas_gemm.problem import Blocks, Epilogue, Problem
from tests import summaries

BLOCKS = Blocks(128, 0, 1)
ZEROS = BLOCKS._replace(zeros=True)
GATED = Epilogue(gated=True, residual=True, activation=jax.nn.silu)
WIDE = {"residual_dtype": jnp.float32}


def program(problem: Problem, config: Any, scales: Any) -> tuple[Callable[..., Any], list[Any]]:
    """Returns a kernel, and what it takes."""
    operands = [jax.ShapeDtypeStruct(problem.a_shape, problem.a_dtype)]
    operands += [jax.ShapeDtypeStruct(problem.b_shape, problem.b_dtype)] * problem.sums
    operands += [jax.ShapeDtypeStruct((problem.groups,), jnp.int32)] * bool(problem.groups)
    if problem.blocks:
        lead = (problem.groups,) if problem.groups else ()
        shape = (*lead, problem.k // problem.blocks.k, problem.n)
        operands += [jax.ShapeDtypeStruct(shape, scales)] * problem.sums
        if problem.blocks.zeros:
            operands += [jax.ShapeDtypeStruct(shape, problem.b_dtype)] * problem.sums
    shapes = {"residual": problem.out_shape}
    operands += [
        jax.ShapeDtypeStruct(shapes.get(name, (problem.n,)), jnp.float32)
        for name in problem.epilogue.operands
    ]
    return kernel.build(WidenedPlan(problem, config, H200)), operands


def check_compiled(problem: Problem, config: WidenedConfig, scales: Any) -> None:
    """Compiles a kernel: it spills nothing, no WGMMA waits, and it has the memory it is said to."""
    run, operands = program(problem, config, scales)
    (found,) = summaries.KEPT.of(run, *operands, target="h200")
    assert (found.spill_bytes, found.serialized) == (0, "")
    assert found.shared_memory_bytes <= config.shared_memory_bytes(problem, device=H200)


@pytest.mark.each_value
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(
    ("rows", "kind", "scales", "options"),
    [
        (1, jnp.int4, jnp.bfloat16, {"blocks": BLOCKS}),
        (64, jnp.int4, jnp.float32, {"blocks": BLOCKS}),
        (512, jnp.int8, jnp.float32, {"blocks": BLOCKS}),
        (16, jnp.float8_e4m3fn, None, {"out_dtype": jnp.float32}),
        (64, jnp.float4_e2m1fn, jnp.float16, {"blocks": Blocks(32, 0, 1)}),
        (
            256,
            jnp.int8,
            None,
            {"epilogue": Epilogue(bias=True, col_scale=True, activation=jax.nn.gelu)},
        ),
        (24, jnp.int4, jnp.bfloat16, {"blocks": BLOCKS, "groups": 8}),
        (16, jnp.int4, jnp.bfloat16, {"blocks": BLOCKS, "epilogue": GATED, **WIDE}),
        (512, jnp.int8, jnp.bfloat16, {"blocks": BLOCKS, "epilogue": GATED, **WIDE}),
        (128, jnp.int4, jnp.bfloat16, {"blocks": BLOCKS, "epilogue": GATED, "groups": 8, **WIDE}),
        (16, jnp.uint4, jnp.bfloat16, {"blocks": ZEROS}),
        (300, jnp.uint4, jnp.float16, {"blocks": ZEROS}),
        (128, jnp.uint4, jnp.bfloat16, {"blocks": ZEROS, "epilogue": GATED, "groups": 8, **WIDE}),
    ],
    ids=[
        *("1", "64", "512", "e4m3", "e2m1", "gelu"),
        *("experts", "gated", "512 gated", "gated experts"),
        *("zero points", "300 zero points", "experts with zero points"),
    ],
)
def test_what_is_chosen_spills_nothing(
    rows: int, kind: Any, scales: Any, options: Any, transpose_b: bool
) -> None:
    problem = Problem(rows, 8192, 4096, b_dtype=kind, transpose_b=transpose_b, **options)
    config = heuristics.best(problem, H200, WIDENED)
    assert isinstance(config, WidenedConfig)
    check_compiled(problem, config, scales)


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "k", "kind"),
    [
        (32, 14336, 4096, jnp.int4),
        (32, 28672, 8192, jnp.int8),
        (512, 1024, 4096, jnp.int4),
        (722, 512, 9984, jnp.int8),
    ],
)
def test_narrow_tiles_spill_nothing(
    rows: int, columns: int, k: int, kind: Any, transpose_b: bool
) -> None:
    problem = Problem(rows, columns, k, b_dtype=kind, blocks=BLOCKS, transpose_b=transpose_b)
    config = heuristics.best(problem, H200, WIDENED)
    assert isinstance(config, WidenedConfig)
    assert config.tile[1] < 128
    check_compiled(problem, config, jnp.bfloat16)


@pytest.mark.parametrize(
    ("rows", "columns", "k", "kind", "gated"),
    [
        (56, 2192, 5760, jnp.float8_e5m2, False),
        (64, 5440, 3760, jnp.float8_e4m3fn, False),
        (24, 9136, 1312, jnp.float8_e4m3fn, True),
        (176, 8816, 7472, jnp.float8_e4m3fn, True),
    ],
)
def test_8_bit_floats_spill_nothing(
    rows: int, columns: int, k: int, kind: Any, gated: bool
) -> None:
    epilogue = Epilogue(gated=gated, activation=jax.nn.silu)
    problem = Problem(rows, columns, k, b_dtype=kind, transpose_b=False, epilogue=epilogue)
    config = heuristics.best(problem, H200, WIDENED)
    assert isinstance(config, WidenedConfig)
    check_compiled(problem, config, None)


@pytest.mark.each_value
@pytest.mark.parametrize("columns", [64, 96, 1024])
@pytest.mark.parametrize("rows", [1, 40, 300])
@pytest.mark.parametrize("group", [32, 64])
def test_gated_weights_may_have_several_groups_in_a_step(
    group: int, rows: int, columns: int
) -> None:
    x = jax.ShapeDtypeStruct((rows, 1024), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((columns, 1024), jnp.int4)
    scale = jax.ShapeDtypeStruct((1024 // group, columns), jnp.float32)

    def layer(x: Any, w: Any, scale: Any) -> Any:
        return gated_gemm(x, w, w, gate_scale=scale, up_scale=scale, transpose_b=True)

    with target("h200"):
        lowered = jax.jit(layer).trace(x, w, scale).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("tile", [(128, 8), (512, 8)])
def test_scales_of_several_copies_spill_nothing(tile: tuple[int, int]) -> None:
    gated = {} if tile[0] == 512 else {"epilogue": GATED, **WIDE}
    problem = Problem(8, 1024, 1024, b_dtype=jnp.int4, blocks=Blocks(32, 0, 1), **gated)
    config = WidenedConfig(tile=tile, stages=2, consumers=tile[0] // 128, along_k=1)
    check_compiled(problem, config, jnp.bfloat16)


@pytest.mark.parametrize("kind", [jnp.int4, jnp.int8])
@pytest.mark.parametrize(
    ("rows", "columns", "k"), [(1, 18944, 3584), (96, 11008, 4096), (128, 5120, 13824)]
)
def test_shared_tiles_spill_nothing(rows: int, columns: int, k: int, kind: Any) -> None:
    problem = Problem(rows, columns, k, b_dtype=kind, blocks=BLOCKS)
    config = heuristics.best(problem, H200, WIDENED)
    assert isinstance(config, WidenedConfig)
    assert config.ctas_along_k > 1 or config.shares_all
    assert config.persistence == "static"
    check_compiled(problem, config, jnp.bfloat16)


@pytest.mark.parametrize(("rows", "kind"), [(32, jnp.int4), (128, jnp.int4), (128, jnp.int8)])
def test_shared_tiles_of_groups_spill_nothing(rows: int, kind: Any) -> None:
    problem = Problem(rows, 14336, 4096, b_dtype=kind, blocks=BLOCKS, groups=8)
    config = heuristics.best(problem, H200, WIDENED)
    assert isinstance(config, WidenedConfig)
    assert (config.ctas_along_k, config.persistence) == (2, "static")
    check_compiled(problem, config, jnp.bfloat16)


@pytest.mark.parametrize(("rows", "columns"), [(256, 32), (256, 64), (300, 128)])
def test_results_are_stored_by_what_clips_at_the_edge(rows: int, columns: int) -> None:
    problem = Problem(rows, columns, 128, b_dtype=jnp.int8, transpose_b=True, out_dtype=jnp.float32)
    config = heuristics.best(problem, H200, WIDENED)
    assert isinstance(config, WidenedConfig)
    run, operands = program(problem, config, None)
    ptx = offline.compile_report(run, *operands, target="h200").ptx
    stores = re.findall(r"cp\.async\.bulk\S*\.global\.shared\S*", ptx)
    assert stores
    assert all("tensor" in store for store in stores)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("columns", "kind", "scales"),
    [(516, jnp.int8, jnp.float32), (514, jnp.int4, jnp.float32), (514, jnp.int8, jnp.bfloat16)],
    ids=str,
)
def test_rows_of_any_length_are_lowered(columns: int, kind: Any, scales: Any, last: bool) -> None:
    def f(x: Any, w: Any, scale: Any) -> Any:
        return gemm(x, w, transpose_b=last, col_scale=scale)

    x = jax.ShapeDtypeStruct((40, 1024), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((columns, 1024) if last else (1024, columns), kind)
    operands = x, w, jax.ShapeDtypeStruct((8, columns), scales)
    with target("h200"):
        found = explain(f, *operands)
        assert found.plan is not None
        assert isinstance(found.plan.config, WidenedConfig)
        exported = jax.export.export(jax.jit(f), platforms=["cuda"])(*operands)
    assert "mosaic_gpu" in exported.mlir_module()


def test_zero_points_of_four_bits_have_rows_of_any_length() -> None:
    columns, k = 100, 1536
    record = QuantizedWeight(
        jax.ShapeDtypeStruct((k, columns), jnp.uint4),
        jax.ShapeDtypeStruct((24, columns), jnp.bfloat16),
        jax.ShapeDtypeStruct((24, columns), jnp.uint4),
    )
    x = jax.ShapeDtypeStruct((16, k), jnp.bfloat16)
    with target("h200"):
        exported = jax.export.export(jax.jit(gemm), platforms=["cuda"])(x, record)
    assert "mosaic_gpu" in exported.mlir_module()


SINGLE = dict.fromkeys(("a_dtype", "b_dtype", "out_dtype"), jnp.float32)


@pytest.mark.parametrize(
    ("rows", "columns", "k", "options"),
    [
        (16, 4096, 4096, {}),
        (64, 5120, 11008, {}),
        (148, 3616, 824, {}),
        (2048, 2048, 2048, {}),
        (65536, 256, 256, {}),
        (1000, 1616, 2528, {"epilogue": Epilogue(bias=True, activation=jax.nn.gelu)}),
        (50, 64, 4864, {"epilogue": GATED, **WIDE}),
        (64, 84, 2500, {"epilogue": Epilogue(residual=True), **WIDE}),
        (400, 1408, 2048, {"groups": 8}),
    ],
    ids=["16", "64", "148", "2048", "65536", "gelu", "gated", "residual", "experts"],
)
def test_float32_spills_nothing(rows: int, columns: int, k: int, options: Any) -> None:
    problem = Problem(rows, columns, k, **SINGLE, **options)
    config = heuristics.best(problem, H200, WIDENED)
    assert isinstance(config, WidenedConfig)
    check_compiled(problem, config, None)


def test_what_is_of_float32_alone_has_no_k_last_and_no_scales() -> None:
    asked = Problem(256, 64, 128, **SINGLE)
    assert not problems.refusals(asked)
    assert "in layout NT" in problems.refusals(dataclasses.replace(asked, transpose_b=True))[0]
    (refused,) = problems.refusals(dataclasses.replace(asked, blocks=BLOCKS))
    assert "float32 has no scales in blocks" in refused
