"""Rewritten programs compute what they computed, bit for bit where their products are exact."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.sharding import AxisType

from pallas_gemm import accelerate, explain, gemm, target
from pallas_gemm.device import H200
from pallas_gemm.kernels.functions import lines
from pallas_gemm.layers import routed
from pallas_gemm.rewriting import inlining
from pallas_gemm.rewriting.products import How
from pallas_gemm.rewriting.walk import Rewriter
from tests.reference import integers
from tests.rewriting.programs import PROGRAMS, WITHOUT_REVERSE, N

DOTS = ("dot_general", "ragged_dot_general")


def operands() -> tuple[Any, Any]:
    """Returns small integers."""
    rng = np.random.default_rng(0)
    return tuple(integers(rng, (N, N), jnp.bfloat16) // 2 for _ in range(2))


def names(jaxpr: Any) -> list[str]:
    """Returns the names of all operations, with those that are called."""
    own = [equation.primitive.name for equation in jaxpr.eqns]
    others = [e for e in jaxpr.eqns if not e.primitive.name.startswith("pallas_gemm")]
    inner = (x for e in others for x in core.jaxprs_in_params(e.params))
    return own + [name for x in inner for name in names(x)]


def inside(program: Any) -> Any:
    """Returns the accelerated function, which is all of a program; itself if nothing changed."""
    (first, *others) = program.eqns
    return program if others else first.params.get("call_jaxpr", program)


def derived(f: Any) -> Any:
    """Returns the function of the gradients."""

    def loss(*args: Any) -> Any:
        leaves = jax.tree.leaves(f(*args))
        floats = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(jnp.sum(x.astype(jnp.float32)) for x in floats)

    return jax.grad(loss, argnums=(0, 1))


def assert_same(found: Any, expected: Any) -> None:
    """Compares bit for bit."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (x.dtype, x.weak_type) == (y.dtype, y.weak_type)
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def _accelerated(f: Any, *args: Any) -> Any:
    """Runs a function rewritten for a GPU, without one; checks that the program is legal."""
    with target("h200"):
        program = jax.make_jaxpr(accelerate(f))(*args)
        core.check_jaxpr(program)
        return inside(program), jax.jit(accelerate(f))(*args)


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_the_programs(name: str) -> None:
    args = operands()
    program, found = _accelerated(PROGRAMS[name], *args)
    assert_same(found, jax.jit(PROGRAMS[name])(*args))
    left = [x for x in names(program) if x in DOTS]
    assert bool(left) == (name == "kept"), left
    assert any(x.startswith("pallas_gemm") for x in names(program)) == (name != "kept")


@pytest.mark.every_other
@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - WITHOUT_REVERSE))
@pytest.mark.parametrize("outside", [False, True], ids=["of_gradient", "derived"])
def test_gradients_are_the_programs(name: str, outside: bool) -> None:
    args, f = operands(), PROGRAMS[name]
    with target("h200"):
        own = derived(accelerate(f)) if outside else accelerate(derived(f))
        program = jax.make_jaxpr(own)(*args)
        core.check_jaxpr(program)
        found = jax.jit(own)(*args)
    assert_same(found, jax.jit(derived(f))(*args))
    if not outside:
        assert not [x for x in names(program) if x in DOTS]


def test_transpositions_around_a_product_are_read_as_stored() -> None:
    x, w = operands()
    with target("h200"):
        program = jax.make_jaxpr(accelerate(PROGRAMS["transposed"]))(x, w)
        gradients = jax.make_jaxpr(accelerate(derived(PROGRAMS["plain"])))(x, w)
    assert "transpose" not in names(program) + names(gradients)


@pytest.mark.parametrize(
    ("f", "left"),
    [
        # The gradient of w is transposed twice.
        (lambda x, w: jax.vjp(lambda w: x @ w.T, w)[1](x), 0),
        (lambda x, w: (x @ w).T.T, 0),
        (lambda x, w: (x.reshape(2, -1, N) @ w).transpose(1, 2, 0).transpose(2, 0, 1), 0),
        # One of two can be left out.
        (lambda x, w: (x.reshape(2, -1, N) @ jnp.stack([w, w])).mT.transpose(2, 1, 0), 1),
    ],
    ids=("gradient", "twice", "around", "one"),
)
def test_a_product_is_stored_as_several_transpositions_leave_it(f: Any, left: int) -> None:
    args = operands()
    program, found = _accelerated(f, *args)
    assert_same(found, jax.jit(f)(*args))
    assert names(program).count("transpose") == left
    assert not [x for x in names(program) if x in DOTS]


def test_a_transposition_that_others_read_stays() -> None:
    def f(x: Any, w: Any) -> Any:
        product = x @ w
        return product.T, product.T @ product

    args = operands()
    program, found = _accelerated(f, *args)
    assert_same(found, jax.jit(f)(*args))
    assert names(program).count("transpose") == 1


def test_what_a_transposition_makes_is_not_read_as_it_was() -> None:
    # The sum is written transposed at once: as it was it is nowhere.
    def f(x: Any, w: Any) -> Any:
        return (x + w).T @ w

    args = operands()
    program, found = _accelerated(f, *args)
    assert_same(found, jax.jit(f)(*args))
    assert names(program).count("transpose") == 1


@pytest.mark.parametrize("is_followed", [False, True], ids=["alone", "gelu"])
@pytest.mark.parametrize(
    ("rows", "columns", "k", "count"),
    # Rows that are no whole cache lines are slow to read transposed, and XLA reads them so.
    [(1000, 1792, 4736, 0), (1024, 1792, 4736, 1), (16, 64, 32768, 0)],
)
def test_a_transposition_is_made_for_no_kernel_where_xla_needs_none(
    rows: int, columns: int, k: int, count: int, is_followed: bool
) -> None:
    def f(x: Any, w: Any) -> Any:
        product = x.T @ w
        return jax.nn.gelu(product) if is_followed else product

    given = [jax.ShapeDtypeStruct((k, side), jnp.bfloat16) for side in (rows, columns)]
    with target("h200"):
        found = names(jax.make_jaxpr(accelerate(f))(*given))
    assert len([name for name in found if name.startswith("pallas_gemm")]) == count
    # XLA's product reads the transposition, and ours the operand.
    assert found.count("transpose") == 1 - count


def test_a_product_is_not_turned_into_one_that_xla_computes_sooner() -> None:
    # Turned, it has 816 rows of a transposed left operand, which are no whole cache lines.
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 8192), (8192, 816))]
    with target("h200"):
        found = names(jax.make_jaxpr(accelerate(lambda x, w: (x @ w).T))(*given))
    assert (found.count("pallas_gemm"), found.count("transpose")) == (1, 1)


def test_equal_functions_are_rewritten_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from pallas_gemm.rewriting import products

    count = []
    dense = products.dense
    monkeypatch.setattr(products, "dense", lambda *args: (count.append(1), dense(*args))[1])
    block = jax.jit(lambda x, w: jnp.sign(x @ w))

    def f(x: Any, w: Any) -> Any:
        for _ in range(4):
            x = block(x, w)
        return x

    args = operands()
    _, found = _accelerated(f, *args)
    assert_same(found, jax.jit(f)(*args))
    assert len(count) == 2


def test_calls_that_return_numbers_and_arguments_stay_right() -> None:
    several = jax.jit(lambda a, b: (a, 1.0, jnp.sum(a) + b, b, b))

    def f(x: Any, w: Any) -> Any:
        y = x @ w
        return several(y, y[0, 0]), several(y, 1), jax.jit(lambda a: jnp.sum(a, 0))(y)

    args = operands()
    program, found = _accelerated(f, *args)
    assert_same(found, jax.jit(f)(*args))
    assert names(program).count("pallas_gemm") == 1


def test_a_call_whose_result_is_a_number_stays_a_call() -> None:
    program = jax.make_jaxpr(lambda x, w: jax.jit(lambda y: (jnp.sum(y, 0), y[:1] + 1))(x @ w))(
        *operands()
    )
    product, call = program.eqns
    inner = call.params["jaxpr"]
    for one in (core.Literal(np.float32(1), inner.outvars[0].aval), inner.outvars[1]):
        other = inner.replace(outvars=[one, inner.outvars[1]])
        equations = [product, call.replace(params=call.params | {"jaxpr": other})]
        assert inlining.inlined(program, equations) == equations
    assert len(inlining.inlined(program, program.eqns)) > 2


def test_a_call_that_says_where_its_results_lie_stays_a_call() -> None:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
    there = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))

    def f(x: Any, w: Any) -> Any:
        return jax.jit(lambda y: (jnp.sum(y, 0), y[:1] + 1), out_shardings=there)(x @ w)

    args = operands()
    program, found = _accelerated(f, *args)
    assert_same(found, jax.jit(f)(*args))
    assert [e.primitive.name for e in program.eqns] == ["pallas_gemm", "jit"]


def test_values_that_are_read_around_a_function_are_known_or_traced() -> None:
    x, w = operands()
    known = jnp.arange(N, dtype=x.dtype)[None] % 3

    def program(f: Any) -> Any:
        def around(x: Any, w: Any) -> Any:
            y = x - 1
            z = w + 1
            return f(lambda v: (v @ z + known) * y)(x)

        return around

    with target("h200"):
        traced = jax.make_jaxpr(program(accelerate))(x, w)
        found = jax.jit(program(accelerate))(x, w)
    assert "pallas_gemm" in str(traced)
    assert_same(found, jax.jit(program(lambda f: f))(x, w))


def test_a_function_is_compiled_whatever_its_arguments_are() -> None:
    x, w = operands()
    traced = []

    def f(x: Any, w: Any, chosen: set[str]) -> Any:
        traced.append(isinstance(x, jax.core.Tracer))
        return jnp.tanh(x @ w) if "tanh" in chosen else x

    with target("h200"):
        found = accelerate(f)(x, w, {"tanh"})
    assert_same(found, jax.jit(lambda x, w: jnp.tanh(x @ w))(x, w))
    assert traced == [True]


def test_only_what_changes_is_another_equation() -> None:
    def f(x: Any, w: Any) -> Any:
        with jax.named_scope("within"):
            y = jnp.sin(x) @ w
        jax.debug.print("{}", y[0, 0])
        return jnp.cos(y)

    args = operands()
    stock = jax.make_jaxpr(f)(*args)
    with target("h200"):
        ours = inside(jax.make_jaxpr(accelerate(f, numerics="exact"))(*args))
    changed = [
        (a, b) for a, b in zip(ours.eqns, stock.eqns, strict=True) if a.primitive is not b.primitive
    ]
    assert [b.primitive.name for _, b in changed] == ["dot_general"]
    assert ours.effects == stock.effects
    for a, b in zip(ours.eqns, stock.eqns, strict=True):
        assert str(a.source_info.name_stack) == str(b.source_info.name_stack)
        assert lines.place(a.source_info) == lines.place(b.source_info)
        assert a.effects == b.effects


def test_shardings_donated_arguments_and_names_survive() -> None:
    x, w = operands()
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))

    def own(x: Any, w: Any) -> Any:
        return jax.lax.with_sharding_constraint(x @ w, rows)

    inner = jax.jit(own, donate_argnums=0, out_shardings=rows)
    with target("h200"):
        program = inside(jax.make_jaxpr(accelerate(inner))(x, w))
    (call,) = (e for e in program.eqns if e.primitive.name == "jit")
    assert call.params["name"] == "own"
    assert call.params["donated_invars"] == (True, False)
    assert call.params["out_shardings"] == (rows,)
    assert names(call.params["jaxpr"]) == ["pallas_gemm", "sharding_constraint"]


def test_a_program_of_several_devices_computes_the_same() -> None:
    x, w = operands()
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
    split = jax.device_put(x, rows)
    with target("h200"):
        found = jax.jit(accelerate(PROGRAMS["scanned"]))(split, w)
    assert_same(found, jax.jit(PROGRAMS["scanned"])(split, w))


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.int32, jnp.complex64])
def test_products_that_are_no_kernels_stay(dtype: Any) -> None:
    with jax.enable_x64(True):
        args = [jnp.asarray(np.asarray(x, np.float32)).astype(dtype) for x in operands()]
        program, found = _accelerated(PROGRAMS["plain"], *args)
        assert names(program) == ["dot_general"]
        np.testing.assert_array_equal(found, args[0] @ args[1])


def test_an_outer_product_stays_with_what_follows_it() -> None:
    def f(x: Any, y: Any) -> Any:
        return jnp.einsum("ik,kj->ij", x, y) + 1, jnp.einsum("i,j->ij", x[:, 0], y[0])

    args = [jax.ShapeDtypeStruct(own, jnp.bfloat16) for own in ((8192, 1), (1, 8192))]
    program, found = Rewriter(How(H200)).rewritten(jax.make_jaxpr(f)(*args).jaxpr)
    assert all("one element is contracted" in str(own.why) for own in found)
    assert "pallas_gemm" not in str(program)
    for own in ({}, {"epilogue": jax.nn.relu}):
        with target("h200"):
            [product] = explain(functools.partial(gemm, **own), *args).products
        assert product.plan is None


def test_products_of_this_package_stay_what_they_are() -> None:
    from pallas_gemm import matmul

    args = operands()
    program, _ = _accelerated(lambda x, w: matmul(x.astype(jnp.int32), w.astype(jnp.int32)), *args)
    assert "pallas_gemm" not in names(program)


def test_a_product_of_the_users_own_that_this_package_calls_is_replaced() -> None:
    def compute(rows: Any, sizes: Any) -> Any:
        return jax.lax.ragged_dot(rows, jnp.stack([rows[:N].T, rows[:N]]), sizes)

    def f(x: Any, w: Any) -> Any:
        group = (jnp.arange(N) > 99).astype(jnp.int32)
        return routed.in_groups(x + w, group, 2, compute)

    args = operands()
    program, found = _accelerated(f, *args)
    assert_same(found, jax.jit(f)(*args))
    assert not [x for x in names(program) if x in DOTS]
