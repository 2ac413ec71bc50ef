"""How an array that is quantized is shared out among the devices of a mesh.

Each device quantizes what it has of the array, and nothing is sent. A dimension stays split where
the devices' parts consist of whole blocks; another one is gathered.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_gemm.call import signature_of
from pallas_gemm.kernels.quantize import ACROSS, ALONG, Quantization
from pallas_gemm.op.mesh import mesh_axes, typed
from pallas_gemm.op.mesh.parts import handed_out, named
from pallas_gemm.op.mesh.resharding import Axes

Part = Callable[..., Sequence[jax.Array]]
"""Quantizes what one device has, for a GPU or None: its argument `target`."""


def shared(
    how: Quantization, part: Part, target: Any, x: jax.Array, *tiles: jax.Array
) -> list[jax.Array]:
    """Quantizes an array in parts that XLA hands out to the devices of a mesh.

    Args:
        how: How it is quantized.
        part: Computes the part of one device.
        target: The GPU, if it is known.
        x: The array.
        *tiles: Its tiles, where groups of rows are told apart. Then each device has all rows.
    """
    run = handed_out(
        functools.partial(part, target=target),
        functools.partial(_partition, how, part, target),
        **_rule(how, x.shape, *(own.shape for own in tiles)),
    )
    with named(f"{how} {signature_of((x, *tiles))}"):
        return list(run(x, *tiles))


def result_shardings(how: Quantization, x: Any, *tiles: Any) -> list[NamedSharding] | None:
    """Returns how values and scales of each way are split, as types of an explicit mesh say.

    Values are split as the array is, and scales as far as devices have whole blocks.

    Args:
        how: How it is quantized.
        x: The array.
        *tiles: Its tiles, where groups of rows are told apart.

    Returns:
        The shardings; None where the type of the array says nothing of a mesh.
    """
    if (sharding := typed.sharding_of(x)) is None:
        return None
    mesh = sharding.mesh
    *lead, rows, cols = mesh_axes.axes_of(sharding)
    found = []
    for way in how.ways:
        across = way.axis == ACROSS
        # Along columns, groups that are told apart have other rows.
        own = () if tiles and across else rows
        whole = zip((own, cols), x.shape[-2:], way.lying, strict=True)
        of_scale = [mesh_axes.dividing(mesh, *each) for each in whole]
        for last in ((cols, own) if across else (own, cols), of_scale):
            found.append(NamedSharding(mesh, PartitionSpec(*lead, *last)))
    return found


class _Dimension(NamedTuple):
    """The names that XLA's rule has for rows or columns of an array.

    Attributes:
        whole: The name of the dimension of the array, and of values.
        of_scales: The names of the dimension of the scales of each way.
        sizes: The sizes of parts of names.
    """

    whole: str
    of_scales: tuple[str, ...]
    sizes: Mapping[str, int]


def _dimension(name: str, size: int, lengths: tuple[int, ...]) -> _Dimension:
    """Names a dimension that has blocks of a length for each way: the blocks are a part of it.

    XLA then knows how scales are split. Where the last block is shorter, or is all, they are on
    their own.
    """
    longest = max(lengths)
    whole, sizes = name, {}
    if size > longest > 1 and size % longest == 0:
        whole = f"({name}0 {name}1)"
        # That of the blocks is a dimension of scales, whose size is known.
        sizes = {f"{name}1": longest}
    names = {1: whole} | ({longest: f"{name}0"} if sizes else {})
    of_scales = tuple(names.get(x, f"{name}{2 + i}") for i, x in enumerate(lengths))
    return _Dimension(whole, of_scales, sizes)


def _rule(how: Quantization, shape: Sequence[int], *tiles: Sequence[int]) -> dict[str, Any]:
    """Says which dimensions of the results are those of the array."""
    lead = [f"d{i}" for i in range(len(shape) - 2)]
    lengths = zip(*(way.lying for way in how.ways), strict=True)
    named = zip("rc", shape[-2:], lengths, strict=True)
    rows, cols = (_dimension(*own) for own in named)
    apart = rows
    if tiles:
        # Along columns, groups that are told apart have more rows.
        each = zip("rt", (shape[-2], tiles[0][0] * how.height), (ALONG, ACROSS), strict=True)
        rows, apart = (
            _dimension(name, size, tuple(x.lying[0] if x.axis == axis else 1 for x in how.ways))
            for name, size, axis in each
        )
    results = []
    for number, way in enumerate(how.ways):
        own = apart if way.axis == ACROSS else rows
        values = (own.whole, cols.whole)
        results.append((*lead, *(values[::-1] if way.axis == ACROSS else values)))
        results.append((*lead, own.of_scales[number], cols.of_scales[number]))
    given = [" ".join((*lead, rows.whole, cols.whole)), *("n w" for _ in tiles)]
    text = f"{', '.join(given)} -> {', '.join(' '.join(own) for own in results)}"
    return {"rule": text, **rows.sizes, **cols.sizes, **apart.sizes}


def _partition(
    how: Quantization, part: Part, target: Any, mesh: Mesh, gpu: Any, args: Sequence[Any], _: Any
) -> Any:
    """Says what one device computes; see `handed_out`."""
    x, *tiles = args
    ndim = len(x.shape)
    wanted = mesh_axes.placement(x.sharding, ndim, mesh)
    # The parts of devices have to consist of whole blocks.
    whole = (math.lcm(*own) for own in zip(*(way.lying for way in how.ways), strict=True))
    steps = [*(1,) * (ndim - 2), *whole]
    *lead, rows, cols = map(functools.partial(mesh_axes.dividing, mesh), wanted, x.shape, steps)
    if tiles:
        rows = ()

    def sharding(*last: Axes) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in (*lead, *last))))

    results = []
    for way in how.ways:
        values = sharding(cols, rows) if way.axis == ACROSS else sharding(rows, cols)
        results += [values, sharding(rows, cols)]
    whole_tiles = [NamedSharding(mesh, PartitionSpec()) for _ in tiles]
    run = functools.partial(part, target=target or gpu)
    return run, results, (sharding(rows, cols), *whole_tiles)
