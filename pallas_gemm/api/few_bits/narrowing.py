"""Arrays in few bits: how each group of one is scaled to the range of a type."""

import dataclasses
import functools
import math
import numbers
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm.api import arguments
from pallas_gemm.op import widening

TYPE_OF_BITS = {8: jnp.int8, 4: jnp.int4}


@dataclasses.dataclass(frozen=True)
class How:
    """How arrays are quantized.

    Attributes:
        dtype: The type of the values.
        group: As for `QuantizedWeight.of`.
        zero_points: As for `QuantizedWeight.of`.
        scale_dtype: The type of the scales.
    """

    dtype: Any
    group: int | None
    zero_points: bool
    scale_dtype: Any

    @classmethod
    def of(cls, bits: Any, group: Any, dtype: Any, zero_points: Any, scale_dtype: Any) -> Self:
        """Returns how arguments say that arrays are quantized, having checked them."""
        if not isinstance(bits, numbers.Real) or bits not in TYPE_OF_BITS:
            raise ValueError(f"bits must be 8 or 4, got {bits!r}")
        if group is not None and (isinstance(group, bool) or not isinstance(group, int)):
            raise ValueError(f"group must be a number of elements or None, got {group!r}")
        if group is not None and group < 1:
            raise ValueError(f"group must be at least 1, got {group}")
        if arguments.flag("zero_points", zero_points):
            if dtype is not None or bits != 4:
                raise ValueError(
                    "zero_points=True is for bits=4, whose values are uint4 then, got"
                    f" bits={bits}, dtype={dtype!r}"
                )
            dtype = jnp.uint4
        dtype = TYPE_OF_BITS[bits] if dtype is None else arguments.number_type("dtype", dtype)
        widening.check_type("dtype", dtype)
        if scale_dtype is None:
            scale_dtype = jnp.float32 if group is None else jnp.bfloat16
        scale_dtype = arguments.number_type("scale_dtype", scale_dtype)
        if scale_dtype not in widening.OF_SCALES:
            raise ValueError(f"scale_dtype must be bfloat16, float16 or float32, got {scale_dtype}")
        return cls(np.dtype(dtype), group, zero_points, scale_dtype)

    def check(self, name: str, w: Any, axis: int) -> None:
        """Checks that an array can be quantized.

        Raises:
            TypeError: It is no array of floats.
            ValueError: It is no matrix, or its groups do not come out even.
        """
        if not jnp.issubdtype(w.dtype, jnp.floating):
            raise TypeError(f"{name} must be of a floating-point type, got dtype {w.dtype}")
        if axis not in (-2, -1):
            raise ValueError(f"axis must be -2 or -1, got {axis!r}")
        if w.ndim < 2:
            raise ValueError(f"{name} must be a matrix or several, got shape {list(w.shape)}")
        k = w.shape[axis]
        if k == 0:
            raise ValueError(
                f"{name} must have a contracted size of at least 1, got 0 in {list(w.shape)}"
                f" (dimension {axis})"
            )
        if self.group is not None and k % self.group:
            largest = math.gcd(k, self.group)
            raise ValueError(
                f"{name} must have a contracted size that is a multiple of group={self.group}, got"
                f" {k} in {list(w.shape)} (dimension {axis}); group={largest} would fit"
            )


@functools.partial(jax.jit, static_argnums=(1, 2))
def quantized(w: jax.Array, how: How, axis: int) -> tuple[Any, Any, Any]:
    """Returns values, scales and zero points."""
    wide = w.astype(jnp.float32)
    wide = wide if axis == -2 else jnp.swapaxes(wide, -1, -2)
    *front, k, n = wide.shape
    group = k if how.group is None else how.group
    wide = wide.reshape(*front, k // max(1, group), group, n)
    least, most = (float(x) for x in widening.limits(how.dtype))
    zero = None
    if how.zero_points:
        # Zero is one of the values, whatever the group is.
        low, high = (jnp.minimum(wide.min(-2), 0), jnp.maximum(wide.max(-2), 0))
        scale = _of_type(high - low, most, how.scale_dtype)
        zero = jnp.clip(jnp.round(-low / scale.astype(jnp.float32)), least, most)
    else:
        scale = _of_type(jnp.max(jnp.abs(wide), axis=-2), most, how.scale_dtype)
    values = wide / scale.astype(jnp.float32)[..., None, :]
    if zero is not None:
        values = values + zero[..., None, :]
    if jnp.issubdtype(how.dtype, jnp.integer):
        values = jnp.round(values)
    least = max(least, -most)
    values = jnp.clip(values, least, most).astype(how.dtype).reshape(*front, k, n)
    values = values if axis == -2 else jnp.swapaxes(values, -1, -2)
    return values, scale, None if zero is None else zero.astype(how.dtype)


def _of_type(span: jax.Array, most: float, dtype: Any) -> jax.Array:
    """Returns scales that make a number the largest of a type; groups of zeros stay what they are.

    A NaN makes NaNs of its group.
    """
    scale = (span / most).astype(dtype)
    return jnp.where(scale == 0, jnp.ones_like(scale), scale)
