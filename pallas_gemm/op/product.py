"""The primitive that every product is: what JAX sees of one, whatever computes it.

Rules for it are in `autodiff.py` (derivatives), `batching.py` (`vmap`) and `lowering.py` (its type
and what it becomes in a compiled program). It is a primitive, and not a function with custom
derivatives, because then it composes as `lax.dot_general` does: forward and reverse mode in any
order, and the gradient of weights that are shared under `vmap` is one product that contracts over
the batch, where `jax.custom_vjp` would compute one product per example and add them up.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from pallas_gemm.op.mesh_context import device_request
from pallas_gemm.planning.call import Call

product_p = core.Primitive("pallas_gemm")


def product(call: Call, *operands: jax.Array) -> jax.Array:
    """Computes what `call` says from its operands, in the order of `Operands`."""
    return product_p.bind(
        *equally_varying(operands), call=call, devices=device_request(call, operands)
    )


def equally_varying(operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Lets all operands vary over the axes of `shard_map` that one varies over.

    The gradient of an operand that was the same everywhere is then summed over those axes.
    """
    varying = [jax.typeof(x).manual_axis_type.varying for x in operands]
    every = frozenset().union(*varying)
    return tuple(
        jax.lax.pcast(x, tuple(sorted(every - own)), to="varying") if every - own else x
        for x, own in zip(operands, varying, strict=True)
    )


@functools.lru_cache(maxsize=1024)
def compiled(run: Callable[..., Any], call: Call) -> Callable[..., Any]:
    """Returns what runs a product of operands that are not traced."""
    return jax.jit(functools.partial(run, call))


@product_p.def_impl
def _run(*operands: jax.Array, call: Call, **_: Any) -> jax.Array:
    """Runs a product of operands that are not traced."""
    return compiled(product, call)(*operands)
