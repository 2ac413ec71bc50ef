"""Rows in another order as one primitive, whose gradient are rows in another order again.

JAX derives `x[places]` as a sum into an array of zeros, because places may be there twice, and says
no less where they are not. Here the gradient is `g[inverse]`: nothing is zeroed or added up, and
what makes `g` can be a part of the same pass.
"""

from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, mlir

from pallas_gemm.op.product import equally_varying, give_rules

permuted_p = core.Primitive("pallas_gemm_permuted")


def permuted(x: jax.Array, places: jax.Array, inverse: jax.Array) -> jax.Array:
    """Returns `x[places]`.

    Args:
        x: The rows.
        places: Which row comes where, each once.
        inverse: Which place each row comes to: `places[inverse]` are all rows in order.
    """
    return permuted_p.bind(*equally_varying((x, places, inverse)))


def _taken(x: jax.Array, places: jax.Array, _: jax.Array) -> jax.Array:
    return x.at[places].get(unique_indices=True, mode="promise_in_bounds")


@permuted_p.def_abstract_eval
def _abstract(*avals: Any) -> Any:
    return jax.make_jaxpr(_taken)(*avals).out_avals[0]


def _jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    x, places, inverse = primals
    return permuted(x, places, inverse), permuted(tangents[0], places, inverse)


def _transpose(cotangent: Any, x: Any, places: Any, inverse: Any) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(x.aval), None, None]
    return [permuted(cotangent, inverse, places), None, None]


def _batch(operands: tuple[Any, ...], dims: tuple[Any, ...]) -> tuple[jax.Array, int]:
    return jax.vmap(_taken, dims)(*operands), 0


give_rules(permuted_p, jvp=_jvp, transpose=_transpose, batch=_batch)
mlir.register_lowering(permuted_p, mlir.lower_fun(_taken, multiple_results=False))
