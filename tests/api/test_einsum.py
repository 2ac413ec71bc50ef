"""`einsum`: every kind of subscript, and which products it is made of."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_gemm
from pallas_gemm import QuantizedWeight, dot_general, einsum, explain, numerics, target
from pallas_gemm.op.product import product_p
from tests import meshes, reference, traced

# Subscripts, shapes, and how many products and transposed operands they come down to.
CASES: list[tuple[str, list[tuple[int, ...]], int, int]] = [
    ("ij,jk->ik", [(2, 3), (3, 4)], 1, 0),
    ("ij,jk", [(2, 3), (3, 4)], 1, 0),
    ("ij,jk->ki", [(2, 3), (3, 4)], 1, 0),
    ("bsd,vd->bsv", [(2, 3, 4), (7, 4)], 1, 0),
    ("vd,bsd->bsv", [(7, 4), (2, 3, 4)], 1, 0),
    ("bhqd,bhkd->bhqk", [(2, 3, 4, 5), (2, 3, 6, 5)], 1, 0),
    ("bqhd,bkhd->bhqk", [(2, 4, 3, 5), (2, 6, 3, 5)], 1, 2),
    ("i,j->ij", [(2,), (3,)], 1, 0),
    ("ij,ij->ij", [(2, 3), (2, 3)], 1, 0),
    ("ij,ij", [(2, 3), (2, 3)], 1, 0),
    (",ij->ij", [(), (2, 3)], 1, 0),
    # The one that is shared by the batch takes part in a single product with all the others.
    ("...ij,...jk->...ik", [(1, 2, 3), (5, 3, 4)], 1, 1),
    ("...ij,...jk->...ik", [(5, 2, 3), (1, 3, 4)], 1, 0),
    ("...d,df", [(2, 3, 4), (4, 5)], 1, 0),
    # Summed out, or a diagonal taken, before the product.
    ("ij,kl->il", [(2, 3), (4, 5)], 1, 0),
    ("ii,ij->j", [(3, 3), (3, 4)], 1, 0),
    ("iij,jkk->ik", [(2, 2, 3), (3, 4, 4)], 1, 0),
    # In pairs.
    ("ij,jk,kl->li", [(2, 3), (3, 4), (4, 5)], 2, 0),
    # No product.
    ("ij->j", [(2, 3)], 0, 0),
    ("ii", [(3, 3)], 0, 0),
    ("ij->ji", [(2, 3)], 0, 0),
]


@pytest.mark.parametrize(
    ("subscripts", "shapes", "products", "copies"), CASES, ids=[case[0] for case in CASES]
)
def test_the_result_is_exact(
    rng: np.random.Generator,
    subscripts: str,
    shapes: list[tuple[int, ...]],
    products: int,
    copies: int,
) -> None:
    operands = [reference.integers(rng, shape, jnp.float32) for shape in shapes]
    exact = np.einsum(subscripts, *(reference.wide(x) for x in operands))
    reference.assert_exact(einsum(subscripts, *operands), exact)
    found = traced.products(lambda *xs: einsum(subscripts, *xs), *operands)
    sides = [side for own in found for side in (own.form.a, own.form.b)]
    copied = sum(not side.is_free for side in sides)
    copied += sum(own.form.permutation is not None for own in found)
    assert (len(found), copied) == (products, copies)


def test_indices_may_be_numbers(rng: np.random.Generator) -> None:
    a, b = (reference.integers(rng, shape, jnp.int8) for shape in ((2, 3), (3, 4)))
    result = einsum(a, [0, 1], b, [1, 2], [2, 0], preferred_element_type=jnp.int32)
    assert result.dtype == jnp.int32
    reference.assert_exact(result, (reference.wide(a) @ reference.wide(b)).T)


@jax.numpy_dtype_promotion("standard")
def test_a_sum_before_a_product_does_not_overflow() -> None:
    many = jnp.ones((1000, 2), jnp.int8)
    result = einsum("ij,jk->k", many, jnp.ones((2, 3), jnp.int8), preferred_element_type=jnp.int32)
    np.testing.assert_array_equal(result, [2000, 2000, 2000])


def test_gradients_and_maps_are_those_of_a_product(rng: np.random.Generator) -> None:
    a, b = (reference.integers(rng, shape, jnp.float32) for shape in ((5, 2, 3), (3, 4)))

    def loss(op: Any) -> Any:
        return lambda a, b: jnp.sum(jax.vmap(lambda x: op("sd,df->fs", x, b))(a) ** 2)

    ours, stock = (jax.grad(loss(op), (0, 1))(a, b) for op in (einsum, jnp.einsum))
    jax.tree.map(np.testing.assert_array_equal, ours, stock)


def test_the_sharding_of_the_result_is_that_which_is_asked_for() -> None:
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        a = jax.device_put(jnp.ones((4, 6, 8)), jax.P("x"))
        b = jax.device_put(jnp.ones((8, 2, 10)), jax.P(None, "y"))
        # The product comes out as bshk and is transposed.
        result = einsum("bsd,dhk->bhsk", a, b, out_sharding=jax.P("x", "y"))
        assert jax.typeof(result).sharding.spec == jax.P("x", "y", None, None)
        np.testing.assert_array_equal(result, np.full((4, 2, 6, 10), 8.0))


def test_several_operands_may_have_a_sharding_asked_for() -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        # No pair of these can be multiplied as they are split: only the whole has a sharding.
        a = jax.device_put(jnp.ones((4, 2, 1, 8)), jax.P(None, None, None, "x"))
        b = jax.device_put(jnp.ones((4, 2, 1, 8)), jax.P("x"))
        c = jax.device_put(jnp.ones((4, 2, 1, 6)), jax.P("x"))
        wanted = jax.P("x", None, None)
        result = einsum("bthD,bthi,bthj->ijD", a, b, c, out_sharding=wanted)
        assert jax.typeof(result).sharding.spec == wanted
        np.testing.assert_array_equal(result, np.full((8, 6, 8), 8.0))


def test_partial_sums_of_a_transposed_result_may_be_asked_for() -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        a = jax.device_put(jnp.ones((2, 4, 6)), jax.P(None, None, "x"))
        b = jax.device_put(jnp.ones((6, 8)), jax.P("x", None))

        def contract(op: Any) -> Any:
            sums = jax.jit(lambda a, b: op("bij,jk->ibk", a, b, out_sharding=partial))(a, b)
            return sums, jax.sharding.reshard(sums, jax.P())

        partial = jax.P(None, None, None, unreduced={"x"})
        ours, stock = contract(einsum), contract(jnp.einsum)
        assert jax.typeof(ours[0]) == jax.typeof(stock[0])
        np.testing.assert_array_equal(ours[1], stock[1])


@pytest.mark.parametrize(
    "optimize",
    [False, True, "greedy", [(0, 1), (0, 1)], [[1, 2], [0, 1]], ((1, 2), (0, 1))],
    ids=repr,
)
def test_pairs_are_chosen_as_by_jax_and_multiplied_by_what_a_layer_passes(optimize: Any) -> None:
    operands = [jnp.ones(shape) for shape in ((2, 3), (3, 40), (40, 5))]

    def products(op: Any) -> list[tuple[int, ...]]:
        seen = []

        def multiply(*args: Any, **kwargs: Any) -> jax.Array:
            seen.append(dot_general(*args, **kwargs))
            return seen[-1]

        how = {"optimize": optimize, "out": None, "_dot_general": multiply}
        result = op("ij,jk,kl", *operands, **how)
        np.testing.assert_array_equal(result, np.full((2, 5), 120.0))
        return [product.shape for product in seen]

    assert len(products(einsum)) == 2
    assert products(einsum) == products(jnp.einsum)


def test_sizes_may_be_symbols() -> None:
    rows, columns = jax.export.symbolic_shape("rows, columns")
    exported = jax.export.export(jax.jit(lambda a, b: einsum("ri,...ic->...cr", a, b)))(
        jax.ShapeDtypeStruct((rows, 3), jnp.float32),
        jax.ShapeDtypeStruct((2, 3, columns), jnp.float32),
    )
    np.testing.assert_array_equal(
        exported.call(np.ones((4, 3), np.float32), np.ones((2, 3, 5), np.float32)),
        np.full((2, 5, 4), 3.0),
    )


def test_what_does_not_fit_is_refused() -> None:
    a = jnp.ones((2, 3))
    with pytest.raises(ValueError, match="label 'j' for operand 1"):
        einsum("ij,jk", a, a)
    with pytest.raises(NotImplementedError, match="3 or more operands"):
        einsum("ij,kj,kl", a, a, a, optimize=[(0, 1, 2)])
    with pytest.raises(TypeError, match="preferred_element_type='f31' is no type of numbers"):
        einsum("ij,kj", a, a, preferred_element_type="f31")
    assert einsum("ij,kj", a, a, preferred_element_type="bf16").dtype == jnp.bfloat16
    with pytest.raises(NotImplementedError, match="'out' argument"):
        einsum("ij,kj", a, a, out=np.ones((2, 2)))


@pytest.mark.parametrize(
    ("subscripts", "names"),
    [
        ("btd,dnh->btnh", "btdnh"),
        ("btd,sndh->sbtnh", "btdsnh"),
        ("vd,bsd->bsv", "vdbs"),
        ("bqhd,bkhd->bhqk", "bqhdk"),
        # Summed out before the product, broadcast, or taken in pairs.
        ("ij,kl->il", "mn"),
        ("...ij,jk->...ik", "mkn"),
    ],
)
def test_dimensions_are_called_what_the_caller_calls_them(subscripts: str, names: str) -> None:
    letters = subscripts.partition("->")[0].split(",")
    shapes = [jax.ShapeDtypeStruct((2,) * len(own.replace("...", "")), "f4") for own in letters]
    jaxpr = jax.make_jaxpr(lambda *xs: einsum(subscripts, *xs))(*shapes)
    found: list[Any] = []

    def visit(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive is product_p:
                found.append(equation.params["contraction"])
            for inner in core.jaxprs_in_params(equation.params):
                visit(inner)

    visit(jaxpr.jaxpr)
    (dims,) = found
    assert {*dims.names().values()} == {*names}
    if dims.lettered:
        assert dims.of_left.names().keys() == dims.of_right.names().keys() == {*names}


STAND_INS: dict[str, tuple[Any, Any]] = {
    "einsum": (jnp, lambda a, b: jnp.einsum("ij,jk->ik", a, b)),
    "matmul": (jnp, lambda a, b: jnp.matmul(a, b, precision=None)),
    "dot_general": (lax, lambda a, b: lax.dot_general(a, b, (((1,), (0,)), ((), ())))),
    "ragged_dot": (lax, lambda a, b: lax.ragged_dot(a, b[None], jnp.array([4]))),
    "ragged_dot_general": (
        lax,
        lambda a, b: lax.ragged_dot_general(
            *(a, b[None], jnp.array([4])),
            lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0]),
        ),
    ),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex64])
@pytest.mark.parametrize("name", STAND_INS)
def test_ours_may_stand_in_for_those_of_jax(
    name: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, multiply = STAND_INS[name]
    a, b = jnp.ones((4, 5), dtype), jnp.ones((5, 6), dtype)
    for stand_in, (own, _) in STAND_INS.items():
        monkeypatch.setattr(own, stand_in, getattr(pallas_gemm, stand_in))
    np.testing.assert_array_equal(multiply(a, b), np.full((4, 6), 5))
    if dtype == jnp.float32:
        loss = jax.grad(lambda a: multiply(a, b).sum())
        np.testing.assert_array_equal(loss(a), np.full((4, 5), 6))
        # What is planned asks for the rules of types, too.
        with pallas_gemm.target("h200"):
            assert len(explain(multiply, a, b).products) == 1


@pytest.mark.parametrize("subscripts", ["mk,kn->mn", "kn,mk->mn"])
def test_a_promise_leaves_the_type_of_the_result_as_it_is_asked_for(subscripts: str) -> None:
    operands = [
        jax.ShapeDtypeStruct(tuple({"m": 256, "k": 128, "n": 384}[x] for x in own), jnp.bfloat16)
        for own in subscripts.partition("->")[0].split(",")
    ]

    def product(*operands: Any) -> jax.Array:
        how: dict[str, Any] = {"preferred_element_type": jnp.float32}
        return einsum(subscripts, *operands, numerics=numerics("rows"), **how)

    with target("h200"):
        (found,) = explain(product, *operands).products
    assert found.problem is not None
    assert found.problem.out_dtype == jnp.float32


def test_where_a_result_with_weights_of_few_bits_lies_is_asked_for() -> None:
    mesh = meshes.make_mesh(AxisType.Explicit)
    rng = np.random.default_rng(0)
    weight = QuantizedWeight.of(reference.normal(rng, (64, 32), jnp.float32), dtype="s8")
    x = reference.normal(rng, (8, 64), jnp.bfloat16)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, P()))
        weight = jax.device_put(weight, NamedSharding(mesh, P()))
        found = einsum("mk,kn->mn", x, weight, out_sharding=P("x", "y"))
        assert jax.typeof(found).sharding.spec == P("x", "y")
