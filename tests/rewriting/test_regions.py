"""The operations around a product that a kernel could compute with it."""

from typing import Any

import jax
import jax.numpy as jnp
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
