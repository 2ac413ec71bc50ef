"""What `vmap` makes of a product: more rows or columns where it can, else a batch of products.

A mapped left operand with one right operand for all is one product with more rows, and nothing is
copied. Mapped vectors on the right are columns of one product. Everything else is a batch, which
shares those operands, of the epilogue too, that are not mapped.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import batching

from pallas_gemm.op import mesh_context
from pallas_gemm.op.product import product, product_p
from pallas_gemm.planning import xla
from pallas_gemm.planning.call import DIMENSIONS, Call, Operands

FEW_ROWS = 64
"""Of fewer rows, each product of a batch would fill the smallest tile in part only."""


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """A product under `vmap`.

    Attributes:
        call: The product of one element.
        size: How many elements are mapped.
        operands: Mapped ones have a new dimension in front.
        flags: Which are mapped.
    """

    call: Call
    size: int
    operands: Operands
    flags: Operands

    @property
    def inner_batch(self) -> int | None:
        """The batch of one element's product; None without one."""
        for x, mapped in ((self.operands.a, self.flags.a), (self.operands.b, self.flags.b)):
            if x.ndim - mapped == 3:
                return x.shape[mapped]
        return None


def _batch(
    operands: tuple[Any, ...], dims: tuple[Any, ...], *, call: Call, **_: Any
) -> tuple[Any, Any]:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    fronted = [
        x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)
    ]
    flags = call.unpack([d is not None for d in dims])
    flags = Operands(*(bool(flag) for flag in flags))
    mapped = _Mapped(call, size, call.unpack(fronted), flags)
    if not (flags.a or flags.b or flags.up):
        return _finished_apart(mapped), 0
    if not (flags.b or flags.up) and (rows := _as_rows(mapped)) is not None:
        return rows
    if _are_columns(mapped):
        return _more_columns(mapped), 1
    return _batched(mapped), 0


def _as_rows(mapped: _Mapped) -> tuple[jax.Array, int] | None:
    """Makes mapped rows those of one product, or of each of a batch; None if it had better not.

    Returns:
        The result, and which of its dimensions is the mapped one.
    """
    call, given, alone = mapped.call, mapped.operands, mapped.inner_batch is None
    few = given.a.shape[-1 if call.transpose_a else -2] < FEW_ROWS
    if mapped.flags.bias:
        return (_finished_apart(mapped), 0) if few and alone else None
    if alone and given.residual is not None and not (mapped.flags.residual or few):
        # More rows would need a copy of the residual for each.
        return None
    # A mesh may split what is mapped and the rows along different axes.
    split = mesh_context.is_on_mesh(*given.present()) and given.a.shape[1] > 1
    if alone and not (call.transpose_a or split):
        return _more_rows(mapped), 0
    if _rows_of_each_are_cheaper(mapped):
        return _more_rows_of_each(mapped), 1
    return None


def _finished_apart(mapped: _Mapped) -> jax.Array:
    """Computes the sums alone, once for all if only the epilogue's operands are mapped."""
    call, given, size = mapped.call, mapped.operands, mapped.size
    epilogue = dataclasses.replace(call.epilogue, alpha=1.0)
    wide = xla.wide_dtype(given.a.dtype, given.b.dtype, call.out_dtype)
    plain = call.plain(wide, call.epilogue.alpha)
    axes = Operands(*(0 if flag else None for flag in mapped.flags))
    multiply = functools.partial(product, plain)
    if mapped.flags.a:
        multiply = jax.vmap(multiply, (0, None), axis_size=size)
    sums = [multiply(given.a, b) for b in (given.b, given.up) if b is not None]

    def finish(sums: list[jax.Array], bias: Any, residual: Any) -> jax.Array:
        extra = Operands(None, None, bias=bias, residual=residual)
        return xla.finish(epilogue, sums, extra).astype(call.out_dtype)

    each = jax.vmap(finish, (axes.a, axes.bias, axes.residual), axis_size=size)
    return each(sums, given.bias, given.residual)


def _more_rows(mapped: _Mapped) -> jax.Array:
    """Folds the mapped dimension of the left operand into the rows."""
    given = mapped.operands
    folded = given._replace(a=lax.collapse(given.a, 0, 2))
    if given.residual is not None:
        folded = folded._replace(residual=lax.collapse(_residual(mapped), 0, 2))
    result = product(mapped.call, *folded.present())
    return result.reshape(mapped.size, given.a.shape[1], result.shape[-1])


def _rows_of_each_are_cheaper(mapped: _Mapped) -> bool:
    """Whether to bring each product of a batch its rows rather than each row its right operand."""
    a, b = mapped.operands.a, mapped.operands.b
    if mapped.call.transpose_a or b.ndim == 2:
        return False
    # Rows that the batch shares need not be moved at all.
    return a.ndim == 3 or 2 * a.size < mapped.size * b.size


def _more_rows_of_each(mapped: _Mapped) -> jax.Array:
    """Folds the mapped dimension of the left operand into the rows of each product of a batch."""
    given = mapped.operands

    def fold(x: jax.Array) -> jax.Array:
        if x.ndim == 3:
            return lax.collapse(x, 0, 2)
        return lax.collapse(jnp.swapaxes(x, 0, 1), 1, 3)

    folded = given._replace(a=fold(given.a))
    if given.residual is not None:
        folded = folded._replace(residual=fold(_residual(mapped)))
    result = product(mapped.call, *folded.present())
    return result.reshape(result.shape[0], mapped.size, given.a.shape[-2], result.shape[-1])


def _are_columns(mapped: _Mapped) -> bool:
    """Whether only the right operand is mapped, and to vectors: those are columns of a matrix."""
    call, flags = mapped.call, mapped.flags
    if flags.a or len(mapped.operands.present()) > 2 or mapped.inner_batch is not None:
        return False
    return mapped.operands.b.shape[1 if call.transpose_b else 2] == 1


def _more_columns(mapped: _Mapped) -> jax.Array:
    """Makes mapped vectors the columns of one product; the mapped dimension comes out second."""
    b = mapped.operands.b
    columns = b.reshape(mapped.size, b.size // mapped.size)
    call = dataclasses.replace(mapped.call, transpose_b=True)
    return product(call, mapped.operands.a, columns)[..., None]


def _batched(mapped: _Mapped) -> jax.Array:
    """Makes the mapped dimension, with the batch that there was, the batch of the product."""
    inner = mapped.inner_batch
    lead = (mapped.size,) if inner is None else (mapped.size, inner)
    given, flags = _both_rights_mapped(mapped)

    def merge(name: str) -> Any:
        """Gives an operand the whole batch, unless all share it."""
        x, flag, own = getattr(given, name), getattr(flags, name), DIMENSIONS[name]
        if x is None or (not flag and x.ndim == own):
            return x
        if not flag:
            x = x[None]
        elif x.ndim == own + 1 and inner is not None:
            x = x[:, None]
        own_shape = x.shape[x.ndim - own :]
        return lax.collapse(jnp.broadcast_to(x, (*lead, *own_shape)), 0, len(lead))

    ready = Operands(*map(merge, Operands._fields))
    result = product(mapped.call, *ready.present())
    return result.reshape(*lead, *result.shape[-2:])


def _both_rights_mapped(mapped: _Mapped) -> tuple[Operands, Operands]:
    """Returns operands and flags; both right operands are mapped if one is."""
    given, flags = mapped.operands, mapped.flags
    if given.up is None or flags.b == flags.up:
        return given, flags
    name = "up" if flags.b else "b"
    x = getattr(given, name)
    copies = jnp.broadcast_to(x, (mapped.size, *x.shape))
    return given._replace(**{name: copies}), flags._replace(b=True, up=True)


def _residual(mapped: _Mapped) -> jax.Array:
    """The residual with the mapped dimension in front."""
    residual = mapped.operands.residual
    if mapped.flags.residual:
        return residual
    return jnp.broadcast_to(residual, (mapped.size, *residual.shape))


batching.primitive_batchers[product_p] = _batch
