"""Products on several GPUs, with the kernels: shared out by XLA, and by kernels that send rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_gemm import all_gather_gemm, explain_on_mesh, gemm, gemm_reduce_scatter, reduce_in
from tests import reference

pytestmark = pytest.mark.gpu("hopper")

SIZE = 2048
TERMS = 64
"""How many terms of a sum are not zero, so that bfloat16 holds every partial sum."""
REPEATS = 5


def _mesh(*sizes: int) -> Mesh:
    count = int(np.prod(sizes))
    devices = np.array(jax.devices()[:count]).reshape(sizes)
    return Mesh(devices, ("y", "x")[-len(sizes) :], axis_types=(AxisType.Auto,) * len(sizes))


@pytest.fixture(scope="module", params=["line", "square"])
def mesh(request: pytest.FixtureRequest) -> Mesh:
    """All GPUs of the computer along one axis, or two of them along the second of two axes."""
    count = len(jax.devices())
    if request.param == "line" and count >= 2:
        return _mesh(count)
    if request.param == "square" and count >= 4:
        return _mesh(2, 2)
    pytest.skip(f"{count} GPUs are too few")


def _integers(mesh: Mesh, spec: P, seed: int) -> jax.Array:
    x = reference.integers(np.random.default_rng(seed), (SIZE, SIZE), jnp.bfloat16)
    return jax.device_put(x, NamedSharding(mesh, spec))


def _sparse(mesh: Mesh, shape: tuple[int, int], spec: P, full: np.ndarray, axis: int) -> jax.Array:
    """Returns fresh small integers; along an axis only some are not zero."""
    values = np.random.default_rng().integers(-3, 4, shape) * np.expand_dims(full, 1 - axis)
    return jax.device_put(jnp.asarray(values, jnp.bfloat16), NamedSharding(mesh, spec))


def _some(length: int) -> np.ndarray:
    return np.random.default_rng().permutation(np.arange(length) < TERMS)


def _product(a: jax.Array, b: jax.Array, full: np.ndarray) -> np.ndarray:
    """Multiplies in float64 what is not zero."""
    return reference.wide(a)[:, full] @ reference.wide(b)[full]


@pytest.mark.parametrize(
    ("a_spec", "b_spec"),
    [(P("x", None), P()), (P(), P(None, "x")), (P(None, "x"), P("x", None))],
    ids=["rows", "columns", "contracted"],
)
def test_a_shared_product(mesh: Mesh, a_spec: P, b_spec: P) -> None:
    """Of full operands where sums travel in float32, and of sparse ones in the result's type."""
    full = _some(SIZE)
    a, b = _integers(mesh, a_spec, 0), _integers(mesh, b_spec, 1)
    sparse_a = _sparse(mesh, (SIZE, SIZE), a_spec, full, 1)
    sparse_b = _sparse(mesh, (SIZE, SIZE), b_spec, full, 0)
    with reduce_in(jnp.float32):
        assert explain_on_mesh(gemm, a, b).implementation == "hopper"
        reference.assert_exact(jax.jit(gemm)(a, b), reference.wide(a) @ reference.wide(b))
    assert explain_on_mesh(gemm, sparse_a, sparse_b).implementation == "hopper"
    reference.assert_exact(jax.jit(gemm)(sparse_a, sparse_b), _product(sparse_a, sparse_b, full))


@pytest.mark.parametrize("shape", [(1024, 512, 512), (4096, 2048, 1280), (8192, 4096, 3584)])
@pytest.mark.parametrize("sums", [jnp.float32, jnp.bfloat16])
def test_scattered_sums_are_exact(mesh: Mesh, shape: tuple[int, int, int], sums: Any) -> None:
    """As `shard_map` asks for them, and as XLA does."""
    m, k, n = shape
    with reduce_in(sums):
        mapped = jax.jit(
            jax.shard_map(
                lambda a, b: gemm_reduce_scatter(a, b, "x"),
                mesh=mesh,
                in_specs=(P(None, "x"), P("x", None)),
                out_specs=P("x", None),
            )
        )
        shared = jax.jit(gemm, out_shardings=NamedSharding(mesh, P("x", None)))
        for _ in range(REPEATS):
            full = _some(k)
            a = _sparse(mesh, (m, k), P(None, "x"), full, 1)
            b = _sparse(mesh, (k, n), P("x", None), full, 0)
            exact = _product(a, b, full)
            for f in (mapped, shared):
                reference.assert_exact(f(a, b), exact)


def test_scattered_sums_of_integers_are_exact(mesh: Mesh) -> None:
    """Beyond what float32 holds."""
    rng = np.random.default_rng()
    specs = (P(None, "x"), P(None, "x"))
    a, b = (
        jax.device_put(
            jnp.asarray(rng.integers(100, 128, (SIZE, SIZE)), jnp.int8), NamedSharding(mesh, spec)
        )
        for spec in specs
    )

    def local(a: jax.Array, b: jax.Array) -> jax.Array:
        return gemm_reduce_scatter(a, b, "x", transpose_b=True, preferred_element_type=jnp.int32)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("x"))
    exact = reference.wide(a) @ reference.wide(b).T
    assert exact.max() > 2**24
    np.testing.assert_array_equal(np.asarray(jax.jit(mapped)(a, b)), exact.astype(np.int64))


@pytest.mark.parametrize("shape", [(1024, 512, 512), (4096, 2048, 2560), (8192, 4096, 3584)])
def test_gathered_rows_are_exact(mesh: Mesh, shape: tuple[int, int, int]) -> None:
    """The gradient of the weights shows the rows themselves."""
    m, k, n = shape
    specs = (P("x", None), P(None, "x"))
    gathering = jax.shard_map(
        lambda a, b: all_gather_gemm(a, b, "x"), mesh=mesh, in_specs=specs, out_specs=specs[1]
    )

    @jax.jit
    def run(a: jax.Array, b: jax.Array, g: jax.Array) -> Any:
        result, pull = jax.vjp(gathering, a, b)
        return result, pull(g)[1]

    for _ in range(REPEATS):
        full, rows = _some(k), _some(m)
        a = _sparse(mesh, (m, k), specs[0], full, 1)
        b = _sparse(mesh, (k, n), specs[1], full, 0)
        g = _sparse(mesh, (m, n), specs[1], rows, 0)
        result, gradient = run(a, b, g)
        reference.assert_exact(result, _product(a, b, full))
        reference.assert_exact(gradient, _product(a.T, g, rows))


@pytest.mark.parametrize("f", [all_gather_gemm, gemm_reduce_scatter])
def test_float32_has_the_bits_of_operands_that_were_rounded_before(
    mesh: Mesh, f: Callable[..., jax.Array]
) -> None:
    """Rows of other devices, too."""
    gathers = f is all_gather_gemm
    spec, result = (P("x"), P(None, "x")) if gathers else (P(None, "x"), P("x"))
    local = jax.shard_map(
        lambda a, b: f(a, b, "x", transpose_b=True),
        mesh=mesh,
        in_specs=(spec, spec),
        out_specs=result,
    )
    rng, product = np.random.default_rng(0), jax.jit(local)
    whole = [reference.normal(rng, (SIZE, SIZE), jnp.float32) for _ in range(2)]
    rounded = [lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10) for x in whole]
    sharded = NamedSharding(mesh, spec)
    found, expected = (product(*jax.device_put(pair, sharded)) for pair in (whole, rounded))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_both_forward_and_backward(mesh: Mesh) -> None:
    rng = np.random.default_rng()
    specs = (P("x", None), P(None, "x"), P("x", None))
    x, w, v = (
        jax.device_put(
            reference.normal(rng, (SIZE, SIZE), jnp.bfloat16) * scale, NamedSharding(mesh, spec)
        )
        for spec, scale in zip(specs, (1.0, SIZE**-0.5, SIZE**-0.5), strict=True)
    )

    def local(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        hidden = all_gather_gemm(x, w, "x", activation="gelu")
        return gemm_reduce_scatter(hidden, v, "x")

    fused = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("x", None))

    def stock(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.gelu(x @ w) @ v

    def derived(f: Callable[..., jax.Array], *operands: Any) -> list[Any]:
        def loss(*operands: Any) -> jax.Array:
            return jnp.mean(jnp.sin(f(*operands).astype(jnp.float32)))

        return jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1, 2)))(*operands))

    with jax.default_matmul_precision("highest"):
        exact = derived(stock, *(z.astype(jnp.float32) for z in (x, w, v)))
    for ours, theirs, value in zip(
        derived(fused, x, w, v), derived(stock, x, w, v), exact, strict=True
    ):
        errors = [np.linalg.norm(reference.wide(z) - reference.wide(value)) for z in (ours, theirs)]
        assert errors[0] <= 2 * errors[1]
