"""`explain`: what would run, of any function, without running it."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallas_gemm
from pallas_gemm import dot_general, explain, gated_gemm, gemm
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
    assert "not blackwell it needs compute capability 10.x, NVIDIA H200 has 9.0" in text


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
    assert (
        explained.copies == ("transpose(0, 2, 1, 3) of bfloat16[4, 128, 8, 64]: moves 1.0 MB",) * 2
    )
    assert "before it: transpose(0, 2, 1, 3)" in str(explained)


def test_a_function_without_products() -> None:
    explained = explain(jnp.sin, 1.0)
    assert str(explained) == "no product"
    assert (explained.implementation, explained.reason) == ("none", "no product")


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
