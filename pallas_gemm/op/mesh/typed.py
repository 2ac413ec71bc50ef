"""Arrays of an explicit mesh, whose types say how they are split: the same, split in another way.

An array whose type says nothing of a mesh stays what it is. A partial sum stays, too.
"""

from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding

from pallas_gemm.op.mesh import mesh_axes, mesh_context
from pallas_gemm.op.mesh.resharding import Axes, Placement


def sharding_of(x: Any) -> NamedSharding | None:
    """Returns how an array is split where its type says so; None elsewhere."""
    if not isinstance(x, jax.Array):
        return None
    sharding: NamedSharding = jax.typeof(x).sharding
    is_said = AxisType.Explicit in sharding.mesh.axis_types
    return sharding if is_said and not mesh_context.is_partial_sum(jax.typeof(x)) else None


def placement_of(x: Any) -> Placement | None:
    """Returns which axes split each dimension; None where the type of an array does not say so."""
    sharding = sharding_of(x)
    return None if sharding is None else mesh_axes.axes_of(sharding, x.ndim)


def split_as(x: Any, sharding: NamedSharding) -> Any:
    """Returns an array that is split as told."""
    return x if sharding_of(x) in (None, sharding) else jax.sharding.reshard(x, sharding)


def split_along(x: Any, placement: Iterable[Axes]) -> Any:
    """Returns an array whose dimensions are split along these axes."""
    own = sharding_of(x)
    if own is None:
        return x
    return split_as(x, NamedSharding(own.mesh, mesh_axes.spec_of(placement)))


def split_into(x: Any, dim: int, parts: int) -> Any:
    """Returns an array of which a dimension is split along those of its axes that divide a number.

    The dimension can then be cut into this number of parts.
    """
    found = placement_of(x)
    if found is None:
        return x
    mesh = jax.typeof(x).sharding.mesh
    own = mesh_axes.dividing(mesh, found[dim], parts)
    return split_along(x, (*found[:dim], own, *found[dim + 1 :]))
