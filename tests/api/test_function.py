"""`gemm(..., epilogue=f)`: what it takes, what it refuses, and in which words."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import (
    HopperConfig,
    explain,
    gated_gemm,
    gemm,
    gram,
    grouped_gemm,
    projections,
    symmetric_matmul,
    target,
)
from tests.reference import normal

pytestmark = pytest.mark.usefixtures("as_users_write")

A, B = jnp.ones((8, 16), jnp.bfloat16), jnp.ones((16, 24), jnp.bfloat16)


def test_the_function_gets_the_whole_product_in_float32() -> None:
    seen = []

    def f(s: Any) -> Any:
        seen.append((s.shape, s.dtype))
        return s

    result = gemm(A, B, epilogue=f)
    assert seen[0] == ((8, 24), jnp.float32)
    assert result.dtype == jnp.float32
    np.testing.assert_array_equal(result, np.full((8, 24), 16.0))


@pytest.mark.parametrize(
    ("left", "right", "shape"),
    [
        ((16,), (16, 24), (24,)),
        ((8, 16), (16,), (8,)),
        ((2, 8, 16), (16, 24), (2, 8, 24)),
        ((3, 1, 8, 16), (2, 16, 24), (3, 2, 8, 24)),
    ],
)
def test_shapes_are_those_of_matmul(left: Any, right: Any, shape: Any) -> None:
    a, b = jnp.ones(left, jnp.bfloat16), jnp.ones(right, jnp.bfloat16)
    result, total = gemm(a, b, epilogue=lambda s: (s + 1, jnp.sum(s)))
    assert result.shape == shape
    assert float(total) == 16 * np.prod(shape)


def test_results_are_any_tree() -> None:
    found = gemm(A, B, epilogue=lambda s, x: {"y": (s * x, None), "z": x}, operands=(jnp.ones(24),))
    assert jax.tree.map(jnp.shape, found) == {"y": ((8, 24), None), "z": (24,)}


def test_transposed_operands() -> None:
    a, b = jnp.arange(6.0).reshape(3, 2), jnp.arange(12.0).reshape(4, 3)
    found = gemm(a, b, epilogue=lambda s: s + 1, transpose_a=True, transpose_b=True)
    np.testing.assert_allclose(found, a.T @ b.T + 1)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"epilogue": 3}, TypeError, "epilogue must be a function, got int"),
        ({"operands": (A,)}, ValueError, "operands has no meaning without epilogue"),
        ({"epilogue": jnp.tanh, "operands": A}, TypeError, "operands must be a tuple"),
        ({"epilogue": jnp.tanh, "operands": ("x",)}, TypeError, r"operands\[0\] must be an array"),
        (
            {"epilogue": jnp.tanh, "bias": jnp.ones(24)},
            ValueError,
            "bias= has no meaning beside epilogue",
        ),
        ({"epilogue": jnp.tanh, "alpha": 2.0}, ValueError, "alpha= has no meaning beside"),
        (
            {"epilogue": jnp.tanh, "col_zero": jnp.zeros((1, 8))},
            ValueError,
            "^col_zero= has no meaning beside",
        ),
        ({"epilogue": jnp.tanh, "preferred_element_type": "bf16"}, ValueError, "preferred_element"),
        (
            {"epilogue": lambda s: () if s.ndim else s},
            TypeError,
            "must return arrays, it returns nothing",
        ),
        ({"epilogue": lambda s: s @ s}, TypeError, "contracting dimensions"),
        ({"epilogue": lambda s, x: s + x, "operands": ()}, TypeError, "missing 1 required"),
    ],
)
def test_refusals(arguments: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        gemm(A, B, **arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"epilogue": lambda x, y: x * y, "activation": "gelu"},
            "activation= has no meaning beside",
        ),
        ({"epilogue": lambda x, y: x * y, "up_bias": jnp.ones(24)}, "up_bias= has no meaning"),
        ({"operands": (A,)}, "operands has no meaning without epilogue"),
    ],
)
def test_refusals_of_gated_products(arguments: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        gated_gemm(A, B, B, **arguments)


def test_a_function_of_both_sums() -> None:
    found = gated_gemm(A, B, 2 * B, epilogue=lambda gate, up, x: (gate + x, up), operands=(1.0,))
    np.testing.assert_array_equal(found[0], np.full((8, 24), 17.0))
    np.testing.assert_array_equal(found[1], np.full((8, 24), 32.0))


def _of_product(s: Any, x: Any) -> Any:
    z = s * x
    return z.astype(jnp.bfloat16), jnp.sum(z, -1)


def _check_both(found: Any, expected: Any) -> None:
    for x, y in zip(found, expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32))


def test_a_function_for_each_of_several_projections() -> None:
    scales = [jnp.arange(24.0), jnp.ones(24)]
    found = projections(A, [B, 2 * B], epilogue=_of_product, operands=[(x,) for x in scales])
    for own, w, x in zip(found, (B, 2 * B), scales, strict=True):
        _check_both(own, _of_product(jnp.full((8, 24), 16.0) * w[0, 0], x))
    alone = projections(A, [B], epilogue=lambda s: s + 1)
    np.testing.assert_array_equal(alone[0], np.full((8, 24), 17.0))
    with pytest.raises(ValueError, match="operands must be a tuple with an entry for each"):
        projections(A, [B, B], epilogue=_of_product, operands=(jnp.ones(24),))
    with pytest.raises(ValueError, match="biases= has no meaning beside"):
        projections(A, [B], epilogue=jnp.tanh, biases=[jnp.ones(24)])


def test_options_of_projections_hold_beside_a_function() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)).astype(jnp.float32))
    w = jnp.asarray(np.random.default_rng(1).normal(size=(24, 16)).astype(jnp.float32))
    how: dict[str, Any] = {"epilogue": lambda s: 2 * s, "transpose_b": True}
    (found,) = projections(x, [w], precision="highest", **how)
    np.testing.assert_allclose(found, 2 * np.asarray(x) @ np.asarray(w).T, rtol=1e-5, atol=1e-5)

    def asked(precision: str) -> str:
        return str(
            jax.make_jaxpr(lambda x, w: projections(x, [w], precision=precision, **how))(x, w)
        )

    assert asked("highest") != asked("default")


@pytest.mark.parametrize("transpose", [False, True])
def test_a_function_of_a_symmetric_product(transpose: bool) -> None:
    x = jnp.asarray(np.random.default_rng(0).integers(-3, 4, (8, 16)).astype(jnp.bfloat16))
    wide = x.astype(jnp.float32)
    whole = wide.T @ wide if transpose else wide @ wide.T
    scale = jnp.arange(float(whole.shape[0]))

    def ours(x: Any) -> Any:
        return gram(x, transpose=transpose, epilogue=_of_product, operands=(scale,))

    _check_both(ours(x), _of_product(whole, scale))
    found = jax.grad(lambda x: jnp.sum(ours(x)[1]))(wide)
    expected = jax.grad(
        lambda x: jnp.sum(_of_product(x.T @ x if transpose else x @ x.T, scale)[1])
    )(wide)
    np.testing.assert_allclose(found, expected)
    square = whole.astype(jnp.float32)
    _check_both(
        symmetric_matmul(square, square, epilogue=_of_product, operands=(scale,)),
        _of_product(square @ square, scale),
    )
    with pytest.raises(ValueError, match="alpha= has no meaning beside"):
        gram(x, epilogue=_of_product, operands=(scale,), alpha=2)


def test_an_error_in_the_function_says_what_it_was_called_with() -> None:
    def broken(s: Any, x: Any) -> Any:
        return s + jnp.ones(7)

    with pytest.raises(Exception, match="broadcast") as caught:
        gemm(A, B, epilogue=broken, operands=(jnp.ones(24),))
    (note,) = (x for x in caught.value.__notes__ if "epilogue=broken was called with" in x)
    line = broken.__code__.co_firstlineno + 1
    assert note.endswith(f", at test_function.py:{line}")


def test_a_traced_array_from_around_is_named() -> None:
    @jax.jit
    def f(a: Any, b: Any, x: Any) -> Any:
        return gemm(a, b, epilogue=lambda s: s * x)

    words = r"uses traced arrays of shapes \[24\].*, in \w+ \(test_function.py:\d+\): .*operands="
    with pytest.raises(TypeError, match=words):
        f(A, B, jnp.ones(24))


def test_an_array_from_around_that_is_there_is_used() -> None:
    scale = jnp.arange(24.0)
    np.testing.assert_allclose(
        gemm(A, B, epilogue=lambda s: s * scale), 16 * scale[None].repeat(8, 0)
    )


def test_a_wrong_number_of_operands_and_such_that_do_not_broadcast_say_what_was_given() -> None:
    for operands in ((), (jnp.ones(24), jnp.ones(24)), (jnp.ones(7),)):
        with pytest.raises((TypeError, ValueError)) as caught:
            gemm(A, B, epilogue=lambda s, x: s + x, operands=operands)
        (note,) = (x for x in caught.value.__notes__ if "was called with" in x)
        assert note.count("ShapeDtypeStruct(") == 1 + len(operands)


def test_side_effects_are_refused() -> None:
    def loud(s: Any) -> Any:
        jax.debug.print("{}", s[0, 0])
        return s

    words = r"pure function, but it has side effects, in debug_\w+ \(test_function.py:\d+\)"
    with pytest.raises(TypeError, match=words):
        gemm(A, B, epilogue=loud)


def test_what_is_named_and_cannot_compute_it_says_why() -> None:
    a, b = jnp.ones((128, 128), jnp.bfloat16), jnp.ones((128, 128), jnp.bfloat16)
    with pytest.raises(ValueError, match="rows and as columns"):
        gemm(a, b, epilogue=lambda s: s + s.T, implementation="interpret")
    config = HopperConfig(tile=(64, 64), split_k=2)
    with pytest.raises(ValueError, match="reduces needs split_k=1, got 2"):
        gemm(a, b, epilogue=lambda s: (s, s.sum(0)), implementation="interpret", config=config)


def test_a_function_that_only_reduces_is_planned_whole_where_others_are_cut() -> None:
    square = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    with target("h200"):
        found = explain(lambda a, b: gemm(a, b, epilogue=lambda s: s.max(-1)), square, square)
    assert found.plan is not None
    assert found.plan.config.split_k == 1


@pytest.mark.parametrize(("dtype", "rtol"), [("bfloat16", 1e-6), ("float32", 1e-2)])
def test_a_function_follows_sums_of_an_odd_number_of_elements(dtype: str, rtol: float) -> None:
    rng = np.random.default_rng(0)
    a, b = (normal(rng, own, jnp.dtype(dtype)) for own in ((2, 72, 77), (136, 77)))
    residual = normal(rng, (2, 72, 136), jnp.float32)

    def f(s: Any, residual: Any) -> Any:
        return jnp.maximum(s + residual, 0), jnp.sum(s * s, 1)

    product = functools.partial(gemm, transpose_b=True, epilogue=f, operands=(residual,))
    found = product(a, b, implementation="interpret")
    sums = np.asarray(a, np.float64) @ np.asarray(b, np.float64).T
    np.testing.assert_allclose(found[0], np.maximum(sums + residual, 0), rtol=rtol, atol=rtol * 9)
    np.testing.assert_allclose(found[1], np.sum(sums * sums, 1), rtol=rtol)
    with target("h200"):
        named = functools.partial(product, implementation="hopper")
        assert explain(named, a, b).plan is not None


@pytest.mark.parametrize("last", [None, 2])
def test_a_function_follows_sums_that_are_cut_along_k(last: int | None) -> None:
    rng = np.random.default_rng(0)
    a, b = normal(rng, (256, 256), jnp.bfloat16), normal(rng, (256, 192), jnp.bfloat16)
    residual = normal(rng, (256, 192), jnp.bfloat16)
    config = HopperConfig(
        tile=(128, 64),
        stages=3,
        store_columns=32,
        split_k=2,
        split_last=last,
        late_store=False,
    )

    def f(s: Any, residual: Any) -> Any:
        return jnp.maximum(s, 0) + residual.astype(jnp.float32)

    given = gemm(a, b, epilogue=f, operands=(residual,), implementation="interpret", config=config)
    expected = f(jnp.dot(a, b, preferred_element_type=jnp.float32), residual)
    np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "multiply",
    [
        lambda x, f: gemm(x, B, epilogue=f),
        lambda x, f: gemm(A, x.T, epilogue=f),
        lambda x, f: gram(x, epilogue=f),
        lambda x, f: grouped_gemm(x, B[None], jnp.array([8]), epilogue=f),
        lambda x, f: projections(x, [B, B], epilogue=f),
    ],
    ids=["gemm", "right", "gram", "grouped_gemm", "projections"],
)
def test_no_function_drops_an_imaginary_part(multiply: Any) -> None:
    with pytest.raises(TypeError, match="complex operands have none, got complex64"):
        multiply(A + 1j, lambda s: s)


def test_a_factor_of_one_says_nothing_and_every_other_word_something() -> None:
    plain = gemm(A, B, epilogue=jnp.tanh)
    np.testing.assert_array_equal(gemm(A, B, epilogue=jnp.tanh, alpha=np.float32(1)), plain)
    for name in ("bias", "residual"):
        with pytest.raises(ValueError, match=f"{name}= has no meaning beside epilogue"):
            gemm(A, B, epilogue=jnp.tanh, **{name: 1})
    with pytest.raises(TypeError, match=r"operands must be a tuple.*got NoneType"):
        gemm(A, B, epilogue=jnp.tanh, operands=None)


SMALL = HopperConfig((64, 64), stages=2, ctas=2, store_columns=32, consumers=1, late_store=False)


def _too_large(s: Any, x: Any) -> Any:
    number = jnp.full_like(s, 300).astype(jnp.int8)
    return jnp.where(s > 0, number, (s * 100).astype(jnp.int8)).astype(jnp.float32) + x


@pytest.mark.parametrize(
    "f",
    [
        lambda s, x: s + x + x.reshape(24, 8).T,
        lambda s, x: s + x.reshape(1, 8, 24)[0],
        lambda s, x: (s + x, 2.0),
        lambda s, x: (s + x, s**0),
        _too_large,
    ],
    ids=["reshaped", "a dimension more", "a number", "to the power of 0", "too large"],
)
def test_unusual_functions_are_right(f: Any) -> None:
    rng = np.random.default_rng(0)
    a, b = (
        jnp.asarray(rng.integers(-2, 3, own).astype(jnp.bfloat16)) for own in ((8, 16), (16, 24))
    )
    x = jnp.asarray(rng.integers(-4, 5, (8, 24)).astype(jnp.float32))
    found = gemm(a, b, epilogue=f, operands=(x,), config=SMALL, implementation="interpret")
    expected = f(a.astype(jnp.float32) @ b.astype(jnp.float32), x)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


def test_a_reshape_that_exchanges_dimensions_is_none_of_the_sums() -> None:
    a, b = jnp.arange(128.0).reshape(8, 16), jnp.arange(384.0).reshape(16, 24) % 7

    def f(s: Any) -> Any:
        return s + s.reshape(24, 8).T

    with target("h200"):
        np.testing.assert_array_equal(gemm(a, b, epilogue=f), f(a @ b))


@pytest.mark.parametrize(
    ("types", "f"),
    [
        ((jnp.int8, jnp.int8), lambda s: s.astype(jnp.float8_e4m3fn)),
        ((jnp.int8, jnp.int8), lambda s: (s.astype(jnp.float8_e5m2), s)),
        (
            (jnp.bfloat16,) * 2,
            lambda s: s.astype(jnp.int32).astype(jnp.float32).astype(jnp.float8_e4m3fn),
        ),
        ((jnp.bfloat16,) * 2, lambda s: s.astype(jnp.float4_e2m1fn).astype(jnp.bfloat16)),
    ],
    ids=["whole sums", "and themselves", "rounded", "of 4 bits"],
)
def test_casts_to_few_bits_are_lowered(types: Any, f: Any) -> None:
    a, b = (jax.ShapeDtypeStruct((1024, 1024), own) for own in types)
    run = jax.jit(functools.partial(gemm, transpose_b=True, epilogue=f))
    with target("h200"):
        lowered = run.trace(a, b).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("f", [jnp.arctan, lambda s: s % 3, jnp.ones_like])
def test_xla_computes_other_functions_of_groups(f: Any) -> None:
    found = grouped_gemm(A, B[None], jnp.array([8]), epilogue=f)
    np.testing.assert_allclose(found, f((A @ B).astype(jnp.float32)), rtol=1e-6)
