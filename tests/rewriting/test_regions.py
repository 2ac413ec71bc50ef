"""The operations around a product that a kernel could compute with it."""

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
