"""The primitive that every product is: what JAX sees of one, whatever computes it.

Its operands are as they were given, with the dimensions that they have (`contraction`); only what
one device computes is merged into a product of matrices (`canonical`).

Rules for it are in `autodiff.py` (derivatives), `batching.py` (`vmap`) and `lowering.py` (its type
and what it becomes in a compiled program). It is a primitive, and not a function with custom
derivatives, so that it composes as `lax.dot_general` does: forward and reverse mode in any order.
The gradient of weights that are shared under `vmap` is one product that contracts over the batch;
`jax.custom_vjp` would compute one product per example and add them up.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.interpreters.xla import apply_primitive

from pallas_gemm.call import Call
from pallas_gemm.op.contraction import Contraction, of_matrices
from pallas_gemm.op.mesh.mesh_context import device_request

product_p = core.Primitive("pallas_gemm")


def product(call: Call, contraction: Contraction, *operands: jax.Array) -> jax.Array:
    """Computes what `call` says from its operands, in the order of `Operands`."""
    contraction, given = squeezed(call, contraction, operands)
    return computed_by(product_p, call, given, call=call, contraction=contraction)


def squeezed(
    call: Call, contraction: Contraction, operands: Sequence[jax.Array]
) -> tuple[Contraction, tuple[jax.Array, ...]]:
    """Returns a product without the dimensions that broadcast, and its operands."""
    contraction, shapes = contraction.without_ones(call, [x.shape for x in operands])
    pairs = zip(operands, shapes, strict=True)
    return contraction, tuple(x if x.shape == own else x.reshape(own) for x, own in pairs)


def product_of_matrices(call: Call, *operands: jax.Array) -> jax.Array:
    """Computes what `call` says from matrices, or batches of them, stored as it says."""
    return product(call, of_matrices(call, *(x.ndim for x in operands)), *operands)


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


def computed_by(
    primitive: core.Primitive, call: Call, operands: Sequence[jax.Array], /, **params: Any
) -> Any:
    """Computes a primitive about a call, whose lowering is told the devices of a mesh."""
    given = equally_varying(operands)
    return primitive.bind(*given, **params, devices=device_request(call, given))


def give_rules(
    primitive: core.Primitive,
    *,
    jvp: Callable[..., Any] | None = None,
    transpose: Callable[..., Any] | None = None,
    batch: Callable[..., Any] | None = None,
) -> None:
    """Says how a primitive is derived and mapped, and lets it run as JAX's own do.

    It is compiled even under `jax.disable_jit`, and a NaN under `debug_nans` ends in JAX's error; a
    `jax.jit` around it would call itself in both.
    """
    primitive.def_impl(functools.partial(apply_primitive, primitive))
    rules: Any = (
        (ad.primitive_jvps, jvp),
        (ad.primitive_transposes, transpose),
        (batching.primitive_batchers, batch),
    )
    for known, rule in rules:
        if rule is not None:
            known[primitive] = rule


def lower_by(primitive: core.Primitive, rule: Callable[..., Any]) -> None:
    """Lets a rule lower a primitive; it is told whether the program is for a GPU."""
    mlir.register_lowering(primitive, functools.partial(rule, gpu=False))
    mlir.register_lowering(primitive, functools.partial(rule, gpu=True), platform="cuda")


give_rules(product_p)
