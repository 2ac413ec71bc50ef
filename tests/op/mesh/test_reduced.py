"""Operands and results whose types say that a sum over devices is still to be made: as in JAX."""

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import pallas_gemm
from pallas_gemm import explain
from tests import meshes, reference


def spelt(spec: Any) -> str:
    """Returns the same text in every process: that of a set depends on the order of its hashes."""
    return re.sub(r"{[^}]*}", lambda found: "".join(sorted(found[0])), str(spec))


REDUCED, UNREDUCED = P(reduced={"x"}), P(unreduced={"x"})
LEFT = [P(None, None), P("x", None), P("x", "y"), REDUCED, UNREDUCED, P(None, "y", reduced={"x"})]
RIGHT = [*LEFT[:1], P("y", None), REDUCED, UNREDUCED]
RIGHT += [P(None, "y", reduced={"x"}), P("y", None, reduced={"x"}), P(reduced={"x", "y"})]
OUT = [None, P("x", "y"), P("x", None, unreduced={"y"})]
COMBINATIONS = [
    specs
    for specs in itertools.product(LEFT, RIGHT, OUT)
    if any(spec is not None and (spec.reduced or spec.unreduced) for spec in specs)
]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    """A mesh whose arrays are split as their types say, entered."""
    explicit = meshes.make_mesh(AxisType.Explicit)
    with jax.set_mesh(explicit):
        yield explicit


def _place(seed: int, spec: P) -> jax.Array:
    """Returns eight by eight small integers of that type."""
    x = reference.integers(np.random.default_rng(seed), (8, 8), jnp.float32)
    return jax.sharding.reshard(jax.device_put(x, P(*spec.partitions)), spec)


def _outcome(f: Callable[..., Any], *args: Any) -> Any:
    """Returns types and values of results, or the type of the error that there is instead."""
    try:
        results = jax.tree.leaves(jax.jit(f)(*args))
    except Exception as error:
        return type(error)
    return [(str(jax.typeof(x)), np.asarray(jax.sharding.reshard(x, P()))) for x in results]


def _assert_same(ours: Callable[..., Any], stock: Callable[..., Any], *args: Any) -> None:
    found, expected = _outcome(ours, *args), _outcome(stock, *args)
    if isinstance(expected, type):
        assert found == expected
        return
    assert [kind for kind, _ in found] == [kind for kind, _ in expected]
    for (_, x), (_, y) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)


def _both_ways(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the result and the gradients of a function of two operands."""

    def run(a: jax.Array, b: jax.Array) -> Any:
        result, pull = jax.vjp(f, a, b)
        g = jnp.full(result.shape, 3, result.dtype)
        spec = jax.typeof(result).sharding.spec
        g = jax.sharding.reshard(g, P(*spec.partitions, reduced=spec.unreduced))
        return result, pull(g)

    return run


@pytest.mark.parametrize(("left", "right", "out"), COMBINATIONS, ids=spelt)
@pytest.mark.usefixtures("mesh")
def test_every_combination(left: P, right: P, out: P | None) -> None:
    options = {} if out is None else {"out_sharding": out}
    ours, stock = (
        _both_ways(functools.partial(f, **options)) for f in (pallas_gemm.matmul, jnp.matmul)
    )
    _assert_same(ours, stock, _place(0, left), _place(1, right))


def _einsum(module: Any) -> Callable[..., jax.Array]:
    return lambda a, b: module.einsum("ij,jk->ik", a, b)


NUMBERS = (((1,), (0,)), ((), ()))
FUNCTIONS = {
    "gemm": (pallas_gemm.gemm, jnp.matmul),
    "dot_general": (
        lambda a, b: pallas_gemm.dot_general(a, b, NUMBERS),
        lambda a, b: lax.dot_general(a, b, NUMBERS),
    ),
    "einsum": (_einsum(pallas_gemm), _einsum(jnp)),
    "projections": (
        lambda a, b: sum(pallas_gemm.projections(a, [b, b])),
        lambda a, b: a @ b + a @ b,
    ),
    "gated": (
        lambda a, b: pallas_gemm.gated_gemm(a, b, b, activation=None),
        lambda a, b: (a @ b) * (a @ b),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("left", "right"), [(P("x", None), REDUCED), (REDUCED, P(None, "x"))], ids=spelt
)
@pytest.mark.usefixtures("mesh")
def test_every_function(name: str, left: P, right: P) -> None:
    ours, stock = map(_both_ways, FUNCTIONS[name])
    _assert_same(ours, stock, _place(0, left), _place(1, right))


def _accumulated(multiply: Callable[..., jax.Array], w: jax.Array, xs: jax.Array) -> jax.Array:
    """Adds up gradients of weights batch by batch, and reduces them once, after the last one."""

    def add(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return total + jax.grad(lambda w: jnp.sum(multiply(x, w)))(w), None

    zeros = jax.sharding.reshard(jnp.zeros(w.shape, w.dtype), UNREDUCED)
    return jax.sharding.reshard(lax.scan(add, zeros, xs)[0], P())


@pytest.mark.usefixtures("mesh")
def test_gradients_that_are_accumulated_before_they_are_reduced() -> None:
    w = _place(0, REDUCED)
    xs = jax.device_put(jnp.arange(64.0).reshape(4, 2, 8), P(None, "x", None))
    found = jax.jit(functools.partial(_accumulated, pallas_gemm.matmul))(w, xs)
    np.testing.assert_array_equal(found, np.broadcast_to(xs.sum((0, 1))[:, None], (8, 8)))


@pytest.mark.parametrize(
    ("left", "right"),
    list(itertools.product([P("x"), P(), REDUCED, UNREDUCED], repeat=2)),
    ids=spelt,
)
@pytest.mark.usefixtures("mesh")
def test_inside_shard_map(left: P, right: P) -> None:
    def run(f: Callable[..., Any], a: jax.Array, b: jax.Array) -> Any:
        if right == P("x"):
            b = lax.all_gather(b, "x", axis=0, tiled=True)

        def loss(a: jax.Array, b: jax.Array) -> jax.Array:
            def add(total: jax.Array, _: None) -> tuple[jax.Array, None]:
                return total + 3 * jnp.sum(f(a, b)), None

            first = 3 * jnp.sum(f(a, b))
            total = lax.scan(add, first, length=2)[0]
            return lax.psum(total, "x") if jax.typeof(total).manual_axis_type.varying else total

        return f(a, b), *jax.grad(loss, (0, 1))(a, b)

    def gradient_spec(spec: P) -> P:
        return P(*spec.partitions, reduced=spec.unreduced, unreduced=spec.reduced)

    varies = P("x") in (left, right)
    ours, stock = (
        jax.shard_map(
            functools.partial(run, f),
            in_specs=(left, right),
            out_specs=(
                P("x") if varies else P(),
                gradient_spec(left),
                gradient_spec(right),
            ),
        )
        for f in (pallas_gemm.matmul, jnp.matmul)
    )
    _assert_same(ours, stock, _place(0, left), _place(1, right))


@pytest.mark.usefixtures("mesh")
def test_who_computes_it_is_explained() -> None:
    explained = str(explain(pallas_gemm.matmul, _place(0, P("x", None)), _place(1, REDUCED)))
    assert "says that it is reduced, or unreduced" in explained
