"""Arrays of several dimensions as matrices, and back: on an explicit mesh, too.

JAX has no type for a dimension that is merged from several of which an inner one is split. Here
axes that split any of them split what they are merged into. The rows of a device follow each other
in the matrix, so that nothing is sent:

    [examples, positions along x, features]
    [examples, x, own positions, features]
    [x, examples, own positions, features]
    [rows along x, features]
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from pallas_gemm.op.mesh import explicit, mesh_axes, resharding, typed

Shape = tuple[int, ...]


class Rows(NamedTuple):
    """The rows of a matrix, which are merged from dimensions.

    Attributes:
        shape: Their sizes.
        parts: Into how many parts each is split.
    """

    shape: Shape
    parts: Shape

    @classmethod
    def of(cls, x: jax.Array, dims: int) -> "Rows":
        """Returns the rows of an array whose first dimensions are merged, as it is split."""
        shape, sharding = x.shape[:dims], typed.sharding_of(x)
        if sharding is None:
            return cls(shape, (1,) * dims)
        axes = mesh_axes.axes_of(sharding)[:dims]
        return cls(shape, tuple(resharding.count((own,), sharding.mesh.shape) for own in axes))

    @property
    def are_in_order(self) -> bool:
        """Whether the rows of a device follow each other as they are."""
        return all(parts == 1 for parts in self.parts[1:])

    @property
    def cut(self) -> Shape:
        """The parts of each dimension, and the size of a part, one after the other."""
        pairs = zip(self.shape, self.parts, strict=True)
        return tuple(own for size, parts in pairs for own in (parts, size // parts))

    def matrix(self, x: jax.Array) -> jax.Array:
        """Returns an array that begins with these dimensions as a matrix."""
        sharding = of_matrix(typed.sharding_of(x), len(self.shape))
        return _computed(_Merged(self), sharding, x)

    def whole(
        self, x: jax.Array, columns: Sequence[int], sharding: NamedSharding | None
    ) -> jax.Array:
        """Returns a matrix as an array that begins with these dimensions.

        Args:
            x: The matrix.
            columns: The sizes of the dimensions that its columns are merged from.
            sharding: How the array is split, if its type says so.
        """
        return _computed(_Apart(self, tuple(columns)), sharding, x)


def _computed(f: explicit.Function, sharding: NamedSharding | None, x: jax.Array) -> jax.Array:
    return (f(x) if sharding is None else explicit.computed(f, [sharding], x))[0]


@dataclasses.dataclass(frozen=True)
class _Merged:
    """An array as a matrix, as a function."""

    rows: Rows

    def __call__(self, x: jax.Array) -> list[jax.Array]:
        dims = len(self.rows.shape)
        columns = math.prod(x.shape[dims:])
        if not self.rows.are_in_order:
            order = (*range(0, 2 * dims, 2), *range(1, 2 * dims, 2), 2 * dims)
            x = x.reshape(*self.rows.cut, columns).transpose(order)
        return [x.reshape(math.prod(self.rows.shape), columns)]


@dataclasses.dataclass(frozen=True)
class _Apart:
    """A matrix as an array, as a function."""

    rows: Rows
    columns: Shape

    def __call__(self, x: jax.Array) -> list[jax.Array]:
        dims, cut = len(self.rows.shape), self.rows.cut
        if not self.rows.are_in_order:
            order = (*(own for i in range(dims) for own in (i, dims + i)), 2 * dims)
            x = x.reshape(*cut[::2], *cut[1::2], x.shape[1]).transpose(order)
        return [x.reshape(*self.rows.shape, *self.columns)]


def of_matrix(sharding: NamedSharding | None, dims: int) -> NamedSharding | None:
    """Returns how the matrix is split that an array becomes.

    Args:
        sharding: How the array is split, if its type says so.
        dims: How many dimensions the rows of the matrix are merged from.
    """
    if sharding is None:
        return None
    placement = mesh_axes.axes_of(sharding)
    rows, columns = (tuple(itertools.chain(*own)) for own in (placement[:dims], placement[dims:]))
    return NamedSharding(sharding.mesh, PartitionSpec(rows, columns))
