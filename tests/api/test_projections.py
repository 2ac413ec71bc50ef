"""Several products of one left operand, and the gradient that is the sum of theirs: one product."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core
from jax.sharding import AxisType
from jax.test_util import check_grads

import pallas_gemm
from pallas_gemm import Explanation, explain, gated_gemm, gemm, projections, round_once, target
from pallas_gemm.call import Options, SumCall
from pallas_gemm.op.contraction import of_matrices
from pallas_gemm.op.product import product_p
from pallas_gemm.op.sum_of_products import one_by_one, sum_of_products, sum_p
from pallas_gemm.tuning import autotune as tuning
from tests import meshes, reference

COLUMNS = (24, 8, 16)
K = 40


def _normal(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return reference.normal(np.random.default_rng(seed), shape, dtype) / 4


def _integers(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return reference.integers(np.random.default_rng(seed), shape, dtype)


def _weights(draw: Callable[..., jax.Array], **options: Any) -> list[jax.Array]:
    return [draw(K, columns, seed=i + 1, **options) for i, columns in enumerate(COLUMNS)]


def _biases(draw: Callable[..., jax.Array], **options: Any) -> list[jax.Array]:
    return [draw(columns, seed=i + 5, **options) for i, columns in enumerate(COLUMNS)]


def _addends(f: Callable[..., Any], *args: Any) -> list[int]:
    """Returns of how many products each product, and sum of products, in a function is the sum."""
    found = []

    def visit(jaxpr: core.Jaxpr) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive is product_p:
                found.append(1)
            if equation.primitive is sum_p:
                found.append(len(equation.invars) // 2)
            for inner in core.jaxprs_in_params(equation.params):
                visit(inner)

    visit(jax.make_jaxpr(f)(*args).jaxpr)
    return found


def _ours(x: Any, weights: Any, biases: Any = None) -> jax.Array:
    return jnp.concatenate(projections(x, weights, biases=biases), -1)


def _stock(x: Any, weights: Any, biases: Any = None) -> jax.Array:
    results = [x @ w for w in weights]
    if biases is not None:
        results = [
            y if bias is None else y + bias.reshape((1,) * (y.ndim - 1) + bias.shape)
            for y, bias in zip(results, biases, strict=True)
        ]
    return jnp.concatenate(results, -1)


@pytest.mark.parametrize("lead", [(), (6,), (2, 3)], ids=len)
def test_each_result_is_that_of_its_own_product(lead: tuple[int, ...]) -> None:
    x, weights = _integers(*lead, K), _weights(_integers)
    for biases in (None, _biases(_integers), [None, *_biases(_integers)[1:]]):
        np.testing.assert_array_equal(_ours(x, weights, biases), _stock(x, weights, biases))
    found = projections(x.astype(jnp.bfloat16), weights[:1], preferred_element_type=jnp.float32)
    assert [y.dtype for y in found] == [jnp.float32]


def test_what_is_named_is_named_of_each_product() -> None:
    x, weights = jnp.ones((512, 256), jnp.bfloat16), [jnp.ones((256, 512), jnp.bfloat16)] * 2
    with target("h200"):
        found = explain(functools.partial(projections, schedule="hilbert"), x, weights)
    orders = [product.plan.config.schedule for product in found.products if product.plan]
    assert orders == ["hilbert", "hilbert"]


def test_weights_may_be_stored_the_other_way_round_and_be_vectors() -> None:
    x, weights = _integers(6, K), _weights(_integers)
    results = projections(x, [w.T for w in weights], transpose_b=True)
    for result, w in zip(results, weights, strict=True):
        np.testing.assert_array_equal(result, x @ w)
    matrix, vector = projections(x, [weights[0], weights[1][:, 0]])
    np.testing.assert_array_equal(vector, x @ weights[1][:, 0])
    np.testing.assert_array_equal(matrix, x @ weights[0])


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_gradients_are_as_good_as_xlas(biased: bool) -> None:
    operands = [_normal(70, K), _weights(_normal), _biases(_normal) if biased else None]
    g = _normal(70, sum(COLUMNS), seed=9)

    def derived(f: Callable[..., jax.Array], dtype: Any) -> list[jax.Array]:
        primals = jax.tree.map(lambda x: x.astype(dtype), operands)
        given = [x for x in primals if x is not None]
        _, forward = jax.jvp(f, given, given)
        return [forward, *jax.tree.leaves(jax.vjp(f, *given)[1](g.astype(dtype)))]

    with jax.enable_x64(True):
        exact = derived(_stock, jnp.float64)
    found = zip(derived(_ours, jnp.bfloat16), derived(_stock, jnp.bfloat16), exact, strict=True)
    for our, xla, wide in found:
        reference.assert_as_good_as_xla(our, xla, np.asarray(wide))


def test_derivatives_of_both_orders_are_differences() -> None:
    x, weights = _normal(3, 5), [_normal(5, 7, seed=1), _normal(5, 2, seed=2)]
    biases = [_normal(7, seed=3), _normal(2, seed=4)]
    check_grads(_ours, (x, weights, biases), order=2, modes=("fwd", "rev"))


@pytest.mark.parametrize("layout", list(itertools.product((False, True), repeat=2)), ids=str)
def test_the_gradient_of_what_gated_products_share_is_one_product(
    layout: tuple[bool, bool],
) -> None:
    a = _integers(*((K, 8) if layout[0] else (8, K)))
    gate, up = (_integers(*((16, K) if layout[1] else (K, 16)), seed=i) for i in (1, 2))
    options = {"transpose_a": layout[0], "transpose_b": layout[1], "activation": "relu"}

    def loss(a: Any, gate: Any, up: Any, implementation: Any = None) -> jax.Array:
        return jnp.sum(gated_gemm(a, gate, up, implementation=implementation, **options))

    gradient = jax.grad(loss, argnums=(0, 1, 2))
    # Both sums of the result are one function's.
    assert sorted(_addends(gradient, a, gate, up)) == [1, 1, 2]
    with round_once(False):
        assert sorted(_addends(gradient, a, gate, up)) == [1, 1, 1, 1, 2]
    by_xla = jax.grad(functools.partial(loss, implementation="xla"), argnums=(0, 1, 2))
    for our, xla in zip(gradient(a, gate, up), by_xla(a, gate, up), strict=True):
        np.testing.assert_array_equal(our, xla)


def _loss(x: Any, weights: Any) -> jax.Array:
    return jnp.sum(jnp.square(_ours(x, weights)))


def _stock_loss(x: Any, weights: Any) -> jax.Array:
    return jnp.sum(jnp.square(_stock(x, weights)))


@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        jax.checkpoint,
        lambda f: lambda x, w: jax.vmap(f, (0, None))(x.reshape(2, 3, K), w).sum(),
        lambda f: lambda x, w: lax.scan(lambda _, x: (None, f(x, w)), None, x[:, None])[1].sum(),
        lambda f: lambda x, w: lax.cond(x[0, 0] > 9, lambda: jnp.float32(0), lambda: f(x, w)),
    ],
    ids=["jit", "checkpoint", "vmap", "scan", "cond"],
)
def test_under_transformations_it_stays_one_product(transform: Callable[..., Any]) -> None:
    x, weights = _integers(6, K), _weights(_integers)
    gradient = jax.grad(transform(_loss), argnums=(0, 1))
    assert _addends(gradient, x, weights).count(len(COLUMNS)) == 1
    expected = jax.grad(_stock_loss, argnums=(0, 1))(x, weights)
    jax.tree.map(np.testing.assert_array_equal, gradient(x, weights), expected)


def test_the_gradient_of_each_of_a_batch() -> None:
    x, weights = _integers(4, 6, K), _weights(_integers)
    gradient = jax.grad(_loss)
    stock = jax.grad(_stock_loss)
    mapped = jax.vmap(gradient, (0, None))
    assert _addends(mapped, x, weights).count(len(COLUMNS)) == 1
    np.testing.assert_array_equal(mapped(x, weights), jax.vmap(stock, (0, None))(x, weights))
    # Weights of their own, or shared examples, make it a batch of products.
    several = [jnp.stack([w, 2 * w, -w, w + 1]) for w in weights]
    for axes, given in (((0, 0), x), ((None, 0), x[0])):
        found, expected = (jax.vmap(f, axes)(given, several) for f in (gradient, stock))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("place", range(len(COLUMNS)))
def test_one_weight_of_their_own_makes_it_a_batch_of_products(place: int) -> None:
    x, weights = _integers(4, 6, K), _weights(_integers)
    weights[place] = jnp.stack([weights[place] * times for times in (1, 2, -1, 3)])
    axes = [0 if i == place else None for i in range(len(weights))]
    for axis, given in ((0, x), (None, x[0])):
        found, expected = (jax.vmap(f, (axis, axes))(given, weights) for f in (_ours, _stock))
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_only_what_is_used_is_derived() -> None:
    x, weights = _integers(6, K), _weights(_integers)
    first = jax.grad(lambda x: jnp.sum(projections(x, weights)[0]))
    assert set(_addends(first, x)) == {1}
    np.testing.assert_array_equal(first(x), jax.grad(lambda x: jnp.sum(x @ weights[0]))(x))
    of_weights = jax.grad(lambda w: _loss(x, w))
    assert set(_addends(of_weights, weights)) == {1}
    frozen = jax.grad(lambda x: jnp.sum(_ours(lax.stop_gradient(x), weights)) + jnp.sum(x))
    np.testing.assert_array_equal(frozen(x), jnp.ones_like(x))


def test_a_policy_keeps_every_result() -> None:
    x, weights = _normal(6, K), _weights(_normal)

    def loss(x: Any, weights: Any) -> jax.Array:
        return jnp.sum(jnp.sin(jnp.sin(_ours(x, weights))))

    policy = pallas_gemm.checkpoint_policies.dots_saveable
    counts = [
        len(_addends(jax.grad(jax.checkpoint(loss, policy=kept), argnums=(0, 1)), x, weights))
        for kept in (policy, None)
    ]
    together = [
        str(jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=kept)))(x, weights)).count(
            "pallas_gemm_projections["
        )
        for kept in (policy, None)
    ]
    # The sum and the gradients of three weights; without the policy the results are computed twice.
    assert counts == [4, 4]
    assert together == [1, 2]


def test_a_weight_without_columns() -> None:
    x, weights = _integers(3, 6, K), [_integers(K, 8), jnp.zeros((K, 0))]
    for f in (_ours, jax.vmap(_ours, (0, None))):
        np.testing.assert_array_equal(f(x, weights), x @ weights[0])
        gradient = jax.grad(lambda x, f=f: jnp.sum(f(x, weights)))(x)
        np.testing.assert_array_equal(gradient, jax.grad(lambda x: jnp.sum(x @ weights[0]))(x))
    assert _kernels(_of_sizes(4096, 0)) == 2


def test_weights_of_several_types_are_derived_one_by_one() -> None:
    x = _normal(6, K).astype(jnp.bfloat16)
    types = (jnp.float32, jnp.bfloat16, jnp.float32)
    weights = [w.astype(dtype) for w, dtype in zip(_weights(_normal), types, strict=True)]

    def loss(x: Any) -> jax.Array:
        results = projections(x, weights, preferred_element_type=jnp.float32)
        return sum(jnp.sum(jnp.square(y)) for y in results)  # type: ignore[return-value]

    assert set(_addends(jax.grad(loss), x)) == {1}
    assert jax.grad(loss)(x).dtype == jnp.bfloat16


def test_linear_in_what_all_share_and_in_the_weights() -> None:
    x, weights, g = _integers(6, K), _weights(_integers), _integers(6, sum(COLUMNS), seed=9)
    (of_x,) = jax.linear_transpose(lambda x: _ours(x, weights), x)(g)
    np.testing.assert_array_equal(of_x, jax.vjp(lambda x: _stock(x, weights), x)[1](g)[0])
    (of_weights,) = jax.linear_transpose(lambda w: _ours(x, w), weights)(g)
    expected = jax.vjp(lambda w: _stock(x, w), weights)[1](g)[0]
    jax.tree.map(np.testing.assert_array_equal, of_weights, expected)
    # The sum is linear in every piece, which transposing twice asks for.
    (again,) = jax.linear_transpose(
        lambda g: jax.linear_transpose(lambda x: _ours(x, weights), x)(g)[0], g
    )(x)
    np.testing.assert_array_equal(again, _stock(x, weights))
    with pytest.raises(NotImplementedError, match="linear"):
        jax.linear_transpose(lambda x: _ours(x, weights, _biases(_integers)), x)(g)
    with pytest.raises(NotImplementedError, match="linear"):
        jax.linear_transpose(_ours, x, weights)(g)


def test_on_a_mesh_no_more_is_sent_than_by_xlas_products() -> None:
    mesh = meshes.make_mesh()
    x, weights = _integers(16, K), _weights(_integers)
    expected = jax.grad(_stock_loss, argnums=(0, 1))(x, weights)
    split = meshes.place(mesh, x, "x", None)
    columns = [meshes.place(mesh, w, None, "y") for w in weights]

    def loss(f: Callable[..., Any], x: Any, weights: Any) -> jax.Array:
        return sum(jnp.sum(jnp.square(y)) for y in f(x, weights))  # type: ignore[return-value]

    def by_xla(x: Any, weights: Any) -> list[jax.Array]:
        return [x @ w for w in weights]

    found, sent = meshes.run(
        jax.grad(functools.partial(loss, projections), argnums=(0, 1)), split, columns
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    _, xlas = meshes.run(jax.grad(functools.partial(loss, by_xla), argnums=(0, 1)), split, columns)
    assert set(sent) == {"all-reduce"}
    assert sent["all-reduce"] <= xlas["all-reduce"]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_on_meshes_that_the_types_know(kind: AxisType) -> None:
    mesh = meshes.make_mesh(kind)
    x, weights = _integers(16, K), _weights(_integers)
    expected = jax.grad(_stock_loss)(x, weights)

    def loss(x: Any, weights: Any) -> jax.Array:
        return sum(jnp.sum(jnp.square(y)) for y in projections(x, weights))  # type: ignore[return-value]

    with jax.set_mesh(mesh):
        split = meshes.place(mesh, x, "x", None)
        columns = [meshes.place(mesh, w, None, "y") for w in weights]
        np.testing.assert_array_equal(jax.jit(jax.grad(loss))(split, columns), expected)


@pytest.mark.parametrize("check", [True, False], ids=["vma", ""])
def test_in_shard_map(check: bool) -> None:
    mesh = meshes.make_mesh()
    x, weights = _integers(16, K), _weights(_integers)

    def loss(x: Any, weights: Any) -> jax.Array:
        return lax.psum(_loss(x, weights), ("x", "y"))

    mapped = jax.shard_map(
        loss, mesh=mesh, in_specs=(jax.P(("x", "y")), jax.P()), out_specs=jax.P(), check_vma=check
    )
    gradient = jax.grad(mapped, argnums=(0, 1))
    assert _addends(gradient, x, weights).count(len(COLUMNS)) == 1
    expected = jax.grad(_stock_loss, argnums=(0, 1))(x, weights)
    jax.tree.map(np.testing.assert_array_equal, gradient(x, weights), expected)


def test_exported_and_called_again() -> None:
    x, weights = _integers(6, K), _weights(_integers)
    exported = jax.export.export(jax.jit(jax.grad(_loss)))(x, weights)
    loaded = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(loaded.call(x, weights), jax.grad(_stock_loss)(x, weights))


def _shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def _of_sizes(*columns: int) -> Explanation:
    weights = [_shape(4096, size) for size in columns]

    def loss(x: jax.Array, weights: Any) -> jax.Array:
        return sum(jnp.sum(y.astype(jnp.float32)) for y in projections(x, weights))  # type: ignore[return-value]

    with pallas_gemm.target("h200"):
        return explain(jax.grad(loss), _shape(2, 2048, 4096), weights, configs=True)


def _kernels(explained: Explanation) -> int:
    return sum(decision.implementation == "hopper" for decision in explained.products)


def test_what_computes_the_gradient_is_explained() -> None:
    explained = _of_sizes(4096, 1024, 1024)
    assert _kernels(explained) == 3 + 1
    assert "hopper: m=4096 n=4096 k=6144 (4096 + 1024 + 1024) NT bfloat16" in str(explained)


def test_tables_are_asked_for_the_whole_product() -> None:
    def loss(x: jax.Array, weights: Any) -> jax.Array:
        return sum(jnp.sum(y.astype(jnp.float32)) for y in projections(x, weights))  # type: ignore[return-value]

    with pallas_gemm.target("h200"):
        wanted = tuning.products_of(jax.grad(loss), _shape(512, 1024), [_shape(1024, 2048)] * 2)
    # The results are not used, and so are not computed.
    asked = [(p.m, p.n, p.k, p.layout, p.terms) for p, _ in wanted]
    assert asked == [(512, 1024, 4096, "NT", ())]


@pytest.mark.usefixtures("proven")
def test_pieces_that_no_kernel_takes_together_are_taken_apart() -> None:
    explained = _of_sizes(4096, 1001)
    assert _kernels(explained) == 2 + 2
    assert "hopper: m=4096 n=4096 k=1001 NT" in str(explained)
    assert _kernels(_of_sizes(*[1024] * 8)) == 8 + 1
    assert _kernels(_of_sizes(*[1024] * 9)) == 9 + 9
    with pallas_gemm.target("b200"):
        gradient = jax.grad(lambda a, *w: jnp.sum(gated_gemm(a, *w).astype(jnp.float32)))
        explained = explain(gradient, *[_shape(4096, 4096)] * 3)
    assert "(4096 + 4096)" not in str(explained)
    assert "2x blackwell 4096 x 4096 x 4096 NT" in str(explained)


@pytest.mark.parametrize("layout", list(itertools.product((False, True), repeat=2)), ids=str)
def test_a_simulated_sum_of_products_is_rounded_once(layout: tuple[bool, bool]) -> None:
    sizes = (64, 128)
    operands = []
    for i, k in enumerate(sizes):
        operands.append(_integers(*((k, 64) if layout[0] else (64, k)), seed=i, dtype=jnp.bfloat16))
        right = (64, k) if layout[1] else (k, 64)
        operands.append(_integers(*right, seed=9 + i, dtype=jnp.bfloat16))
    call = SumCall(jnp.bfloat16, *layout, options=Options("interpret"))
    result = jax.jit(functools.partial(sum_of_products, call))(*operands)
    exact = np.zeros((64, 64))
    for a, b in call.pairs([reference.wide(x) for x in operands]):
        exact += (a.T if layout[0] else a) @ (b.T if layout[1] else b)
    reference.assert_exact(result, exact)
    plain = SumCall(jnp.float32, *layout)
    apart = functools.partial(one_by_one, plain, (of_matrices(plain, 2, 2),) * len(sizes))
    reference.assert_exact(jax.jit(apart)(*operands), exact)


@pytest.mark.parametrize(
    ("weights", "biases", "error", "message"),
    [
        ([], None, ValueError, r"weights must be one array or more, got \[\]"),
        (jnp.ones((3, 4)), None, TypeError, r"arrays, got one of \[3, 4\]: \[weights\] is one"),
        ({"q": jnp.ones(3)}, None, TypeError, r"got dict: list\(weights.values\(\)\) is one"),
        (
            [jnp.ones((3, 4))],
            [],
            ValueError,
            "biases must have an entry for each of the 1 weights, or be None, got 0",
        ),
        ([jnp.ones((3, 4))], jnp.ones(4), TypeError, "biases must be a list or tuple"),
        (
            [jnp.ones((3, 4)), jnp.ones((4, 3))],
            None,
            TypeError,
            r"weights\[1\]: a and b must agree",
        ),
        ([jnp.ones((3, 4))], [jnp.ones(3)], ValueError, r"weights\[0\]: bias must"),
        ([jnp.ones((3, 4)), None], None, TypeError, r"weights\[1\]: b must be an array"),
    ],
)
def test_errors_name_the_weight(
    weights: Any, biases: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        projections(jnp.ones((2, 3)), weights, biases=biases)


@pytest.mark.gpu("hopper")
@pytest.mark.parametrize("rows", [1000, 4096])
def test_on_a_gpu_the_sum_is_as_good_as_xlas(rows: int) -> None:
    x, weights = _normal(rows, 1024), [_normal(1024, n, seed=n) for n in (512, 128, 1024)]
    g = _normal(rows, 512 + 128 + 1024, seed=9)

    def gradient(f: Callable[..., jax.Array], dtype: Any) -> jax.Array:
        primals = [w.astype(dtype) for w in weights]
        pull = jax.vjp(lambda x: f(x, primals), x.astype(dtype))[1]
        return jax.jit(lambda g: pull(g)[0])(g.astype(dtype))

    with jax.enable_x64(True):
        exact = np.asarray(gradient(_stock, jnp.float64))
    narrow = [w.astype(jnp.bfloat16) for w in weights]
    text = str(explain(jax.grad(_loss), x.astype(jnp.bfloat16), narrow))
    assert f"{rows} x 1024 x {512 + 128 + 1024}" in text
    reference.assert_as_good_as_xla(
        gradient(_ours, jnp.bfloat16), gradient(_stock, jnp.bfloat16), exact
    )
    one = gemm(x.astype(jnp.bfloat16), narrow[0])
    np.testing.assert_array_equal(projections(x.astype(jnp.bfloat16), narrow)[0], one)
