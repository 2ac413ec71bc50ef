"""How one product is shared out among the devices of a mesh, when its program is compiled.

XLA knows how every array is split only when it compiles a program. It is told how dimensions hang
together, and asks for each product what one device is to compute (`_partition`):

- Each axis of the mesh splits one of the dimensions (`mesh_axes`).
- Rows, columns and the batch need no communication: a device computes its part with the epilogue.
- Where k is split, each device's product is a partial sum. It travels in the result's type, as the
  sums of JAX's own product do, or in float32 if an epilogue follows (`reduce_in` says otherwise).
  It is reduced once, or reduced and scattered where the result is split along that axis: then the
  kernel may send it (`fused_collective`).

The kernel and its config are chosen for one device's part, by the rules of `dispatch`.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core
from jax.interpreters import mlir
from jax.sharding import Mesh

from pallas_gemm._version import __version__
from pallas_gemm.op import fused_collective, mesh_axes, mesh_context
from pallas_gemm.op.mesh_axes import Axes, Split
from pallas_gemm.op.parts import note, part_p
from pallas_gemm.op.reduction import travelling_dtype
from pallas_gemm.planning import dispatch, targeting, xla
from pallas_gemm.planning.call import Call, Operands, Signature, signature_of


def shared_product(call: Call, *operands: jax.Array) -> jax.Array:
    """Computes a call whose parts XLA hands out to the devices of a mesh."""
    signature = signature_of(operands)
    shared = custom_partitioning(functools.partial(_whole, call))
    shared.def_partition(
        functools.partial(_partition, call, signature),
        sharding_rule=mesh_axes.sharding_rule(call, signature),
        reduction_factors=tuple(mesh_axes.factor_letters(call)[0].strip("m")),
        # Dimensions may be split along a part of an axis, which no `NamedSharding` can say.
        decode_shardings=False,
    )
    # All that the compiler sees of a product is its name; a cache of compiled programs needs more.
    with set_xla_metadata(pallas_gemm=_fingerprint(call, signature)):
        return shared(*_changed(call, call.unpack(operands), mesh_axes.split_contracted).present())


def _whole(call: Call, *operands: jax.Array) -> jax.Array:
    ready = _changed(call, call.unpack(operands), mesh_axes.merge_contracted)
    return part_p.bind(*ready.present(), call=call)


def _changed(call: Call, given: Operands, change: Callable[..., jax.Array]) -> Operands:
    """Takes the contracted dimension of the factors apart, or puts it together."""
    a, b, up = (
        None if x is None else change(call, x, own)
        for x, own in zip(given[:3], mesh_axes.factor_letters(call), strict=True)
    )
    return given._replace(a=a, b=b, up=up)


@functools.lru_cache(maxsize=1024)
def _fingerprint(call: Call, signature: Signature) -> str:
    """Tells products apart whose results differ."""
    with jax.sharding.use_abstract_mesh(mesh_context.no_mesh()):
        shapes = [jax.ShapeDtypeStruct(*operand) for operand in signature]
        formula = jax.make_jaxpr(functools.partial(xla.product, call))(*shapes)
    epilogue = dataclasses.replace(call.epilogue, activation=None)
    how = (call.precision, call.options, epilogue, __version__)
    return hashlib.sha256(f"{formula} {how}".encode()).hexdigest()


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
    *letters, out_letters = mesh_axes.dimensions(call, signature)
    fine = mesh_axes.refined(mesh, args)
    wanted = [mesh_axes.placement(x.sharding, len(x.shape), fine) for x in (*args, result)]
    split = mesh_axes.share_out(call, signature, fine, wanted)
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
        *letters, out_letters = mesh_axes.dimensions(call, self.signature)
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
        given = _changed(call, call.unpack(operands), mesh_axes.merge_contracted)
        lead = given.a.shape[:-1]
        rows = len(lead) == 2 and given.b.ndim == 2 and not call.transpose_a
        rows = rows and (given.bias is None or given.bias.ndim == 1)
        rows = rows and (given.residual is None or given.residual.ndim == 3)
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
            dispatch.check(call, signature)
        except ValueError as error:
            raise ValueError(
                f"the mesh splits {self.split}, and for one device's part: {error}"
            ) from None

    def _without_padding(self, x: jax.Array, letters: str) -> jax.Array:
        """Puts zeros where the last parts of a contracted dimension reach beyond its end."""
        for dimension, letter in enumerate(letters):
            axes, size = self.split.axes[letter], x.shape[dimension]
            if letter not in mesh_axes.CONTRACTED or not axes:
                continue
            whole = mesh_axes.contracted(self.call, self.signature, letter)
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
        ready = _changed(plain, Operands(a, b), mesh_axes.merge_contracted).present()
        if plain.options.names_something:
            self._check(plain, signature_of(ready))
        how = fused_collective.ScatteredProduct(plain, self.split.contracted, plain.out_dtype)
        return fused_collective.scattered_product(how, *ready)

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
    return mesh_context.types_off_mesh((share.shape, share.call.out_dtype))[0]


def _lowered_share(ctx: mlir.LoweringRuleContext, *operands: Any, share: _Share) -> Any:
    return mesh_context.lower_off_mesh(ctx, share, operands)


mlir.register_lowering(_share_p, _lowered_share)
