"""Which axis of a mesh splits which dimension of a product: arithmetic, without a word to XLA.

A product has four dimensions: batch (b), rows (m), columns (n), and the contracted one (k), which
may be made of two (j and k). Each axis of the mesh goes to one of them. Where operands and result
disagree about an axis, the choice is the one that moves the fewest bytes, so that what has to be
gathered is the smaller operand.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_gemm.planning import xla
from pallas_gemm.planning.call import Call, Operands, Signature

Axes = tuple[str, ...]
CONTRACTED = "jk"
"""The dimensions that a contracted one may be made of, of which each can be split."""

Placement = tuple[Axes, ...]
"""The axes of the mesh along which each dimension of an array is split, the outer one first."""


def factor_letters(call: Call) -> tuple[str, str, str]:
    """Names the dimensions of the factors of a product, a letter each, without the batch."""
    k = CONTRACTED if call.contracted else "k"
    b = f"n{k}" if call.transpose_b else f"{k}n"
    return f"{k}m" if call.transpose_a else f"m{k}", b, b


def dimensions(call: Call, signature: Signature) -> tuple[str, ...]:
    """Names the dimensions of each operand and of the result: b, m, n, k, and j for half of k."""
    shapes = call.unpack([shape for shape, _ in signature])
    batch = "b" if 3 in (len(shapes.a), len(shapes.b)) else ""
    a, b, up = (
        None if shape is None else ("b" if len(shape) == 3 else "") + letters
        for shape, letters in zip(shapes[:3], factor_letters(call), strict=True)
    )
    bias = None if shapes.bias is None else "n" if len(shapes.bias) == 1 else "bn"
    residual = None if shapes.residual is None else "bmn"[3 - len(shapes.residual) :]
    return (*Operands(a, b, up, bias, residual).present(), f"{batch}mn")


def contracted(call: Call, signature: Signature, letter: str) -> int:
    """Returns the size of a contracted dimension."""
    if call.contracted:
        return call.contracted[CONTRACTED.index(letter)]
    return call.problem(signature).k


def split_contracted(call: Call, x: jax.Array, letters: str) -> jax.Array:
    """Takes a contracted dimension that is made of two apart, so that each can be split."""
    if not call.contracted:
        return x
    first = x.ndim - len(letters) + 1 + letters.index("j")
    return x.reshape(*x.shape[:first], *call.contracted, *x.shape[first + 1 :])


def merge_contracted(call: Call, x: jax.Array, letters: str) -> jax.Array:
    """Puts a contracted dimension together again, of the whole operand or of a device's part."""
    if not call.contracted:
        return x
    first = x.ndim - len(letters) + letters.index("j")
    return x.reshape(*x.shape[:first], -1, *x.shape[first + 2 :])


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
        scattered: The contracted axes along which the result is split, by the result's dimension.
    """

    mesh: Mesh
    axes: Mapping[str, Axes]
    scattered: Mapping[str, Axes]

    @property
    def contracted(self) -> Axes:
        """The axes along which a contracted dimension is split."""
        return tuple(axis for letter in CONTRACTED for axis in self.axes[letter])

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
            f"{x} along {'*'.join(dict.fromkeys(axis.partition(':')[0] for axis in axes))}"
            for x, axes in self.axes.items()
            if axes
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


def share_out(call: Call, signature: Signature, mesh: Mesh, wanted: Sequence[Placement]) -> Split:
    """Gives each axis of the mesh to the dimension that moves the fewest bytes.

    Args:
        call: The product.
        signature: Shapes and types of the whole operands.
        mesh: The devices.
        wanted: How the operands come, and how the result is wanted.
    """
    letters = dimensions(call, signature)
    axes: dict[str, Axes] = dict.fromkeys(f"bmn{CONTRACTED}", ())
    summed: dict[str, Axes] = dict.fromkeys("bmn", ())
    order = [axis for placement in wanted[::-1] for dim in placement for axis in dim]
    for axis in dict.fromkeys(order):
        uses = [_user(axis, placement, own) for placement, own in zip(wanted, letters, strict=True)]
        best = _cheapest(call, signature, mesh, wanted, uses)
        axes[best] += (axis,)
        if best in CONTRACTED and uses[-1]:
            summed[uses[-1]] += (axis,)
    problem = call.problem(signature)
    sizes = {"b": problem.batch, "m": problem.m, "n": problem.n}
    scattered = {
        x: own if sizes[x] % math.prod(mesh.shape[a] for a in (*axes[x], *own)) == 0 else ()
        for x, own in summed.items()
    }
    return Split(mesh, axes, scattered)


def _user(axis: str, placement: Placement, letters: str) -> str | None:
    """Returns the dimension of an array that is split along an axis."""
    return next((x for x, dim in zip(letters, placement, strict=True) if axis in dim), None)


def _cheapest(
    call: Call,
    signature: Signature,
    mesh: Mesh,
    wanted: Sequence[Placement],
    uses: Sequence[str | None],
) -> str:
    """Returns the dimension that an axis had best split.

    What is split along another dimension counts as gathered: XLA finds no cheaper way at times.

    Args:
        call: The product.
        signature: Shapes and types of the whole operands.
        mesh: The devices.
        wanted: How the operands come, and how the result is wanted.
        uses: Which dimension of each the axis splits.
    """
    if uses[0] == uses[1] and uses[0] in tuple(CONTRACTED):
        # Never gathered, whatever is wanted of the result.
        return uses[0]
    problem = call.problem(signature)
    elements = problem.batch * problem.m * problem.n
    wide = xla.wide_dtype(signature[0][1], signature[1][1], call.out_dtype)
    sums_dtype = call.options.reduced or wide
    parts = [
        math.prod(mesh.shape[axis] for dim in placement for axis in dim) for placement in wanted
    ]
    operands = [math.prod(shape) * dtype.itemsize for shape, dtype in signature]

    def moved(choice: str) -> float:
        shares = zip(operands, parts, uses, strict=False)
        total = sum(size / count for size, count, use in shares if use not in (None, choice))
        if choice in CONTRACTED:
            passes = 1 if uses[-1] else 2
            return total + elements / parts[-1] * problem.sums * sums_dtype.itemsize * passes
        return total + (uses[-1] != choice) * elements / parts[-1] * call.out_dtype.itemsize

    # The result's own dimension comes first, and is taken if another is only as good.
    return min(dict.fromkeys(use for use in reversed(uses) if use), key=moved)
