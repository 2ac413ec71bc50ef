"""Weights of few bits as arrays of more: `(values - zero) * scale`, rounded once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm.kernels.element_types import BITS

OF_SCALES = tuple(map(np.dtype, (jnp.bfloat16, jnp.float16, jnp.float32)))


def check_type(name: str, dtype: Any) -> None:
    """Checks that weights of few bits are of a type.

    Raises:
        TypeError: They are not.
    """
    if np.dtype(dtype) not in BITS:
        legal = ", ".join(sorted(map(str, BITS)))
        raise TypeError(f"{name} must be one of {legal}, got {np.dtype(dtype)}")


def limits(dtype: Any) -> tuple[Any, Any]:
    """Returns the smallest and the largest number of a type."""
    info = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype)
    return info.min, info.max


def bits(dtype: Any) -> int:
    """Returns the bits of a number in the memory of a GPU."""
    if jnp.issubdtype(dtype, jnp.integer):
        return int(jnp.iinfo(dtype).bits)
    return int(jnp.finfo(dtype).bits)


def widened(values: jax.Array, scale: Any, zero: Any, axis: int, dtype: Any) -> jax.Array:
    """Returns the array that weights of few bits stand for.

    Args:
        values: `[..., k, n]`.
        scale: `[..., k / group, n]`.
        zero: Like the scale, or None.
        axis: -2, or -1 for values `[..., n, k]`.
        dtype: The type of the result, to which it is rounded once.
    """
    wide = np.promote_types(dtype, np.float32)
    found = values.astype(wide)
    if zero is not None:
        found = found - _spread(zero.astype(wide), values.shape[axis], axis)
    return (found * _spread(scale.astype(wide), values.shape[axis], axis)).astype(dtype)


def _spread(x: jax.Array, k: int, axis: int) -> jax.Array:
    """Returns an array with a row for each group, with a row for each element."""
    if x.shape[-2] > 1:
        x = jnp.repeat(x, k // x.shape[-2], axis=-2)
    return x if axis == -2 else jnp.swapaxes(x, -1, -2)
