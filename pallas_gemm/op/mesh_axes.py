"""Which axis of a mesh splits which dimension of a product: arithmetic, without a word to XLA.

Each axis of the mesh goes to one dimension of the contraction, whichever group that belongs to.
Where operands and result disagree about an axis, the choice is the one that moves the fewest bytes,
so that what has to be gathered is the smaller operand.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.reduction import travelling_dtype
from pallas_gemm.planning import dispatch
from pallas_gemm.planning.call import Call, Signature

Axes = tuple[str, ...]

Placement = tuple[Axes, ...]
"""The axes of the mesh along which each dimension of an array is split, the outer one first."""


def sharding_rule(call: Call, contraction: Contraction) -> str:
    """Says which dimensions of operands and result are split alike."""
    *operands, result = (
        " ".join(_factors(contraction, letters)) for letters in contraction.of_operands(call)
    )
    return f"{', '.join(operands)} -> {result}"


def reduced_factors(contraction: Contraction) -> tuple[str, ...]:
    """Returns the dimensions that are summed over, by the names that the rule has for them."""
    return tuple(_factors(contraction, contraction.contracted))


def _factors(contraction: Contraction, letters: str) -> list[str]:
    """Names dimensions as XLA's parser of rules knows names: one letter and a number."""
    every = list(dict.fromkeys(contraction.lhs + contraction.rhs))
    return [f"d{every.index(x)}" for x in letters]


def sums_dtype(call: Call, signature: Signature) -> np.dtype:
    """Returns the type in which partial sums of a product travel."""
    wide = dispatch.sums_only(call, signature).out_dtype
    # What follows the sum is computed in float32.
    result = call.out_dtype if call.epilogue.is_identity else wide
    return travelling_dtype(wide, result, call.options.reduced)


def sizes_of(call: Call, contraction: Contraction, signature: Signature) -> dict[str, int]:
    """Returns the size of each dimension of the whole product."""
    named = call.unpack(signature)
    letters, shape = contraction.lhs + contraction.rhs, (*named.a[0], *named.b[0])
    return dict(zip(letters, shape, strict=True))


@dataclasses.dataclass(frozen=True)
class Split:
    """What one device computes of a product.

    Attributes:
        contraction: The product's dimensions.
        mesh: The devices.
        axes: The axes along which each dimension is split, by its letter.
        scattered: The contracted axes along which the result is split, by the result's dimension.
    """

    contraction: Contraction
    mesh: Mesh
    axes: Mapping[str, Axes]
    scattered: Mapping[str, Axes]

    @property
    def contracted(self) -> Axes:
        """The axes along which a contracted dimension is split."""
        return tuple(axis for x in self.contraction.contracted for axis in self.axes[x])

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
        # Parts of an axis that stay together are the axis.
        split = [
            f"{name} along {'*'.join(dict.fromkeys(axis.partition(':')[0] for axis in axes))}"
            for x, name in self.contraction.names().items()
            if (axes := self.axes[x])
        ]
        return ", ".join(split) or "nothing"


def refined(mesh: Mesh, args: Sequence[Any]) -> Mesh:
    """Returns the same devices with axes of prime sizes.

    An array can be split along a part of an axis, which is then an axis of its own.
    """
    if mesh.empty:
        first = args[0]
        # Every number of parts divides the number of devices.
        whole = (len(first.sharding.device_set),) * len(first.shape)
        devices = np.array(list(first.sharding.devices_indices_map(whole)))
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


def share_out(
    call: Call,
    contraction: Contraction,
    signature: Signature,
    mesh: Mesh,
    wanted: Sequence[Placement],
) -> Split:
    """Gives each axis of the mesh to the dimension that moves the fewest bytes.

    Args:
        call: The product.
        contraction: Its dimensions.
        signature: Shapes and types of the whole operands.
        mesh: The devices.
        wanted: How the operands come, and how the result is wanted.
    """
    letters = contraction.of_operands(call)
    sizes = sizes_of(call, contraction, signature)
    axes: dict[str, Axes] = dict.fromkeys(sizes, ())
    summed: dict[str, Axes] = dict.fromkeys(contraction.out, ())
    costs = _Costs(call, contraction, signature, mesh, wanted)
    order = [axis for placement in wanted[::-1] for dim in placement for axis in dim]
    for axis in dict.fromkeys(order):
        uses = [_user(axis, placement, own) for placement, own in zip(wanted, letters, strict=True)]
        best = costs.cheapest(axis, uses)
        axes[best] += (axis,)
        if best in contraction.contracted and uses[-1]:
            summed[uses[-1]] += (axis,)
    scattered = {
        x: own if sizes[x] % math.prod(mesh.shape[a] for a in (*axes[x], *own)) == 0 else ()
        for x, own in summed.items()
    }
    return Split(contraction, mesh, axes, scattered)


def _user(axis: str, placement: Placement, letters: str) -> str | None:
    """Returns the dimension of an array that is split along an axis."""
    return next((x for x, dim in zip(letters, placement, strict=True) if axis in dim), None)


class _Costs:
    """The bytes that each device receives, by which dimension an axis splits."""

    def __init__(
        self,
        call: Call,
        contraction: Contraction,
        signature: Signature,
        mesh: Mesh,
        wanted: Sequence[Placement],
    ) -> None:
        """Computes the bytes of each device's part of operands and result, as they are wanted."""
        sizes = sizes_of(call, contraction, signature)
        elements = math.prod(sizes[x] for x in contraction.out)
        parts = [
            math.prod(mesh.shape[axis] for dim in placement for axis in dim) for placement in wanted
        ]
        self.mesh = mesh
        self.contracted = contraction.contracted
        self.operands = [
            math.prod(shape) * dtype.itemsize / count
            for (shape, dtype), count in zip(signature, parts, strict=False)
        ]
        self.result = elements * call.out_dtype.itemsize / parts[-1]
        sums = 1 + call.epilogue.gated
        self.sums = elements * sums * sums_dtype(call, signature).itemsize / parts[-1]

    def cheapest(self, axis: str, uses: Sequence[str | None]) -> str:
        """Returns the dimension that an axis had best split.

        Args:
            axis: The axis.
            uses: Which dimension of each operand, and of the result, the axis is wanted to split.
        """
        if uses[0] == uses[1] and uses[0] is not None and uses[0] in self.contracted:
            # Never gathered, whatever is wanted of the result.
            return uses[0]
        # The result's own dimension comes first, and is taken if another is only as good.
        choices = dict.fromkeys(use for use in reversed(uses) if use)
        return min(choices, key=lambda choice: self._moved(self.mesh.shape[axis], uses, choice))

    def _moved(self, size: int, uses: Sequence[str | None], choice: str) -> float:
        """Returns the bytes that arrive at each device.

        What is split along another dimension counts as gathered: XLA finds no cheaper way at times.
        """
        others = size - 1
        pairs = zip(self.operands, uses, strict=False)
        total = sum(part * others for part, use in pairs if use not in (None, choice))
        if choice in self.contracted:
            # Reduced and scattered, or reduced for all.
            return total + self.sums * others * (1 if uses[-1] else 2 / size)
        if uses[-1] == choice:
            return total
        return total + self.result * others * (1 if uses[-1] else 1 / size)
