"""The operations around a product that a kernel could compute with it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallas_gemm.rewriting.inside import Inside
from pallas_gemm.rewriting.level import Level
from pallas_gemm.rewriting.regions import Region, region_of

SHAPE = (256, 128)


def _names(region: Region | None) -> set[str]:
    assert region is not None
    return {equation.primitive.name for equation in region.inside}


def test_a_product_has_a_region_with_its_reductions_and_one_without() -> None:
    def program(x: Any, w: Any) -> Any:
        y = lax.max(lax.dot(x, w), jnp.zeros(SHAPE))
        return y, lax.reduce_sum(y, (0,))

    like = jax.ShapeDtypeStruct
    jaxpr = jax.make_jaxpr(program)(like((256, 64), jnp.float32), like((64, 128), jnp.float32))
    (dot,) = (e for e in jaxpr.eqns if e.primitive.name == "dot_general")
    inside = Inside(Level(jaxpr, jaxpr.eqns), (dot.outvars[0],), exact=False)
    whole, alone = region_of(inside), region_of(inside.without_reductions())
    assert {"max", "reduce_sum"} <= _names(whole)
    assert "max" in _names(alone)
    assert "reduce_sum" not in _names(alone)
    # The first is as it was, though the second has been asked for.
    assert region_of(inside) == whole
    assert alone is not None
    assert [x.aval.shape for x in alone.results] == [SHAPE]


def _loss(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.sin(lax.dot_general(x, w, (((1,), (1,)), ((), ())))))


def _updated(x: Any, w: Any) -> Any:
    return w - jax.grad(_loss)(w, x)


def _apart(x: Any, w: Any) -> Any:
    return (w - jax.grad(_loss)(w, x)).astype(jnp.float32)


def _of_another(x: Any, w: Any) -> Any:
    w = lax.sort(w)
    return w - jax.grad(_loss)(w, x)


def _added(x: Any, w: Any) -> Any:
    return w - lax.dot_general(x, x, (((0,), (0,)), ((), ())))


@pytest.mark.parametrize(
    ("program", "copies"), [(_updated, 1), (_apart, 0), (_of_another, 0), (_added, 0)]
)
def test_an_update_is_copied_over_what_the_function_was_given(program: Any, copies: int) -> None:
    like = jax.ShapeDtypeStruct
    jaxpr = jax.make_jaxpr(program)(like((512, 256), jnp.bfloat16), like((256, 256), jnp.bfloat16))
    *_, last = (e for e in jaxpr.eqns if e.primitive.name == "dot_general")
    found = region_of(Inside(Level(jaxpr, jaxpr.eqns), (last.outvars[0],), exact=False))
    assert found is not None
    assert found.left == 2 * copies * 256 * 256 * 2


@pytest.mark.parametrize("count", [2, 3])
def test_a_kernel_has_five_arrays_at_most(count: int) -> None:
    def program(x: Any, w: Any, *beside: Any) -> Any:
        y = lax.dot(x, w)
        return [y * own for own in beside]

    like = jax.ShapeDtypeStruct
    beside = [like(SHAPE, jnp.bfloat16)] * count
    jaxpr = jax.make_jaxpr(program)(
        like((256, 64), jnp.bfloat16), like((64, 128), jnp.bfloat16), *beside
    )
    found = region_of(Inside(Level(jaxpr, jaxpr.eqns), (jaxpr.eqns[0].outvars[0],), exact=False))
    assert (found is None) == (2 * count > 5)


def _inside(program: Any, *shapes: tuple[int, ...]) -> Inside:
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    jaxpr = jax.make_jaxpr(program)(*given)
    (dot,) = (e for e in jaxpr.eqns if e.primitive.name == "dot_general")
    return Inside(Level(jaxpr, jaxpr.eqns), (dot.outvars[0],), exact=False)


def test_transpositions_alone_are_no_region() -> None:
    def program(x: Any, w: Any) -> Any:
        return lax.expand_dims(lax.transpose(lax.dot(x, w), (1, 0)), (0,))

    inside = _inside(program, (256, 64), (64, 128))
    assert len(inside.equations) == 2
    assert region_of(inside) is None


def test_a_reshape_of_dimensions_ends_a_region() -> None:
    def program(x: Any, w: Any) -> Any:
        return lax.sin(lax.reshape(lax.exp(lax.dot(x, w)), (2, 128, 128)))

    region = region_of(_inside(program, (256, 64), (64, 128)))
    assert _names(region) == {"exp"}


def test_operands_are_read_where_the_fewest_bytes_are() -> None:
    def program(x: Any, w: Any, u: Any, v: Any, table: Any) -> Any:
        beside = lax.broadcast_in_dim(u + v, SHAPE, (1,))
        chosen = jnp.take(table, jnp.arange(256) % 2, axis=0)
        masked = lax.broadcasted_iota(jnp.int32, SHAPE, 0) < 7
        return lax.select(masked, lax.dot(x, w) * beside, chosen)

    shapes = (256, 64), (64, 128), (128,), (128,), (2, 128)
    with jax.numpy_rank_promotion("allow"):
        region = region_of(_inside(program, *shapes))
    assert region is not None
    # The sum of the vectors, and the rows that are chosen; positions are computed.
    assert sorted(x.aval.shape for x in region.operands) == [(128,), SHAPE]
    assert "iota" in _names(region)


def test_results_in_the_order_in_which_a_kernel_makes_them_are_not_copied() -> None:
    def program(x: Any, w: Any) -> Any:
        z = lax.exp(lax.dot(x, w))
        return z, lax.transpose(lax.sin(z), (1, 0))

    inside = _inside(program, (256, 64), (64, 128))
    results = [e.outvars[0] for e in inside.equations if e.primitive.name in ("exp", "transpose")]
    turned = inside.made_in_order((1, 0))
    copied = 2 * 256 * 128 * 4
    for own, is_copied in ((inside, [False, True]), (turned, [True, False])):
        assert [own.copied_bytes([x]) for x in results] == [copied * x for x in is_copied]
        # Whatever the kernel does, XLA's own scores are in the program's order.
        assert list(map(own.is_turned, results)) == [False, True]


def test_a_broadcast_within_an_operation_ends_a_region() -> None:
    def program(x: Any, w: Any) -> Any:
        column = lax.expand_dims(lax.sqrt(lax.dot(x, w)), (1,))
        return lax.transpose(lax.mul(x, column), (1, 0))

    region = region_of(_inside(program, (256, 64), (64,)))
    assert _names(region) == {"sqrt", "broadcast_in_dim"}


def test_operands_that_one_operation_makes_are_in_its_order() -> None:
    def program(x: Any, w: Any, p: Any, q: Any) -> Any:
        a, b = lax.sort((p, q), num_keys=2)
        return lax.dot(x, w) * b + a

    like, known = jax.ShapeDtypeStruct, jnp.float32
    given = [like(shape, known) for shape in ((256, 64), (64, 128), SHAPE, SHAPE)]
    # Sets of what was just traced have another order each time.
    for _ in range(16):
        jaxpr = jax.make_jaxpr(functools.partial(program))(*given)
        (dot,) = (e for e in jaxpr.eqns if e.primitive.name == "dot_general")
        (sort,) = (e for e in jaxpr.eqns if e.primitive.name == "sort")
        region = region_of(Inside(Level(jaxpr, jaxpr.eqns), (dot.outvars[0],), exact=False))
        assert region is not None
        assert region.operands == tuple(sort.outvars)
