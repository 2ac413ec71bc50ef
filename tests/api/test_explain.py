"""`explain`: what would run, of any function, without running it."""

import inspect
import io
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import rich.console

import pallas_gemm
from pallas_gemm import dot_general, explain, gated_gemm, gemm, matmul, ragged_dot, target
from pallas_gemm.kernels.hopper import kernel as hopper

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
                precision="highest",
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
    explained = explain(dot_general, _shape(4, 128, 8, 64), _shape(4, 128, 8, 64), numbers)
    assert [str(copy) for copy in explained.copies] == [
        "transpose(0, 2, 1, 3) of bfloat16[4, 128, 8, 64]: moves 1.0 MB"
    ] * 2
    assert "before it     transpose(0, 2, 1, 3)" in str(explained)


TURNED: dict[str, tuple[Any, tuple[Any, ...], list[str]]] = {
    "right": (
        lambda a, b: gemm(a, b.T),
        ((256, 128), (512, 128)),
        ["transpose(1, 0) of bfloat16[512, 128] by the program: moves 0.3 MB"],
    ),
    "both, of a batch": (
        lambda a, b: matmul(a.swapaxes(1, 2), jnp.permute_dims(b, (2, 0, 1))),
        ((4, 128, 256), (128, 512, 4)),
        ["transpose(0, 2, 1) of bfloat16[4, 128, 256] by the program: moves 0.5 MB"],
    ),
    "all three of its dimensions": (
        lambda a, b: matmul(jnp.permute_dims(a, (1, 2, 0)), b),
        ((128, 4, 64), (128, 512)),
        ["transpose(1, 2, 0) of bfloat16[128, 4, 64] by the program: moves 0.1 MB"],
    ),
    "groups": (
        lambda a, b: ragged_dot(a, b.mT, jnp.full(4, 64)),
        ((256, 128), (4, 512, 128)),
        ["transpose(0, 2, 1) of bfloat16[4, 512, 128] by the program: moves 1.0 MB"],
    ),
    "a gradient, too": (
        jax.grad(lambda a, b: gemm(a, b.T).astype(jnp.float32).sum()),
        ((256, 128), (512, 128)),
        ["transpose(1, 0) of bfloat16[512, 128] by the program: moves 0.3 MB"],
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
        ["transpose(1, 0) of bfloat16[128, 128] by the program: moves 0.1 MB"],
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
        explained = explain(jax.jit(jax.grad(_model)), [layer] * 3, _shape(2048, 4096))
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
        ((4096, 4096, 4096), jnp.float32, "store b as [n, k]: saves 134.2 MB"),
    ],
)
def test_what_to_change_is_said(sizes: tuple[int, int, int], dtype: Any, hint: str) -> None:
    m, n, k = sizes
    operands = _shape(m, k, dtype=dtype), _shape(k, n, dtype=dtype)
    with pallas_gemm.target("h200"):
        assert f"to change     {hint}" in str(explain(gemm, *operands, activation="gelu"))
    assert 'with target("h200")' in str(explain(gemm, *operands))


def test_nothing_is_run_or_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a kernel was made")

    monkeypatch.setattr(hopper, "build", forbidden)
    monkeypatch.setattr(jax.stages.Traced, "lower", forbidden)
    with pallas_gemm.target("h200"):
        explain(gated_gemm, *[_shape(4096, 4096)] * 3)


def test_an_impossible_wish_raises() -> None:
    with pytest.raises(ValueError, match="HIGHEST"):
        explain(
            gemm,
            *[_shape(64, 64, dtype=jnp.float32)] * 2,
            precision="highest",
            implementation="hopper",
        )
