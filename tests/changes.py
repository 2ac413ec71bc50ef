"""Records that differ from a given one in one thing: what a key has to tell apart.

The fields are those that the record has now, and those of the records in it: a new one is changed
too, and a test of a key fails until the key has it.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gemm.planning.architectures import ARCHITECTURES, Architecture


def changes(value: Any, instead_of_none: Mapping[str, Any], path: str = "") -> Iterator[Any]:
    """Yields (path, value) pairs, of which each differs in what is at the end of the path.

    What is made is not checked: a key is asked before anything is known to be legal.

    Args:
        value: A record, or what a field of one holds.
        instead_of_none: What fields hold that are None, by the end of their path.
        path: The fields that lead to the value.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, Architecture):
        parts = {
            f".{field.name}": (
                getattr(value, field.name),
                functools.partial(_with, value, field.name),
            )
            for field in dataclasses.fields(value)
        }
    elif isinstance(value, tuple):
        yield f"{path}[:]", (*value, 1)
        parts = {
            f"[{i}]": (each, functools.partial(_put, value, i)) for i, each in enumerate(value)
        }
    elif value is None:
        yield path, next(x for end, x in instead_of_none.items() if path.endswith(end))
        return
    else:
        yield path, _other(value)
        return
    for name, (part, put) in parts.items():
        for own, other in changes(part, instead_of_none, f"{path}{name}"):
            yield own, put(other)


def _other(value: Any) -> Any:
    """Returns another value of the same kind."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return f"{value}'"
        case np.dtype():
            return np.dtype(jnp.float16 if value == jnp.bfloat16 else jnp.bfloat16)
        case Mapping():
            return {**value, 99: 1}
        case lax.Precision():
            return next(other for other in lax.Precision if other != value)
        case Architecture():
            # Where names are equal, everything is.
            return next(other for other in ARCHITECTURES if other is not value)
    return jnp.sin if value is jnp.tanh else jnp.tanh


def _put(values: tuple[Any, ...], place: int, other: Any) -> Any:
    """Returns a tuple with another element; one with names keeps its type."""
    changed = (*values[:place], other, *values[place + 1 :])
    return type(values)(*changed) if hasattr(values, "_fields") else changed


def _with(record: Any, name: str, other: Any) -> Any:
    """Returns a record with another field, without what it has found out about itself."""
    made = object.__new__(type(record))
    for field in dataclasses.fields(record):
        changed = other if field.name == name else getattr(record, field.name)
        object.__setattr__(made, field.name, changed)
    return made
