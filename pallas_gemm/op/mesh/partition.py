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
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from pallas_gemm.call import Call, Operands, Signature, signature_of
from pallas_gemm.device import Device
from pallas_gemm.op.canonical import Form, Merged, merged
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.mesh import fused_collective, mesh_axes, resharding, sharing
from pallas_gemm.op.mesh.mesh_axes import Split
from pallas_gemm.op.mesh.parts import Shared, handed_out, note, part_p, share, told_apart
from pallas_gemm.op.mesh.resharding import Placement, Step
from pallas_gemm.planning import dispatch, numerics, plans


def shared_product(call: Call, contraction: Contraction, *operands: jax.Array) -> jax.Array:
    """Computes a call whose parts XLA hands out to the devices of a mesh."""
    signature = signature_of(operands)
    *given, result = contraction.of_operands(call)
    shared = handed_out(
        functools.partial(part_p.bind, call=call, contraction=contraction),
        functools.partial(_partition, call, contraction, signature),
        mesh_axes.sharding_rule(contraction, given, [result]),
        reduction_factors=mesh_axes.reduced_factors(contraction),
    )
    with told_apart(contraction.by_xla, call, signature):
        return shared(*operands)


def _partition(
    call: Call,
    contraction: Contraction,
    signature: Signature,
    mesh: Mesh,
    gpu: Device | None,
    args: Sequence[Any],
    result: Any,
) -> tuple[Any, ...]:
    """Says what one device computes; see `handed_out`."""
    call = call if call.options.target else call.with_target(gpu)
    wanted = tuple(mesh_axes.placement(x.sharding, len(x.shape), mesh) for x in (*args, result))
    split, received = sharing.share_out(call, contraction, signature, mesh, wanted)
    if split.contracted and call.options.parts:
        why = f"the mesh splits what is summed over ({split}), and devices add up their sums"
        numerics.refuse_promised(call.options, why)
    needed = split.placements(call)
    before, after = (*wanted[:-1], needed[-1]), (*needed[:-1], wanted[-1])
    shapes = [x.shape for x in (*args, result)]
    moves = tuple(map(functools.partial(_own_steps, split), shapes, before, after))
    # What is not moved here comes, and goes, as it is needed.
    *given, final = (
        own if steps else other for steps, own, other in zip(moves, wanted, needed, strict=True)
    )
    shape = split.local(result.shape, final)
    whole = Shared(call, contraction, signature, tuple(map(split.sharding, wanted)), received)
    run = share(_Share(whole, split, moves), ((shape, call.out_dtype),), whole)
    return run, split.sharding(final), tuple(map(split.sharding, given))


def _own_steps(
    split: Split, shape: Sequence[int], before: Placement, after: Placement
) -> tuple[Step, ...]:
    """Returns how an array is split anew here; nothing where XLA does it as well."""
    steps = resharding.steps(before, after, tuple(split.mesh.shape.items()))
    is_even = all(
        size % split.size(axes) == 0
        for placement in (before, after)
        for size, axes in zip(shape, placement, strict=True)
    )
    return steps if is_even and not resharding.is_xlas(steps) else ()


@dataclasses.dataclass(frozen=True, eq=False)
class _Share:
    """The part of a product that one device computes.

    Attributes:
        whole: The product.
        split: Which axes of the mesh split what.
        moves: How each operand, and last the result, is split anew here.
    """

    whole: Shared
    split: Split
    moves: tuple[tuple[Step, ...], ...]

    def __call__(self, *operands: jax.Array) -> jax.Array:
        """Computes it from the device's parts of the operands."""
        moved = map(_moved, operands, self.moves)
        return _moved(self._computed(*moved), self.moves[-1])

    def _computed(self, *operands: jax.Array) -> jax.Array:
        """Computes it from the parts that it takes."""
        call, dims = self.whole.call, self.whole.contraction
        if not self.split.contracted:
            return self._multiply(call, *operands)
        given = call.unpack(operands)
        letters = {"a": dims.lhs, "b": dims.rhs, "up": dims.rhs}
        letters |= {name: getattr(dims, name) for name in call.epilogue.blocks}
        named = {name: (getattr(given, name), own) for name, own in letters.items()}
        whole = {name: self._without_padding(*x) for name, x in named.items() if x[0] is not None}
        each = call.each_sum(given._replace(**whole))
        plain = plans.sums_only(call, self.whole.signature)
        dtype = mesh_axes.sums_dtype(call, self.whole.signature)
        plain = dataclasses.replace(plain, out_dtype=dtype)
        sums = [self._added_up(plain, *own.present()) for own in each]
        result = sums[0]
        if not call.epilogue.of_whole_sums.is_identity:
            result = dims.finish(call.epilogue, sums, given)
        return result.astype(call.out_dtype)

    def _multiply(self, call: Call, *operands: Any) -> jax.Array:
        """Computes a product of what this device has."""
        matrices = merged(call, self.whole.contraction, signature_of(operands))
        if call.options.names_something:
            self._check(matrices)
        note(matrices.call, matrices.signature, str(self.split))
        return part_p.bind(*operands, call=call, contraction=self.whole.contraction)

    def _check(self, matrices: Merged) -> None:
        """Refuses what is named if it cannot compute a device's part.

        Raises:
            ValueError: It cannot; the message says which axes of the mesh split what.
        """
        try:
            dispatch.check(matrices.call, matrices.signature)
        except ValueError as error:
            raise ValueError(
                f"the mesh splits {self.split}, and for one device's part: {error}"
            ) from None

    def _without_padding(self, x: jax.Array, letters: str) -> jax.Array:
        """Puts zeros where the last parts of a contracted dimension reach beyond its end."""
        (left, _), (right, _), *_ = self.whole.signature
        sizes = self.whole.contraction.sizes(left, right)
        for dimension, letter in enumerate(letters):
            axes, size = self.split.axes[letter], x.shape[dimension]
            if letter not in self.whole.contraction.contracted or not axes:
                continue
            if size * self.split.size(axes) != sizes[letter]:
                left = sizes[letter] - lax.axis_index(axes) * size
                inside = lax.broadcasted_iota(np.int32, x.shape, dimension) < left
                x = jnp.where(inside, x, jnp.zeros_like(x))
        return x

    def _added_up(self, plain: Call, a: jax.Array, b: jax.Array, *scales: jax.Array) -> jax.Array:
        """Computes what this device is to have of a sum over devices."""
        matrices = merged(plain, self.whole.contraction, signature_of((a, b, *scales)))
        if not scales and self._is_of_rows(matrices.form, a, b):
            return self._scattered(matrices, a, b)
        total, scattered = self._multiply(plain, a, b, *scales), ()
        for dimension, letter in enumerate(self.whole.contraction.out):
            if axes := self.split.scattered[letter]:
                total = lax.psum_scatter(total, axes, scatter_dimension=dimension, tiled=True)
                scattered += axes
        rest = tuple(axis for axis in self.split.contracted if axis not in scattered)
        return lax.psum(total, rest) if rest else total

    def _is_of_rows(self, form: Form, a: jax.Array, b: jax.Array) -> bool:
        """Whether sums are added up so that each device gets some of the rows of a matrix."""
        dims, scattered = self.whole.contraction, self.split.scattered
        split = [x for x in dims.out if scattered[x]]
        sizes = dict(zip(dims.out, dims.shape(a.shape, b.shape), strict=True))
        outer = next((x for x in dims.out if sizes[x] > 1), "")
        rows = dims.columns if form.swapped else dims.rows
        return (
            outer != ""
            and split == [outer]
            and outer in rows
            and scattered[outer] == self.split.contracted
            and form.permutation is None
            and len(form.product_shape) == 2
        )

    def _scattered(self, matrices: Merged, a: jax.Array, b: jax.Array) -> jax.Array:
        """Computes this device's rows of a sum, which the kernel may send itself."""
        if matrices.call.options.names_something:
            self._check(matrices)
        call = matrices.call
        how = fused_collective.ScatteredProduct(call, self.split.contracted, call.out_dtype)
        ready = matrices.form.ready(Operands(a, b)).present()
        dims, scattered = self.whole.contraction, self.split.scattered
        whole = zip(dims.out, dims.shape(a.shape, b.shape), strict=True)
        shape = [size // self.split.size(scattered[x]) for x, size in whole]
        return fused_collective.scattered_product(how, *ready).reshape(shape)


def _moved(x: jax.Array, steps: Sequence[Step]) -> jax.Array:
    return functools.reduce(lambda x, step: step.run(x), steps, x)
