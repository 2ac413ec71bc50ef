"""How one product is shared out among the devices of a mesh, when its program is compiled.

XLA knows how every array is split only when it compiles a program. It is told how dimensions hang
together, and asks for each product what one device is to compute (`_partition`):

- Each axis of the mesh splits one of the dimensions (`sharing`).
- Rows, columns and the batch need no communication: a device computes its part with the epilogue.
- Where k is split, each device's product is a partial sum. It travels in the result's type, as the
  sums of JAX's own product do, or in float32 if an epilogue follows (`reduce_in` says otherwise).
  It is reduced once, or reduced and scattered where the result is split along that axis: then the
  kernel may send it (`exchanging`).

The kernel and its config are chosen for one device's part, by the rules of `dispatch`.
"""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, Mesh

from pallas_gemm._version import __version__
from pallas_gemm.op import sharing
from pallas_gemm.op.sharing import Axes, Split
from pallas_gemm.planning import dispatch, targeting, xla
from pallas_gemm.planning.call import Call, Operands, Signature, signature_of

part_p = core.Primitive("pallas_gemm_part")
"""The product that one device computes; `lowering` says what becomes of it."""

# A context of JAX's own, so that a function that was traced outside a block is traced anew in it.
_REDUCED = jax.make_user_context(default_value=None)
_NOTED = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def reduce_in(dtype: Any) -> Iterator[None]:
    """Sends partial sums from GPU to GPU in another type than the result's, gradients' included.

    >>> with reduce_in(jnp.float32):
    ...     y = train_step(params, batch)  # doctest: +SKIP

    A sum in float32 is twice as many bytes as one in bfloat16, which JAX's own product of bfloat16
    sends; but no device rounds its part before they are added. It counts where it is traced.

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


def travelling_dtype(sums: Any, out_dtype: Any, asked: np.dtype | None) -> np.dtype:
    """Returns the type in which sums travel: the result's, but not one of 8 bits.

    Args:
        sums: The type in which they are made.
        out_dtype: The result's.
        asked: What `reduce_in` said where the product was traced.
    """
    if not jnp.issubdtype(sums, jnp.floating):
        return np.dtype(sums)
    usual = jnp.bfloat16 if np.dtype(out_dtype).itemsize == 1 else out_dtype
    return np.dtype(asked or usual)


class Part(NamedTuple):
    """A product of one device.

    Attributes:
        call: Everything about it but the operands.
        signature: The operands.
        split: Which axes of the mesh split what.
        plan: How the kernel computes it, if not as it does without the other devices.
    """

    call: Call
    signature: Signature
    split: str
    plan: dispatch.Plan | None = None


class Parts:
    """Products of one device, with which axes of the mesh split what."""

    def __init__(self) -> None:
        self.found: list[Part] = []


@contextlib.contextmanager
def noted() -> Iterator[Parts]:
    """Collects what one device computes in the programs that are compiled within."""
    parts = Parts()
    with _NOTED(parts):
        yield parts


def note(call: Call, signature: Signature, split: str, plan: dispatch.Plan | None = None) -> None:
    """Lets `explain_on_mesh` know what one device computes, if it asks: see `Part`."""
    if (noted := _NOTED.value) is not None:
        noted.found.append(Part(call, signature, split, plan))


def product(call: Call, *operands: jax.Array) -> jax.Array:
    """Computes a call whose parts XLA hands out to the devices of a mesh."""
    signature = signature_of(operands)
    shared = custom_partitioning(functools.partial(_whole, call))
    shared.def_partition(
        functools.partial(_partition, call, signature),
        sharding_rule=sharing.sharding_rule(call, signature),
        reduction_factors=tuple(sharing.factor_letters(call)[0].strip("m")),
        # Dimensions may be split along a part of an axis, which no `NamedSharding` can say.
        decode_shardings=False,
    )
    # All that the compiler sees of a product is its name; a cache of compiled programs needs more.
    with set_xla_metadata(pallas_gemm=_fingerprint(call, signature)):
        return shared(*_changed(call, call.unpack(operands), sharing.apart).present())


def _whole(call: Call, *operands: jax.Array) -> jax.Array:
    ready = _changed(call, call.unpack(operands), sharing.merged)
    return part_p.bind(*ready.present(), call=call)


def _changed(call: Call, given: Operands, change: Callable[..., jax.Array]) -> Operands:
    """Takes the contracted dimension of the factors apart, or puts it together."""
    a, b, up = (
        None if x is None else change(call, x, own)
        for x, own in zip(given[:3], sharing.factor_letters(call), strict=True)
    )
    return given._replace(a=a, b=b, up=up)


def asking(call: Call, operands: Sequence[Any]) -> core.ClosedJaxpr | None:
    """Returns what makes JAX tell a product's lowering the devices; None where that is no use."""
    meshes = _meshes(operands)
    alone = any(not mesh.empty for mesh in meshes) and all(mesh.size <= 1 for mesh in meshes)
    if call.options.implementation == "interpret" or alone or why_not_on(*meshes) is not None:
        return None
    return _asks_for_devices()


def is_on_mesh(*operands: Any) -> bool:
    """Whether a product of these operands is known to be for several devices that share it."""
    meshes = _meshes([x for x in operands if isinstance(x, jax.Array)])
    return any(mesh.size > 1 for mesh in meshes) and why_not_on(*meshes) is None


def _meshes(operands: Sequence[Any]) -> list[AbstractMesh]:
    """Returns the meshes that operands and the context name; some may be empty."""
    return [*(jax.typeof(x).sharding.mesh for x in operands), jax.sharding.get_abstract_mesh()]


def why_not_on(*meshes: AbstractMesh) -> str | None:
    """Returns why a product on these meshes cannot be shared out; None if it can."""
    for mesh in meshes:
        if AxisType.Manual in mesh.axis_types:
            manual = all(kind == AxisType.Manual for kind in mesh.axis_types)
            return "it is one device's" if manual else "the mesh is manual along some axes only"
        if not mesh.empty and mesh.abstract_device is None:
            return "the mesh is abstract and names no device"
    if len({tuple(mesh.shape.items()) for mesh in meshes if mesh.size > 1}) > 1:
        return "the operands are on different meshes"
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
    if module.axis_context.device_assignment is None:
        return "JAX does not tell the devices"
    return None


@functools.cache
def _asks_for_devices() -> core.ClosedJaxpr:
    """Returns a program that nobody runs, which makes JAX tell the devices to what it is part of.

    A lowering rule learns them only in programs that hold a primitive known to need them.
    """
    nothing = custom_partitioning(lambda x: x)
    nothing.def_partition(lambda *_: None, sharding_rule="i -> i")
    with jax.sharding.use_abstract_mesh(_no_mesh()):
        return jax.make_jaxpr(nothing)(np.zeros(1, np.float32))


@functools.lru_cache(maxsize=1024)
def _fingerprint(call: Call, signature: Signature) -> str:
    """Tells products apart whose results differ."""
    with jax.sharding.use_abstract_mesh(_no_mesh()):
        shapes = [jax.ShapeDtypeStruct(*operand) for operand in signature]
        formula = jax.make_jaxpr(functools.partial(xla.product, call))(*shapes)
    epilogue = dataclasses.replace(call.epilogue, activation=None)
    how = (call.precision, call.options, epilogue, __version__)
    return hashlib.sha256(f"{formula} {how}".encode()).hexdigest()


@functools.cache
def _no_mesh() -> AbstractMesh:
    return AbstractMesh((), ())


def _partition(
    call: Call, signature: Signature, mesh: Mesh, args: Sequence[Any], result: Any
) -> tuple[Any, ...]:
    """Says what one device computes: the answer to XLA's question.

    Args:
        call: The product.
        signature: Shapes and types of the whole operands.
        mesh: The program's mesh; empty if it has none.
        args: Shape, type and sharding of each operand, as XLA would have them.
        result: The same of the result.

    Returns:
        The mesh, the function of one device, the sharding of the result and those of the operands.
    """
    if call.options.target is None:
        # Where only `jit` was told about a mesh, its devices are seen here for the first time.
        call = call.with_target(targeting.absent_gpu(mesh))
    *letters, out_letters = sharing.dimensions(call, signature)
    fine = sharing.refined(mesh, args)
    wanted = [sharing.placement(x.sharding, len(x.shape), fine) for x in (*args, result)]
    split = sharing.share_out(call, signature, fine, wanted)
    late = set(call.unpack(range(len(args)))[3:])
    placements = [split.placement(letters[i], scattered=i in late) for i in range(len(args))]
    placement = split.placement(out_letters, scattered=True)
    share = _Share(call, signature, split, split.local(result.shape, placement))
    run = functools.partial(_share_p.bind, share=share)
    return fine, run, split.sharding(placement), tuple(map(split.sharding, placements))


@dataclasses.dataclass(frozen=True, eq=False)
class _Share:
    """What one device computes of a product.

    Attributes:
        call: The product.
        signature: Shapes and types of its whole operands.
        split: Which axes of the mesh split what.
        shape: The shape of the device's part of the result.
    """

    call: Call
    signature: Signature
    split: Split
    shape: tuple[int, ...]

    def __call__(self, *operands: jax.Array) -> jax.Array:
        """Computes it from the device's parts of the operands."""
        call, split = self.call, self.split
        if not split.contracted:
            return self._multiply(call, *operands)
        *letters, out_letters = sharing.dimensions(call, self.signature)
        given, named = call.unpack(operands), call.unpack(letters)
        a, b, up = (
            None if x is None else self._without_padding(x, own)
            for x, own in zip(given[:3], named[:3], strict=True)
        )
        plain = dispatch.sums_only(call, self.signature)
        # What follows the sum is computed in float32.
        result_dtype = call.out_dtype if call.epilogue.is_identity else plain.out_dtype
        dtype = travelling_dtype(plain.out_dtype, result_dtype, call.options.reduced)
        plain = dataclasses.replace(plain, out_dtype=dtype)
        rights = [right for right in (b, up) if right is not None]
        if self._scatters_rows(out_letters):
            sums = [self._scattered(plain, a, right) for right in rights]
        else:
            totals = [self._multiply(plain, a, right) for right in rights]
            sums = [self._added_up(total, out_letters) for total in totals]
        result = sums[0]
        if not call.epilogue.is_identity:
            result = xla.finish(call.epilogue, sums, given)
        return result.astype(call.out_dtype)

    def _multiply(self, call: Call, *operands: Any) -> jax.Array:
        """Computes a product of what this device has, in the form that is best for a kernel."""
        given = _changed(call, call.unpack(operands), sharing.merged)
        lead = given.a.shape[:-1]
        rows = len(lead) == 2 and given.b.ndim == 2 and not call.transpose_a
        rows = rows and (given.bias is None or given.bias.ndim == 1)
        if rows:
            # A batch that shares its right operand is a product with more rows.
            given = given._replace(a=given.a.reshape(-1, given.a.shape[-1]))
            if given.residual is not None:
                columns = given.residual.shape[-1]
                given = given._replace(residual=given.residual.reshape(-1, columns))
        ready = given.present()
        if call.options.names_something:
            self._check(call, signature_of(ready))
        note(call, signature_of(ready), str(self.split))
        result = part_p.bind(*ready, call=call)
        return result.reshape(*lead, result.shape[-1]) if rows else result

    def _check(self, call: Call, signature: Signature) -> None:
        """Refuses what is named if it cannot compute a device's part.

        Raises:
            ValueError: It cannot; the message says which axes of the mesh split what.
        """
        try:
            dispatch.decide(call, signature)
        except ValueError as error:
            raise ValueError(
                f"the mesh splits {self.split}, and for one device's part: {error}"
            ) from None

    def _without_padding(self, x: jax.Array, letters: str) -> jax.Array:
        """Puts zeros where the last parts of a contracted dimension reach beyond its end."""
        for dimension, letter in enumerate(letters):
            axes, size = self.split.axes[letter], x.shape[dimension]
            if letter not in sharing.CONTRACTED or not axes:
                continue
            whole = sharing.contracted(self.call, self.signature, letter)
            if size * self.split.size(axes) != whole:
                left = whole - lax.axis_index(axes) * size
                inside = lax.broadcasted_iota(np.int32, x.shape, dimension) < left
                x = jnp.where(inside, x, jnp.zeros_like(x))
        return x

    def _scatters_rows(self, letters: str) -> bool:
        """Whether sums are added up so that each device gets some of their rows."""
        scattered = [self.split.scattered[letter] for letter in letters]
        return len(self.signature[0][0]) == 2 and scattered == [self.split.contracted, ()]

    def _scattered(self, plain: Call, a: Any, b: Any) -> jax.Array:
        """Computes this device's rows of a sum, which the kernel may send itself."""
        from pallas_gemm.op import exchange

        ready = _changed(plain, Operands(a, b), sharing.merged).present()
        if plain.options.names_something:
            self._check(plain, signature_of(ready))
        how = exchange.Scattered(plain, self.split.contracted, plain.out_dtype)
        return exchange.scattered(how, *ready)

    def _added_up(self, total: jax.Array, letters: str) -> jax.Array:
        """Adds up the devices' sums; each gets the part of the result that it is to have."""
        scattered: Axes = ()
        for dimension, letter in enumerate(letters):
            if axes := self.split.scattered[letter]:
                total = lax.psum_scatter(total, axes, scatter_dimension=dimension, tiled=True)
                scattered += axes
        rest = tuple(axis for axis in self.split.contracted if axis not in scattered)
        return lax.psum(total, rest) if rest else total


_share_p = core.Primitive("pallas_gemm_share")
"""What one device computes; its arrays are on no mesh, whatever the types around it say."""


@_share_p.def_abstract_eval
def _abstract_share(*_: Any, share: _Share) -> Any:
    return _plain_types((share.shape, share.call.out_dtype))[0]


def _lowered_share(ctx: mlir.LoweringRuleContext, *operands: Any, share: _Share) -> Any:
    return lower_off_mesh(ctx, share, operands)


def lower_off_mesh(
    ctx: mlir.LoweringRuleContext, run: Callable[..., jax.Array], operands: Sequence[Any]
) -> Any:
    """Lowers a function of arrays whose types say nothing of a mesh, whatever those around it say.

    Kernels take no arrays that vary along the axes of a `shard_map`, or are split by their types.
    """
    types = _plain_types(*signature_of(tuple(ctx.avals_in)))
    with jax.sharding.use_abstract_mesh(_no_mesh()):
        lower = mlir.lower_fun(run, multiple_results=len(ctx.avals_out) > 1)
        inner = ctx.replace(avals_in=types)
        result = lower(inner, *operands)
    if inner.tokens_out is not None:
        # Where the simulator has got to, from one call to the next.
        ctx.set_tokens_out(inner.tokens_out)
    return result


@functools.lru_cache(maxsize=1024)
def _plain_types(*signature: Any) -> Any:
    """Returns the types of arrays on no mesh."""
    with jax.sharding.use_abstract_mesh(_no_mesh()):
        shapes = [jax.ShapeDtypeStruct(*operand) for operand in signature]
        return jax.make_jaxpr(lambda *arrays: arrays)(*shapes).in_avals


mlir.register_lowering(_share_p, _lowered_share)
