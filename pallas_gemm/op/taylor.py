"""`jax.experimental.jet` of a product: the Taylor series of XLA's, which JAX knows."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental import jet

from pallas_gemm.call import Call
from pallas_gemm.op import projections, sum_of_products
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.product import product_p


def _of_one(
    primals: Any, series: Any, *, call: Call, contraction: Contraction, **_: Any
) -> tuple[Any, Any]:
    return _series(functools.partial(contraction.by_xla, call), primals, series)


def _of_several(
    one_by_one: Callable[..., Any],
    primals: Any,
    series: Any,
    *,
    call: Any,
    contractions: Sequence[Contraction],
    **_: Any,
) -> tuple[Any, Any]:
    return _series(functools.partial(one_by_one, call, contractions), primals, series)


def _series(function: Callable[..., Any], primals: Any, series: Any) -> tuple[Any, Any]:
    return jet.jet(function, primals, series, factorial_scaled=False)


jet.jet_rules[product_p] = _of_one
jet.jet_rules[sum_of_products.sum_p] = functools.partial(_of_several, sum_of_products.one_by_one)
jet.jet_rules[projections.projections_p] = functools.partial(_of_several, projections.one_by_one)
