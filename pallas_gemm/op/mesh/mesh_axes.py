"""Which axis of a mesh splits which dimension of a product: the words that XLA understands."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pallas_gemm.call import OF_RESULT, Call, Signature
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.mesh.reduction import travelling_dtype
from pallas_gemm.op.mesh.resharding import Axes, Placement
from pallas_gemm.planning import plans


def sharding_rule(
    contraction: Contraction, operands: Sequence[str], results: Sequence[str], more: str = ""
) -> str:
    """Says which dimensions of operands and results are split alike.

    Args:
        contraction: A product.
        operands: The dimensions of each operand.
        results: The dimensions of each result.
        more: Dimensions that the product has not.
    """
    given, made = (
        ", ".join(" ".join(_factors(contraction, own, more)) for own in each)
        for each in (operands, results)
    )
    return f"{given} -> {made}"


def reduced_factors(contraction: Contraction) -> tuple[str, ...]:
    """Returns the dimensions that are summed over, by the names that the rule has for them."""
    return tuple(_factors(contraction, contraction.contracted))


def _factors(contraction: Contraction, letters: str, more: str = "") -> list[str]:
    """Names dimensions as XLA's parser of rules knows names: one letter and a number."""
    every = list(dict.fromkeys(contraction.lhs + contraction.rhs + more))
    return [f"d{every.index(x)}" for x in letters]


def sums_dtype(call: Call, signature: Signature) -> np.dtype:
    """Returns the type in which partial sums of a product travel."""
    wide = plans.sums_only(call, signature).out_dtype
    # What follows the sum is computed in float32.
    result = call.out_dtype if call.epilogue.of_whole_sums.is_identity else wide
    return travelling_dtype(wide, result, call.options.reduced)


def dividing(mesh: Mesh | AbstractMesh, axes: Iterable[str], size: int, parts: int = 1) -> Axes:
    """Returns those of some axes that split a dimension into parts of one size.

    Args:
        mesh: The devices.
        axes: The axes, the first choice first.
        size: The size of the dimension.
        parts: Each part is to be a multiple of this.
    """
    found: Axes = ()
    for axis in axes:
        if size % (parts * mesh.shape[axis]) == 0:
            parts *= mesh.shape[axis]
            found += (axis,)
    return found


def axes_of(sharding: NamedSharding) -> Placement:
    """Reads from the type of an array which axes of an explicit mesh split each dimension."""
    said = sharding.spec.partitions
    return tuple((own,) if isinstance(own, str) else tuple(own or ()) for own in said)


@dataclasses.dataclass(frozen=True)
class Split:
    """The part of a product that one device computes.

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

    @property
    def scattered_axes(self) -> Axes:
        """The axes along which sums are scattered."""
        return tuple(axis for own in self.scattered.values() for axis in own)

    @property
    def devices(self) -> int:
        """Into how many parts the whole work is split."""
        return math.prod(self.size(own) for own in self.axes.values())

    def size(self, axes: Axes) -> int:
        """Returns into how many parts these axes split a dimension."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def placement(self, letters: str, *, scattered: bool) -> Placement:
        """Returns how an array is split, before or after the sums are reduced and scattered."""
        after = self.scattered if scattered else {}
        return tuple(self.axes.get(x, ()) + after.get(x, ()) for x in letters)

    def placements(self, call: Call) -> tuple[Placement, ...]:
        """Returns how operands have to be split, and how the result is."""
        *letters, out = self.contraction.of_operands(call)
        named = call.unpack(range(len(letters)))
        late = {getattr(named, name) for name in OF_RESULT}
        operands = (self.placement(own, scattered=i in late) for i, own in enumerate(letters))
        return (*operands, self.placement(out, scattered=True))

    def sharding(self, placement: Placement) -> NamedSharding:
        """Returns a placement as JAX takes it."""
        return NamedSharding(self.mesh, PartitionSpec(*(axes or None for axes in placement)))

    def local(self, shape: Sequence[int], placement: Placement) -> tuple[int, ...]:
        """Returns the shape of one device's part."""
        return tuple(
            -(-size // self.size(axes)) for size, axes in zip(shape, placement, strict=True)
        )

    def __str__(self) -> str:
        names = self.contraction.names()
        return split_text({name: self.axes[x] for x, name in names.items()})


def split_text(axes: Mapping[str, Axes]) -> str:
    """Says which axes split which dimension."""
    # Parts of an axis that stay together are the axis.
    split = [
        f"{name} along {'*'.join(dict.fromkeys(axis.partition(':')[0] for axis in own))}"
        for name, own in axes.items()
        if own
    ]
    return ", ".join(split) or "nothing"


@functools.lru_cache(maxsize=1024)
def refined(mesh: Mesh, sharding: Any, rank: int) -> Mesh:
    """Returns the same devices with axes of prime sizes.

    An array can be split along a part of an axis, which is then an axis of its own.

    Args:
        mesh: The devices; empty if only arrays know them.
        sharding: The sharding of an array.
        rank: How many dimensions it has.
    """
    if mesh.empty:
        # Every number of parts divides the number of devices.
        whole = (len(sharding.device_set),) * rank
        devices = np.array(list(sharding.devices_indices_map(whole)))
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


@functools.lru_cache(maxsize=4096)
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
