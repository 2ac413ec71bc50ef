"""`precompile`: what products become on a GPU that is not there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import HopperConfig, explain, gated_gemm, offline, precompile, round_once
from pallas_gemm.api import precompile as precompilation
from pallas_gemm.config import STEP_BYTES
from pallas_gemm.problem import Problem

needs_compiler = pytest.mark.skipif(
    bool(offline.missing_packages()), reason="needs the extra aot, which brings the compiler"
)


@needs_compiler
def test_each_product_is_planned_compiled_and_reported_on() -> None:
    large, batched, small = precompile(
        [(1024, 2048, 512), (4, 256, 256, 256), [16, 72, 72]],
        "h200",
        bias=True,
        activation="gelu",
        transpose_b=True,
    )
    problem = large.decision.problem
    assert (problem.m, problem.n, problem.k, problem.layout) == (1024, 2048, 512, "NT")
    assert (problem.epilogue.bias, problem.epilogue.residual) == (True, False)
    assert batched.decision.problem.batch == 4
    for product in (large, batched):
        assert (product.implementation, product.spill_bytes) == ("hopper", 0)
        assert product.report is not None
        assert product.report.target == "h200"
        assert product.registers == product.report.registers > 0
        assert product.config is not None
        # The ring of operands alone: two bytes for each element of its tiles.
        rows, columns = product.config.tile
        ring = 2 * product.config.stages * 64 * (rows + columns)
        assert ring < product.shared_memory_bytes < 232448
        assert f"{product.registers} registers, 0 bytes spilled" in str(product)
        assert str(product.config) in str(product)
    # What is left to XLA is not compiled.
    assert (small.implementation, small.report, small.config) == ("xla", None, None)
    assert (small.registers, small.spill_bytes, small.shared_memory_bytes) == (0, 0, 0)
    assert str(small) == f"1 x 16 x 72 x 72 NT: xla, because {small.decision.reason}"


@pytest.mark.usefixtures("proven")
@needs_compiler
@pytest.mark.parametrize(("target", "kernel"), [("h100", "hopper"), ("b200", "blackwell")])
def test_every_target_has_its_kernel(target: str, kernel: str) -> None:
    [product] = precompile([(1024, 1024, 1024)], target, gated=True, activation="silu")
    assert product.implementation == kernel
    assert product.decision.problem.epilogue.gated
    assert product.report is not None
    assert product.report.target == target
    assert product.spill_bytes == 0


def _recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Compiles nothing, and returns the decisions about what would have been compiled."""
    seen = []

    def instead(f: Any, operands: Any, *, target: str) -> Any:
        seen.append((target, explain(f, operands).products[0]))
        return ()

    monkeypatch.setattr(precompilation, "compile_reports", instead)
    return seen


def test_the_products_of_a_program_are_those_that_are_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loss(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
        return gated_gemm(x, gate, up, preferred_element_type=jnp.float32).sum()

    x = jax.ShapeDtypeStruct((4, 512, 1024), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16)
    seen = _recorded(monkeypatch)
    with pallas_gemm.target("h200"):
        forward = explain(loss, x, w, w).products
        with round_once(False):
            # A function of both sums is none of the words that a problem is compiled with.
            backward = explain(jax.grad(loss, (0, 1, 2)), x, w, w).products
    products = [decision.problem for decision in (*forward, *backward)]
    # Forward; and for derivatives both pre-activations, the gradients of the weights, and that of
    # the inputs, which is one sum of products.
    assert len(products) == 1 + 2 + 2 + 1
    assert [problem.terms for problem in products].count((512, 512)) == 1
    done = precompile([*products, *products], "h200", activation="ignored")
    # Several at a time, so in any order, and each once.
    assert {decision.problem for _, decision in seen} == set(products)
    assert len(seen) == len(set(products)) < len(products)
    assert done[: len(products)] == done[len(products) :]
    done = done[: len(products)]
    assert {target for target, _ in seen} == {"h200"}
    assert [product.decision.problem for product in done] == products
    plans = [decision.plan for decision in (*forward, *backward)]
    assert [product.config for product in done] == [plan.config for plan in plans if plan]


def test_options_are_those_of_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _recorded(monkeypatch)
    precompile(
        [(1024, 1024, 1024)],
        "h200",
        dtype=("f16", jnp.float16),
        residual=True,
        alpha=2.0,
        preferred_element_type="f32",
        schedule="hilbert",
    )
    [(_, decision)] = seen
    assert (decision.problem.a_dtype, decision.problem.out_dtype) == (jnp.float16, jnp.float32)
    assert (decision.problem.epilogue.residual, decision.problem.epilogue.alpha) == (True, 2.0)
    assert decision.plan.config.schedule == "hilbert"


def test_what_no_kernel_considers_is_xlas() -> None:
    [product] = precompile([(64, 64, 64)], "h200", dtype=jnp.complex64)
    assert product.implementation == "xla"
    assert product.decision.reason == "no kernel takes operands of complex64"


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ((4096, 4096, 4096), {}, r"shapes\[0\]=4096 must be \(m, n, k\) or \(batch, m, n, k\)"),
        ([(1, 2, 3), (1, 2)], {}, r"shapes\[1\]=\(1, 2\) must be"),
        ([(1, 2, 0)], {}, r"shapes\[0\]=\(1, 2, 0\) must be .* of positive integers"),
        ([(1, 2, 3.0)], {}, r"shapes\[0\]=\(1, 2, 3.0\) must be"),
        ([(1, 2, 3)], {"target": "a100"}, "target='a100' is unknown; .*legal: b200, "),
        ([(1, 2, 3)], {"target": 9}, "target=9 is unknown"),
        (5, {}, r"shapes must be a list of shapes, got 5: \[\(m, n, k\)\] is one"),
        ([(1, 2, 3)], {"activation": "gleu"}, "did you mean 'gelu'"),
        ([(64, 64, 64)], {"implementation": "blackwell"}, "needs compute capability 10"),
    ],
)
def test_bad_requests_are_refused(shapes: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        precompile(shapes, **{"target": "h200", **options})


def test_a_type_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="dtype='bf17' is no type of numbers"):
        precompile([(1, 2, 3)], "h200", dtype="bf17")


def test_a_missing_compiler_is_told_before_anything_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offline, "_importable", lambda module: not module.startswith("nvidia"))
    with pytest.raises(RuntimeError, match="needs nvidia-cuda-nvcc"):
        precompile([], "h200")


def test_a_bias_is_there_or_not() -> None:
    with pytest.raises(TypeError, match=r"bias must be True or False, got .*\[1\., 1\."):
        precompile([(64, 64, 64)], "h200", bias=jnp.ones(64))  # type: ignore[arg-type]


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match="'swizzle'"):
        precompile([(64, 64, 64)], "h200", swizzle=8)


@pytest.mark.usefixtures("proven")
@needs_compiler
def test_sums_of_products() -> None:
    problem = Problem(256, 256, 16384, transpose_b=True, terms=(8192, 8192))
    [product] = precompile([problem], "h200")
    assert (product.implementation, product.spill_bytes) == ("hopper", 0)
    # It is cut along k, and another kernel joins it, which has no ring.
    config = product.config
    assert isinstance(config, HopperConfig)
    assert config.pieces(problem) > config.tiles(problem)
    ring = config.stages * sum(config.tile) * STEP_BYTES
    assert ring < product.shared_memory_bytes <= config.shared_memory_bytes(problem)
    assert product.decision.problem == problem
    # Which takes them apart, so that there is no kernel of the whole.
    [product] = precompile([problem], "b200")
    assert (product.implementation, product.report) == ("xla", None)
    assert "no sum of products" in str(product.decision.refused)


def test_products_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
        return pallas_gemm.ragged_dot(rows, matrices, sizes).astype(jnp.float32).sum()

    def gated(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
        options: Any = {"activation": "silu", "bias": jnp.ones((4, 256)), "up": matrices}
        return pallas_gemm.grouped_gemm(rows, matrices, sizes, **options)

    shapes = ((1024, 512), jnp.bfloat16), ((4, 512, 256), jnp.bfloat16), ((4,), jnp.int32)
    seen = _recorded(monkeypatch)
    given = [jax.ShapeDtypeStruct(*own) for own in shapes]
    with pallas_gemm.target("h200"):
        told = explain(jax.grad(loss, (0, 1)), *given).products + explain(gated, *given).products
    problems = [decision.problem for decision in told]
    assert len(set(problems)) == 4
    done = precompile(problems, "h200")
    assert [product.decision.problem for product in done] == problems
    assert {decision.problem for _, decision in seen} == set(problems)
    assert {product.implementation for product in done} == {"hopper"}


STRUCT = jax.ShapeDtypeStruct
ROWS, WEIGHTS = (STRUCT(shape, jnp.float8_e4m3fn) for shape in ((512, 1024), (2048, 1024)))
WIDE, BITS = STRUCT(ROWS.shape, jnp.bfloat16), STRUCT((1024, 2048), jnp.uint4)
EXPERTS, SIZES = STRUCT((4, *BITS.shape), jnp.uint4), STRUCT((4,), jnp.int32)
OF_ROWS, OF_BLOCKS, OF_COLUMNS = (STRUCT(x, jnp.float32) for x in ((512, 8), (8, 16), (8, 2048)))
OF_EXPERTS = STRUCT((4, 8, 2048), jnp.bfloat16)
SCALED = {"row_scale": OF_ROWS, "transpose_b": True, "preferred_element_type": jnp.bfloat16}


@pytest.mark.parametrize(
    ("f", "operands", "options"),
    [
        (pallas_gemm.gemm, (ROWS, WEIGHTS), SCALED | {"col_scale": OF_BLOCKS}),
        (pallas_gemm.gemm, (ROWS, WEIGHTS), SCALED | {"row_scale": STRUCT((4, 8), jnp.float32)}),
        (pallas_gemm.group_sums, (ROWS, WEIGHTS, SIZES), SCALED | {"col_scale": OF_COLUMNS}),
        (gated_gemm, (WIDE, BITS, BITS), {"gate_scale": OF_COLUMNS, "up_scale": OF_COLUMNS}),
        (
            pallas_gemm.grouped_gemm,
            (WIDE, EXPERTS, SIZES),
            {"up": EXPERTS}
            | dict.fromkeys(("col_scale", "up_scale", "col_zero", "up_zero"), OF_EXPERTS),
        ),
    ],
)
def test_scales_of_blocks(
    monkeypatch: pytest.MonkeyPatch, f: Any, operands: Any, options: Any
) -> None:
    monkeypatch.setattr(precompilation, "_report", lambda *_: None)
    with pallas_gemm.target("h200"):
        [planned] = explain(f, *operands, **options).products
    assert planned.problem.blocks is not None
    [done] = precompile([planned.problem], "h200")
    assert done.decision == planned
    if f is pallas_gemm.gemm and "col_scale" in options:
        # As arrays, they are operands too, and two products that take them are one.
        given = options | {"col_scale": np.ones((8, 16), np.float32)}
        every = precompile([(512, 2048, 1024)] * 2, "h200", dtype="e4m3", **given)
        assert [own.decision for own in every] == [planned] * 2


def test_few_bits_need_no_type_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _recorded(monkeypatch)
    precompile([(512, 2048, 1024)], "h200", dtype=("bf16", jnp.int4), col_scale=OF_COLUMNS)
    assert [own.problem.out_dtype for _, own in seen] == [jnp.bfloat16]


def test_half_of_a_symmetric_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompilation, "_report", lambda *_: None)
    x = jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16)

    def step(x: jax.Array) -> jax.Array:
        a = pallas_gemm.gram(x, transpose=True, alpha=0.5)
        return pallas_gemm.symmetric_matmul(a, a, residual=a, beta=2.0)

    with pallas_gemm.target("h200"):
        planned = explain(step, x).products
    assert [decision.problem.symmetric for decision in planned] == ["gram", "product"]
    problems = [decision.problem for decision in planned]
    assert [done.decision for done in precompile(problems, "h200")] == list(planned)
