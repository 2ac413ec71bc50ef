"""How a last layer is shared out among the devices of a mesh, when its program is compiled.

    tokens    each device has some: its statistics are its own, the weight's gradient is a sum
    words     each device has some: statistics are combined, the tokens' gradient is a sum

The width is gathered where it is split. If one axis splits tokens and words, it goes on splitting
the dimension that is larger.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_gemm.call import signature_of
from pallas_gemm.op.loss.loss_layer import Layer
from pallas_gemm.op.mesh import mesh_axes
from pallas_gemm.op.mesh.parts import handed_out, named, share
from pallas_gemm.op.mesh.resharding import Axes


def shared(work: Any, *operands: jax.Array) -> list[jax.Array]:
    """Computes something of a last layer in parts that XLA hands out to the devices of a mesh.

    Args:
        work: `Statistics`, or the `Gradients` of `loss_gradient`. It says the dimensions of its
            operands and results: t for tokens, w for words, k for the width.
        *operands: Its operands; the first ones are hidden, weight and labels.
    """
    given, results = (
        ", ".join(" ".join(own) for own in each) for each in (work.operands, work.results)
    )
    summed = set("".join(work.operands)) - set("".join(work.results)) - {"k"}
    run = handed_out(
        lambda *x: list(work.run(*x)),
        functools.partial(_partition, work),
        f"{given} -> {results}",
        reduction_factors=tuple(sorted(summed)),
        need_replication_factors=("k",),
    )
    with named(f"{work} {signature_of(operands)}"):
        return run(*operands)


def _partition(work: Any, mesh: Mesh, _: Any, args: Sequence[Any], results: Sequence[Any]) -> Any:
    """Says what one device computes; see `handed_out`."""
    sizes: dict[str, int] = {}
    placed: dict[str, Axes] = {}
    for letters, x in zip(work.operands, args, strict=True):
        sizes |= dict(zip(letters, x.shape, strict=True))
    for letters, x in zip(work.operands[:2], args[:2], strict=True):
        placed |= dict(zip(letters, mesh_axes.placement(x.sharding, 2, mesh), strict=True))
    axes = _shared_out(mesh, sizes, placed)

    def sharding(letters: str) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(axes.get(x) or None for x in letters)))

    def run(*own: jax.Array) -> list[jax.Array]:
        if axes["w"]:
            first = lax.axis_index(axes["w"]) * own[1].shape[work.layer.axis]
            own = (*own[:2], own[2] - first, *own[3:])
        return list(work.combine(work.on_one_device(*own), axes))

    placed_results = [sharding(x) for x in work.results]
    types = tuple(
        (own.shard_shape(tuple(x.shape)), x.dtype)
        for own, x in zip(placed_results, results, strict=True)
    )
    return share(run, types), placed_results, tuple(map(sharding, work.operands))


def _shared_out(mesh: Mesh, sizes: dict[str, int], placed: dict[str, Axes]) -> dict[str, Axes]:
    """Returns the axes that split tokens and words, into parts of one size."""
    found: dict[str, Axes] = {"t": (), "w": ()}
    for letter in sorted("tw", key=lambda x: -sizes[x]):
        taken = {*found["t"], *found["w"]}
        free = (axis for axis in placed[letter] if axis not in taken)
        found[letter] = mesh_axes.dividing(mesh, free, sizes[letter])
    return found


def dimensions_of(layer: Layer) -> tuple[str, ...]:
    """Returns the dimensions of the operands of a layer."""
    return ("tk", "wk" if layer.transposed else "kw", "t", *(("w",) if layer.bias else ()))
