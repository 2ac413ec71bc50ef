"""Derivatives of programs on a mesh, not inside a `jit` of their own: as those of `jnp.matmul`."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from pallas_gemm import gated_gemm, gemm, matmul
from tests import covering, meshes, reference

Function = Callable[..., Any]


def _loss(f: Function) -> Function:
    return lambda x, w: jnp.sum(jnp.square(f(x, w)))


def _both(f: Function) -> Function:
    def run(x: jax.Array, w: jax.Array) -> Any:
        result, pull = jax.vjp(f, x, w)
        return result, pull(result)

    return run


def _linearized(f: Function) -> Function:
    def run(x: jax.Array, w: jax.Array) -> Any:
        result, change = jax.linearize(f, x, w)
        return result, change(x, w)

    return run


def _transposed(f: Function) -> Function:
    return lambda x, w: jax.linear_transpose(lambda x: f(x, w), x)(f(x, w))


DERIVATIVES: dict[str, Callable[[Function], Function]] = {
    "grad": lambda f: jax.grad(_loss(f), (0, 1)),
    "value_and_grad": lambda f: jax.value_and_grad(_loss(f), (0, 1)),
    "vjp": _both,
    "linearize": _linearized,
    "transpose": _transposed,
    "hessian": lambda f: jax.hessian(_loss(f)),
}

WRAPPERS: dict[str, Callable[[Function], Function]] = {
    "none": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x, w: lax.scan(lambda x, _: (f(x, w), None), x, length=2)[0],
    "cond": lambda f: lambda x, w: lax.cond(jnp.array(True), f, lambda x, w: 2 * f(x, w), x, w),
}

CHOICES = {
    "kind": ("auto", "explicit", "explicit, entered", "shard_map"),
    "wrapper": tuple(WRAPPERS),
    "derivative": tuple(DERIVATIVES),
}


def _outcome(f: Function, *args: Any) -> Any:
    """Returns what there is on the host, or None where JAX refuses the program."""
    try:
        return jax.tree.leaves(jax.device_get(f(*args)))
    except Exception:
        return None


def _numbers() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x, w = (reference.integers(rng, (4, 4), jnp.float32) / 4 for _ in range(2))
    return x, w


@functools.cache
def _expected(name: str, wrapper: str) -> list[np.ndarray]:
    """Returns a derivative of JAX's own product on one device; only a loop's is another one."""
    program = WRAPPERS[wrapper](jnp.matmul)
    return jax.tree.leaves(jax.device_get(jax.jit(DERIVATIVES[name](program))(*_numbers())))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Draws the cases of a test: where kind, wrapper and derivative meet by two, or all."""
    strength = {test_any_two_choices: 2, test_every_derivative_of_every_program: 3}
    if metafunc.function in strength:
        cases = covering.pairs(CHOICES, bool, 2000, strength=strength[metafunc.function])
        metafunc.parametrize("case", cases, ids=lambda case: " ".join(case.values()))


def test_any_two_choices(case: covering.Case) -> None:
    check(**case)


@pytest.mark.stress
def test_every_derivative_of_every_program(case: covering.Case) -> None:
    check(**case)


def check(kind: str, wrapper: str, derivative: str) -> None:
    """Compares a derivative on a mesh with that of JAX's own product on one device."""
    mesh = meshes.make_mesh(AxisType.Explicit if "explicit" in kind else AxisType.Auto)
    x, w = _numbers()
    x, w = meshes.place(mesh, x, "x", None), meshes.place(mesh, w, None, None)

    def run(f: Function) -> Any:
        program = WRAPPERS[wrapper](f)
        if kind == "shard_map":
            program = jax.shard_map(program, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
        derived = DERIVATIVES[derivative](program)
        # One operation after the other takes six times as long, and needs no more of us.
        return _outcome(derived if wrapper in ("none", "jit") else jax.jit(derived), x, w)

    with jax.set_mesh(mesh) if "entered" in kind else contextlib.nullcontext():
        found = run(matmul)
        if found is None:
            # JAX itself has no program for some whose mesh nobody entered.
            assert kind == "explicit"
            assert run(jnp.matmul) is None
            return
    expected = _expected(derivative, "scan" if wrapper == "scan" else "none")
    for ours, stock in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, stock, rtol=1e-5, atol=1e-5)


EPILOGUES: dict[str, tuple[Function, Function]] = {
    "plain": (gemm, jnp.matmul),
    "bias and residual": (
        lambda x, w: gemm(x, w, bias=w[0], residual=jnp.sin(x @ w), beta=0.5),
        lambda x, w: x @ w + w[0][None] + 0.5 * jnp.sin(x @ w),
    ),
    "relu": (
        lambda x, w: gemm(x, w, bias=w[0], activation="relu"),
        lambda x, w: jax.nn.relu(x @ w + w[0][None]),
    ),
    "silu and residual": (
        lambda x, w: gemm(x, w, residual=jnp.sin(x @ w), activation="silu"),
        lambda x, w: jax.nn.silu(x @ w) + jnp.sin(x @ w),
    ),
    "gated": (lambda x, w: gated_gemm(x, w, 2 * w), lambda x, w: jax.nn.silu(x @ w) * (x @ w * 2)),
}


@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues_are_derived_and_mapped(name: str) -> None:
    mesh = meshes.make_mesh(AxisType.Explicit)
    rng = np.random.default_rng(0)
    x = meshes.place(mesh, reference.integers(rng, (2, 4, 8), jnp.float32) / 8, "x", None, None)
    w = meshes.place(mesh, reference.integers(rng, (8, 8), jnp.float32) / 8, None, "y")

    def run(f: Function) -> Any:
        one = jax.sharding.reshard(x, P())[0]
        gradient = jax.jit(jax.grad(_loss(f), (0, 1)))
        twice = jax.grad(lambda w: jnp.sum(jnp.square(jax.grad(_loss(f), 1)(one, w))))
        with jax.set_mesh(mesh):
            return (
                jax.jit(jax.vmap(f, (0, None)))(x, w),
                gradient(one, w),
                jax.jit(jax.vmap(jax.grad(_loss(f), (0, 1)), (0, None)))(x, w),
                jax.jit(twice)(w),
            )

    with jax.set_mesh(mesh):
        ours, stock = map(run, EPILOGUES[name])
    for found, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(stock), strict=True):
        assert found.sharding.spec == expected.sharding.spec
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_operands_that_the_program_closes_over(kind: AxisType) -> None:
    mesh: Mesh = meshes.make_mesh(kind)
    rng = np.random.default_rng(0)
    left, right = (np.asarray(reference.integers(rng, (8, 8), jnp.float32)) for _ in range(2))
    a, b = meshes.place(mesh, left, "x", None), meshes.place(mesh, right, None, "y")
    with jax.set_mesh(mesh):
        for run in (
            jax.jit(lambda: gemm(a, b)),
            functools.partial(jax.jit(lambda b: gemm(a, b)), b),
            functools.partial(jax.jit(lambda b: gemm(a, b)), right),
            functools.partial(jax.jit(gemm), left, b),
            functools.partial(gemm, a, right),
        ):
            np.testing.assert_array_equal(run(), left @ right)


def test_what_is_kept_for_a_gradient_is_named() -> None:
    mesh = meshes.make_mesh(AxisType.Explicit)
    x = meshes.place(mesh, jnp.ones((8, 8)), "x", None)

    def layers(w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(gemm(jnp.sin(gemm(x, w)), w, activation="gelu")))

    def products(policy: Any) -> int:
        with jax.set_mesh(mesh):
            checked = jax.checkpoint(layers, policy=policy)
            w = meshes.place(mesh, jnp.ones((8, 8)), None, None)
            return str(jax.make_jaxpr(jax.grad(checked))(w)).count("pallas_gemm_explicit[")

    kept = jax.checkpoint_policies.save_only_these_names("pallas_gemm_out")
    assert products(None) == products(kept) + 2


def test_a_loop_that_starts_with_a_zero_of_no_mesh() -> None:
    mesh, (left, right) = meshes.make_mesh(AxisType.Explicit), _numbers()
    x, w = meshes.place(mesh, left, "x", None), meshes.place(mesh, right, None, "y")

    def loss(f: Function, x: jax.Array, w: jax.Array) -> jax.Array:
        def added(total: jax.Array, _: Any) -> tuple[jax.Array, None]:
            return f(x, w) + total, None

        return jnp.sum(jnp.square(lax.scan(added, jnp.zeros((4, 4)), length=2)[0]))

    # The program enters no mesh. So the zero of the loop and its cotangent are on none.
    found = jax.jit(jax.grad(functools.partial(loss, matmul), (0, 1)))(x, w)
    expected = jax.grad(functools.partial(loss, jnp.matmul), (0, 1))(left, right)
    for ours, stock in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, stock, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", [P("x", None), P(None, "y"), P(), P("x", "y")])
@pytest.mark.parametrize("split", [(P("x"), P(None, "y")), (P("x", "y"), P("y"))])
def test_functions_are_split_as_is_asked(spec: Any, split: Any) -> None:
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    rng = np.random.default_rng(0)
    with jax.sharding.set_mesh(mesh):
        a, b = (
            jax.device_put(reference.integers(rng, own, jnp.float32), placed)
            for own, placed in zip(((8, 16), (16, 24)), split, strict=True)
        )

        def ours(a: Any, b: Any) -> Any:
            return gemm(a, b, epilogue=jnp.abs, out_sharding=spec)

        found = jax.jit(ours)(a, b)
        stock = jax.jit(lambda a, b: jnp.abs(jnp.matmul(a, b, out_sharding=spec)))(a, b)
        assert jax.typeof(found).sharding.spec == jax.typeof(stock).sharding.spec
        np.testing.assert_array_equal(found, stock)
