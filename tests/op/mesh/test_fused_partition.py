"""Functions as epilogues on meshes: each device runs the program on its own part."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_gemm import gated_gemm, gemm

F32, BF16 = jnp.float32, jnp.bfloat16
M, N, K = 24, 40, 32

pytestmark = [
    pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices"),
    pytest.mark.usefixtures("as_users_write"),
]


def _all(s: Any, bias: Any, residual: Any, scale: Any) -> Any:
    z = jax.nn.gelu(s * scale[:, None] + bias) + residual
    return {
        "z": z,
        "rows": jnp.sum(z * z, -1),
        "largest of columns": jnp.max(z, -2),
        "smallest": jnp.min(z),
        "loss": jax.nn.logsumexp(z, -1),
    }


def _normed(s: Any, bias: Any, residual: Any, scale: Any) -> Any:
    z = s + residual + scale[:, None]
    return z * jax.lax.rsqrt(jnp.mean(z * z, -1, keepdims=True)) * bias


def _reduced(s: Any, bias: Any, residual: Any, scale: Any) -> Any:
    return jnp.sum((s + bias) * residual, -1) * scale, jnp.sum(s, 0)


def _placed(s: Any, bias: Any, residual: Any, scale: Any) -> Any:
    z = s * scale[:, None] + residual
    # A number of columns have the largest value.
    return jnp.argmin(z, -1), jnp.argmax(jnp.minimum(s, 2) * 0 + jnp.round(bias), -1)


FUNCTIONS = {"all": _all, "normed": _normed, "reduced": _reduced, "placed": _placed}
# How a, b, the bias, the residual and the scales of rows are split.
SPLITS = {
    "rows": (P("x"), P(), P(), P("x"), P("x")),
    "columns": (P(), P(None, "x"), P("x"), P(None, "x"), P()),
    "both": (P("x"), P(None, "y"), P("y"), P("x", "y"), P("x")),
    "k": (P(None, "x"), P("x"), P(), P(), P()),
    "rows and k": (P("x", "y"), P("y"), P(), P("x"), P()),
    "disagreeing": (P("x"), P("y"), P("x"), P("y", "x"), P("y")),
    "nothing": (P(), P(), P(), P(), P()),
}
SHAPES = ((M, K), (K, N), (N,), (M, N), (M,))


def _drawn(*shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape).astype(F32)) for shape in shapes]


def _mesh(kind: Any) -> Any:
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))


def _put(mesh: Any, operands: Any, specs: Any) -> list[jax.Array]:
    return [
        jax.device_put(np.asarray(x), NamedSharding(mesh, spec))
        for x, spec in zip(operands, specs, strict=True)
    ]


def _check(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def _ours(f: Any) -> Any:
    return lambda a, b, *x: gemm(a, b, epilogue=f, operands=x)


def _jaxs(f: Any) -> Any:
    return lambda a, b, *x: f(jnp.matmul(a, b), *x)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)
def test_on_an_automatic_mesh(f: Any, split: str) -> None:
    operands = _drawn(*SHAPES)
    given = _put(_mesh(AxisType.Auto), operands, SPLITS[split])
    _check(jax.jit(_ours(f))(*given), _jaxs(f)(*operands))


@pytest.mark.parametrize("split", ["rows", "both", "k"])
def test_derivatives_on_an_automatic_mesh(split: str) -> None:
    operands = _drawn(*SHAPES)
    given = _put(_mesh(AxisType.Auto), operands, SPLITS[split])

    def loss(f: Any) -> Any:
        return lambda *x: sum(jnp.sum(jnp.sin(y / 50)) for y in jax.tree.leaves(f(*x)))

    every = tuple(range(5))
    found = jax.jit(jax.grad(loss(_ours(_all)), every))(*given)
    _check(found, jax.grad(loss(_jaxs(_all)), every)(*operands), 2e-4)
    changes = tuple(jnp.cos(x) for x in operands)
    _, found = jax.jit(lambda x, t: jax.jvp(_ours(_all), x, t))(tuple(given), changes)
    _check(found, jax.jvp(_jaxs(_all), tuple(operands), changes)[1], 2e-4)


@pytest.mark.parametrize("split", ["rows", "columns", "both", "k"])
def test_what_devices_do_not_divide(split: str) -> None:
    shapes = ((21, 30), (30, 37), (37,), (21, 37), (21,))
    operands = _drawn(*shapes)
    mesh = _mesh(AxisType.Auto)
    specs = SPLITS[split]

    def run(*given: Any) -> Any:
        own = [
            jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
            for x, spec in zip(given, specs, strict=True)
        ]
        return _ours(_all)(*own)

    _check(jax.jit(run)(*operands), _jaxs(_all)(*operands))


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P(("x", "y")), P("x", "y")])
def test_a_batch(spec: Any) -> None:
    shapes = ((8, M, K), (8, K, N), (8, 1, N))
    operands = _drawn(*shapes)
    given = _put(_mesh(AxisType.Auto), operands[:1], [spec]) + operands[1:]

    def f(s: Any, bias: Any) -> Any:
        z = jnp.tanh(s + bias)
        return z, jnp.sum(z, -1), jnp.max(z, 1), jax.nn.logsumexp(z, -1)

    _check(jax.jit(_ours(f))(*given), _jaxs(f)(*operands))


@pytest.mark.parametrize("specs", [(P("x"), P(), P()), (P("x"), P(None, "y"), P(None, "y"))])
def test_both_sums_of_a_gated_product(specs: Any) -> None:
    operands = _drawn((M, K), (K, N), (K, N))
    given = _put(_mesh(AxisType.Auto), operands, specs)

    def f(gate: Any, up: Any) -> Any:
        z = jax.nn.silu(gate) * up
        return z.astype(BF16), jnp.sum(z * z, -1)

    found = jax.jit(lambda *x: gated_gemm(*x, epilogue=f))(*given)
    expected = f(operands[0] @ operands[1], operands[0] @ operands[2])
    _check(found, expected)


@pytest.mark.parametrize("kind", ["shard_map", "explicit"])
@pytest.mark.parametrize("split", ["rows", "both"])
def test_where_types_say_how_arrays_are_split(kind: str, split: str) -> None:
    operands, specs = _drawn(*SHAPES), SPLITS[split]

    def f(s: Any, bias: Any, residual: Any, scale: Any) -> Any:
        z = jax.nn.gelu(s * scale[:, None] + bias[None]) + residual
        return z, jnp.sum(z, -1)

    if kind == "explicit":
        mesh = _mesh(AxisType.Explicit)
        with jax.set_mesh(mesh):
            given = _put(mesh, operands, specs)
            found = jax.jit(_ours(f))(*given)
            assert jax.typeof(found[0]).sharding.spec[0] == "x"
        _check(found, _jaxs(f)(*operands))
        return
    mesh = _mesh(AxisType.Auto)
    out = P("x", "y") if split == "both" else P("x")
    each = jax.shard_map(
        lambda *x: _ours(f)(*x)[0], mesh=mesh, in_specs=specs, out_specs=out, check_vma=False
    )
    _check(jax.jit(each)(*operands), _jaxs(f)(*operands)[0])


def test_derivatives_on_an_explicit_mesh() -> None:
    operands, specs = _drawn(*SHAPES), SPLITS["both"]

    def f(s: Any, bias: Any, residual: Any, scale: Any) -> Any:
        z = jax.nn.gelu(s * scale[:, None] + bias[None]) + residual
        return z, jnp.sum(z, -1)

    def loss(f: Any) -> Any:
        return lambda *x: sum(jnp.sum(jnp.sin(y / 50)) for y in f(*x))

    every = tuple(range(5))
    mesh = _mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        given = _put(mesh, operands, specs)
        found = jax.jit(jax.grad(loss(_ours(f)), every))(*given)
        assert [jax.typeof(x).sharding.spec for x in found[:2]] == [P("x", None), P(None, "y")]
    _check(found, jax.grad(loss(_jaxs(f)), every)(*operands), 2e-4)


@pytest.mark.parametrize("lead", [(4, 1), (1, 2), (1, 1), (4, 2)], ids=str)
def test_products_of_a_batch_that_share_an_operand(lead: tuple[int, int]) -> None:
    a, b, x = _drawn((4, 2, M, K), (4, 2, K, N), (*lead, M, N))
    split = _put(_mesh(AxisType.Auto), (a, b, x), (P("x", "y"), P("x"), P()))

    def f(s: Any, x: Any) -> Any:
        z = jnp.maximum(s, 0) + x
        return z, jnp.max(z, -1)

    def run(a: Any, b: Any, x: Any) -> Any:
        return gemm(a, b, epilogue=f, operands=(x,))

    _check(jax.jit(run)(*split), f(jnp.matmul(a, b), x))
