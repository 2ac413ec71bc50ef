"""Functions as epilogues: derivatives, `vmap`, meshes, export and remat, beside JAX's own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_gemm import explain, gated_gemm, gemm, target
from pallas_gemm.op import function_of_sums, linear
from tests import reference

pytestmark = pytest.mark.usefixtures("as_users_write")

F32, BF16 = jnp.float32, jnp.bfloat16
M, N, K = 24, 40, 32


def _kept(s: Any, bias: Any) -> Any:
    z = s + bias
    return jax.nn.gelu(z), z


def _normed(s: Any, residual: Any, scale: Any) -> Any:
    z = s * scale + residual
    return {"z": z, "squares": jnp.sum(z * z, -1), "largest": jnp.max(jnp.abs(z))}


def _linear(s: Any, v: Any) -> Any:
    return s * 2 + v[:, None]


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "kept": (_kept, ((N,),)),
    "normed": (_normed, ((M, N), ())),
    "linear": (_linear, ((M,),)),
}


def _drawn(*shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape).astype(F32)) for shape in shapes]


def _ours(function: Any) -> Callable[..., Any]:
    return lambda a, b, *x: gemm(a, b, epilogue=function, operands=x)


def _jaxs(function: Any) -> Callable[..., Any]:
    return lambda a, b, *x: function(jnp.matmul(a, b), *x)


def _check(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", FUNCTIONS.values(), ids=FUNCTIONS)
def test_values_and_derivatives_are_jaxs(case: Any) -> None:
    function, shapes = case
    operands = _drawn((M, K), (K, N), *shapes)
    changes = [jnp.cos(x) for x in operands]
    ours, jaxs = _ours(function), _jaxs(function)
    _check(jax.jit(ours)(*operands), jaxs(*operands))
    _check(
        jax.jvp(ours, tuple(operands), tuple(changes)),
        jax.jvp(jaxs, tuple(operands), tuple(changes)),
    )

    def loss(f: Any) -> Any:
        return lambda *x: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(f(*x)))

    every = tuple(range(len(operands)))
    _check(jax.grad(loss(ours), every)(*operands), jax.grad(loss(jaxs), every)(*operands))
    # Second derivatives, along one direction.
    twice = [
        jax.jvp(jax.grad(loss(f), 1), tuple(operands), tuple(changes))[1] for f in (ours, jaxs)
    ]
    np.testing.assert_allclose(*twice, rtol=2e-4, atol=2e-4)


def _swiglu(gate: Any, up: Any, bias: Any) -> Any:
    z = jax.nn.silu(gate + bias) * up
    return z, jnp.sum(z * z, -1), up


def _gated(a: Any, gate: Any, up: Any, *x: Any) -> Any:
    return gated_gemm(a, gate, up, epilogue=_swiglu, operands=x)


def _gated_by_jax(a: Any, gate: Any, up: Any, *x: Any) -> Any:
    return _swiglu(jnp.matmul(a, gate), jnp.matmul(a, up), *x)


def test_a_function_of_both_sums_of_a_gated_product_and_its_derivatives() -> None:
    # Larger ones have gradients of 1000, of which the last place is more than the tolerance.
    operands = [x * 0.25 for x in _drawn((M, K), (K, N), (K, N), (N,))]
    changes = tuple(jnp.cos(x) for x in operands)
    _check(jax.jit(_gated)(*operands), _gated_by_jax(*operands))
    _check(
        *(jax.jvp(f, tuple(operands), changes) for f in (_gated, _gated_by_jax)),
    )
    for arguments in ((0, 1, 2, 3), (0,), (2,), (3,)):
        found, expected = (
            jax.grad(lambda *x, f=f: sum(jnp.sum(jnp.sin(y)) for y in f(*x)), arguments)(*operands)
            for f in (_gated, _gated_by_jax)
        )
        _check(found, expected)


@pytest.mark.parametrize(
    "axes", [(0, None, None, None), (None, 0, None, 0), (1, 1, 0, None), (None, None, None, 0)]
)
def test_vmap_of_a_function_of_both_sums(axes: tuple[Any, ...]) -> None:
    shapes = [
        s if axis is None else (*s[:axis], 3, *s[axis:])
        for axis, s in zip(axes, ((M, K), (K, N), (K, N), (N,)), strict=True)
    ]
    operands = _drawn(*shapes)
    _check(*(jax.vmap(f, axes)(*operands) for f in (_gated, _gated_by_jax)))


def test_the_gradient_of_a_gated_products_left_operand_is_one_sum_of_products() -> None:
    operands = _drawn((M, K), (K, N), (K, N), (N,))
    text = str(jax.make_jaxpr(jax.grad(lambda *x: jnp.sum(_gated(*x)[0])))(*operands))
    assert text.count("pallas_gemm_sum") == 1


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (1, 0, 0), (None, None, 0)])
@pytest.mark.parametrize("inner", [False, True])
def test_vmap(axes: tuple[Any, ...], inner: bool) -> None:
    lead = {0: lambda s: (3, *s), 1: lambda s: (s[0], 3, *s[1:]), None: lambda s: s}
    shapes = [lead[axis](s) for axis, s in zip(axes, ((M, K), (K, N), (N,)), strict=True)]
    operands = _drawn(*shapes)

    def mapped(f: Any) -> Any:
        def summed(*x: Any) -> Any:
            return sum(map(jnp.sum, f(*x)))

        return jax.vmap(jax.grad(summed, (0, 1, 2)) if inner else f, axes)

    _check(mapped(_ours(_kept))(*operands), mapped(_jaxs(_kept))(*operands))


def test_the_derivative_keeps_the_sums_once_and_rounds_no_result_twice() -> None:
    a, b, bias = (x.astype(BF16) for x in _drawn((M, K), (K, N), (N,)))

    def f(a: Any, b: Any, bias: Any) -> Any:
        return gemm(a, b, epilogue=lambda s, x: jax.nn.gelu(s + x).astype(BF16), operands=(bias,))

    alone = jax.jit(f)(a, b, bias)
    under, pull = jax.vjp(f, a, b, bias)
    # The same product and the same function: the result under differentiation has the same bits.
    np.testing.assert_array_equal(np.asarray(alone, F32), np.asarray(under, F32))
    kept = [x for x in jax.tree.leaves(pull) if getattr(x, "shape", None) == (M, N)]
    assert [x.dtype for x in kept] == [BF16]


@pytest.mark.parametrize(
    ("function", "moved", "needs"),
    [
        (lambda s, x: s * 2 + x, (True, True), False),
        (lambda s, x: s * x, (True, False), False),
        (lambda s, x: s * x, (True, True), True),
        (lambda s, x: jnp.tanh(s) + x, (True, False), True),
        (lambda s, x: jnp.tanh(s) + x, (False, True), False),
    ],
)
def test_the_sums_are_kept_only_where_the_derivative_needs_them(
    function: Any, moved: tuple[bool, ...], needs: bool
) -> None:
    types = [jax.ShapeDtypeStruct((M, N), F32)] * 2
    assert function_of_sums.traced(function, *types).derivative_needs_sums(moved) == needs


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(F32, F32), (BF16, BF16), (jnp.float16, F32), (jnp.float8_e4m3fn, BF16)],
)
def test_the_sums_are_kept_in_a_type_that_holds_them(dtype: Any, kept: Any) -> None:
    assert linear.kept_sums_dtype(dtype) == kept


@pytest.mark.usefixtures("empty_kernels")
def test_a_program_for_an_h200_has_one_kernel_for_all_results() -> None:
    shapes = [jax.ShapeDtypeStruct(s, BF16) for s in ((512, 512), (512, 512), (512,))]

    def f(a: Any, b: Any, bias: Any) -> Any:
        out, z = gemm(a, b, epilogue=lambda s, x: (jnp.tanh(s + x), s), operands=(bias,))
        return out.astype(BF16), z.astype(BF16)

    known = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    with target("h200"):
        exported = jax.export.export(jax.jit(f), platforms=["cuda"], disabled_checks=[known])(
            *shapes
        )
    text = exported.mlir_module()
    assert text.count("mosaic_gpu_v2") == 1
    assert "dot_general" not in text


def test_on_a_mesh_and_under_remat() -> None:
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    operands = _drawn((M, K), (K, N), (N,))
    split = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(operands, (P("d"), P(), P()), strict=True)
    ]
    # JAX's own is compiled, too: as one program, XLA computes a hyperbolic tangent otherwise.
    _check(jax.jit(_ours(_kept))(*split), jax.jit(_jaxs(_kept))(*operands))

    def loss(f: Any) -> Any:
        again = jax.checkpoint(f, policy=jax.checkpoint_policies.nothing_saveable)
        return lambda *x: sum(map(jnp.sum, again(*x)))

    found = jax.jit(jax.grad(loss(_ours(_kept)), (0, 1, 2)))(*split)
    _check(found, jax.jit(jax.grad(loss(_jaxs(_kept)), (0, 1, 2)))(*operands))


def test_in_shard_map() -> None:
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    operands = _drawn((M, K), (K, N), (N,))
    each = jax.shard_map(
        _ours(_kept), mesh=mesh, in_specs=(P("d"), P(), P()), out_specs=(P("d"), P("d"))
    )
    _check(jax.jit(each)(*operands), _jaxs(_kept)(*operands))


@pytest.mark.parametrize(("k", "n"), [(1024, 1024), (1023, 1024), (1024, 1001)], ids=str)
def test_a_kernel_that_needs_operands_padded_computes_the_function(k: int, n: int) -> None:
    shapes = [jax.ShapeDtypeStruct(shape, BF16) for shape in ((2048, k), (k, n))]
    bias = jax.ShapeDtypeStruct((n,), F32)
    with target("h200"):
        explained = explain(_ours(_kept), *shapes, bias)
    [product] = explained.products
    assert product.implementation == "hopper"
    assert product.plan is not None
    assert bool(product.plan.realigned.steps) == ((k, n) != (1024, 1024))
    # A factor may be turned, and padded along k. Results may have any length.
    assert product.problem.epilogue.program is not None
    assert "the rest of the epilogue by XLA" not in str(explained)


@pytest.mark.each_value
@pytest.mark.parametrize("layout", ["NN", "TN", "TT", "NT"])
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_factors_may_be_stored_in_any_layout(batch: Any, dtype: Any, layout: str) -> None:
    m, n, k = 40, 48, 80
    left, right = (side == "T" for side in layout)
    rng = np.random.default_rng(0)
    a = reference.integers(rng, (*batch, *((k, m) if left else (m, k))), dtype)
    b = reference.integers(rng, (*batch, *((n, k) if right else (k, n))), dtype)
    x = reference.integers(rng, (n,), jnp.float32)
    # Sums of int8 are not reduced.
    second = (lambda s: 2 * s) if dtype == jnp.int8 else (lambda s: jnp.max(s, -1))
    found, other = gemm(
        *(a, b),
        epilogue=lambda s, x: (s + jnp.broadcast_to(x, s.shape), second(s)),
        operands=(x,),
        transpose_a=left,
        transpose_b=right,
        implementation="interpret",
    )
    exact = reference.Formula(transpose_a=left, transpose_b=right)(a, b)
    reference.assert_exact(found, exact + np.asarray(x))
    reference.assert_exact(other, 2 * exact if dtype == jnp.int8 else exact.max(-1))
