"""Kernels that make the dimensions of a product in another order than the program has them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallas_gemm.device import H200
from pallas_gemm.planning import prediction
from pallas_gemm.rewriting import folds
from pallas_gemm.rewriting.folds import Fold, Folder
from pallas_gemm.rewriting.functions import function_of
from pallas_gemm.rewriting.inlining import inlined
from pallas_gemm.rewriting.inside import Inside
from pallas_gemm.rewriting.level import Level
from pallas_gemm.rewriting.products import Dense, How, dense
from pallas_gemm.rewriting.regions import region_of

ROWS, COLUMNS, WIDTH = 4096, 8192, 128


def _scores(x: Any, w: Any) -> Any:
    return jnp.einsum("md,nd->mn", x, w, preferred_element_type=jnp.float32)


def _turned(x: Any, w: Any) -> Any:
    z = lax.transpose(_scores(x, w) * 0.125, (1, 0))
    return z, jax.nn.logsumexp(z, 1)


def _not_turned(x: Any, w: Any) -> Any:
    z = _scores(x, w) * 0.125
    return z, jax.nn.logsumexp(z, 0)


def _program(f: Callable[..., Any], factors: int = 2) -> tuple[Level, Folder, list[Dense]]:
    """Returns a program, what folds it, and its products."""
    sizes = (ROWS, COLUMNS, COLUMNS)[:factors]
    jaxpr = jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct((n, WIDTH), jnp.bfloat16) for n in sizes))
    equations = inlined(jaxpr.jaxpr, jaxpr.eqns)
    level, how = Level(jaxpr.jaxpr, equations), How(H200)
    products = [dense(e, how) for e in equations if e.primitive.name == "dot_general"]
    assert all(isinstance(own, Dense) for own in products)
    return level, Folder(how), [own for own in products if isinstance(own, Dense)]


def _fold(f: Callable[..., Any]) -> tuple[Level, Folder, Fold]:
    level, folder, (own,) = _program(f)
    fold = folder.fold(level, own, {own.out: own})
    assert fold is not None
    # The columns of the product are the rows of its kernel.
    assert fold.products[0].order == (1, 0)
    return level, folder, fold


def test_a_function_is_known_by_the_order_of_its_sums() -> None:
    level, _, (own,) = _program(lambda x, w: jnp.tanh(_scores(x, w)))
    region = region_of(Inside(level, (own.out,), exact=False))
    assert region is not None
    plain, turned = (function_of(level, region, order) for order in ((), (1, 0)))
    assert plain.types[0].shape == (ROWS, COLUMNS)
    assert turned.types[0].shape == (COLUMNS, ROWS)
    assert function_of(level, region) is plain


def test_a_kernel_with_more_in_it_keeps_its_order() -> None:
    level, folder, fold = _fold(_turned)
    again = folder.again(level, fold, fold.region)
    assert again is not None
    assert again.function.types[0].shape == (COLUMNS, ROWS)


def test_results_that_a_kernel_makes_in_another_order_are_copied() -> None:
    (*_, as_made), (*_, copied) = map(_fold, (_turned, _not_turned))
    launch = prediction.pass_seconds(0, H200)
    moving = prediction.pass_seconds(2 * 4 * ROWS * COLUMNS, H200) - launch
    assert as_made.saved - copied.saved == pytest.approx(moving)


def test_a_gate_has_both_of_its_products_in_the_order_of_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def program(x: Any, gate: Any, up: Any) -> Any:
        return jax.nn.softmax(jax.nn.silu(_scores(x, gate)) * _scores(x, up), 0)

    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)
    level, folder, products = _program(program, factors=3)
    fold, _ = folder._best(level, tuple(products))
    assert fold is not None
    assert [own.out for own in fold.products] == [own.out for own in products]


@pytest.mark.parametrize(("axes", "along_all"), [((0, 1), True), (1, False), (0, False)])
def test_a_kernel_adds_up_all_rows_of_its_product(axes: Any, along_all: bool) -> None:
    def program(x: Any, w: Any) -> Any:
        z = jnp.einsum("btd,nd->btn", x, w, preferred_element_type=jnp.float32)
        return jnp.sum(jnp.exp(z - jnp.max(z, axes, keepdims=True)), axes)

    shapes = [jax.ShapeDtypeStruct(own, jnp.bfloat16) for own in ((8, 512, 128), (4096, 128))]
    jaxpr = jax.make_jaxpr(program)(*shapes)
    equations = inlined(jaxpr.jaxpr, jaxpr.eqns)
    (product,) = (e for e in equations if e.primitive.name == "dot_general")
    inside = Inside(Level(jaxpr.jaxpr, equations), (product.outvars[0],), exact=False)
    assert inside.of_exp
    assert inside.sums_along((0, 1)) == along_all
