"""`explain`: what would run, of any function, without running it."""

import functools
import inspect
import io
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import rich.console
from jax import lax

import pallas_gemm
from pallas_gemm import (
    dot_general,
    explain,
    explain_on_mesh,
    gated_gemm,
    gemm,
    grouped_gemm,
    linear_cross_entropy,
    matmul,
    ragged_dot,
    round_once,
    target,
)
from pallas_gemm.api.explaining import explanation
from pallas_gemm.kernels.hopper import kernel as hopper
from pallas_gemm.planning import targeting
from pallas_gemm.planning.realign import Step
from pallas_gemm.problem import Problem

CONFIGS = ("HopperConfig", "BlackwellConfig")


def _shape(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def test_a_product_is_explained() -> None:
    with pallas_gemm.target("h200"):
        explained = explain(gemm, _shape(8191, 8191), _shape(8191, 8191), activation="gelu")
    assert explained.implementation == "hopper"
    assert explained.plan is not None
    text = str(explained)
    for part in (
        "hopper: m=8191 n=8191 k=8191 NN bfloat16 x bfloat16 -> bfloat16 gelu_tanh",
        "for           NVIDIA H200",
        "config        HopperConfig(tile=(128, 256)",
        "schedule='swizzle:",
        "us (heuristics)",
        "step          pad a to 8191 x 8192: moves 268.4 MB",
    ):
        assert part in text, text
    # The kernel stores 8191 columns of the 8192 that there are then.
    assert "result" not in text


@pytest.mark.parametrize(("target", "kernel"), [("h200", "hopper"), ("b200", "blackwell")])
def test_what_is_printed_is_a_config(target: str, kernel: str) -> None:
    a, b = _shape(4096, 1024), _shape(1024, 4096)
    with pallas_gemm.target(target):
        explained = explain(gemm, a, b, implementation=kernel)
        assert explained.plan is not None
        printed = re.search(r"config +(\w+Config\(.*?\n?.*?\))\n  predicted", str(explained), re.S)
        assert printed
        pasted = eval(printed[1], {name: getattr(pallas_gemm, name) for name in CONFIGS})
        assert pasted == explained.plan.config
        again = explain(gemm, a, b, config=pasted).plan
    assert again is not None
    assert (again.config, again.source) == (pasted, "argument")


def test_what_is_no_function_is_not_explained() -> None:
    with pytest.raises(TypeError, match=r"as in explain\(gemm, a, b\); got ShapeDtypeStruct"):
        explain(_shape(256, 256), _shape(256, 256), alpha=2)
    with pytest.raises(TypeError, match=r"f must be a function, .* got NoneType"):
        explain_on_mesh(None, _shape(256, 256))


def test_on_a_cpu_xla_computes_and_the_reason_is_given() -> None:
    explained = explain(gemm, jnp.ones((4, 4)), jnp.ones((4, 4)))
    assert (explained.implementation, explained.reason) == ("xla", "no GPU is planned for")
    assert "why           no GPU is planned for" in str(explained)


def test_what_was_refused_is_said() -> None:
    with pallas_gemm.target("h200"):
        text = str(
            explain(
                gemm,
                _shape(4096, 4096, dtype=jnp.float32),
                _shape(4096, 4096, dtype=jnp.float32),
                precision="F32_F32_F32",
            )
        )
    assert "not hopper" in text
    # That a kernel is for another GPU is no news where one is for this.
    assert "not blackwell" not in text
    with pallas_gemm.target("b200"):
        named = explain(gemm, _shape(4096, 4096), _shape(4096, 4096))
    assert named.products[0].refused[0][0] == "hopper"
    assert "compute capability" not in str(named)


def test_products_of_gradients_and_maps_are_found() -> None:
    def loss(params: dict[str, Any], x: Any) -> jax.Array:
        hidden = jax.vmap(lambda row: gemm(row, params["in"], activation="silu"))(x)
        return jnp.sum(gemm(hidden, params["out"]).astype(jnp.float32))

    params = {"in": _shape(512, 1024), "out": _shape(1024, 512)}
    with pallas_gemm.target("h200"):
        explained = explain(jax.jit(jax.grad(loss)), params, _shape(2048, 512))
    sizes = [(d.problem.m, d.problem.n, d.problem.k) for d in explained.products]
    # Both layers, then the gradients of the second, its operand, and of the first.
    assert sizes[:2] == [(2048, 1024, 512), (2048, 512, 1024)]
    assert sorted(sizes[2:]) == sorted([(1024, 512, 2048), (2048, 1024, 512), (512, 1024, 2048)])
    # A second time, although JAX has traced the function before.
    with pallas_gemm.target("h200"):
        again = explain(jax.jit(jax.grad(loss)), params, _shape(2048, 512))
    assert str(again) == str(explained)


def test_what_xla_computes_without_a_look_at_the_kernels_is_there_too() -> None:
    explained = explain(gemm, _shape(4, 8, dtype=jnp.complex64), _shape(8, 4, dtype=jnp.complex64))
    assert explained.products == ()
    assert explained.outside == (
        ("complex64[4, 8] x complex64[8, 4] -> complex64", "no kernel takes operands of complex64"),
    )
    assert (explained.implementation, explained.plan) == ("xla", None)
    named = explain(gemm, _shape(4, 8), _shape(8, 4), implementation="xla")
    assert named.reason == "implementation='xla'"


def test_copies_before_the_product_are_there() -> None:
    numbers = (((3,), (3,)), ((0, 2), (0, 2)))
    operands = [_shape(4, 1024, 8, 256)] * 2
    with target("h200"):
        explained = explain(dot_general, *operands, numbers)
    assert explained.implementation == "hopper"
    assert [str(copy) for copy in explained.copies] == [
        "transpose(0, 2, 1, 3) of bfloat16[4, 1024, 8, 256]: moves 33.6 MB"
    ] * 2
    text = " ".join(str(explained).split())
    assert "before it transpose(0, 2, 1, 3)" in text
    assert "moves 33.6 MB, 2 times" in text
    assert explained.copy_seconds > 0
    # XLA takes operands as they are.
    wide = [_shape(4, 16, 8, 16, dtype=jnp.float32)] * 2
    with target("h200"):
        by_xla = explain(dot_general, *wide, numbers, "highest")
    assert (by_xla.implementation, by_xla.copies) == ("xla", ())


TURNED: dict[str, tuple[Any, tuple[Any, ...], list[str]]] = {
    "right": (
        lambda a, b: gemm(a, b.T, schedule="hilbert"),
        ((256, 128), (512, 128)),
        ["transpose(1, 0) of bfloat16[512, 128] by the program: moves 0.3 MB"],
    ),
    "both, of a batch": (
        lambda a, b: matmul(a.swapaxes(1, 2), jnp.permute_dims(b, (2, 0, 1))),
        ((4, 128, 256), (128, 512, 4)),
        [],
    ),
    "all three of its dimensions": (
        lambda a, b: matmul(jnp.permute_dims(a, (1, 2, 0)), b),
        ((128, 4, 64), (128, 512)),
        [],
    ),
    "groups": (
        lambda a, b: ragged_dot(a, b.mT, jnp.full(4, 64)),
        ((256, 128), (4, 512, 128)),
        ["transpose(0, 2, 1) of bfloat16[4, 512, 128] by the program: moves 1.0 MB"],
    ),
    "a gradient, too": (
        jax.grad(lambda a, b: gemm(a, b.T).astype(jnp.float32).sum()),
        ((256, 128), (512, 128)),
        [],
    ),
    "for a function that is called": (
        lambda a, b: jax.jit(gemm)(a, b.T),
        ((256, 128), (512, 128)),
        ["transpose(1, 0) of bfloat16[512, 128] by the program: moves 0.3 MB"],
    ),
    "slices of it": (
        lambda a, b: jax.lax.scan(lambda x, w: (gemm(x, w), None), a, b.mT)[0],
        ((128, 128), (3, 128, 128)),
        [],
    ),
    "a slice": (
        lambda a, b: jax.lax.scan(lambda x, w: (gemm(x, w.T), None), a, b)[0],
        ((128, 128), (3, 128, 128)),
        [],
    ),
    "made before, and needed so": (
        lambda a: matmul(a * 2, (a * 2).T),
        ((256, 512),),
        [],
    ),
    "a product": (
        lambda a, b: gemm(gemm(a, b).T, a),
        ((256, 256), (256, 256)),
        [],
    ),
    "made before": (lambda a, b: gemm(a, jnp.sin(b).T), ((256, 128), (512, 128)), []),
    "XLA's": (lambda a, b: gemm(a, b.T), ((4096, 512), (4096, 512)), []),
    "as it is stored": (
        lambda a, b: gemm(a, b, transpose_b=True),
        ((256, 128), (512, 128)),
        [],
    ),
}


@pytest.mark.parametrize(("f", "shapes", "copies"), TURNED.values(), ids=TURNED)
def test_what_a_program_turns_for_a_product_is_told_once(
    f: Any, shapes: tuple[Any, ...], copies: list[str]
) -> None:
    with target("h200"):
        explained = explain(f, *(_shape(*shape) for shape in shapes))
    assert [str(copy) for copy in explained.turned] == copies
    assert ("transpose_b=True, dot_general or einsum" in str(explained)) == bool(copies)
    assert ("by the program" in explained.json()) == bool(copies)


def test_a_function_without_products() -> None:
    explained = explain(jnp.sin, 1.0)
    assert str(explained) == "no product"
    assert (explained.implementation, explained.reason) == ("none", "no product")


def _model(params: list[dict[str, Any]], x: Any) -> jax.Array:
    for layer in params:
        hidden = jnp.tanh(gemm(x, layer["in"]))  # FIRST
        x = gemm(hidden, layer["out"])  # SECOND
    return jnp.sum(x)


def test_products_of_a_program_are_grouped_and_summed_up() -> None:
    layer = {"in": _shape(4096, 1024), "out": _shape(1024, 4096)}
    with pallas_gemm.target("h200"):
        explained = explain(
            jax.jit(jax.grad(_model)), [layer] * 3, _shape(2048, 4096), configs=True
        )
    groups = explained.groups
    assert len(explained.products) == sum(group.count for group in groups) == 3 * 6 - 1
    forward = [group for group in groups if not group.gradient]
    assert [(g.count, g.decision.problem.n) for g in forward] == [(3, 1024), (3, 4096)]
    source = inspect.getsource(inspect.getmodule(_model)).splitlines()  # type: ignore[arg-type]
    for group, mark in zip(forward, ("FIRST", "SECOND"), strict=True):
        [place] = group.places
        file, _, number = place.partition(":")
        assert (file, mark) == ("test_explain.py", source[int(number) - 1].partition("# ")[2])
    gradients = [place for group in groups if group.gradient for place in group.places]
    assert {*gradients} == {place for group in forward for place in group.places}

    text = str(explained)
    assert max(map(len, text.splitlines())) <= 80
    assert f"17, of which {len(groups)} are distinct, for NVIDIA H200" in text
    assert "3 x hopper: m=2048 n=1024 k=4096 NN" in text
    ways = [
        round(1e6 * sum(group.seconds for group in groups if group.gradient is gradient))
        for gradient in (False, True)
    ]
    predicted = f"{sum(ways):,} us in kernels, {ways[0]:,} forward and {ways[1]:,} in gradients"
    assert predicted in " ".join(text.split())
    assert "left to XLA   0 products, 0% of the arithmetic" in text

    document = json.loads(explained.json())
    assert [entry["count"] for entry in document["products"]] == [g.count for g in groups]
    assert document["products"][0]["config"]["kernel"] == "hopper"
    console = rich.console.Console(width=80, file=io.StringIO())
    console.print(explained)
    assert "2048 x 1024 x 4096 NN bf16" in console.file.getvalue()  # type: ignore[attr-defined]


def test_groups_of_rows_and_of_k_are_told_apart_from_a_batch() -> None:
    sizes = jnp.full(4, 512, jnp.int32)
    with pallas_gemm.target("h200"):
        explained = explain(
            jax.grad(lambda w, x: jnp.sum(pallas_gemm.ragged_dot(x, w, sizes) ** 2)),
            *(_shape(4, 512, 256), _shape(2048, 512)),
            configs=True,
        )
    text = str(explained)
    assert "m=2048 n=256 k=512 in 4 groups of rows NN" in text
    assert "hopper: m=512 n=256 k=2048 in 4 groups of k TN" in text
    assert "2048 (4) x 256 x 512 NN bf16" in text
    assert "512 x 256 x 2048 (4) TN bf16" in text
    document = json.loads(explained.json())
    assert [entry["groups"] for entry in document["products"]] == [4, 4]


def test_products_of_jax_are_counted_and_what_to_write_is_said() -> None:
    explained = explain(lambda a, b: gemm(a @ b, b) @ b, *[_shape(64, 64)] * 2)
    assert len(explained.by_jax) == 2
    assert all(place.startswith("test_explain.py:") for place in explained.by_jax)
    text = str(explained)
    assert "2 products are not asked of pallas_gemm, at test_explain.py:" in text
    assert "write pallas_gemm.matmul(a, b) for a @ b" in text
    # What a call of ours leaves to XLA is asked of us.
    assert explain(gemm, *[_shape(8, 8, dtype=jnp.complex64)] * 2).by_jax == ()


@pytest.mark.parametrize(
    ("sizes", "dtype", "hint"),
    [
        ((4096, 8191, 4096), jnp.bfloat16, "n=8192 in b, instead of [4096, 8191]: saves 134.2 MB"),
        ((1024, 2048, 2048), jnp.float8_e4m3fn, "store b as [n, k]: saves 8.4 MB"),
    ],
)
def test_what_to_change_is_said(sizes: tuple[int, int, int], dtype: Any, hint: str) -> None:
    m, n, k = sizes
    operands = _shape(m, k, dtype=dtype), _shape(k, n, dtype=dtype)
    with pallas_gemm.target("h200"):
        assert f"to change     {hint}" in str(explain(gemm, *operands, activation="gelu"))
    assert 'with target("h200")' in str(explain(gemm, *operands))


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (1, "a.py:0"),
        (3, "a.py:0, a.py:1, a.py:2"),
        (4, "a.py:0, a.py:1, a.py:2 and 1 other lines"),
        (9, "a.py:0, a.py:1, a.py:2 and 6 other lines"),
    ],
)
def test_some_places_are_named_and_others_counted(count: int, said: str) -> None:
    assert explanation._places_text(tuple(f"a.py:{i}" for i in range(count))) == said


def test_products_that_no_gpu_is_planned_for_are_for_none() -> None:
    text = str(explain(lambda a, b: gemm(gemm(a, b)[:32], b), *[_shape(64, 64)] * 2))
    assert "2, of which 2 are distinct\n" in text
    assert ", for " not in text.partition("\n\n")[0]


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("side", ["a", "b"])
def test_an_operand_that_is_turned_is_named_as_it_should_be_stored(
    side: str, transpose: bool
) -> None:
    stored = {"a": "mk", "b": "kn"}[side]
    stored = stored[::-1] if transpose else stored
    step = Step(side, "transpose", (64, 64), 1_000_000)
    problem = Problem(64, 64, 64, **{f"transpose_{side}": transpose})
    hint = explanation._hint_of_step(step, problem)
    assert hint == f"store {side} as [{stored[1]}, {stored[0]}]: saves 1.0 MB"


def test_nothing_is_run_or_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a kernel was made")

    monkeypatch.setattr(hopper, "build", forbidden)
    monkeypatch.setattr(jax.stages.Traced, "lower", forbidden)
    with pallas_gemm.target("h200"):
        explain(gated_gemm, *[_shape(4096, 4096)] * 3)


def test_an_impossible_wish_raises() -> None:
    with pytest.raises(ValueError, match="F32_F32_F32"):
        explain(
            gemm,
            *[_shape(64, 64, dtype=jnp.float32)] * 2,
            precision="F32_F32_F32",
            implementation="hopper",
        )


def _ragged(lhs: Any, rhs: Any, sizes: Any) -> jax.Array:
    """Computes groups of rows in a batch, whose matrices lie side by side."""
    numbers = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), [1], [2])
    return pallas_gemm.ragged_dot_general(lhs, rhs, sizes, numbers)


BATCH = "no kernel takes groups with batch dimensions"
RAGGED: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "types": (
        ragged_dot,
        (_shape(512, 256, dtype=jnp.int8), _shape(4, 256, 128)),
        "no kernel multiplies bfloat16 by int8; cast int8 to bfloat16",
    ),
    "complex": (
        ragged_dot,
        (_shape(512, 256, dtype=jnp.complex64), _shape(4, 256, 128, dtype=jnp.complex64)),
        "no kernel takes operands of complex64",
    ),
    "types of an epilogue": (
        lambda a, b, sizes: pallas_gemm.grouped_gemm(a, b, sizes, activation="gelu"),
        (_shape(512, 256, dtype=jnp.int8), _shape(4, 256, 128)),
        "no kernel multiplies bfloat16 by int8",
    ),
    "a batch": (_ragged, (_shape(2, 512, 256), _shape(2, 256, 4, 128)), BATCH),
}


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize(("f", "operands", "why"), RAGGED.values(), ids=RAGGED)
def test_groups_that_jax_computes_are_there_with_the_reason(
    f: Any, operands: tuple[Any, ...], why: str
) -> None:
    sizes = jnp.full((2, 4) if f is _ragged else 4, 128)
    with target("h200"):
        explained = explain(f, *operands, sizes)
    assert explained.products == ()
    ((what, reason),) = explained.outside
    assert reason.startswith(why)
    assert what.count("[") == 2
    assert str(explained).count("why ") == 1
    (entry,) = explained.entries
    assert (entry.is_ours, entry.is_outside, entry.decision.implementation) == (True, True, "xla")
    assert entry.decision.problem.groups == 4
    rows = 1024 if f is _ragged else 512
    assert entry.decision.problem.flops == 2 * rows * 256 * 128
    assert explained.by_jax == ()
    assert why in " ".join(str(explained).split())


def test_groups_of_jax_are_counted_with_what_would_compute_them() -> None:
    operands = (_shape(16384, 4096), _shape(8, 4096, 4096), jnp.full(8, 2048))
    with target("h200"):
        explained = explain(
            jax.grad(lambda a, b, n: jnp.sum(lax.ragged_dot(a, b, n)), (0, 1)), *operands
        )
    assert (explained.products, len(explained.by_jax)) == ((), 3)
    forward, *gradients = explained.entries
    assert [entry.decision.implementation for entry in explained.entries] == ["hopper"] * 3
    # As measured: 5.0 ms, and 0.66 by a kernel.
    assert forward.by_xla == pytest.approx(5.05e-3, rel=0.1)
    assert forward.by_kernel == pytest.approx(0.67e-3, rel=0.1)
    assert forward.seconds == forward.by_xla
    assert {entry.decision.problem.ragged_k for entry in gradients} == {False, True}
    assert explained.seconds > 3 * explained.seconds_if_asked
    assert "if every product were asked of pallas_gemm: -" in " ".join(str(explained).split())


def test_the_implementation_of_several_is_that_of_the_first() -> None:
    large, small = (jax.ShapeDtypeStruct((size, size), jnp.bfloat16) for size in (4096, 8))
    with target("h200"):
        found = explain(lambda x, y: (pallas_gemm.gemm(x, x), pallas_gemm.gemm(y, y)), large, small)
    assert [own.implementation for own in found.products] == ["hopper", "xla"]
    assert found.implementation == "hopper"


def test_what_a_loop_repeats_is_counted_as_often() -> None:
    def f(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda x, w: (jnp.tanh(matmul(x @ w, w)), None), x, w)[0]

    with target("h200"):
        explained = explain(f, _shape(4096, 4096), _shape(5, 4096, 4096))
    assert [group.count for group in explained.groups] == [5, 5]
    assert len(explained.products) == 1
    one = explained.entries[0]
    assert one.by_xla is not None
    assert explained.seconds_by_xla - explained.pass_seconds == pytest.approx(10 * one.by_xla)
    text = str(explained)
    assert "  5x hopper    4096 x 4096 x 4096 NN" in text
    assert "  5x jax       4096 x 4096 x 4096 NN" in text
    # The elementwise function between two rounds.
    assert [(own.bytes, own.times) for own in explained.passes] == [(2 * 2 * 4096**2, 5)]


def _mlp(dot: Any, x: Any, gate: Any, up: Any, down: Any) -> Any:
    return dot(jax.nn.silu(dot(x, gate)) * dot(x, up), down)


def test_passes_are_those_that_were_counted_in_the_program_of_xla() -> None:
    # docs/layers.md: 352 MB forward, 587 backward with hooks, and none without derivatives.
    x, hidden = _shape(4096, 4096), 14336
    weights = _shape(4096, hidden), _shape(4096, hidden), _shape(hidden, 4096)

    def megabytes(f: Any) -> list[int]:
        with target("h200"):
            return [round(own.bytes / 1e6) for own in explain(f, x, *weights).passes]

    def fused(x: Any, gate: Any, up: Any, down: Any) -> Any:
        return matmul(gated_gemm(x, gate, up, activation="silu"), down)

    assert megabytes(functools.partial(_mlp, matmul)) == [352]
    assert megabytes(functools.partial(_mlp, jnp.matmul)) == [352]
    assert megabytes(fused) == []

    def trained(f: Any) -> list[int]:
        def loss(*args: Any) -> jax.Array:
            return jnp.sum(jnp.square(f(*args).astype(jnp.float32)))

        return megabytes(jax.grad(loss, (0, 1, 2, 3)))

    # Between both: the gradient of the loss. The last is a sum of two products, one of ours.
    assert trained(functools.partial(_mlp, matmul)) == [352, 67, 587, 101]
    # The kernel stores gate and up beside the hidden layer.
    assert trained(fused) == [67, 587]
    with round_once(False):
        assert trained(fused) == [352, 67, 587]


def test_what_is_not_asked_stands_in_the_table_with_its_share() -> None:
    a, b = _shape(4096, 4096), _shape(4096, 4096)
    with target("h200"):
        explained = explain(lambda a, b: (gemm(a, b) @ b) @ b[:, :1024], a, b)
    text = str(explained)
    header, ours, stock, last, *_ = text.splitlines()
    assert header.split() == ["n", "by", "product", "dir", "us", "XLA", "us", "ms", "%"]
    assert (ours.split()[1], stock.split()[1], last.split()[1]) == ("hopper", "jax", "jax")
    assert [line.split()[-1] for line in (ours, stock, last)] == ["44", "44", "11"]
    assert "not asked     2 products, 56% of the arithmetic" in text
    # Configs are there on request.
    assert "config" not in text
    with target("h200"):
        told = explain(lambda a, b: gemm(a, b) @ b, a, b, configs=True)
    assert "config        HopperConfig" in str(told)
    document = json.loads(explained.json())
    assert [entry["asked"] for entry in document["products"]] == [True, False, False]
    assert document["seconds_if_asked"] < document["seconds_by_xla"]


@jax.numpy_dtype_promotion("standard")
def test_the_hint_for_two_types_leads_to_a_kernel() -> None:
    wide, narrow = _shape(4096, 4096, dtype=jnp.float32), _shape(4096, 4096)
    with target("h200"):
        explained = explain(gemm, narrow, wide)
        assert "cast float32 to bfloat16" in explained.reason
        assert explain(gemm, narrow, narrow).implementation == "hopper"


@pytest.mark.parametrize("gpu", ["h200", "b200"])
@pytest.mark.parametrize("f", [gemm, jnp.matmul])
def test_sizes_may_be_symbols(f: Any, gpu: str) -> None:
    (m,) = jax.export.symbolic_shape("m")
    with target(gpu):
        explained = explain(f, jax.ShapeDtypeStruct((m, 512), jnp.bfloat16), _shape(512, 512))
    (entry,) = explained.entries
    assert (entry.seconds, explained.groups[0].flops) == (None, 0)
    assert "a size is a symbol" in str(explained)
    (product,) = json.loads(explained.json())["products"]
    assert (product["m"], product["n"]) == ("m", 512)


def test_the_rest_of_an_epilogue_is_no_reason_to_store_an_operand_otherwise() -> None:
    def f(a: Any, b: Any) -> Any:
        return gemm(a, b, epilogue=lambda s: jnp.cumsum(s, axis=1))

    with target("h200"):
        explained = explain(f, _shape(1024, 512), _shape(512, 1024))
    text = " ".join(str(explained).split())
    assert "after it the rest of the epilogue by XLA: " in text
    assert "side by side" not in text
    assert [copy.is_epilogue for copy in explained.copies] == [True]


def _squares(s: jax.Array) -> tuple[jax.Array, jax.Array]:
    return s.astype(jnp.bfloat16), jnp.sum(s * s, -1)


def _of_groups(a: Any, b: Any) -> Any:
    sizes = jnp.asarray([512, 1536], jnp.int32)
    return grouped_gemm(a, jnp.stack([b, b]), sizes, epilogue=_squares)


def _last_layer(a: Any, b: Any) -> Any:
    return linear_cross_entropy(a, b, jnp.zeros(len(a), int))


@pytest.mark.parametrize(
    "f",
    [
        gemm,
        functools.partial(gemm, epilogue=_squares),
        _of_groups,
        lambda a, b: gated_gemm(a, b, b, epilogue=lambda gate, up: gate * up),
        jax.grad(lambda a, b: _last_layer(a, b).sum()),
        lambda a, b: gemm(gemm(a, b).T, a),
        lambda a, b: jnp.tanh(a @ b),
        pallas_gemm.accelerate(lambda a, b: jnp.tanh(a @ b)),
    ],
    ids=("plain", "function", "groups", "gated", "last", "turned", "jax", "accelerated"),
)
def test_a_gpu_that_is_here_is_planned_for_like_one_that_is_named(
    f: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands = _shape(2048, 1024), _shape(1024, 4096)
    with target("h200") as device:
        named = str(explain(f, *operands))
    assert "no GPU" not in named
    monkeypatch.setattr(targeting, "first_gpu", lambda: device)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert str(explain(f, *operands)) == named


def test_padding_that_a_transposition_does_as_well_is_no_saving() -> None:
    operands = _shape(1950, 1344, dtype=jnp.float32), _shape(1950, 184, dtype=jnp.float32)
    with pallas_gemm.target("h200"):
        found = explain(
            functools.partial(gemm, transpose_a=True, implementation="hopper"), *operands
        )
    assert "pad a to 1952 x 1344: free" in str(found)
    assert "saves 0.0 MB" not in str(found)
    assert "store a as [m, k]: saves 21.0 MB" in str(found)
