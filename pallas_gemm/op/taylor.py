"""What `jax.experimental.jet` makes of a product: the Taylor series of XLA's, which JAX knows."""

import functools
from collections.abc import Callable
from typing import Any

from jax.experimental import jet

from pallas_gemm.op import projections, sum_of_products
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.product import product_p


def _product_series(primals: Any, series: Any, *, contraction: Contraction, **params: Any) -> Any:
    return _series(contraction.by_xla, primals, series, **params)


def _series(
    function: Callable[..., Any], primals: Any, series: Any, *, call: Any, **_: Any
) -> tuple[Any, Any]:
    same = functools.partial(function, call)
    return jet.jet(same, primals, series, factorial_scaled=False)


jet.jet_rules[product_p] = _product_series
jet.jet_rules[sum_of_products.sum_p] = functools.partial(_series, sum_of_products.one_by_one)
jet.jet_rules[projections.projections_p] = functools.partial(_series, projections.one_by_one)
