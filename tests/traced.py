"""The products that a function comes to when it is traced: the matrices that kernels multiply."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

from pallas_gemm.call import signature_of
from pallas_gemm.op.canonical import Merged, merged
from pallas_gemm.op.fused import fused_p
from pallas_gemm.op.product import product_p


def products(f: Callable[..., Any], *args: Any) -> list[Merged]:
    """Returns every product in a function."""
    return list(_products(jax.make_jaxpr(f)(*args).jaxpr))


def count(f: Callable[..., Any], *args: Any) -> int:
    """Returns how many products are in a function, those with functions as epilogues too."""
    return _count(jax.make_jaxpr(f)(*args).jaxpr)


def _count(jaxpr: core.Jaxpr) -> int:
    own = sum(equation.primitive in (product_p, fused_p) for equation in jaxpr.eqns)
    inner = (x for equation in jaxpr.eqns for x in core.jaxprs_in_params(equation.params))
    return own + sum(map(_count, inner))


def shapes(f: Callable[..., Any], *args: Any) -> list[list[tuple[int, ...]]]:
    """Returns the shapes of the matrices of every product in a function."""
    return [[shape for shape, _ in own.signature] for own in products(f, *args)]


def _products(jaxpr: core.Jaxpr) -> Iterator[Merged]:
    for equation in jaxpr.eqns:
        if equation.primitive is product_p:
            call, contraction = (equation.params[name] for name in ("call", "contraction"))
            avals: list[Any] = [v.aval for v in equation.invars]
            yield merged(call, contraction, signature_of(tuple(avals)))
        for inner in core.jaxprs_in_params(equation.params):
            yield from _products(inner)
