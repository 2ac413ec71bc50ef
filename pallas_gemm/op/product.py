"""The primitive that every product is: what JAX sees of one, whatever computes it.

Rules for it are in `autodiff.py` (derivatives), `batching.py` (`vmap`) and `lowering.py` (its type
and what it becomes in a compiled program). It is a primitive, and not a function with custom
derivatives, because then it composes as `lax.dot_general` does: forward and reverse mode in any
order, and the gradient of weights that are shared under `vmap` is one product that contracts over
the batch, where `jax.custom_vjp` would compute one product per example and add them up.

Products of one left operand are a primitive of their own for the same reason, a fan: JAX would add
up the gradients that the left operand has from each, and a kernel can do that in its accumulator.

    y1, y2, ... = a @ b1, a @ b2, ...        as many products as there are
    da = g1 @ b1.T + g2 @ b2.T + ...         one, whose operands are in pieces
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from pallas_gemm.op import partition
from pallas_gemm.planning.call import Call

product_p = core.Primitive("pallas_gemm")

fan_p = core.Primitive("pallas_gemm_fan")
fan_p.multiple_results = True


def product(call: Call, *operands: jax.Array) -> jax.Array:
    """Computes what `call` says from its operands, in the order of `Operands`."""
    return product_p.bind(
        *equally_varying(operands), call=call, devices=partition.asking(call, operands)
    )


def apart(call: Call, *operands: jax.Array) -> jax.Array:
    """Computes a product of operands in pieces as JAX adds up gradients: the last one first."""
    one = dataclasses.replace(call, pieces=1)
    products = [product(one, a, b) for a, b in reversed(call.pairs(operands))]
    return functools.reduce(operator.add, products)


def fan(call: Call, a: jax.Array, rights: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
    """Computes several products of one left operand.

    Args:
        call: What each of them is.
        a: Their left operand.
        rights: The other operands of each, in the order of `Operands`.
    """
    operands = equally_varying((a, *itertools.chain.from_iterable(rights)))
    # What devices of a mesh add up is not added up in an accumulator, and neither is a batch, nor
    # what is of several types; what is named is for each product alone.
    alone = call.options.names_something or partition.is_on_mesh(*operands)
    alike = len({right[0].dtype for right in rights}) == 1
    if len(rights) == 1 or a.ndim != 2 or alone or not alike:
        return spread(call, *operands)
    return fan_p.bind(*operands, call=call, devices=partition.asking(call, operands))


def spread(call: Call, a: jax.Array, *operands: jax.Array) -> list[jax.Array]:
    """Computes the products of a fan one by one."""
    return [product(call, a, *own) for own in blades(call, operands)]


def blades(call: Call, rest: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns what belongs to each product of a fan, of what there is but for the left operand."""
    each = 1 + call.epilogue.bias
    return list(itertools.batched(rest, each))


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
def _compiled(run: Callable[..., Any], call: Call) -> Callable[..., Any]:
    return jax.jit(functools.partial(run, call))


@product_p.def_impl
def _run(*operands: jax.Array, call: Call, **_: Any) -> jax.Array:
    """Runs a product of operands that are not traced."""
    return _compiled(product, call)(*operands)


@fan_p.def_impl
def _run_fan(*operands: jax.Array, call: Call, **_: Any) -> list[jax.Array]:
    """Runs several products of operands that are not traced."""
    return _compiled(spread, call)(*operands)
