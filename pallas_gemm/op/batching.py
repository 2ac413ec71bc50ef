"""How `vmap` maps a product: it gets one more dimension.

Where only the left operand is mapped, that dimension is more rows; of the right operand alone, more
columns; of both, a batch. The merge (`canonical`) decides what this dimension is merged with, and
whether anything is copied for it. It decides for the part that one device has.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching

from pallas_gemm.call import DIMENSIONS, EXTRAS, OF_RESULT, Call, Operands
from pallas_gemm.op.canonical import count
from pallas_gemm.op.contraction import ONE, Contraction
from pallas_gemm.op.product import product, product_p
from pallas_gemm.planning.by_xla import xla
from pallas_gemm.planning.candidates.cuts import SMALLEST_TILE


def _batch(
    operands: tuple[Any, ...],
    dims: tuple[Any, ...],
    *,
    call: Call,
    contraction: Contraction,
    **_: Any,
) -> tuple[Any, Any]:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    given, mapped = call.unpack(operands), call.unpack(dims)
    given, mapped = _with_their_factors(given, mapped, size)
    # What is promised is that of a kernel that applies the epilogue; so are sums of blocks scaled.
    together = call.options.numerics is not None or call.epilogue.blocks
    if together and (mapped.a, mapped.b, mapped.up) == (None, None, None):
        given, mapped = given._replace(a=fronted(given.a, None, size)), mapped._replace(a=0)
    if not together and _is_finished_apart(contraction, given, mapped):
        return _finished_apart(call, contraction, given, mapped), 0
    if mapped.b != mapped.up and given.up is not None:
        # Both right operands have the same dimensions.
        rights = (fronted(x, d, size) for x, d in ((given.b, mapped.b), (given.up, mapped.up)))
        given = given._replace(**dict(zip(("b", "up"), rights, strict=True)))
        mapped = mapped._replace(b=0, up=0)
    letter = contraction.unused()
    extras = {
        name: with_dimension(getattr(contraction, name), getattr(mapped, name), letter)
        for name in EXTRAS
    }
    whole = Contraction(
        with_dimension(contraction.lhs, mapped.a, letter),
        with_dimension(contraction.rhs, mapped.b, letter),
        letter + contraction.out,
        **extras,
        lettered=contraction.lettered,
    )
    return product(call, whole, *given.present()), 0


def _with_their_factors(given: Operands, mapped: Operands, size: int) -> tuple[Operands, Operands]:
    """Lets a factor be mapped wherever the scales of its blocks are: they have its dimensions."""
    of_factors = {"a": ("row_blocks",), "b": ("col_blocks", "col_zeros")}
    of_factors["up"] = ("up_blocks", "up_zeros")
    for factor, blocks in of_factors.items():
        is_mapped = any(getattr(mapped, name) is not None for name in blocks)
        if is_mapped and getattr(mapped, factor) is None:
            given = given._replace(**{factor: fronted(getattr(given, factor), None, size)})
            mapped = mapped._replace(**{factor: 0})
    return given, mapped


def with_dimension(letters: str, dim: int | None, letter: str) -> str:
    """Returns the dimensions of an operand with the one that is mapped."""
    return letters if dim is None else letters[:dim] + letter + letters[dim:]


def fronted(x: Any, dim: int | None, size: int) -> Any:
    """Returns an operand with the mapped dimension in front."""
    if dim is None:
        return jnp.broadcast_to(x, (size, *x.shape))
    return jnp.moveaxis(x, dim, 0)


def one_by_one(
    compute: Callable[..., Any], operands: Sequence[jax.Array], dims: Sequence[int | None]
) -> Any:
    """Maps what has no dimension more: one after the other, such as groups of several sizes."""
    mapped = [fronted(x, d, 0) for x, d in zip(operands, dims, strict=True) if d is not None]

    def one(own: list[jax.Array]) -> Any:
        left, pairs = iter(own), zip(operands, dims, strict=True)
        return compute(*(x if d is None else next(left) for x, d in pairs))

    return jax.lax.map(one, mapped)


def _is_finished_apart(contraction: Contraction, given: Operands, mapped: Operands) -> bool:
    """Whether the sums had better be those of one product, and the epilogue be XLA's.

    So it is where only operands of the epilogue are mapped, and where few rows have a bias or a
    scale each.
    """
    if (mapped.b, mapped.up) != (None, None):
        return False
    if mapped.a is None:
        return True
    sizes = dict(zip(with_dimension(contraction.lhs, mapped.a, ONE), given.a.shape, strict=True))
    rows = count([sizes[x] for x in contraction.rows])
    differs = any(
        getattr(mapped, name) is not None and "m" not in DIMENSIONS[name] for name in OF_RESULT
    )
    return differs and not contraction.batch and rows < SMALLEST_TILE


def _finished_apart(
    call: Call, contraction: Contraction, given: Operands, mapped: Operands
) -> jax.Array:
    """Computes the sums alone, once for all if only the epilogue's operands are mapped."""
    wide = xla.wide_dtype(given.a.dtype, given.b.dtype, call.out_dtype)
    multiply = functools.partial(product, call.plain(wide), contraction)
    if mapped.a is not None:
        multiply = jax.vmap(multiply, (mapped.a, None))
    sums = [multiply(given.a, b) for b in (given.b, given.up) if b is not None]

    def finish(sums: list[jax.Array], extras: dict[str, jax.Array]) -> jax.Array:
        extra = Operands(None, None, **extras)
        return contraction.finish(call.epilogue, sums, extra).astype(call.out_dtype)

    extras = {name: getattr(given, name) for name in call.epilogue.operands}
    axes = {name: getattr(mapped, name) for name in extras}
    return jax.vmap(finish, (None if mapped.a is None else 0, axes))(sums, extras)


batching.primitive_batchers[product_p] = _batch
