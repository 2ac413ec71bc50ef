"""Meshes of eight virtual devices, and what the programs compiled for them send back and forth."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

_SENDING = re.compile(
    r" = [^=]*? (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def make_mesh(kind: AxisType = AxisType.Auto) -> Mesh:
    """Two by four devices, along the axes x and y."""
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))


def place(mesh: Mesh, x: jax.Array, *spec: Any) -> jax.Array:
    """Splits an array along these axes; JAX would compile a program to slice its own."""
    return jax.device_put(np.asarray(x), NamedSharding(mesh, PartitionSpec(*spec)))


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
