"""`round_once`: what is derived is rounded as often as what is not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import explain, gated_gemm, gemm, round_once, target

BF16, F32 = jnp.bfloat16, jnp.float32
M, N, K = 24, 40, 32


def _drawn(*shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape).astype(BF16)) for shape in shapes]


def _gelu(a: Any, b: Any, bias: Any) -> Any:
    return gemm(a, b, bias=bias, activation="gelu")


def _residual(a: Any, b: Any, residual: Any) -> Any:
    return gemm(a, b, residual=residual, activation="silu", beta=0.5)


def _swiglu(a: Any, b: Any, bias: Any) -> Any:
    return gated_gemm(a, b, b * 2, up_bias=bias)


def _scaled(a: Any, b: Any, scale: Any) -> Any:
    return gemm(a, b, row_scale=scale.astype(F32), activation="tanh")


def _batch(a: Any, b: Any, bias: Any) -> Any:
    return gemm(jnp.stack([a, a + 1]), b, bias=bias, activation="gelu_exact")


CASES = {
    "gelu": (_gelu, (N,)),
    "residual": (_residual, (M, N)),
    "gated": (_swiglu, (N,)),
    "scale": (_scaled, (M,)),
    "batch": (_batch, (N,)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_result_has_the_same_bits_whether_it_is_derived_or_not(case: str) -> None:
    f, shape = CASES[case]
    operands = _drawn((M, K), (K, N), shape)
    alone = jax.jit(f)(*operands)
    under, pull = jax.vjp(f, *operands)
    _, change = jax.jvp(f, tuple(operands), tuple(operands))
    found = pull(jnp.ones_like(under))
    np.testing.assert_array_equal(np.asarray(under, F32), np.asarray(alone, F32))

    @jax.jit
    def derived(*wide: Any) -> Any:
        result, pull = jax.vjp(f, *wide)
        return *pull(jnp.ones_like(result)), jax.jvp(f, wide, wide)[1]

    expected = derived(*(np.asarray(x, F32) for x in operands))
    for x, y in zip((*found, change), expected, strict=True):
        error = np.abs(np.asarray(x, F32) - np.asarray(y, F32))
        assert error.max() <= 2**-6 * np.abs(y).max()


def test_nothing_more_is_kept() -> None:
    operands = _drawn((M, K), (K, N), (N,))

    def kept() -> list[Any]:
        _, pull = jax.vjp(_gelu, *operands)
        return sorted((x.shape, str(x.dtype)) for x in jax.tree.leaves(pull))

    once = kept()
    with round_once(False):
        assert kept() == once
    assert ((M, N), "bfloat16") in once


@pytest.mark.usefixtures("empty_kernels")
def test_one_kernel_stores_both() -> None:
    shapes = [jax.ShapeDtypeStruct(s, BF16) for s in ((512, 512), (512, 512), (512,))]
    known = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")

    def text() -> str:
        def forward(*x: Any) -> Any:
            result, pull = jax.vjp(_gelu, *x)
            return result, pull

        with target("h200"):
            exported = jax.export.export(
                jax.jit(lambda *x: jax.tree.leaves(forward(*x))),
                platforms=["cuda"],
                disabled_checks=[known],
            )(*shapes)
        return exported.mlir_module()

    # XLA applies the activation, and its function is that of the kernel inside the block.
    with round_once(False):
        assert text().count("stablehlo.tanh") == 1
    once = text()
    assert once.count("stablehlo.tanh") == 0
    assert once.count("mosaic_gpu_v2") == 1


def test_a_gpu_whose_kernels_store_one_result_is_asked_for_one() -> None:
    shapes = [jax.ShapeDtypeStruct((512, 512), BF16)] * 3

    def products() -> list[str]:
        def forward(*x: Any) -> Any:
            result, pull = jax.vjp(gated_gemm, *x)
            return jax.tree.leaves((result, pull))

        with target("b200"):
            traced = jax.jit(forward).trace(*shapes)
            lines = traced.lower(lowering_platforms=("cuda",)).as_text().splitlines()
        return [line.split("->")[-1].strip() for line in lines if "dot_general" in line]

    # Sums in float32 would be twice as much to write and to read.
    assert products() == ["tensor<512x512xbf16>"] * 2
    with round_once(False):
        assert products() == ["tensor<512x512xbf16>"] * 2


def test_a_kernel_that_is_named_derives_odd_sizes() -> None:
    shapes = [jax.ShapeDtypeStruct(s, BF16) for s in ((9, 33), (33, 17), (9, 17))]

    def product(a: Any, b: Any, residual: Any) -> Any:
        return gemm(a, b, residual=residual, activation="relu", implementation="hopper")

    def loss(*x: Any) -> Any:
        return jnp.sum(product(*x).astype(F32))

    with target("h200"):
        found = explain(jax.grad(loss, (0, 1, 2)), *shapes)
    named = [own for own in found.products if own.implementation == "hopper"]
    assert len(named) == 3
    # No kernel takes the function of such rows: one stores what XLA applies the rest to.
    assert "rows of a multiple of 16 bytes, got 17 columns" in str(found)


def test_what_a_block_says_is_taken_back_and_checked() -> None:
    operands = _drawn((M, K), (K, N), (N,))
    once, _ = jax.vjp(_gelu, *operands)
    with round_once(False):
        twice, _ = jax.vjp(_gelu, *operands)
        with round_once():
            found, _ = jax.vjp(_gelu, *operands)
    np.testing.assert_array_equal(np.asarray(found, F32), np.asarray(once, F32))
    # Otherwise no test here could fail.
    alone = jax.jit(_gelu)(*operands)
    np.testing.assert_array_equal(np.asarray(once, F32), np.asarray(alone, F32))
    assert np.any(np.asarray(twice, F32) != np.asarray(alone, F32))
    with pytest.raises(TypeError, match="once must be True or False, got 'yes'"), round_once("yes"):
        pass
