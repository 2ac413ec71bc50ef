"""How one product is shared out among the devices of a mesh, when its program is compiled.

XLA knows how every array is split only when it compiles a program. It is told how dimensions hang
together, and asks for each product what one device is to compute (`_partition`):

- Each axis of the mesh splits one of the dimensions (`sharing`).
- Rows, columns and the batch need no communication: a device computes its part with the epilogue.
- Where k is split, each device's product is a partial sum, kept in float32 (int32 for integers;
  `reduce_in` says otherwise). It is reduced once, or reduced and scattered where the result is
  split along that axis; the epilogue follows, and the result is rounded once.

The kernel and its config are chosen for one device's part, by the rules of `dispatch`.
"""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core
from jax.sharding import AxisType, Mesh

from pallas_gemm import dispatch, sharing
from pallas_gemm._version import __version__
from pallas_gemm.call import Call, Signature
from pallas_gemm.kernels import xla
from pallas_gemm.sharing import Axes, Split

part_p = core.Primitive("pallas_gemm_part")
"""The product that one device computes; `lowering` says what becomes of it."""

# A context of JAX's own, so that a function that was traced outside a block is traced anew in it.
_REDUCED = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def reduce_in(dtype: Any) -> Iterator[None]:
    """Sends partial sums from GPU to GPU in another type than float32, gradients' sums included.

    >>> with reduce_in(jnp.bfloat16):
    ...     y = train_step(params, batch)  # doctest: +SKIP

    A sum in bfloat16 is half as many bytes, and what JAX's own product of bfloat16 sends; each
    device then rounds its part before they are added. It counts where it is traced.

    Args:
        dtype: A floating-point type.

    Raises:
        ValueError: It is none.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype={dtype!r} must be a floating-point type")
    with _REDUCED(np.dtype(dtype)):
        yield


def reduction_dtype() -> np.dtype | None:
    """Returns what `reduce_in` says; None outside of it."""
    return _REDUCED.value


def product(call: Call, *operands: jax.Array) -> jax.Array:
    """Computes a call whose parts XLA hands out to the devices of a mesh."""
    signature = tuple((x.shape, np.dtype(x.dtype)) for x in operands)

    def whole(*operands: jax.Array) -> jax.Array:
        return part_p.bind(*operands, call=call)

    shared = custom_partitioning(whole)
    shared.def_partition(
        functools.partial(_partition, call),
        sharding_rule=sharing.sharding_rule(call, signature),
        reduction_factors=("k",),
        # Dimensions may be split along a part of an axis, which no `NamedSharding` can say.
        decode_shardings=False,
    )
    # All that the compiler sees of a product is its name; a cache of compiled programs needs more.
    with set_xla_metadata(pallas_gemm=_fingerprint(call, signature)):
        return shared(*operands)


def asking(call: Call, operands: Sequence[Any]) -> core.ClosedJaxpr | None:
    """Returns what makes JAX tell a product's lowering the devices; None where that is no use."""
    if call.options.implementation == "interpret" or why_not_here(operands) is not None:
        return None
    return _asks_for_devices()


def why_not_here(operands: Sequence[Any]) -> str | None:
    """Returns why a product that is traced here cannot be shared out; None if it can."""
    meshes = [jax.typeof(x).sharding.mesh for x in operands]
    for mesh in (*meshes, jax.sharding.get_abstract_mesh()):
        if AxisType.Manual in mesh.axis_types:
            manual = all(kind == AxisType.Manual for kind in mesh.axis_types)
            return "it is one device's" if manual else "the mesh is manual along some axes only"
        if not mesh.empty and mesh.abstract_device is None:
            return "the mesh is abstract and names no device"
    return None


def is_one_devices(context: Any) -> bool:
    """Whether a program, or the part of it that is being lowered, is that of a single device.

    Args:
        context: The `axis_context` of the module that is being lowered.
    """
    if hasattr(context, "manual_axes"):
        return context.mesh.size == 1 or set(context.manual_axes) == set(context.mesh.axis_names)
    return getattr(context, "num_devices", 1) == 1


def why_not(module: Any) -> str | None:
    """Returns why a program for several devices cannot ask us about parts; None if it can.

    Args:
        module: The context of the module that is being lowered.
    """
    if hasattr(module.axis_context, "manual_axes"):
        return "the mesh is manual along some axes only"
    if module.lowering_parameters.for_export:
        return "an exported program is partitioned where we are not"
    if not jax.config.jax_use_shardy_partitioner:
        return "the Shardy partitioner is off"
    return None


@functools.cache
def _asks_for_devices() -> core.ClosedJaxpr:
    """Returns a program that nobody runs, which makes JAX tell the devices to what it is part of.

    A lowering rule learns them only in programs that hold a primitive known to need them.
    """
    nothing = custom_partitioning(lambda x: x)
    nothing.def_partition(lambda *_: None, sharding_rule="i -> i")
    return jax.make_jaxpr(nothing)(np.zeros(1, np.float32))


@functools.lru_cache(maxsize=1024)
def _fingerprint(call: Call, signature: Signature) -> str:
    """Tells products apart whose results differ."""
    shapes = [jax.ShapeDtypeStruct(*operand) for operand in signature]
    formula = jax.make_jaxpr(functools.partial(xla.product, call))(*shapes)
    epilogue = dataclasses.replace(call.epilogue, activation=None)
    how = (call.precision, call.options, epilogue, __version__)
    return hashlib.sha256(f"{formula} {how}".encode()).hexdigest()


def _partition(call: Call, mesh: Mesh, args: Sequence[Any], result: Any) -> tuple[Any, ...]:
    """Says what one device computes: the answer to XLA's question.

    Args:
        call: The product.
        mesh: The program's mesh; empty if it has none.
        args: Shape, type and sharding of each operand, as XLA would have them.
        result: The same of the result.

    Returns:
        The mesh, the function of one device, the sharding of the result and those of the operands.
    """
    signature = tuple((tuple(x.shape), np.dtype(x.dtype)) for x in args)
    *letters, out_letters = sharing.dimensions(call, signature)
    fine = sharing.refined(mesh, args)
    wanted = [sharing.placement(x.sharding, len(x.shape), fine) for x in (*args, result)]
    split = sharing.share_out(call, signature, fine, wanted)
    late = set(call.unpack(range(len(args)))[3:])
    placements = [split.placement(letters[i], scattered=i in late) for i in range(len(args))]
    parts = tuple(
        (split.local(x.shape, placement), np.dtype(x.dtype))
        for x, placement in zip(args, placements, strict=True)
    )
    _check_named(call, split, signature, parts)
    run = functools.partial(_part, call, signature, split)
    out = split.sharding(split.placement(out_letters, scattered=True))
    return fine, run, out, tuple(map(split.sharding, placements))


def _check_named(call: Call, split: Split, signature: Signature, parts: Signature) -> None:
    """Refuses what is named if it cannot compute a device's part.

    Raises:
        ValueError: It cannot; the message says along which axes the product is split.
    """
    if not call.options.names_something:
        return
    own = call if not split.axes["k"] else dispatch.sums_only(call, signature)
    try:
        dispatch.decide(own, parts if own is call else parts[:2])
    except ValueError as error:
        raise ValueError(f"on a mesh that splits {split}, for one device's part: {error}") from None


def _part(call: Call, signature: Signature, split: Split, *operands: jax.Array) -> jax.Array:
    """Computes one device's part of a product from its parts of the operands."""
    if not split.axes["k"]:
        return part_p.bind(*operands, call=call)
    *letters, out_letters = sharing.dimensions(call, signature)
    given = call.unpack(operands)
    named = call.unpack(letters)
    whole = call.problem(signature).k
    a, b, up = (
        None if x is None else _without_padding(split, x, own.index("k"), whole)
        for x, own in zip(given[:3], named[:3], strict=True)
    )
    sums_only = dispatch.sums_only(call, signature)
    if call.options.reduced is not None and jnp.issubdtype(sums_only.out_dtype, jnp.floating):
        sums_only = dataclasses.replace(sums_only, out_dtype=call.options.reduced)
    sums = [part_p.bind(a, right, call=sums_only) for right in (b, up) if right is not None]
    sums = [_reduced(split, total, out_letters) for total in sums]
    result = sums[0]
    if not call.epilogue.is_identity:
        result = xla.finish(call.epilogue, sums, given)
    return result.astype(call.out_dtype)


def _without_padding(split: Split, x: jax.Array, dimension: int, whole: int) -> jax.Array:
    """Puts zeros where the last parts of a contracted dimension reach beyond its end."""
    axes, size = split.axes["k"], x.shape[dimension]
    if size * split.size(axes) == whole:
        return x
    left = whole - lax.axis_index(axes) * size
    inside = lax.broadcasted_iota(np.int32, x.shape, dimension) < left
    return jnp.where(inside, x, jnp.zeros_like(x))


def _reduced(split: Split, total: jax.Array, letters: str) -> jax.Array:
    """Adds up the devices' sums; each gets the part of the result that it is to have."""
    scattered: Axes = ()
    for dimension, letter in enumerate(letters):
        if axes := split.scattered[letter]:
            total = lax.psum_scatter(total, axes, scatter_dimension=dimension, tiled=True)
            scattered += axes
    rest = tuple(axis for axis in split.axes["k"] if axis not in scattered)
    return lax.psum(total, rest) if rest else total
