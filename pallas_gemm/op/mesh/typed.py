"""Arrays of an explicit mesh, whose types say how they are split.

A partial sum counts as an array whose type says nothing of it: it stays what it is.
"""

from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_gemm.op.mesh import mesh_axes, mesh_context


def sharding_of(x: Any) -> NamedSharding | None:
    """Returns how an array is split where its type says so; None elsewhere."""
    if not isinstance(x, jax.Array):
        return None
    sharding: NamedSharding = jax.typeof(x).sharding
    is_said = AxisType.Explicit in sharding.mesh.axis_types
    return sharding if is_said and not mesh_context.is_partial_sum(jax.typeof(x)) else None


def are_split(*arrays: Any) -> bool:
    """Whether a type says how an array is split, and none is a partial sum."""
    types = [jax.typeof(x) for x in arrays if isinstance(x, jax.Array)]
    said = any(AxisType.Explicit in x.sharding.mesh.axis_types for x in types)
    return said and not any(map(mesh_context.is_partial_sum, types))


def split_as(x: Any, sharding: NamedSharding | None) -> Any:
    """Returns an array that is split as told, if its type says how it is."""
    stays = sharding is None or sharding_of(x) in (None, sharding)
    return x if stays else jax.sharding.reshard(x, sharding)


def split_into(x: Any, dim: int, parts: int) -> Any:
    """Returns an array with a dimension split along those of its axes that divide a number."""
    if (sharding := sharding_of(x)) is None:
        return x
    placement = [*mesh_axes.axes_of(sharding)]
    placement[dim] = mesh_axes.dividing(sharding.mesh, placement[dim], parts)
    return split_as(x, NamedSharding(sharding.mesh, PartitionSpec(*placement)))
