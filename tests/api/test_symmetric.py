"""`gram` and `symmetric_matmul`: values, derivatives, `vmap`, what is decided, and errors."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_gemm import BlackwellConfig, HopperConfig, explain, gram, symmetric_matmul, target
from schedules import raster
from tests import meshes, reference, traced

N, K = 5, 7


def _integers(*shape: int) -> jax.Array:
    return reference.integers(np.random.default_rng(len(shape)), shape, jnp.float32)


def _symmetric(*shape: int) -> jax.Array:
    x = _integers(*shape, shape[-1])
    return x + jnp.swapaxes(x, -1, -2)


X, RESIDUAL = _integers(3, N, K), _symmetric(3, N)
ALPHA, BETA = jnp.float32(0.5), jnp.float32(2)


def _exact(x: Any, residual: Any = None, alpha: Any = 1.0, beta: Any = 1.0) -> Any:
    whole = alpha * jnp.einsum("...mk,...nk->...mn", x, x, precision="highest")
    return whole if residual is None else whole + beta * residual


def _ours(x: Any, residual: Any = None, alpha: Any = 1.0, beta: Any = 1.0) -> Any:
    return gram(x, residual=residual, alpha=alpha, beta=beta)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_a_gram_matrix(transpose, implementation):
    x = jnp.swapaxes(X, -1, -2) if transpose else X
    how = {"transpose": transpose, "implementation": implementation}
    np.testing.assert_array_equal(gram(x, **how), _exact(X))
    result = gram(x[None], residual=RESIDUAL[None], alpha=0.5, beta=ALPHA, **how)
    np.testing.assert_array_equal(result, _exact(X, RESIDUAL, 0.5, 0.5)[None])


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 0, 4), (2, 4, 0), (0, 4, 3)])
def test_empty_dimensions(shape):
    x = jnp.ones(shape)
    np.testing.assert_array_equal(gram(x), x @ jnp.swapaxes(x, -1, -2))
    if len(shape) > 2:
        np.testing.assert_array_equal(jax.vmap(gram)(x), gram(x))


def test_a_residual_has_the_type_that_jax_gives_it():
    result = gram(X, residual=np.asarray(RESIDUAL, np.float64))
    np.testing.assert_array_equal(result, _exact(X, RESIDUAL))


def test_what_commutes():
    square = _exact(X)
    np.testing.assert_array_equal(symmetric_matmul(square, square), square @ square)
    cube = functools.partial(symmetric_matmul, square[0], square[0] @ square[0])
    expected = square[0] @ square[0] @ square[0] + 2 * RESIDUAL[0]
    np.testing.assert_array_equal(cube(residual=RESIDUAL[0], beta=2), expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.int8, jnp.complex64])
def test_it_is_symmetric_bit_for_bit(dtype):
    x = (30 * jax.random.normal(jax.random.key(0), (67, 129))).astype(dtype)
    for result in (gram(x), jax.jit(gram)(x), gram(x, implementation="xla")):
        np.testing.assert_array_equal(result, result.T)


def test_derivatives_in_both_modes():
    x, residual = X / 4, RESIDUAL / 4

    def loss(f: Callable[..., Any], *args: Any) -> Any:
        # Nothing about this cotangent is symmetric.
        return jnp.sum(jnp.sin(f(*args)) * _integers(3, N, N))

    args = (x, residual, ALPHA, BETA)
    every = range(len(args))

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(f: Callable[..., Any]) -> Any:
        of = functools.partial(loss, f)
        grad = jax.grad(of, every)
        return jax.jvp(of, args, args), jax.jvp(grad, args, args)

    for one, other in zip(
        *map(jax.tree.leaves, (derivatives(_ours), derivatives(_exact))), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)


def test_the_derivative_of_a_product_is_that_of_any():
    a, b = _exact(X[0]), _exact(X[1])

    def loss(f: Callable[..., Any], a: Any, b: Any) -> Any:
        return jnp.sum(f(a, b) * _integers(N, N))

    ours, exact = (
        jax.grad(functools.partial(loss, f), (0, 1)) for f in (symmetric_matmul, jnp.matmul)
    )
    for one, other in zip(ours(a, b), exact(a, b), strict=True):
        np.testing.assert_array_equal(one, other)


def test_reverse_mode_takes_one_product():
    x = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)
    grad = jax.grad(lambda x: gram(x).astype(jnp.float32).sum())
    assert traced.shapes(grad, x) == [[(64, 64), (64, 32)]]


MAPPED = [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (1, 1, 0, 0), (0, 0, 1, 1), (1, 1, 1, 1)]


@pytest.mark.parametrize("batch", [(), (2,)], ids=["matrices", "batches"])
def test_vmap(batch):
    shapes = [(*batch, N, K), (*batch, N, N), batch, batch]
    operands = [
        [
            _integers(*([3] if own else []), *shape)
            for own, shape in zip(mapped, shapes, strict=True)
        ]
        for mapped in MAPPED
    ]
    for each in operands:
        each[1] += jnp.swapaxes(each[1], -1, -2)

    def exact(x: Any, residual: Any, alpha: Any, beta: Any) -> Any:
        return _exact(x, residual, alpha[..., None, None], beta[..., None, None])

    @functools.partial(jax.jit, static_argnums=0)
    def every(f: Callable[..., Any], operands: Any) -> Any:
        axes = [[0 if own else None for own in mapped] for mapped in MAPPED]
        return [jax.vmap(f, own)(*each) for own, each in zip(axes, operands, strict=True)]

    for one, other in zip(every(_ours, operands), every(exact, operands), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(jax.vmap(gram, 1)(X), _exact(jnp.swapaxes(X, 0, 1)))


@pytest.mark.parametrize("axes", [(0, None), (None, 0)])
def test_a_factor_that_mapped_products_share_is_not_repeated(axes):
    factors = [jax.ShapeDtypeStruct((3, 8, 8)[axis is None :], jnp.float32) for axis in axes]
    traced = jax.make_jaxpr(jax.vmap(symmetric_matmul, axes))(*factors)
    equations = [e for e in _all_equations(traced.jaxpr) if e.primitive.name.endswith("symmetric")]
    assert [[x.aval.ndim for x in e.invars] for e in equations] == [[len(f.shape) for f in factors]]


def _all_equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from _all_equations(inner)


def test_what_mapped_matrices_share_changes_all_of_their_results():
    a, residual, beta = X[:3].astype(jnp.float32), jnp.eye(X.shape[1]), jnp.float32(2)

    def ours(residual, beta):
        return jax.vmap(lambda each: gram(each, residual=residual, beta=beta))(a)

    result, change = jax.jvp(ours, (residual, beta), (residual, beta))
    np.testing.assert_array_equal(change, jnp.broadcast_to(4 * residual, result.shape))
    gradients = jax.vjp(ours, residual, beta)[1](jnp.ones_like(result))
    np.testing.assert_array_equal(gradients[0], 2 * len(a) * jnp.ones_like(residual))
    assert gradients[1] == a.shape[0] * a.shape[1]


def test_vmap_of_one_factor():
    a = _exact(X)
    result = jax.vmap(symmetric_matmul, (0, None))(a, a[1])
    np.testing.assert_array_equal(result[1], a[1] @ a[1])
    assert result.shape == a.shape


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh(kind):
    mesh = meshes.make_mesh(kind)
    with jax.set_mesh(mesh):
        # Rows and columns of the result may not lie along one axis.
        rows = "y" if kind == AxisType.Auto else None
        x = meshes.place(mesh, _integers(2, 8, 16), "x", rows)
        np.testing.assert_array_equal(jax.jit(gram)(x), _exact(np.asarray(x)))


def test_each_device_of_a_shard_map_has_its_own():
    mesh = meshes.make_mesh()
    x = _integers(8, N, K)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P(("x", "y")), out_specs=P(("x", "y")))
    def each(x: Any) -> Any:
        assert "pallas_gemm_symmetric" in str(jax.make_jaxpr(gram)(x))
        return gram(x)

    np.testing.assert_array_equal(jax.jit(each)(x), _exact(x))


def _explained(*shape: int, dtype: Any = jnp.bfloat16, gpu: str = "h200", **how: Any) -> Any:
    with target(gpu):
        (found,) = explain(gram, jax.ShapeDtypeStruct(shape, dtype), **how).products
    return found


def test_half_of_it_is_what_a_kernel_computes():
    found = _explained(4096, 4096)
    assert (found.implementation, found.problem.symmetric) == ("hopper", "gram")
    assert found.problem.flops == 4096 * 4097 * 4096
    # A tile is stored while another is multiplied, and four waves are full.
    config = found.plan.config
    assert (config.tile, config.pingpong, config.schedule) == ((128, 128), True, "swizzle:8")
    assert found.plan.config.tiles(found.problem) < 0.6 * np.prod(
        found.plan.config.stacked_grid(found.problem)
    )
    a = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)
    with target("h200"):
        text = str(explain(lambda a: symmetric_matmul(a, a, residual=a), a))
    assert "m=2048 n=2048 k=2048 NT bfloat16 x bfloat16 -> bfloat16 symmetric" in text


@pytest.mark.usefixtures("proven")
def test_else_all_of_it_is_and_why():
    single = _explained(1024, 1024, dtype=jnp.float32)
    assert (single.problem.symmetric, single.refused[0][1][0]) == (
        "",
        "a symmetric result is one of 16 bits, got float32",
    )
    other = _explained(4096, 4096, dtype=jnp.float8_e4m3fn, gpu="b200")
    assert (other.implementation, other.problem.symmetric) == ("blackwell", "")
    assert "one of 16 bits" in dict(other.refused)["blackwell"][0]


@pytest.mark.usefixtures("empty_kernels")
def test_a_batch_of_one_whose_whole_a_kernel_computes():
    def commuting(x: jax.Array) -> jax.Array:
        return symmetric_matmul(x, x, residual=x)

    x = jax.ShapeDtypeStruct((1, 256, 256), jnp.bfloat16)
    with target("h200"):
        (found,) = explain(commuting, x).products
        lowered = jax.jit(commuting).trace(x).lower(lowering_platforms=("cuda",))
    assert (found.implementation, found.problem.symmetric) == ("hopper", "")
    assert lowered.out_info.shape == (1, 256, 256)


def test_rows_of_any_number():
    # Its rows are made longer, and what is too much of the result is sliced off.
    found = _explained(4001, 4096)
    assert [step.action for step in found.plan.realigned.steps] == ["pad", "pad", "slice"]
    assert found.plan.realigned.problem.m == found.plan.realigned.problem.n


HALF = jnp.ones((16, 16), jnp.bfloat16)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: gram([[1.0]]), TypeError, "x must be an array, got list"),
        (lambda: gram(X[0, 0]), ValueError, r"x must be a matrix or several, got shape \[7\]"),
        (
            lambda: gram(X, residual=RESIDUAL[0]),
            ValueError,
            r"residual must have the result's shape \[3, 5, 5\], got \[5, 5\]",
        ),
        (
            lambda: gram(X, residual=RESIDUAL, transpose=True),
            ValueError,
            r"residual must have the result's shape \[3, 7, 7\]",
        ),
        (
            lambda: gram(X, residual=RESIDUAL.astype(jnp.bfloat16)),
            TypeError,
            "residual must be of the result's type, float32, got bfloat16",
        ),
        (
            lambda: gram(X[0], residual=1.0),
            ValueError,
            r"residual must have the result's shape \[5, 5\], got \[\]",
        ),
        (lambda: gram(X, transpose=1), TypeError, "transpose must be True or False, got int"),
        (lambda: gram(X, check=1), TypeError, "check must be True or False, got int"),
        (lambda: symmetric_matmul(X, X), ValueError, r"a must be square, .* got shape \[3, 5, 7\]"),
        (
            lambda: symmetric_matmul(RESIDUAL, RESIDUAL[0]),
            ValueError,
            r"same shape, got \[3, 5, 5\] and \[5, 5\]",
        ),
        (
            lambda: symmetric_matmul(RESIDUAL, RESIDUAL.astype(jnp.bfloat16)),
            TypeError,
            "same dtype, got float32 and bfloat16",
        ),
        (
            lambda: gram(HALF, schedule="online_raster"),
            ValueError,
            "schedule must be a table for a symmetric result, got 'online_raster'",
        ),
        (
            lambda: gram(HALF, config=HopperConfig(mirrored=True)),
            ValueError,
            "a symmetric product is not mirrored",
        ),
        (
            lambda: gram(HALF, schedule=raster(3, 3)),
            ValueError,
            r"made for the grid \(3, 3\); legal are \(1, 1\)",
        ),
        (
            lambda: gram(HALF, config=BlackwellConfig(direct_store=True)),
            ValueError,
            "direct_store has no mirrored half",
        ),
    ],
)
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_promises_are_looked_at_if_asked_for():
    gram(X, residual=RESIDUAL.at[1, 2, 2].set(jnp.nan), check=True)
    symmetric_matmul(_exact(X), _exact(X), check=True)
    broken = RESIDUAL.at[2, 1, 3].add(1)
    words = r"residual must be symmetric, got .* at \[2, 1, 3\] and .* at \[2, 3, 1\]"
    with pytest.raises(ValueError, match=words):
        gram(X, residual=broken, check=True)
    with pytest.raises(ValueError, match=r"a must be symmetric, got .* at \[2, 1, 3\]"):
        symmetric_matmul(broken, RESIDUAL, check=True)
    with pytest.raises(ValueError, match=r"a and b must commute.* at \[0, 1\]"):
        symmetric_matmul(RESIDUAL[0], RESIDUAL[1], check=True)
    # Within a program, it is when that runs that the numbers are known.
    run = jax.jit(lambda residual: gram(X, residual=residual, check=True))
    jax.block_until_ready(run(RESIDUAL))
    with pytest.raises(jax.errors.JaxRuntimeError, match="residual must be symmetric"):
        jax.block_until_ready(run(broken))


def test_a_factor_may_have_one_for_several_products() -> None:
    x, alpha = _integers(2, 3, N, K), jnp.arange(1.0, 4).reshape(1, 3)
    exact = alpha[..., None, None] * (x @ x.mT)
    np.testing.assert_array_equal(gram(x, alpha=alpha), exact)
