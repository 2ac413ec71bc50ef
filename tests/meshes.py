"""Meshes of eight virtual devices, and what the programs compiled for them send back and forth."""

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

_SENDING = re.compile(
    r" = [^=]*? (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def make_mesh(kind: AxisType = AxisType.Auto) -> Mesh:
    """Two by four devices, along the axes x and y."""
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))


def place(mesh: Mesh, x: jax.Array, *spec: Any) -> jax.Array:
    """Splits an array along these axes."""
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


def sent_in(text: str) -> dict[str, int]:
    """Counts the collectives in a compiled program."""
    return dict(Counter(_SENDING.findall(text)))


def run(f: Callable[..., Any], *operands: Any, out: Any = None) -> tuple[Any, dict[str, int]]:
    """Compiles a function; returns its result and the collectives in it.

    Args:
        f: The function.
        *operands: Its arguments.
        out: The sharding of the result, if it is to be a certain one.
    """
    compiled = jax.jit(f, out_shardings=out).lower(*operands).compile()
    return compiled(*operands), sent_in(compiled.as_text())


_WIDTHS = {"pred": 1, "s8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4}
_COLLECTIVE = re.compile(
    r"^ +(?:ROOT )?\S+ = (.*?) "
    r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\((.*)",
    re.MULTILINE,
)


def bytes_sent(text: str) -> float:
    """Returns the bytes that each device receives, at least, in a compiled program."""
    found = _COLLECTIVE.findall(text)
    return sum(_size(result) * _share(name, _group(rest)) for result, name, rest in found)


def _size(result: str) -> int:
    return sum(
        _WIDTHS[dtype] * math.prod(int(size) for size in shape.split(",") if size)
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", result)
    )


def _share(name: str, devices: int) -> float:
    """Returns how much of the result, or how many times that, comes from other devices."""
    others = (devices - 1) / devices
    shares = {"all-reduce": 2 * others, "reduce-scatter": devices - 1, "collective-permute": 1}
    return shares.get(name, others)


def _group(rest: str) -> int:
    """Returns how many devices take part in a collective with each other."""
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return len(match[1].split(","))
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(match[1])
    if match := re.search(r"replica_groups=mesh\[(.*?)\][^{]*\{(.*?)\}", rest):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", match[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']*)'", match[2]))
    assert "source_target_pairs" in rest, rest
    return 1
