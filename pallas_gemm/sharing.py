"""Which axis of a mesh splits which dimension of a product: arithmetic, without a word to XLA.

A product has four dimensions: batch (b), rows (m), columns (n), and the contracted one (k). Each
axis of the mesh goes to one of them. Where operands and result disagree about an axis, the choice
is the one that moves the fewest bytes, so that what has to be gathered is the smaller operand.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_gemm.call import Call, Signature
from pallas_gemm.kernels import xla

Axes = tuple[str, ...]
Placement = tuple[Axes, ...]
"""The axes of the mesh along which each dimension of an array is split, the outer one first."""


def dimensions(call: Call, signature: Signature) -> tuple[str, ...]:
    """Names the dimensions of each operand and of the result, by a letter each: b, m, n, k."""
    ranks = [len(shape) for shape, _ in signature]
    named = call.unpack(range(len(ranks)))
    batch = "b" if 3 in (ranks[named.a], ranks[named.b]) else ""
    letters = {
        named.a: "km" if call.transpose_a else "mk",
        named.b: "nk" if call.transpose_b else "kn",
    }
    letters[named.up] = letters[named.b]
    letters = {i: ("b" if ranks[i] == 3 else "") + letters[i] for i in letters if i is not None}
    if named.bias is not None:
        letters[named.bias] = "bn" if ranks[named.bias] == 2 else "n"
    if named.residual is not None:
        letters[named.residual] = batch + "mn"
    return (*(letters[i] for i in range(len(ranks))), batch + "mn")


def sharding_rule(call: Call, signature: Signature) -> str:
    """Says which dimensions of operands and result are split alike."""
    *operands, result = (" ".join(letters) for letters in dimensions(call, signature))
    return f"{', '.join(operands)} -> {result}"


@dataclasses.dataclass(frozen=True)
class Split:
    """What one device computes of a product.

    Attributes:
        mesh: The devices.
        axes: The axes along which each dimension is split, by its letter.
        scattered: The axes of `k` along which the result is split, by the result's dimension.
    """

    mesh: Mesh
    axes: Mapping[str, Axes]
    scattered: Mapping[str, Axes]

    def size(self, axes: Axes) -> int:
        """Returns into how many parts these axes split a dimension."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def placement(self, letters: str, *, scattered: bool) -> Placement:
        """Returns how an array is split, before or after the sums are reduced and scattered."""
        after = self.scattered if scattered else {}
        return tuple(self.axes.get(x, ()) + after.get(x, ()) for x in letters)

    def sharding(self, placement: Placement) -> NamedSharding:
        """Returns a placement as JAX takes it."""
        return NamedSharding(self.mesh, PartitionSpec(*(axes or None for axes in placement)))

    def local(self, shape: Sequence[int], placement: Placement) -> tuple[int, ...]:
        """Returns the shape of one device's part."""
        return tuple(
            -(-size // self.size(axes)) for size, axes in zip(shape, placement, strict=True)
        )

    def __str__(self) -> str:
        split = [f"{x} along {'*'.join(axes)}" for x, axes in self.axes.items() if axes]
        return ", ".join(split) or "nothing"


def refined(mesh: Mesh, args: Sequence[Any]) -> Mesh:
    """Returns the same devices with axes of prime sizes.

    An array can be split along a part of an axis, which is then an axis of its own.
    """
    if mesh.empty:
        first = args[0]
        devices = np.array(list(first.sharding.devices_indices_map((1,) * len(first.shape))))
        named: Mapping[str, int] = {"devices": devices.size}
    else:
        devices, named = mesh.devices, mesh.shape
    sizes, names = [], []
    for name, size in named.items():
        factors = _prime_factors(size)
        sizes += factors
        names += [name] if len(factors) == 1 else [f"{name}:{i}" for i in range(len(factors))]
    return Mesh(devices.reshape(sizes), names)


def _prime_factors(number: int) -> list[int]:
    factors, divisor = [], 2
    while number > 1:
        while number % divisor:
            divisor += 1
        factors.append(divisor)
        number //= divisor
    return factors


def placement(sharding: Any, rank: int, mesh: Mesh) -> Placement:
    """Reads from a sharding which axes of the mesh split each dimension.

    Raises:
        NotImplementedError: It does not follow the axes of the mesh.
    """
    if sharding is None:
        return ((),) * rank
    # Every number of parts divides the number of devices.
    indices = sharding.devices_indices_map((mesh.size,) * rank)
    placement = []
    for dimension in range(rank):
        starts = np.array([indices[device][dimension].start or 0 for device in mesh.devices.flat])
        starts = starts.reshape(mesh.devices.shape)
        steps = {
            axis: int(np.take(starts, 1, i).flat[0] - starts.flat[0])
            for i, axis in enumerate(mesh.axis_names)
        }
        placement.append(tuple(sorted(filter(steps.get, steps), key=lambda axis: -steps[axis])))
    own = NamedSharding(mesh, PartitionSpec(*placement))
    if own.devices_indices_map((mesh.size,) * rank) != indices:
        raise NotImplementedError(f"{sharding} splits an array along no axes of {mesh}")
    return tuple(placement)


def share_out(call: Call, signature: Signature, mesh: Mesh, wanted: Sequence[Placement]) -> Split:
    """Gives each axis of the mesh to the dimension that moves the fewest bytes.

    Args:
        call: The product.
        signature: Shapes and types of the whole operands.
        mesh: The devices.
        wanted: How the operands come, and how the result is wanted.
    """
    letters = dimensions(call, signature)
    sizes = {
        x: size
        for (shape, _), own in zip(signature, letters, strict=False)
        for x, size in zip(own, shape, strict=True)
    }
    axes: dict[str, Axes] = dict.fromkeys("bmnk", ())
    summed: dict[str, Axes] = dict.fromkeys("bmn", ())
    order = [axis for placement in wanted[::-1] for dim in placement for axis in dim]
    for axis in dict.fromkeys(order):
        uses = [_user(axis, placement, own) for placement, own in zip(wanted, letters, strict=True)]
        costs = {
            x: _moved_bytes(call, signature, uses, x, mesh.shape[axis])
            # The result's own dimension comes first, and is taken if another is only as good.
            for x in dict.fromkeys(use for use in reversed(uses) if use)
        }
        best = min(costs, key=lambda x: costs[x])
        axes[best] += (axis,)
        if best == "k" and uses[-1]:
            summed[uses[-1]] += (axis,)
    scattered = {
        x: own if sizes.get(x, 1) % math.prod(mesh.shape[a] for a in (*axes[x], *own)) == 0 else ()
        for x, own in summed.items()
    }
    return Split(mesh, axes, scattered)


def _user(axis: str, placement: Placement, letters: str) -> str | None:
    """Returns the dimension of an array that is split along an axis."""
    return next((x for x, dim in zip(letters, placement, strict=True) if axis in dim), None)


def _moved_bytes(
    call: Call,
    signature: Signature,
    uses: Sequence[str | None],
    choice: str,
    parts: int,
) -> float:
    """Returns how many bytes a device receives if an axis splits this dimension.

    What is split along another dimension counts as gathered: XLA finds no cheaper way at times.
    """
    rest = (parts - 1) / parts
    pairs = zip(signature, uses, strict=False)
    moved = sum(
        math.prod(shape) * dtype.itemsize
        for (shape, dtype), use in pairs
        if use not in (None, choice)
    )
    problem = call.problem(signature)
    elements = problem.batch * problem.m * problem.n
    if choice == "k":
        wide = call.options.reduced or xla.wide_dtype(signature[0][1], call.out_dtype)
        moved += elements * problem.sums * wide.itemsize * (1 if uses[-1] else 2)
    elif uses[-1] != choice:
        moved += elements * call.out_dtype.itemsize
    return moved * rest
