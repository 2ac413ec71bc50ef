"""Functions of rows in groups: what a kernel computes of them, derived, promised and on a mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import HopperConfig, explain, grouped_gemm, numerics, target
from tests import meshes

pytestmark = pytest.mark.usefixtures("as_users_write")

F32, BF16 = jnp.float32, jnp.bfloat16
M, N, K, GROUPS = 72, 64, 128, 3
SIZES = np.array([5, 0, 40])
SMALL = HopperConfig(
    tile=(64, 64), consumers=1, stages=2, ctas=2, late_store=False, store_columns=32
)


def _drawn(*shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape).astype(BF16)) for shape in shapes]


def _gelu(s: Any, bias: Any, scale: Any, residual: Any) -> Any:
    z = jax.nn.gelu(s * scale + bias) + residual
    return z.astype(BF16), jnp.sum(z * z, -1)


def _over_the_largest(s: Any) -> Any:
    return jnp.tanh(s) / jnp.max(s, -1, keepdims=True)


OPERANDS = ((M, K), (GROUPS, K, N), (GROUPS, N), (GROUPS, 1), (M, N))


def _run(a: Any, b: Any, *x: Any, **how: Any) -> Any:
    return grouped_gemm(a, b, SIZES, epilogue=_gelu, operands=x, **how)


def _loss(results: Any) -> Any:
    z, squares = results
    return jnp.sum(jnp.sin(z.astype(F32))) + jnp.sum(jnp.cos(squares))


def test_derivatives_through_the_kernel() -> None:
    operands = _drawn(*OPERANDS)
    every = tuple(range(len(operands)))
    simulated = {"implementation": "interpret", "config": SMALL}
    found, expected = (
        jax.jit(jax.grad(lambda *x, how=how: _loss(_run(*x, **how)), every))(*operands)
        for how in (simulated, {})
    )
    for x, y in zip(found, expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        error = np.abs(np.asarray(x, F32) - np.asarray(y, F32)).max()
        assert error <= 0.02 * np.abs(np.asarray(y, F32)).max()


def test_one_row_has_what_its_group_has() -> None:
    a, b, bias, scale = _drawn((1, K), *OPERANDS[1:4])
    # What is rounded first is made by XLA, of rows already.
    bias, scale, residual = bias.astype(F32), scale.astype(F32), jnp.zeros((1, N), F32)

    def run(**how: Any) -> Any:
        sizes = np.array([0, 0, 1])
        given = (bias, scale, residual)
        return grouped_gemm(a, b, sizes, epilogue=_gelu, operands=given, **how)

    found, expected = run(implementation="interpret", config=SMALL), run()
    for x, y in zip(found, expected, strict=True):
        error = np.abs(np.asarray(x, F32) - np.asarray(y, F32)).max()
        assert error <= 0.01 * np.abs(np.asarray(y, F32)).max()


def test_the_derivative_keeps_the_rounded_sums_and_no_array_of_float32() -> None:
    operands = _drawn(*OPERANDS)
    _, pull = jax.vjp(lambda *x: _run(*x)[0], *operands)
    kept = [(x.shape, x.dtype) for x in jax.tree.leaves(pull) if x.shape == (M, N)]
    # The sums, and the residual.
    assert 1 <= len(kept) <= 2
    assert {dtype for _, dtype in kept} == {np.dtype(BF16)}


def test_explain_says_which_part_is_xlas() -> None:
    shapes = [jax.ShapeDtypeStruct(x, BF16) for x in ((512, 256), (4, 256, 512))]
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)

    def run(f: Any) -> Any:
        with target("h200"):
            return explain(lambda a, b, s: grouped_gemm(a, b, s, epilogue=f), *shapes, sizes)

    whole = run(lambda s: (jnp.tanh(s), jnp.max(s, -1)))
    assert whole.implementation == "hopper"
    assert not whole.copies
    part = run(_over_the_largest)
    assert part.implementation == "hopper"
    assert "the rest of the epilogue by XLA: div" in str(part)
    nothing = run(lambda s: s)
    assert nothing.implementation == "hopper"
    assert "the rest of the epilogue by XLA: the function computes nothing" in str(nothing)


@pytest.mark.parametrize("dtype", [BF16, jnp.float16, F32])
def test_a_function_of_each_type_is_planned(dtype: Any) -> None:
    a, b = (jax.ShapeDtypeStruct(x, dtype) for x in ((1024, 3072), (4, 3072, 704)))
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    with target("h200"):
        found = explain(lambda *x: grouped_gemm(*x, epilogue=jnp.tanh), a, b, sizes)
    assert found.implementation == "hopper"
    assert not found.copies


def test_a_promise_holds_of_what_a_kernel_computes() -> None:
    a, b = _drawn((M, K), (GROUPS, K, N))
    how = {"implementation": "interpret", "config": SMALL, "numerics": numerics(invariant="rows")}

    def largest(s: Any) -> Any:
        return jnp.tanh(s), jnp.max(s, -1)

    found = grouped_gemm(a, b, SIZES, epilogue=largest, **how)
    # The first group's rows as another's, which come later.
    moved = jnp.concatenate([a[5:12], a[:5]])
    sizes = np.array([0, 7, 5])
    others = grouped_gemm(moved, b[jnp.array([1, 1, 0])], sizes, epilogue=largest, **how)
    for x, y in zip(found, others, strict=True):
        np.testing.assert_array_equal(np.asarray(x[:5], F32), np.asarray(y[7:12], F32))
    with pytest.raises(ValueError, match="XLA computes the epilogue, or a part of it: div"):
        grouped_gemm(a, b, SIZES, epilogue=_over_the_largest, **how)


def test_what_is_named_must_compute_it() -> None:
    a, b = _drawn((M, K), (GROUPS, K, N))
    with pytest.raises(ValueError, match="rows in groups are not claimed"):
        grouped_gemm(a, b, SIZES, epilogue=jnp.tanh, config=HopperConfig(persistence="dynamic"))
    with pytest.raises(ValueError, match="cannot compute this epilogue: the function computes"):
        grouped_gemm(a, b, SIZES, epilogue=lambda s: s, config=SMALL)
    by_xla = grouped_gemm(a, b, SIZES, epilogue=jnp.tanh, implementation="xla")
    np.testing.assert_allclose(by_xla, grouped_gemm(a, b, SIZES, epilogue=jnp.tanh), rtol=1e-5)


def test_on_a_mesh() -> None:
    mesh, operands = meshes.make_mesh(), _drawn(*OPERANDS)
    expected = _run(*operands)
    split = [meshes.place(mesh, operands[0], "x"), meshes.place(mesh, operands[1], None, None, "y")]
    found, _ = meshes.run(_run, *split, *operands[2:])
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(x, F32), np.asarray(y, F32), rtol=2e-2, atol=1e-2)
