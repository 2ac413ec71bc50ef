"""How a product of groups is shared out among the devices of a mesh, when its program is compiled.

    rows in groups    a device has some of the rows, of the columns, of k (a partial sum), and of
                      the groups, where their matrices are split (a sum with zeros)
    k in groups       a device has some of the rows and columns of every group's result, of the
                      contracted elements (a partial sum), and of the groups

Each axis of the mesh splits one of these, as the operands are split when they come. Every device
has the sizes of all groups, and finds those of its own elements.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_gemm.call import DIMENSIONS, GroupedCall, signature_of
from pallas_gemm.device import Device
from pallas_gemm.op.mesh import mesh_axes
from pallas_gemm.op.mesh.parts import handed_out, note, share, told_apart
from pallas_gemm.op.mesh.resharding import Axes
from pallas_gemm.op.permutation import permuted
from pallas_gemm.planning import numerics
from pallas_gemm.planning.by_xla import xla_groups

grouped_part_p = core.Primitive("pallas_gemm_grouped_part")
"""The product of groups that one device computes; `grouped` says what becomes of it."""


def shared_groups(call: GroupedCall, *operands: jax.Array) -> jax.Array:
    """Computes a call whose parts XLA hands out to the devices of a mesh."""
    letters = _letters(call, [x.ndim for x in operands])
    *given, out = (" ".join(own) for own in letters)
    shared = handed_out(
        functools.partial(grouped_part_p.bind, call=call),
        functools.partial(_partition, call, letters),
        f"{', '.join(given)} -> {out}",
        reduction_factors=("k",) if call.contracted else ("k", "g"),
    )
    with told_apart(xla_groups.by_jax, call, signature_of(operands)):
        return shared(*operands)


def rows_of_groups(
    sizes: jax.Array, rows: int, first: Any, groups: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what brings the rows of some groups to the front.

    Args:
        sizes: The sizes of all groups.
        rows: How many rows there are.
        first: The first of the groups.
        groups: How many.

    Returns:
        The sizes of these groups, which row comes where, and which place each row comes to.
    """
    ends = xla_groups.bounds(sizes, rows, 1).end
    own = lax.dynamic_slice_in_dim(sizes, first, groups)
    numbers = lax.iota(jnp.int32, sizes.shape[0])
    before = jnp.where(numbers < first, ends, 0).max(initial=0)
    row, start = lax.iota(jnp.int32, rows), jnp.minimum(before, rows)
    return own, (row + start) % rows, (row - start) % rows


def _letters(call: GroupedCall, ranks: Sequence[int]) -> tuple[str, ...]:
    """Returns the dimensions of each operand, and last those of the result; the sizes' are s."""
    if call.contracted:
        return "km", "kn", "s", "gmn"
    matrix = "gnk" if call.transpose_b else "gkn"
    factors = ["mk", matrix] + [matrix] * call.epilogue.gated
    extras = (DIMENSIONS[name] for name in call.epilogue.operands)
    own = zip(extras, ranks[len(factors) + 1 :], strict=True)
    return (*factors, "s", *("g" * (rank > len(x)) + x for x, rank in own), "mn")


def _partition(
    call: GroupedCall,
    letters: tuple[str, ...],
    mesh: Mesh,
    gpu: Device | None,
    args: Sequence[Any],
    result: Any,
) -> tuple[Any, ...]:
    """Says what one device computes; see `handed_out`."""
    call = call if call.options.target else call.with_target(gpu)
    own = _Share.of(call, letters, mesh, [*args, result])
    if own.axes["k"] and call.options.parts:
        why = f"the mesh splits what is summed over ({mesh_axes.split_text(own.axes)})"
        numerics.refuse_promised(call.options, why)
    *given, final = own.shardings()
    return share(own, ((own.shape, call.out_dtype),)), final, tuple(given)


@dataclasses.dataclass(frozen=True, eq=False)
class _Share:
    """The part that one device computes.

    Attributes:
        call: The product.
        letters: The dimensions of operands and result.
        sizes: The whole size of each dimension.
        mesh: The devices.
        axes: The axes along which each dimension is split.
        scattered: The axes of sums along which the result is split, by its dimension.
    """

    call: GroupedCall
    letters: tuple[str, ...]
    sizes: Mapping[str, int]
    mesh: Mesh
    axes: Mapping[str, Axes]
    scattered: Mapping[str, Axes]

    @classmethod
    def of(
        cls, call: GroupedCall, letters: tuple[str, ...], mesh: Mesh, arrays: Sequence[Any]
    ) -> "_Share":
        """Returns what follows from how operands come and the result is wanted."""
        shape = [size for x in arrays for size in x.shape]
        sizes = dict(zip("".join(letters), shape, strict=True))
        a, b, *_, out = (
            dict(zip(own, mesh_axes.placement(x.sharding, len(own), mesh), strict=True))
            for own, x in zip(letters, arrays, strict=True)
        )
        axes: dict[str, Axes] = dict.fromkeys("mnkg", ())
        scattered: dict[str, Axes] = dict.fromkeys("mng", ())
        share = cls(call, letters, sizes, mesh, axes, scattered)
        for letter, wanted in _preferred(call, a, b, out):
            taken = {axis for own in axes.values() for axis in own}
            axes[letter] += share._dividing(letter, (x for x in wanted if x not in taken))
        # What follows a sum needs all of it.
        for letter, wanted in out.items() if call.epilogue.is_identity else ():
            scattered[letter] += share._dividing(letter, (x for x in wanted if x in share.summed))
        return share

    def _dividing(self, letter: str, wanted: Iterable[str]) -> Axes:
        """Returns those of some axes that split a dimension further, into parts of one size."""
        parts = self._parts(letter)
        return mesh_axes.dividing(self.mesh, wanted, self.sizes[letter], parts)

    def _parts(self, letter: str) -> int:
        """Returns into how many parts a dimension is split, that of the result if it has it."""
        return self._size((*self.axes[letter], *self.scattered.get(letter, ())))

    def _size(self, axes: Axes) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the device's part of the result."""
        return tuple(self.sizes[x] // self._parts(x) for x in self.letters[-1])

    @property
    def summed(self) -> Axes:
        """The axes along which results are partial sums."""
        return self.axes["k"] if self.call.contracted else (*self.axes["k"], *self.axes["g"])

    def shardings(self) -> Iterator[NamedSharding]:
        """Yields how operands have to be split, and how the result is."""
        factors = 2 + self.call.epilogue.gated
        for place, own in enumerate(self.letters):
            is_result = place == len(self.letters) - 1
            # What rows take by their group each device has of all groups.
            known = self.axes if is_result or place < factors else {**self.axes, "g": ()}
            after = self.scattered if is_result else {}
            split = (known.get(x, ()) + after.get(x, ()) for x in own)
            yield NamedSharding(self.mesh, PartitionSpec(*(axes or None for axes in split)))

    def __call__(self, *operands: jax.Array) -> jax.Array:
        """Computes it from the device's parts of the operands."""
        place = 2 + self.call.epilogue.gated
        sizes = self._own_sizes(operands[place], operands[0].shape[0])
        given = (*operands[:place], sizes, *operands[place + 1 :])
        if not self.summed:
            return self._product(self.call, *given)
        return xla_groups.finished(self.call, self._sum, *given)

    def _own_sizes(self, sizes: jax.Array, rows: int) -> jax.Array:
        """Returns how many of the device's own rows are in each group."""
        axes = self.axes["k" if self.call.contracted else "m"]
        if not axes:
            return sizes
        each = xla_groups.bounds(sizes, rows * self._size(axes), 1)
        first = lax.axis_index(axes) * rows
        start, end = (jnp.clip(x - first, 0, rows) for x in (each.first, each.end))
        return end - start

    def _sum(self, plain: GroupedCall, a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
        """Computes what this device is to have of a sum over devices."""
        total, left = self._product(plain, a, b, sizes), self.summed
        for dimension, letter in enumerate(self.letters[-1]):
            if axes := self.scattered[letter]:
                total = lax.psum_scatter(total, axes, scatter_dimension=dimension, tiled=True)
                left = tuple(axis for axis in left if axis not in axes)
        return lax.psum(total, left) if left else total

    def _product(self, call: GroupedCall, *operands: jax.Array) -> jax.Array:
        """Computes a product of the groups that this device has."""
        if not (axes := self.axes["g"]):
            return self._part(call, *operands)
        a, b, sizes = operands
        every, rows = sizes.shape[0], a.shape[0]
        groups = every // self._size(axes)
        first = lax.axis_index(axes) * groups
        own, there, back = rows_of_groups(sizes, rows, first, groups)
        a = permuted(a, there, back)
        if call.contracted:
            return self._part(call, a, permuted(b, there, back), own)
        return permuted(self._part(call, a, b, own), back, there)

    def _part(self, call: GroupedCall, *operands: jax.Array) -> jax.Array:
        note(call, signature_of(operands), mesh_axes.split_text(self.axes))
        return grouped_part_p.bind(*operands, call=call)


def _preferred(
    call: GroupedCall, a: dict[str, Axes], b: dict[str, Axes], out: dict[str, Axes]
) -> tuple[tuple[str, Axes], ...]:
    """Returns what may split which dimension, the first choice first."""
    own = (("m", a["m"]), ("n", b["n"]), ("k", a["k"]))
    wanted = (("m", out["m"]), ("n", out["n"]))
    if call.contracted:
        return (*own, ("g", out["g"]), *wanted)
    return (*own, ("g", b["g"]), *wanted)
