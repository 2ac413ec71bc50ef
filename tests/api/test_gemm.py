"""The public functions inside JAX programs: shapes, types, control flow, threads, export, cost."""

import concurrent.futures
import functools
import itertools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gemm
from pallas_gemm import dot_general, gated_gemm, gemm, matmul
from tests import reference

LEADS = ((), (1,), (3,), (2, 1), (2, 3))


def _integers(*shape: int, dtype: Any = jnp.float32, seed: int = 0) -> jax.Array:
    return reference.integers(np.random.default_rng(seed), shape, dtype)


@pytest.mark.parametrize("lead", list(itertools.product(LEADS, repeat=2)), ids=str)
def test_matmul_is_that_of_jax_numpy(lead: tuple[Any, Any]) -> None:
    a, b = _integers(*lead[0], 4, 5), _integers(*lead[1], 5, 6)
    np.testing.assert_array_equal(matmul(a, b), jnp.matmul(a, b), strict=True)


@pytest.mark.parametrize(
    ("a", "b"),
    [((5,), (5,)), ((4, 5), (5,)), ((5,), (5, 6)), ((2, 4, 5), (5,)), ((5,), (2, 5, 6))],
    ids=str,
)
def test_vectors(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    left, right = _integers(*a), _integers(*b)
    np.testing.assert_array_equal(matmul(left, right), jnp.matmul(left, right), strict=True)
    # A vector is never transposed.
    turned = {"transpose_a": len(a) == 1, "transpose_b": len(b) == 1}
    np.testing.assert_array_equal(gemm(left, right, **turned), jnp.matmul(left, right))


@pytest.mark.parametrize("flags", list(itertools.product((False, True), repeat=2)), ids=str)
def test_a_left_operand_that_a_batch_shares(flags: tuple[bool, bool]) -> None:
    transpose_a, transpose_b = flags
    a, b = _integers(5, 4, dtype=jnp.bfloat16), _integers(3, 4, 6, dtype=jnp.bfloat16, seed=1)
    result = gemm(
        a.T if transpose_a else a,
        b.swapaxes(1, 2) if transpose_b else b,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        preferred_element_type=jnp.float32,
        precision=("default", "highest"),
        activation="relu",
    )
    exact = np.maximum(np.matmul(reference.wide(a), reference.wide(b)), 0)
    np.testing.assert_array_equal(reference.wide(result), exact, strict=True)


@pytest.mark.parametrize("size", list(itertools.product((0, 3), repeat=3)), ids=str)
def test_empty_products(size: tuple[int, int, int]) -> None:
    m, n, k = size
    a, b = jnp.ones((m, k), jnp.bfloat16), jnp.ones((k, n), jnp.bfloat16)
    bias, residual = _integers(n), _integers(m, n, dtype=jnp.bfloat16)
    result = gemm(a, b, bias=bias, residual=residual, activation="relu", beta=2)
    exact = reference.Formula(activation="relu", beta=2)(a, b, bias=bias, residual=residual)
    reference.assert_exact(result, exact)
    gradient = jax.grad(lambda a: jnp.sum(gemm(a, b, activation="gelu")).astype(jnp.float32))(a)
    assert gradient.shape == a.shape


TYPES = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.int8, jnp.int32, jnp.uint8, jnp.complex64)


OF_COMPLEX_NUMBERS = {"xla_backend_extra_options": ""}
"""XLA's older emitters, by which tests compile quickly, make no real number of a complex one."""


@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: t.__name__)
@pytest.mark.parametrize("preferred", [None, jnp.float32, jnp.int32, jnp.complex64], ids=str)
def test_types_are_those_of_jax_numpy(dtype: Any, preferred: Any) -> None:
    a, b = _integers(3, 4, dtype=dtype), _integers(4, 5, dtype=dtype)

    def product(f: Any) -> jax.Array:
        preferring = functools.partial(f, preferred_element_type=preferred)
        if dtype == jnp.complex64:
            preferring = jax.jit(preferring, compiler_options=OF_COMPLEX_NUMBERS)
        return preferring(a, b)

    try:
        expected = product(jnp.matmul)
    except TypeError:
        with pytest.raises(TypeError):
            product(matmul)
        return
    result = product(matmul)
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(result, expected)


def test_operands_of_different_types_are_those_of_jax_numpy() -> None:
    a, b = _integers(3, 4, dtype=jnp.bfloat16), _integers(4, 5)
    result = matmul(a, b, preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(result, jnp.matmul(a, b, preferred_element_type=jnp.float32))
    with jax.numpy_dtype_promotion("standard"):
        assert matmul(a, b).dtype == jnp.matmul(a, b).dtype
    e4m3, e5m2 = a.astype(jnp.float8_e4m3fn), b.astype(jnp.float8_e5m2)
    with pytest.raises(Exception, match="promotion"):
        matmul(e4m3, e5m2)
    assert matmul(e4m3, e5m2, preferred_element_type=jnp.bfloat16).dtype == jnp.bfloat16


def test_double_precision_stays_double() -> None:
    with jax.enable_x64(True):
        a = jnp.asarray(np.random.default_rng(0).standard_normal((4, 4)))
        bias = a[0]
        result = gemm(a, a, bias=bias, activation="tanh")
        assert result.dtype == jnp.float64
        stock = jax.jit(lambda a, bias: jnp.tanh(jnp.matmul(a, a) + bias[None]))
        np.testing.assert_array_equal(result, stock(a, bias))


def test_numpy_arrays_and_other_array_likes_are_taken() -> None:
    class Parameter:
        """What Flax's parameters are."""

        def __init__(self, value: jax.Array) -> None:
            self.value = value

        def __jax_array__(self) -> jax.Array:
            return self.value

    a, b = _integers(3, 4), _integers(4, 5)
    np.testing.assert_array_equal(gemm(np.asarray(a), Parameter(b)), a @ b)


def test_dot_general_has_the_signature_of_lax() -> None:
    a, b = _integers(3, 4, dtype=jnp.bfloat16), _integers(4, 5, dtype=jnp.bfloat16)
    numbers = (((1,), (0,)), ((), ()))
    # As Flax's linen, Flax's nnx and jnp.einsum call it.
    for result in (
        dot_general(a, b, numbers, precision=None),
        dot_general(a, b, numbers, precision="default", out_sharding=None),
        dot_general(a, b, numbers, None, jnp.float32),
        dot_general(a, b, ([[1], [0]], [[], []]), preferred_element_type=jnp.float32),
        jnp.einsum("mk,kn->nm", a, b, _dot_general=dot_general).T,
    ):
        np.testing.assert_array_equal(reference.wide(result), reference.wide(a) @ reference.wide(b))


def test_alpha_and_beta_may_be_numpy_numbers() -> None:
    a, b, c = _integers(3, 4), _integers(4, 5), _integers(3, 5)
    result = gemm(a, b, residual=c, alpha=np.float64(2), beta=np.int32(3))
    np.testing.assert_array_equal(result, 2 * (a @ b) + 3 * c)


def test_an_epilogue_is_rounded_once() -> None:
    # In bfloat16, 256 + 1 is 256: rounding the product first would lose the bias.
    a, b = jnp.full((8, 1), 256, jnp.bfloat16), jnp.ones((1, 8), jnp.bfloat16)
    bias, residual = jnp.ones(8), jnp.full((8, 8), -256, jnp.bfloat16)
    np.testing.assert_array_equal(gemm(a, b, bias=bias, residual=residual), np.ones((8, 8)))


def test_inside_scan_while_and_cond() -> None:
    a = jnp.eye(4) * 2

    def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return gemm(x, a, activation="relu"), None

    scanned, _ = jax.jit(lambda x: lax.scan(step, x, None, length=3))(jnp.eye(4))
    np.testing.assert_array_equal(scanned, np.eye(4) * 8)
    looped = lax.while_loop(lambda x: x[0, 0] < 100, lambda x: gemm(x, a), jnp.eye(4))
    np.testing.assert_array_equal(looped, np.eye(4) * 128)
    chosen = lax.cond(True, lambda x: gemm(x, a), lambda x: x, jnp.eye(4))
    np.testing.assert_array_equal(chosen, a)
    gradient = jax.grad(lambda x: jnp.sum(lax.scan(step, x, None, length=3)[0]))(jnp.ones((4, 4)))
    np.testing.assert_array_equal(gradient, np.full((4, 4), 8))


def test_a_donated_operand() -> None:
    a, b = _integers(8, 8), _integers(8, 8, seed=1)
    expected = np.asarray(a) @ np.asarray(b) + np.asarray(a)
    result = jax.jit(lambda a, b: gemm(a, b, residual=a), donate_argnums=0)(a, b)
    np.testing.assert_array_equal(result, expected)


def test_several_threads_trace_at_once() -> None:
    def traced(i: int) -> jax.Array:
        a = _integers(4 + i % 5, 8, seed=i)
        b = _integers(8, 6, seed=i)
        target = pallas_gemm.target("h200" if i % 2 else "b200")
        with target:
            return jax.jit(
                lambda a, b: jax.grad(lambda a: jnp.sum(gemm(a, b, activation="relu")))(a)
            )(a, b)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(traced, range(24)))
    for i, result in enumerate(results):
        np.testing.assert_array_equal(result, traced(i))


def test_in_shard_map() -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    a, b = _integers(8, 6), _integers(6, 5, seed=1)

    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.psum(jnp.sum(gemm(a, b, activation="relu")), "x")

    for check in (True, False):
        mapped = jax.shard_map(
            loss,
            mesh=mesh,
            in_specs=(jax.P("x"), jax.P()),
            out_specs=jax.P(),
            check_vma=check,
        )
        value, gradients = jax.value_and_grad(mapped, argnums=(0, 1))(a, b)
        expected = jax.value_and_grad(lambda a, b: jnp.sum(jax.nn.relu(a @ b)), (0, 1))(a, b)
        np.testing.assert_array_equal(value, expected[0])
        for gradient, one in zip(gradients, expected[1], strict=True):
            np.testing.assert_array_equal(gradient, one)


def test_on_an_explicit_mesh() -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        a = jax.device_put(_integers(8, 6), jax.NamedSharding(mesh, jax.P("x", None)))
        b = jax.device_put(_integers(6, 5, seed=1), jax.NamedSharding(mesh, jax.P(None, None)))
        result = jax.jit(lambda a, b: gemm(a, b, activation="relu"))(a, b)
        assert jax.typeof(result).sharding.spec == jax.P("x", None)
        np.testing.assert_array_equal(result, jax.nn.relu(a @ b))
        whole = gemm(a, b, out_sharding=jax.P(None, None))
        assert jax.typeof(whole).sharding.spec == jax.P(None, None)


def test_exported_and_called_again() -> None:
    a = jax.ShapeDtypeStruct((8, 8), jnp.float32)

    def f(a: jax.Array, b: jax.Array) -> jax.Array:
        return gated_gemm(a, b, b)

    exported = jax.export.deserialize(jax.export.export(jax.jit(f))(a, a).serialize(vjp_order=1))
    x, y = _integers(8, 8), _integers(8, 8, seed=1)
    np.testing.assert_array_equal(exported.call(x, y), f(x, y))
    gradient = jax.grad(lambda x: jnp.sum(exported.call(x, y)))(x)
    np.testing.assert_allclose(gradient, jax.grad(lambda x: jnp.sum(f(x, y)))(x), rtol=1e-6)


MORE = 12_000
"""Calls of Python functions, some 10 ms of them: to decide on a product takes 8,000."""


def _python_calls(function: Any, *args: Any) -> int:
    """Counts calls of Python functions: time that no other work on the computer adds to."""
    function(*args)
    count = 0

    def on_event(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(on_event)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("size", [4104, 8192], ids=["left to XLA", "a kernel"])
def test_a_configured_call_takes_little_more_python_than_jaxs_own(size: int) -> None:
    a = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((size,), jnp.float32)

    def ours(a: Any, b: Any, bias: Any) -> jax.Array:
        return gemm(a, b, bias=bias, activation="gelu")

    def jaxs(a: Any, b: Any, bias: Any) -> jax.Array:
        return jax.nn.gelu(jnp.matmul(a, b) + bias.astype(jnp.bfloat16)[None])

    def trace(function: Any) -> Any:
        # A new function each time, so that nothing is answered from a cache of JAX's.
        return jax.jit(functools.partial(function)).trace(a, a, bias)

    def lower(function: Any) -> None:
        trace(function).lower(lowering_platforms=("cuda",))

    def decide(function: Any) -> None:
        # To lower a kernel is JAX's work; ours is to trace the call, and to decide on it.
        pallas_gemm.explain(functools.partial(function), a, a, bias)

    with pallas_gemm.target("h200"):
        by_kernel = pallas_gemm.explain(ours, a, a, bias).plan is not None
        assert by_kernel == (size == 8192)
        assert _python_calls(trace, ours) < _python_calls(trace, jaxs) + MORE
        if by_kernel:
            assert _python_calls(decide, ours) < _python_calls(trace, jaxs) + MORE
        else:
            assert _python_calls(lower, ours) < _python_calls(lower, jaxs) + MORE


@pytest.mark.parametrize(
    ("operand", "result"),
    [
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.float32, jnp.float32),
        (jnp.float8_e4m3fn, jnp.float16),
        (jnp.int8, jnp.int32),
    ],
    ids=lambda t: t.__name__,
)
def test_results_of_odd_rows_are_lowered_in_every_type(operand: Any, result: Any) -> None:
    a = jax.ShapeDtypeStruct((1001, 1001), operand)

    def product(a: Any, b: Any) -> jax.Array:
        return gemm(a, b, preferred_element_type=result, implementation="hopper")

    with pallas_gemm.target("h200"):
        lowered = jax.jit(product).trace(a, a).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
