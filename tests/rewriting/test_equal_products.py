"""Equal products of a program are planned once, and no others are taken for equal."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallas_gemm.device import H200
from pallas_gemm.rewriting import products
from pallas_gemm.rewriting.products import Dense, How

SHAPE, BF16 = jax.ShapeDtypeStruct, jnp.bfloat16
X, W = SHAPE((1024, 1024), BF16), SHAPE((1024, 1024), BF16)


def _dot(contracting: tuple[int, int] = (1, 0), **params: Any) -> Callable[..., Any]:
    numbers = (tuple((axis,) for axis in contracting), ((), ()))
    return lambda x, w: lax.dot_general(x, w, numbers, **params)


PRODUCTS = {
    "first": (_dot(), X, W),
    "rows": (_dot(), SHAPE((2048, 1024), BF16), W),
    "columns": (_dot(), X, SHAPE((1024, 2048), BF16)),
    "type": (_dot(), X, SHAPE((1024, 1024), jnp.float16)),
    "dimensions": (_dot((1, 1)), X, W),
    "result": (_dot(preferred_element_type=jnp.float32), X, W),
    "precision": (_dot(precision=lax.Precision.HIGHEST), X, W),
    "no kernel's": (_dot(), SHAPE(X.shape, jnp.int32), SHAPE(W.shape, jnp.int32)),
}


def _equation(f: Callable[..., Any], *args: Any) -> Any:
    (found,) = (e for e in jax.make_jaxpr(f)(*args).eqns if e.primitive.name == "dot_general")
    return found


def _planned(own: Dense | str) -> Any:
    return (own.call, own.dims, own.seconds, own.left) if isinstance(own, Dense) else own


@pytest.mark.parametrize("name", PRODUCTS)
def test_what_tells_products_apart_is_noticed(name: str) -> None:
    how = How(H200)
    with jax.numpy_dtype_promotion("standard"):
        first, other = (_equation(*PRODUCTS[own]) for own in ("first", name))
    products.dense(first, how)
    assert _planned(products.dense(other, how)) == _planned(products.dense(other, How(H200)))


def test_equal_products_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count, how = [], How(H200)
    plan = products._dense
    monkeypatch.setattr(products, "_dense", lambda *args: (count.append(1), plan(*args))[1])
    equations = [_equation(*PRODUCTS[name]) for name in ("first", "first", "rows", "rows")]
    found = [products.dense(own, how) for own in equations]
    assert len(count) == 2
    for own, equation in zip(found, equations, strict=True):
        assert isinstance(own, Dense)
        assert (*own.factors, own.out) == (*equation.invars, *equation.outvars)
