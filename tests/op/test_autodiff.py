"""Derivatives: both modes, any order, the layouts of the products that they are made of."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import jet
from jax.extend import core
from jax.test_util import check_grads

import pallas_gemm
from pallas_gemm import gated_gemm, gemm
from pallas_gemm.kernels.functions import activations
from tests import reference, traced

LAYOUTS = list(itertools.product((False, True), repeat=2))


def _normal(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return reference.normal(np.random.default_rng(seed), shape, dtype)


def _primitives(f: Callable[..., Any], *args: Any) -> set[str]:
    names = set()

    def visit(jaxpr: core.Jaxpr) -> None:
        for equation in jaxpr.eqns:
            names.add(equation.primitive.name)
            for inner in core.jaxprs_in_params(equation.params):
                visit(inner)

    visit(jax.make_jaxpr(f)(*args).jaxpr)
    return names


EPILOGUES = [
    {},
    {"activation": "relu"},
    {"activation": "gelu", "alpha": 0.5},
    {"activation": "gelu_exact"},
    {"activation": lambda x: x * x},
    {"activation": "silu", "beta": 2.0, "residual": True},
    {"activation": "relu", "residual": True},
    {"beta": 0.5, "residual": True, "alpha": 3.0},
]


def _stock(
    a: Any,
    b: Any,
    bias: Any = None,
    residual: Any = None,
    *,
    up: Any = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    activation: Any = None,
    alpha: float = 1,
    beta: float = 1,
) -> jax.Array:
    """The same as a program for JAX would say it: each step in the type of the operands."""
    left = a.T if transpose_a else a

    def times(right: Any) -> jax.Array:
        return alpha * (left @ (right.T if transpose_b else right))

    result = times(b)
    if bias is not None:
        result = result + bias.astype(result.dtype)[None]
    function = activations.resolve(activation)
    result = function(result) if function is not None else result
    if up is not None:
        result = result * times(up)
    if residual is not None:
        result = result + beta * residual
    return result


def _assert_derived_as_well(
    ours: Callable[..., jax.Array], stock: Callable[..., jax.Array], operands: list[jax.Array]
) -> None:
    """Compares what both modes give with what they give for JAX's own program."""
    out = jax.eval_shape(ours, *operands)
    g = _normal(*out.shape, seed=7, dtype=out.dtype)
    tangents = [_normal(*x.shape, seed=8 + i, dtype=x.dtype) for i, x in enumerate(operands)]

    def derived(f: Callable[..., jax.Array], primals: Any, tangents: Any, g: Any) -> list[Any]:
        _, forward = jax.jvp(f, primals, tangents)
        return [forward, *jax.vjp(f, *primals)[1](g)]

    given = operands, tangents, g
    with jax.enable_x64(True):
        exact = jax.jit(functools.partial(derived, stock))(*jax.tree.map(reference.wide, given))
    ours_derived, stock_derived = derived(ours, *given), derived(stock, *given)
    for our, xla, wide in zip(ours_derived, stock_derived, exact, strict=True):
        reference.assert_as_good_as_xla(our, xla, np.asarray(wide))


def _operands(layout: tuple[bool, bool], residual: bool, dtype: Any) -> list[jax.Array]:
    m, n, k = (70, 80, 40) if dtype == jnp.bfloat16 else (3, 7, 5)
    operands = [
        _normal(*((k, m) if layout[0] else (m, k)), dtype=dtype),
        _normal(*((n, k) if layout[1] else (k, n)), seed=1, dtype=dtype),
        _normal(n, seed=2, dtype=dtype),
    ]
    if residual:
        operands.append(_normal(m, n, seed=3, dtype=dtype))
    return [x / 4 for x in operands]


def _gemm(a: Any, b: Any, bias: Any, residual: Any = None, **options: Any) -> jax.Array:
    return gemm(a, b, bias=bias, residual=residual, **options)


@pytest.mark.every_other
@pytest.mark.parametrize(
    ("layout", "epilogue"),
    [
        *((layout, {"activation": "gelu_exact", "residual": True}) for layout in LAYOUTS),
        *((LAYOUTS[i % 4], epilogue) for i, epilogue in enumerate(EPILOGUES)),
    ],
    ids=lambda value: str(value).partition("<")[0],
)
def test_both_modes_are_as_good_as_xlas(
    layout: tuple[bool, bool], epilogue: dict[str, Any]
) -> None:
    options = {"transpose_a": layout[0], "transpose_b": layout[1], **epilogue}
    operands = _operands(layout, options.pop("residual", False), jnp.bfloat16)
    _assert_derived_as_well(
        functools.partial(_gemm, **options), functools.partial(_stock, **options), operands
    )


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=lambda e: "-".join(map(str, e)) or "plain")
def test_derivatives_of_both_orders_are_differences(epilogue: dict[str, Any]) -> None:
    options = {"transpose_b": True, **epilogue}
    operands = _operands((False, True), options.pop("residual", False), jnp.float32)
    check_grads(functools.partial(_gemm, **options), operands, order=2, modes=("fwd", "rev"))


@pytest.mark.parametrize("activation", ["silu", "relu", None])
def test_gated_products_are_derived(activation: str | None) -> None:
    def ours(a: Any, gate: Any, up: Any) -> jax.Array:
        return gated_gemm(a, gate, up, activation=activation)

    def stock(a: Any, gate: Any, up: Any) -> jax.Array:
        return _stock(a, gate, up=up, activation=activation)

    for dtype, shapes in (
        (jnp.bfloat16, ((70, 40), (40, 80), (40, 80))),
        (jnp.float32, ((3, 5), (5, 7), (5, 7))),
    ):
        operands = [_normal(*s, seed=i, dtype=dtype) / 4 for i, s in enumerate(shapes)]
        if dtype == jnp.bfloat16:
            _assert_derived_as_well(ours, stock, operands)
        else:
            check_grads(ours, operands, order=2, modes=("fwd", "rev"))


def test_forward_over_reverse_and_the_other_way_round() -> None:
    a, b, direction = _normal(3, 5), _normal(5, 7, seed=1), _normal(3, 5, seed=2)

    def loss(a: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(gemm(a, b, activation="tanh")))

    forward_over_reverse = jax.jvp(jax.grad(loss), (a,), (direction,))[1]
    reverse_over_forward = jax.grad(lambda a: jax.jvp(loss, (a,), (direction,))[1])(a)
    np.testing.assert_allclose(forward_over_reverse, reverse_over_forward, rtol=1e-4, atol=1e-4)
    assert jax.hessian(loss)(a).shape == (3, 5, 3, 5)


def test_a_product_can_be_transposed_as_a_linear_function() -> None:
    rng = np.random.default_rng(0)
    a, b, g = (reference.integers(rng, s, jnp.float32) for s in ((3, 5), (5, 7), (3, 7)))
    for implementation in (None, "xla"):

        def product(a: jax.Array, named: str | None = implementation) -> jax.Array:
            return gemm(a, b, alpha=2, implementation=named)

        (transposed,) = jax.linear_transpose(product, a)(g)
        np.testing.assert_array_equal(transposed, 2 * (g @ b.T))
    with pytest.raises(NotImplementedError, match="linear"):
        jax.linear_transpose(lambda a: gemm(a, b, bias=_normal(7)), a)(g)


def test_conjugate_gradients_solve_with_it() -> None:
    root = _normal(6, 6)
    matrix = root @ root.T + 6 * jnp.eye(6)
    wanted = _normal(6, seed=1)
    found, _ = jax.scipy.sparse.linalg.cg(lambda x: gemm(matrix, x), matrix @ wanted)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_are_products_of_what_is_stored(layout: tuple[bool, bool]) -> None:
    a = _normal(5, 3) if layout[0] else _normal(3, 5)
    b = _normal(7, 5) if layout[1] else _normal(5, 7)

    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(gemm(a, b, transpose_a=layout[0], transpose_b=layout[1]))

    gradient = jax.grad(loss, argnums=(0, 1))
    found = traced.products(gradient, a, b)
    layouts = {"NT"[call.transpose_a] + "NT"[call.transpose_b] for call, *_ in found[1:]}
    expected = {
        (False, False): {"NT", "TN"},
        (False, True): {"NN", "TN"},
        (True, False): {"NT", "NN"},
        (True, True): {"TT"},
    }[layout]
    assert layouts == expected
    assert all(form.a.is_free and form.b.is_free and not form.permutation for *_, form in found)
    assert "transpose" not in _primitives(gradient, a, b)


def test_shared_weights_under_vmap_get_one_product() -> None:
    weights, examples = _normal(5, 7), _normal(4, 3, 5)

    def loss(weights: jax.Array) -> jax.Array:
        return jnp.sum(jax.vmap(jax.vmap(lambda x: gemm(x, weights)))(examples))

    assert traced.shapes(jax.grad(loss), weights) == [[(12, 5), (5, 7)], [(12, 5), (12, 7)]]


def test_a_weight_on_the_left_of_mapped_vectors_gets_one_product_too() -> None:
    weights, examples = _normal(7, 5), _normal(12, 5)

    def loss(weights: jax.Array) -> jax.Array:
        return jnp.sum(jax.vmap(lambda x: gemm(weights, x))(examples))

    gradient = jax.grad(loss)
    found = traced.shapes(gradient, weights)
    assert [tuple(sorted(pair)) for pair in found] == [((7, 5), (12, 5)), ((12, 5), (12, 7))]
    np.testing.assert_allclose(
        gradient(weights), np.broadcast_to(examples.sum(0), (7, 5)), rtol=1e-5, atol=1e-5
    )


def test_gradient_of_a_shared_operand_of_a_batch_contracts_over_the_batch() -> None:
    shared, batch = _normal(3, 5), _normal(4, 5, 7)

    def loss(shared: jax.Array, implementation: str | None = None) -> jax.Array:
        return jnp.sum(jnp.square(gemm(shared, batch, implementation=implementation)))

    np.testing.assert_allclose(
        jax.grad(loss)(shared), jax.grad(lambda x: loss(x, "xla"))(shared), rtol=1e-4, atol=1e-4
    )
    # Of the product itself the shared one alone has two dimensions, of its gradient both have.
    ranks = [len(shape) for own in traced.shapes(jax.grad(loss), shared) for shape in own]
    assert ranks == [2, 3, 2, 2]


def test_float32_cotangents_are_rounded_to_the_type_of_the_operands() -> None:
    a, b = _normal(8, 16, dtype=jnp.bfloat16), _normal(16, 8, dtype=jnp.bfloat16)

    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(gemm(a, b, preferred_element_type=jnp.float32)))

    found = traced.products(jax.grad(loss, argnums=(0, 1)), a, b)
    assert {str(dtype) for own in found for _, dtype in own.signature} == {"bfloat16"}
    gradient = jax.grad(loss)(a, b)
    assert gradient.dtype == jnp.bfloat16


def test_operands_of_8_bits_are_widened_for_the_gradient() -> None:
    rng = np.random.default_rng(0)
    a = reference.integers(rng, (8, 16), jnp.float8_e4m3fn)
    b = reference.integers(rng, (16, 8), jnp.float8_e5m2)
    g = reference.integers(rng, (8, 8), jnp.bfloat16)

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return gemm(a, b, preferred_element_type=jnp.bfloat16)

    _, pull = jax.vjp(product, a, b)
    da, db = pull(g)
    assert (da.dtype, db.dtype) == (a.dtype, b.dtype)
    reference.assert_exact(da, reference.wide(g) @ reference.wide(b).T)
    reference.assert_exact(db, reference.wide(a).T @ reference.wide(g))


def test_integers_have_no_gradient_but_their_bias_has() -> None:
    a, b = jnp.ones((3, 4), jnp.int8), jnp.ones((4, 5), jnp.int8)

    def loss(bias: jax.Array) -> jax.Array:
        return jnp.sum(gemm(a, b, bias=bias, preferred_element_type=jnp.float32))

    np.testing.assert_array_equal(jax.grad(loss)(jnp.zeros(5)), np.full(5, 3.0))


def test_an_activation_changes_nothing_but_the_last_bit_under_differentiation() -> None:
    a, b = _normal(64, 32, dtype=jnp.bfloat16), _normal(32, 64, seed=1, dtype=jnp.bfloat16)

    def product(a: jax.Array) -> jax.Array:
        return gemm(a, b, activation="gelu")

    exact = reference.Formula(activation="gelu")(a, b)
    under, _ = jax.vjp(product, a)
    # XLA's own program rounds the product before the activation, too.
    xlas = jax.nn.gelu(a @ b)
    reference.assert_as_good_as_xla(under, xlas, exact)
    reference.assert_as_good_as_xla(product(a), xlas, exact)


def test_relu_is_derived_from_its_result() -> None:
    a, b = _normal(6, 5), _normal(5, 4)
    calls = traced.products(jax.grad(lambda a: jnp.sum(gemm(a, b, activation="relu"))), a)
    assert [call.epilogue.activation is not None for call, *_ in calls] == [True, False]


def _saved(policy: Any, f: Callable[..., Any], *args: Any) -> int:
    """Returns how many products the gradient of a function under `jax.checkpoint` computes."""
    checked = jax.checkpoint(f, policy=policy)
    return traced.count(jax.grad(lambda *args: jnp.sum(checked(*args))), *args)


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_nothing_wide_is_kept_for_an_activation(activation: str) -> None:
    a, b, up = (jnp.ones(shape, jnp.bfloat16) for shape in ((24, 16), (16, 40), (16, 40)))
    functions = [
        (lambda a, b, up: gemm(a, b, bias=up[0], activation=activation), 1),
        (lambda a, b, up: gated_gemm(a, b, up, activation=activation), 2),
    ]
    for f, pre_activations in functions:
        _, pull = jax.vjp(f, a, b, up)
        kept = [x.dtype for x in jax.tree.leaves(pull) if x.size == 24 * 40]
        assert kept == [jnp.bfloat16] * pre_activations


def test_policies_of_checkpoint_know_the_results() -> None:
    a, b, c = _normal(4, 4), _normal(4, 4, seed=1), _normal(4, 4, seed=2)

    def layers(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        return jnp.sin(gemm(jnp.sin(gemm(a, b, activation="gelu")), c))

    # Two forward, two backward (only that of `a`), and what is computed again in between.
    ours = pallas_gemm.checkpoint_policies
    assert _saved(None, layers, a, b, c) == 2 + 2 + 2
    assert _saved(jax.checkpoint_policies.dots_saveable, layers, a, b, c) == 2 + 2 + 2
    assert _saved(ours.dots_saveable, layers, a, b, c) == 2 + 2
    assert _saved(ours.dots_with_no_batch_dims_saveable, layers, a, b, c) == 2 + 2
    by_name = jax.checkpoint_policies.save_only_these_names("pallas_gemm_out")
    assert _saved(by_name, layers, a, b, c) == 2 + 2


def test_results_may_wait_in_other_memory() -> None:
    a = jnp.ones((8, 16))
    policy = pallas_gemm.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")

    def loss(a: jax.Array) -> jax.Array:
        hidden = jnp.sin(jnp.sin(a) @ a.T)
        return jnp.sum(jnp.sin(gemm(hidden, a)))

    _, pull = jax.vjp(jax.checkpoint(loss, policy=policy), a)
    waiting = [x.shape for x in jax.tree.leaves(pull) if x.sharding.memory_kind == "pinned_host"]
    # The result of each product: XLA's and ours.
    assert sorted(waiting) == [(8, 8), (8, 16)]
    assert _saved(policy, loss, a) == 1 + 2


def test_taylor_series_are_those_of_xlas_product(rng: np.random.Generator) -> None:
    shapes = ((4, 6), (6, 8), (8,), (4, 8))
    primals = tuple(reference.integers(rng, shape, jnp.float32) for shape in shapes)
    # Even, because the second derivative is twice the coefficient.
    terms = tuple([2 * x, -2 * x] for x in primals)

    def ours(a: jax.Array, b: jax.Array, bias: jax.Array, residual: jax.Array) -> Any:
        one = gemm(a, b, bias=bias, residual=residual, activation=jnp.square, alpha=2, beta=3)
        return [one, *pallas_gemm.projections(a, [b, b], biases=[bias, bias])]

    def stock(a: jax.Array, b: jax.Array, bias: jax.Array, residual: jax.Array) -> Any:
        one = jnp.square(2 * (a @ b) + bias[None]) + 3 * residual
        return [one, a @ b + bias[None], a @ b + bias[None]]

    right = jet.jet(stock, primals, terms)
    for f in (ours, jax.jit(ours)):
        jax.tree.map(np.testing.assert_array_equal, jet.jet(f, primals, terms), right)


def test_checkpoint_changes_no_gradient() -> None:
    a, b = _normal(4, 6), _normal(6, 4, seed=1)

    def loss(a: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(gemm(a, b, activation="silu")))

    policy = pallas_gemm.checkpoint_policies.dots_saveable
    np.testing.assert_allclose(
        jax.grad(jax.checkpoint(loss, policy=policy))(a), jax.grad(loss)(a), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("scale", ["alpha", "row_scale", "col_scale"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_sums_beyond_float16_have_the_gradients_of_their_scales(
    scale: str, activation: str | None
) -> None:
    """The result is within float16, but the sum before it is scaled is not."""
    a, b = jnp.full((2, 64), 64, jnp.float16), jnp.full((64, 3), 32, jnp.float16)
    shape = {"alpha": (), "row_scale": (2,), "col_scale": (3,)}[scale]
    own = jnp.full(shape, 2.0**-14, jnp.float32)

    def total(own: jax.Array) -> jax.Array:
        return gemm(a, b, activation=activation, **{scale: own}).astype(jnp.float32).sum()

    value, gradient = jax.value_and_grad(total)(own)
    # Of each sum, 2 ** 17; silu(8) and its derivative, rounded to float16 as the result is.
    result, slope = (8, 1) if activation is None else (jax.nn.silu(8.0), jax.grad(jax.nn.silu)(8.0))
    count = {"alpha": 6, "row_scale": 3, "col_scale": 2}[scale]
    np.testing.assert_allclose(value, 6 * result, rtol=2**-11)
    np.testing.assert_allclose(gradient, np.full(shape, count * slope * 2.0**17), rtol=2**-10)
