"""Products with weights of few bits, of every type and group, against float64."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import pallas_gemm
from pallas_gemm import QuantizedWeight, explain, gated_gemm, gemm, grouped_gemm, projections
from pallas_gemm.call import Call
from pallas_gemm.planning.by_xla import xla
from pallas_gemm.problem import Epilogue, element_type
from tests import covering, reference

E4M3, E5M2, E2M1 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float4_e2m1fn
M, K, N, GROUP = 5, 64, 24, 16
TYPES = [jnp.int8, jnp.int4, jnp.uint4, E4M3, E5M2, E2M1]
LEFT = [jnp.bfloat16, jnp.float16, jnp.float32]


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def _left(*shape: int, dtype: Any = jnp.bfloat16, seed: int = 0) -> jax.Array:
    return reference.integers(_rng(seed), shape, dtype)


def _weights(*shape: int, dtype: Any, seed: int = 1) -> jax.Array:
    """Integers that every one of the types holds."""
    least = 0 if dtype == jnp.uint4 else -3
    return jnp.asarray(_rng(seed).integers(least, 4, shape).astype(dtype))


def _scales(*shape: int, dtype: Any = jnp.float32, seed: int = 2) -> jax.Array:
    return jnp.asarray(_rng(seed).choice([0.5, 1, 2, -0.25], shape).astype(dtype))


def _whole(x: Any, k: int) -> np.ndarray:
    """What each row of weights has of its group, `[..., k, n]`."""
    x = np.asarray(x, np.float64)
    if x.ndim < 2:
        return x
    return np.repeat(x, k // x.shape[-2], axis=-2)


def _wide(values: Any, scale: Any = 1.0, zero: Any = 0.0) -> np.ndarray:
    values, scale, zero = map(reference.wide, (values, scale, zero))
    k = values.shape[-2]
    return (values - _whole(zero, k)) * _whole(scale, k)


SHAPES = {"tensor": (), "column": (N,), "one group": (1, N), "groups": (K // GROUP, N)}
OPTIONS: dict[str, Sequence[Any]] = {
    "left": LEFT,
    "dtype": TYPES,
    "scale": tuple(SHAPES),
    "zero": (None, "as the weights", "float"),
    "transposed": (False, True),
}


@pytest.mark.parametrize("case", covering.pairs(OPTIONS, bool, 2000, strength=3), ids=str)
def test_weights_of_few_bits_are_scaled(case: covering.Case) -> None:
    left, dtype, scale, zero, transposed = (case[name] for name in OPTIONS)
    x, w = _left(M, K, dtype=left), _weights(K, N, dtype=dtype)
    scales, given, taken = _scales(*SHAPES[scale], dtype=left), {}, 0.0
    if zero is not None:
        own = dtype if zero == "as the weights" else jnp.float32
        taken = _weights(*SHAPES[scale], dtype=own, seed=3)
        given["col_zero"] = taken
    stored = w.T if transposed else w
    result = gemm(x, stored, col_scale=scales, transpose_b=transposed, **given)
    # Integers and powers of two: nothing is rounded.
    assert result.dtype == left
    exact = np.asarray(x, np.float64) @ _wide(w, scales, taken)
    reference.assert_exact(result, exact.astype(left).astype(np.float64))


def test_as_many_products_as_groups_share_the_scales_of_their_weights() -> None:
    x, w, scales = _left(4, M, K), _weights(K, N, dtype=jnp.int4), _scales(4, N)
    result = gemm(x, w, col_scale=scales, preferred_element_type="f32")
    reference.assert_exact(result, np.asarray(x, np.float64) @ _wide(w, scales))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_xla_computes_the_same_of_matrices(transposed: bool, gated: bool) -> None:
    x, w, up = _left(M, K), _record(-1 if transposed else -2), _record(-2, seed=5)
    up_values = up.values.T if transposed else up.values
    names = ("col_blocks", "up_blocks", "col_zeros", "up_zeros")
    flags = {name: gated or name.startswith("col") for name in names}
    call = Call(jnp.float32, transpose_b=transposed, epilogue=Epilogue(gated=gated, **flags))
    both = (up_values,) if gated else ()
    scales = (w.scale, up.scale, w.zero, up.zero) if gated else (w.scale, w.zero)
    result = xla.product(call, x, w.values, *both, *scales)
    sums = [np.asarray(x, np.float64) @ _stands(own) for own in (w, up)]
    reference.assert_exact(result, sums[0] * sums[1] if gated else sums[0])


@pytest.mark.parametrize("group", [None, GROUP, 32])
@pytest.mark.parametrize("dtype", ["s8", "int4", "uint4", "e4m3"])
def test_the_error_is_that_of_widened_weights(dtype: str, group: int | None) -> None:
    x = reference.normal(_rng(0), (64, 256), jnp.bfloat16)
    w = reference.normal(_rng(1), (256, 64), jnp.float32)
    how: Any = {"zero_points": True, "bits": 4} if dtype == "uint4" else {"dtype": dtype}
    made = QuantizedWeight.of(w, group=group, **how)
    stands = _wide(made.values, made.scale, 0.0 if made.zero is None else made.zero)
    exact = np.asarray(x, np.float64) @ stands
    widened = gemm(x, made.widened(jnp.bfloat16), preferred_element_type="f32")
    for out in ("f32", "bf16"):
        result = np.asarray(gemm(x, made, preferred_element_type=out), np.float64)
        bound = np.asarray(widened.astype(element_type(out)), np.float64)
        errors = [np.linalg.norm(y - exact) for y in (result, bound)]
        assert errors[0] <= 1.02 * errors[1]


@functools.cache
def _record(axis: int = -2, *, lead: tuple[int, ...] = (), zero: bool = True, seed: int = 1) -> Any:
    shape = (*lead, K // GROUP, N)
    values = _weights(*lead, K, N, dtype=jnp.uint4 if zero else jnp.int4, seed=seed)
    zeros = _weights(*shape, dtype=jnp.uint4, seed=seed + 1) if zero else None
    values = values if axis == -2 else jnp.swapaxes(values, -1, -2)
    return QuantizedWeight(values, _scales(*shape, seed=seed), zeros, axis, jnp.dtype(jnp.bfloat16))


def _stands(w: Any) -> np.ndarray:
    values = w.values if w.axis == -2 else jnp.swapaxes(w.values, -1, -2)
    return _wide(values, w.scale, 0.0 if w.zero is None else w.zero)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize(
    ("rows", "lead"), [((), ()), ((M,), ()), ((4, M), ()), ((3, M), (3,)), ((2, 3, M), (3,))]
)
def test_a_record_is_multiplied_as_what_it_stands_for(
    rows: tuple[int, ...], lead: tuple[int, ...], axis: int, zero: bool
) -> None:
    # There are as many groups as products in one of the batches: it makes no difference.
    x, w = _left(*rows, K), _record(axis, lead=lead, zero=zero)
    result = gemm(x, w, transpose_b=axis == -1, preferred_element_type="f32", activation="relu")
    reference.assert_exact(result, np.maximum(np.asarray(x, np.float64) @ _stands(w), 0))


def test_groups_that_no_kernel_has_are_widened_first() -> None:
    w = QuantizedWeight(
        _weights(24, N, dtype=jnp.int4), _scales(3, N), None, -2, jnp.dtype(jnp.bfloat16)
    )
    x = _left(M, 24)
    reference.assert_exact(
        gemm(x, w, preferred_element_type="f32"), np.asarray(x, np.float64) @ _stands(w)
    )


@pytest.mark.parametrize("zero", [False, True])
def test_gated_products_and_projections_take_records(zero: bool) -> None:
    x = _left(M, K)
    gate, up = _record(zero=zero), _record(zero=zero, seed=5)
    sums = [np.asarray(x, np.float64) @ _stands(w) for w in (gate, up)]
    result = gated_gemm(x, gate, up, activation="relu", preferred_element_type="f32")
    reference.assert_exact(result, np.maximum(sums[0], 0) * sums[1])
    words = {"gate_scale": gate.scale, "up_scale": up.scale}
    words |= {"gate_zero": gate.zero, "up_zero": up.zero} if zero else {}
    same = gated_gemm(
        *(x, gate.values, up.values), activation="relu", preferred_element_type="f32", **words
    )
    np.testing.assert_array_equal(result, same)
    for found, own in zip(projections(x, [gate, up]), sums, strict=True):
        reference.assert_exact(found, own.astype(jnp.bfloat16).astype(np.float64))
    double, both = (
        gemm(x, gate, epilogue=lambda s: (2 * s, s)),
        gated_gemm(x, gate, up, epilogue=lambda s, t: s - t),
    )
    reference.assert_exact(double[0], 2 * sums[0])
    reference.assert_exact(both, sums[0] - sums[1])


@pytest.mark.parametrize("axis", [-2, -1])
def test_einsum_and_dot_general_take_records(axis: int) -> None:
    x, w = _left(2, M, K), dataclasses.replace(_record(axis), dtype=jnp.dtype(jnp.float32))
    exact = (np.asarray(x, np.float64) @ _stands(w)).astype(jnp.bfloat16).astype(np.float64)
    own = "kn" if axis == -2 else "nk"
    for said in (f"bmk,{own}->bmn", f"bmk, {own} -> bnm", f"bmk,{own}"):
        result = pallas_gemm.einsum(said, x, w)
        assert result.dtype == jnp.bfloat16
        reference.assert_exact(result, exact.swapaxes(1, 2) if "bnm" in said else exact)
    numbers = (((2,), (axis % 2,)), ((), ()))
    reference.assert_exact(pallas_gemm.dot_general(x, w, numbers), exact)
    with pallas_gemm.target("h200"):
        asked = [explain(pallas_gemm.einsum, said, x, w).products for said in (f"bmk,{own}->bmn",)]
    assert str(asked[0][0].problem.b_dtype) == "uint4"
    square = dataclasses.replace(w, values=w.values[:, :N] if axis == -1 else w.values[:N])
    square = dataclasses.replace(square, scale=w.scale[:1], zero=w.zero[:1])
    # What is contracted are the columns: a product with what the record stands for.
    turned = {"kn": "nk", "nk": "kn"}[own]
    found = pallas_gemm.einsum(f"mk,{turned}->mn", x[0, :, :N], square)
    wide = np.asarray(x[0, :, :N], np.float64) @ _stands(square).T
    reference.assert_exact(found, wide.astype(jnp.bfloat16).astype(np.float64))


@pytest.mark.parametrize("zero", [False, True])
def test_experts_take_records(zero: bool) -> None:
    sizes = jnp.array([3, 0, 4])
    x, w, up = _left(9, K), _record(lead=(3,), zero=zero), _record(lead=(3,), zero=zero, seed=5)
    of = np.repeat([0, 2], [3, 4])
    sums = [np.einsum("mk,mkn->mn", np.asarray(x, np.float64)[:7], _stands(e)[of]) for e in (w, up)]
    result = grouped_gemm(x, w, sizes, up=up, activation="relu", preferred_element_type="f32")
    reference.assert_exact(result[:7], np.maximum(sums[0], 0) * sums[1])
    reference.assert_exact(
        pallas_gemm.ragged_dot(x, w, sizes).astype(jnp.float32)[:7],
        sums[0].astype(jnp.bfloat16).astype(np.float64),
    )


@pytest.mark.parametrize("deep", [4, 1])
@pytest.mark.parametrize("gated", [False, True])
def test_a_function_follows_experts_of_few_bits(gated: bool, deep: int) -> None:
    sizes, x, bias = jnp.array([3, 0, 4]), _left(9, K), _left(3, N, dtype=jnp.float32, seed=3)
    gate, up = (_record(lead=(3,), zero=False, seed=seed) for seed in (1, 5))
    gate, up = (dataclasses.replace(w, scale=w.scale[:, :deep]) for w in (gate, up))
    of = np.repeat([0, 2], [3, 4])

    def one(s: Any, bias: Any) -> Any:
        return jax.nn.relu(s + bias)

    def two(s: Any, t: Any, bias: Any) -> Any:
        return jax.nn.relu(s + bias) * t

    def ours(x: Any, bias: Any) -> Any:
        more = {"up": up, "epilogue": two} if gated else {"epilogue": one}
        return grouped_gemm(x, gate, sizes, operands=(bias,), **more)

    def stock(x: Any, bias: Any) -> Any:
        stands = [jnp.asarray(_stands(w)[of], jnp.float32) for w in (gate, up)]
        sums: Any = [jnp.einsum("mk,mkn->mn", x[:7].astype(jnp.float32), w) for w in stands]
        found = two(sums[0], sums[1], bias[of]) if gated else one(sums[0], bias[of])
        return jnp.pad(found, ((0, 2), (0, 0)))

    np.testing.assert_array_equal(ours(x, bias), stock(x, bias))
    wide = x.astype(jnp.float32)
    grads = [jax.grad(lambda *a, f=f: jnp.sum(f(*a)), (0, 1))(wide, bias) for f in (ours, stock)]
    jax.tree.map(np.testing.assert_array_equal, *grads)


def test_experts_of_one_group_have_zero_points_too() -> None:
    sizes, w = jnp.array([3, 0, 4]), _record(lead=(3,))
    w = dataclasses.replace(w, scale=w.scale[:, :1], zero=w.zero[:, :1])
    x = _left(7, K)
    result = grouped_gemm(x, w, sizes, preferred_element_type="f32")
    stands = _stands(w)[np.repeat([0, 2], [3, 4])]
    reference.assert_exact(result, np.einsum("mk,mkn->mn", np.asarray(x, np.float64), stands))


@pytest.mark.each_value
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("scale", [(N,), (3, N), (3, 4, N)])
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint4, E4M3], ids=lambda x: jnp.dtype(x).name)
def test_experts_of_few_bits_are_scaled(
    dtype: Any, scale: tuple[int, ...], zero: bool, transposed: bool
) -> None:
    sizes = jnp.array([3, 0, 4])
    x, w = _left(9, K), _weights(3, K, N, dtype=dtype)
    scales, zeros = _scales(*scale), _weights(*scale, dtype=dtype, seed=4) if zero else None
    stored = jnp.swapaxes(w, 1, 2) if transposed else w
    result = grouped_gemm(
        *(x, stored, sizes), col_scale=scales, col_zero=zeros, transpose_b=transposed
    )
    assert result.dtype == jnp.bfloat16
    whole = [
        np.broadcast_to(
            np.asarray(y)[..., None, :] if y.ndim < 3 else y,
            (3, y.shape[1] if y.ndim == 3 else 1, N),
        )
        for y in (scales, 0 * scales if zeros is None else zeros)
    ]
    stands = _wide(w, *whole)[np.repeat([0, 2], [3, 4])]
    exact = np.einsum("mk,mkn->mn", np.asarray(x, np.float64)[:7], stands)
    reference.assert_exact(result[:7].astype(jnp.float32), exact.astype(jnp.bfloat16).astype(float))


def test_adapters_are_trained_beside_weights_of_few_bits() -> None:
    x, w = _left(M, K, dtype=jnp.float32), _record()
    a, b = _left(K, 2, dtype=jnp.float32, seed=7), _left(2, N, dtype=jnp.float32, seed=8)
    g = _left(M, N, dtype=jnp.float32, seed=9)

    def adapted(x: Any, a: Any, b: Any, w: Any) -> jax.Array:
        return gemm(x, w, residual=gemm(gemm(x, a), b))

    stock = jnp.asarray(_stands(w), jnp.float32)
    results, pull = jax.vjp(functools.partial(adapted, w=w), x, a, b)
    expected, pull_stock = jax.vjp(lambda x, a, b: x @ stock + x @ a @ b, x, a, b)
    np.testing.assert_array_equal(results, expected)
    jax.tree.map(np.testing.assert_array_equal, pull(g), pull_stock(g))


@pytest.mark.parametrize("left", LEFT, ids=lambda x: jnp.dtype(x).name)
@pytest.mark.parametrize("grouped", [False, True])
def test_derivatives_with_respect_to_the_inputs(grouped: bool, left: Any) -> None:
    values, scale = _weights(K, N, dtype=jnp.int4), _scales(*((4, N) if grouped else (N,)))
    stands = jnp.asarray(_wide(values, scale), jnp.float32)
    x, t = (_left(M, K, dtype=left, seed=i) for i in (0, 1))
    # More than bfloat16 holds, where the inputs are of a type that holds it.
    g = (_left(M, N, dtype=left, seed=2) * (1 if left == jnp.bfloat16 else 257)).astype(left)

    def ours(x: Any, scale: Any = scale) -> jax.Array:
        return gemm(x, values, col_scale=scale)

    result, change = jax.jvp(ours, (x,), (t,))
    wide = np.asarray(stands, np.float64)
    for found, own in ((result, x), (change, t)):
        exact = np.asarray(own, np.float64) @ wide
        reference.assert_exact(found, exact.astype(left).astype(np.float64))
    (pulled,) = jax.vjp(ours, x)[1](g)
    assert pulled.dtype == left
    exact = np.asarray(g, np.float64) @ wide.T
    reference.assert_exact(pulled, exact.astype(left).astype(np.float64))


@pytest.mark.parametrize("grouped", [False, True])
def test_derivatives_of_any_order_and_of_scales_that_are_learned(grouped: bool) -> None:
    values, scale = _weights(K, N, dtype=jnp.int4), _scales(*((4, N) if grouped else (N,)))
    x, t = (_left(M, K, dtype=jnp.float32, seed=i) for i in (0, 1))

    def ours(x: Any, scale: Any) -> jax.Array:
        return jnp.sum(gemm(x, values, col_scale=scale) ** 2) / 2

    def stock(x: Any, scale: Any) -> jax.Array:
        groups = scale.reshape(-1, N)
        w = values.astype(jnp.float32) * jnp.repeat(groups, K // groups.shape[0], axis=0)
        return jnp.sum((x @ w) ** 2) / 2

    for of in (0, 1):
        np.testing.assert_array_equal(*(jax.grad(f, of)(x, scale) for f in (ours, stock)))
    both = (jax.jvp(jax.grad(f, (0, 1)), (x, scale), (t, scale))[1] for f in (ours, stock))
    jax.tree.map(np.testing.assert_array_equal, *both)


def test_weights_of_few_bits_have_no_gradient() -> None:
    x, w = _left(M, K), _weights(K, N, dtype=E4M3)
    with pytest.raises(
        TypeError, match="weights of float8_e4m3fn beside bfloat16 have no gradient"
    ):
        jax.grad(lambda w: gemm(x, w, col_scale=_scales(N)).sum().astype(jnp.float32))(w)
    with pytest.raises(
        TypeError, match="weights of float8_e4m3fn beside bfloat16 have no gradient"
    ):
        jax.grad(lambda w: gemm(x, w, col_scale=_scales(4, N)).sum().astype(jnp.float32))(w)


@pytest.mark.parametrize("mapped", ["x", "w", "both"])
@pytest.mark.parametrize("zero", [False, True])
def test_vmap_of_inputs_and_of_weights(mapped: str, zero: bool) -> None:
    lead = (3,) if mapped in ("w", "both") else ()
    rows = (3, M) if mapped in ("x", "both") else (M,)
    x, w = _left(*rows, K), _record(lead=lead, zero=zero)
    axes = (0 if len(rows) == 2 else None, 0 if lead else None)
    run = jax.vmap(lambda x, w: gemm(x, w, preferred_element_type="f32"), axes)
    reference.assert_exact(jax.jit(run)(x, w), np.asarray(x, np.float64) @ _stands(w))


@pytest.mark.parametrize("name", ["scale", "zero"])
def test_vmap_of_scales_or_zero_points_alone(name: str) -> None:
    x, w, several = _left(M, K), _record(), _record(lead=(3,))
    given = jnp.asarray(getattr(several, name))

    def run(own: Any) -> jax.Array:
        return gemm(x, dataclasses.replace(w, **{name: own}), preferred_element_type="f32")

    exact = [
        np.asarray(x, np.float64) @ _stands(dataclasses.replace(w, **{name: own})) for own in given
    ]
    reference.assert_exact(jax.vmap(run)(given), np.stack(exact))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("spec", [("k", None), (None, "n"), ("k", "n"), (("k", "n"), None)])
def test_weights_are_split_over_a_mesh_with_their_scales(spec: Any, zero: bool, kind: Any) -> None:
    mesh = jax.make_mesh((2, 2), ("k", "n"), axis_types=(kind,) * 2)
    x, w = _left(8, K), _record(zero=zero)
    with jax.set_mesh(mesh):
        placed = jax.tree.map(
            lambda x, own: jax.device_put(x, jax.NamedSharding(mesh, own)), w, w.specs(jax.P(*spec))
        )
        rows = jax.device_put(x, jax.NamedSharding(mesh, jax.P(None, spec[0])))
        how: Any = {"out_sharding": jax.P(None, spec[1])} if kind is AxisType.Explicit else {}
        result = jax.jit(lambda x, w: gemm(x, w, preferred_element_type="f32", **how))(rows, placed)
    if kind is AxisType.Explicit:
        assert jax.typeof(result).sharding.spec == jax.P(None, spec[1])
    reference.assert_exact(result, np.asarray(x, np.float64) @ _stands(w))


def test_experts_are_split_over_a_mesh_with_their_scales() -> None:
    mesh = jax.make_mesh((4,), ("e",), axis_types=(AxisType.Auto,))
    x, w, sizes = _left(16, K), _record(lead=(4,)), jnp.array([5, 0, 4, 7])
    placed = jax.tree.map(
        lambda x, own: jax.device_put(x, jax.NamedSharding(mesh, own)), w, w.specs(jax.P("e"))
    )
    assert placed.scale.sharding.spec == jax.P("e", None, None)
    with jax.set_mesh(mesh):
        result = jax.jit(lambda x, w: grouped_gemm(x, w, sizes, preferred_element_type="f32"))(
            x, placed
        )
    of = np.repeat(np.arange(4), np.asarray(sizes))
    exact = np.einsum("mk,mkn->mn", np.asarray(x, np.float64), _stands(w)[of])
    reference.assert_exact(result, exact)


def test_export_and_remat_of_products_with_records() -> None:
    x, w = _left(M, K, dtype=jnp.float32), _record()
    exported = jax.export.export(jax.jit(gemm))(x, w)
    again = jax.export.deserialize(exported.serialize())
    reference.assert_exact(again.call(x, w), np.asarray(x, np.float64) @ _stands(w))
    with pytest.raises(ValueError, match="pytree"):
        again.call(x, dataclasses.replace(w, axis=-1))

    @jax.checkpoint
    def layer(x: Any) -> jax.Array:
        return gemm(x, w, activation="relu")

    found = jax.grad(lambda x: layer(x).sum())(x)
    stands = jnp.asarray(_stands(w), jnp.float32)
    stock = jax.grad(lambda x: jax.nn.relu(x @ stands).sum())(x)
    np.testing.assert_array_equal(found, stock)


def test_a_program_outside_of_jit_is_compiled_once() -> None:
    x, w = _left(M, K), _record()
    gemm(x, w)
    with jax.log_compiles(False), jax.numpy_dtype_promotion("strict"):
        before = gemm(x, w)
    np.testing.assert_array_equal(before, jax.jit(gemm)(x, w))


def test_explain_names_the_types_and_the_groups() -> None:
    x, w = (
        jax.ShapeDtypeStruct((16, 4096), jnp.bfloat16),
        jax.eval_shape(
            lambda: QuantizedWeight.of(jnp.ones((4096, 14336), jnp.bfloat16), bits=4, group=128)
        ),
    )
    with pallas_gemm.target("h200"):
        [decision] = explain(gemm, x, w).products
    assert str(decision.problem.b_dtype) == "int4"
    assert decision.problem.blocks is not None
    assert (decision.problem.blocks.k, decision.problem.blocks.columns) == (128, 1)


EXPERTS, SIZES = jnp.ones((2, K, N), jnp.int8), jnp.array([2, 3])
X, W8 = jnp.ones((M, K), jnp.bfloat16), jnp.ones((K, N), jnp.int8)
W4 = jnp.ones((K, N), jnp.uint4)
RECORD = QuantizedWeight.of(jnp.ones((K, N)), bits=4, group=GROUP)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: gemm(X, W8, col_scale=jnp.ones((5, N))),
            ValueError,
            r"col_scale must be \[k / g, n / c\], .* got \[5, 24\], the nearest is \[4, 24\]",
        ),
        (
            lambda: gemm(X[:, :60], W8[:60], col_scale=jnp.ones((4, N))),
            ValueError,
            r"blocks of 16 along k, of which k=60 is no multiple: pad",
        ),
        (
            lambda: gemm(X, W4, col_zero=jnp.ones((4, N), jnp.uint4)),
            ValueError,
            "col_zero needs col_scale, the scales of the same groups",
        ),
        (
            lambda: gemm(X, W4, col_scale=jnp.ones((4, N)), col_zero=jnp.ones((4, N), jnp.int8)),
            TypeError,
            "col_zero must be of the type of b, uint4, or of bfloat16, .* got int8",
        ),
        (
            lambda: gemm(X, W4, col_scale=jnp.ones((4, N)), col_zero=jnp.ones(N, jnp.uint4)),
            ValueError,
            r"col_zero must have the shape of col_scale, \[4, 24\], got \[24\]",
        ),
        (
            lambda: gemm(
                jnp.ones((M, K), jnp.int8), W8, col_scale=jnp.ones(N), col_zero=jnp.ones(N)
            ),
            TypeError,
            "col_zero is for a right operand of few bits .* beside a .* got int8 and int8",
        ),
        (
            lambda: gemm(jnp.ones((M, K), jnp.int8), RECORD),
            TypeError,
            "a must be of a floating-point type beside a QuantizedWeight, got dtype int8",
        ),
        (
            lambda: gemm(X, RECORD, transpose_b=True),
            ValueError,
            "transpose_b=True needs a QuantizedWeight whose axis is -1, got axis=-2 in b",
        ),
        (
            lambda: gemm(X, RECORD, col_scale=jnp.ones(N)),
            ValueError,
            "col_scale must be None beside a QuantizedWeight, which has scales of its own",
        ),
        (
            lambda: gemm(X, RECORD, col_zero=jnp.ones(N)),
            ValueError,
            "the zero points of b must be None beside a QuantizedWeight",
        ),
        (
            lambda: gated_gemm(X, RECORD, W8),
            TypeError,
            "w_gate and w_up must both be a QuantizedWeight, or both arrays, got QuantizedWeight",
        ),
        (
            lambda: gated_gemm(
                *(X, W4, W4), gate_scale=jnp.ones(N), up_scale=jnp.ones(N), gate_zero=jnp.ones(N)
            ),
            ValueError,
            "gate_zero and up_zero must both be given, or neither",
        ),
        (
            lambda: grouped_gemm(
                X, EXPERTS.astype(jnp.bfloat16), SIZES, col_zero=jnp.ones((2, 4, N))
            ),
            TypeError,
            r"col_zero is for a right operand of few bits \(float4_e2m1fn, .*, uint4\) beside .*"
            " got bfloat16 and bfloat16",
        ),
        (
            lambda: grouped_gemm(X, EXPERTS, SIZES, col_scale=jnp.ones((2, 5, N))),
            ValueError,
            r"col_scale must be \[k / g, n / c\], .* got \[2, 5, 24\], the nearest is \[4, 24\]",
        ),
        (
            lambda: grouped_gemm(X, EXPERTS, SIZES, col_zero=jnp.ones((2, 4, N))),
            ValueError,
            "col_zero needs col_scale, the scales of the same groups",
        ),
        (
            lambda: grouped_gemm(X, EXPERTS, SIZES, up_zero=jnp.ones((2, 4, N))),
            ValueError,
            "up_zero has no meaning without up",
        ),
        (
            lambda: gemm(X, QuantizedWeight(W8, jnp.ones((5, N)))),
            ValueError,
            r"scale of b must be \[k / group, 24\] for values with k=64, got \[5, 24\]",
        ),
        (
            lambda: gemm(X, QuantizedWeight(W8, jnp.ones((4, N)), jnp.ones((1, N), jnp.int8))),
            ValueError,
            r"zero of b must have the shape of scale, \[4, 24\], got \[1, 24\]",
        ),
        (
            lambda: gemm(X, QuantizedWeight(W8, jnp.ones((4, N)), jnp.ones((4, N), jnp.int32))),
            TypeError,
            "zero of b must be one of bfloat16, .*, int8, got int32",
        ),
        (
            lambda: gemm(X, QuantizedWeight(W8.astype(jnp.int32), jnp.ones((4, N)))),
            TypeError,
            "values of b must be one of float4_e2m1fn, .* got int32",
        ),
    ],
)
def test_what_makes_no_sense_is_named(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("scaled", ["groups", "columns", "tensor"])
@pytest.mark.parametrize("gated", [False, True])
def test_a_function_follows_weights_of_few_bits(gated: bool, scaled: str) -> None:
    shape = {"groups": (K // 32, N), "columns": (1, N), "tensor": (1, N)}[scaled]
    x, bias = _left(M, K), _left(N, dtype=jnp.float32, seed=5)
    gate, up = (
        QuantizedWeight(
            _weights(K, N, dtype=jnp.int4, seed=seed),
            _scales(*shape, seed=seed),
            dtype=jnp.dtype(jnp.bfloat16),
        )
        for seed in (1, 3)
    )

    def one(s: Any, bias: Any) -> Any:
        return jax.nn.relu(s + bias[None]), jnp.sum(s, -1)

    def two(s: Any, t: Any, bias: Any) -> Any:
        return jax.nn.relu(s + bias[None]) * t

    def ours(x: Any, bias: Any) -> Any:
        if gated:
            return gated_gemm(x, gate, up, epilogue=two, operands=(bias,))
        return gemm(x, gate, epilogue=one, operands=(bias,))

    def stock(x: Any, bias: Any) -> Any:
        sums: Any = [
            x.astype(jnp.float32) @ jnp.asarray(_stands(w), jnp.float32) for w in (gate, up)
        ]
        return two(sums[0], sums[1], bias) if gated else one(sums[0], bias)

    jax.tree.map(np.testing.assert_array_equal, ours(x, bias), stock(x, bias))
    many, biases = _left(3, M, K, seed=7), _left(3, N, dtype=jnp.float32, seed=8)
    for axes in ((0, None), (None, 0), (0, 0)):
        each = zip((x, bias), (many, biases), axes, strict=True)
        given = [y if axis is None else ys for y, ys, axis in each]
        found, expected = (jax.vmap(f, axes)(*given) for f in (ours, stock))
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    change, expected = (jax.jvp(f, (x, bias), (x, bias))[1] for f in (ours, stock))
    jax.tree.map(np.testing.assert_array_equal, change, expected)
    grads = [
        jax.grad(lambda x, bias, f=f: jnp.sum(jax.tree.leaves(f(x, bias))[0]), (0, 1))(x, bias)
        for f in (ours, stock)
    ]
    jax.tree.map(np.testing.assert_array_equal, *grads)


@pytest.mark.parametrize("mapped", [False, True])
def test_vmap_of_weights_with_a_function(mapped: bool) -> None:
    x, w = _left(3, M, K), _record(lead=(3,), zero=False)
    x = x if mapped else x[0]

    def f(x: Any, w: Any) -> Any:
        return gemm(x, w, epilogue=jax.nn.relu)

    found = jax.vmap(f, (0 if mapped else None, 0))(x, w)
    wide = np.asarray(x, np.float64) @ _stands(w)
    reference.assert_exact(found, np.maximum(wide, 0))


def test_a_function_is_computed_by_the_kernel_of_few_bits() -> None:
    x = jax.ShapeDtypeStruct((16, 512), jnp.bfloat16)

    def f(x: Any) -> Any:
        w = QuantizedWeight.of(jnp.ones((512, 256), jnp.bfloat16), bits=4, group=128)
        return gemm(x, w, epilogue=lambda s: jax.nn.gelu(s).astype(jnp.bfloat16))

    with pallas_gemm.target("h200"):
        [decision] = explain(f, x).products
    assert decision.implementation == "hopper"
    assert str(decision.problem.b_dtype) == "int4"
    assert decision.problem.epilogue.program is not None


def test_experts_without_columns_have_zero_points_too() -> None:
    values, scales = jnp.ones((4, 8, 0), jnp.int8), jnp.ones((4, 1, 0))
    record = QuantizedWeight(values, scales, scales)
    assert grouped_gemm(jnp.ones((5, 8)), record, jnp.array([1, 0, 3, 1])).shape == (5, 0)
