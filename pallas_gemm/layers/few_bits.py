"""Weights that a layer stores in few bits, for serving a model.

A layer stores the arrays of a `QuantizedWeight`, by their names: then its inputs keep their type.
Or it stores those of `per_channel.Quantized`, and its inputs are quantized, too.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gemm.api.few_bits.weights import QuantizedWeight
from pallas_gemm.layers import fused, per_channel
from pallas_gemm.op import widening

INT8 = jnp.dtype(jnp.int8)
OF_COLUMNS = ("int8", "float8_e4m3fn", "float8_e5m2")
"""The types that weights with a scale for each column may have."""


def check(bits: Any, group: Any, zero_points: Any) -> None:
    """Checks what a layer is told of its weights.

    Raises:
        ValueError: There are groups or zero points without bits.
    """
    if bits is None and (group is not None or zero_points):
        raise ValueError(
            "group and zero_points are for weights alone: they need bits=4 or bits=8, got"
            f" group={group!r}, zero_points={zero_points!r}, bits=None"
        )


def stored(
    kernel: jax.Array, bits: int | None, group: int | None, zero_points: bool, dtype: Any
) -> dict[str, Any]:
    """Returns what a layer stores of a kernel `[inputs, features]`.

    Args:
        kernel: The kernel.
        bits: As for `QuantizedWeight.of`; None if inputs are to be quantized, too.
        group: As for `QuantizedWeight.of`.
        zero_points: As for `QuantizedWeight.of`.
        dtype: The layer's type of weights; int8 leaves it to `bits`.

    Raises:
        ValueError: The type has another number of bits, or there is no such layer.
    """
    if bits is None:
        if dtype is None or jnp.dtype(dtype).name not in OF_COLUMNS:
            raise ValueError(
                f"quantized_dtype must be {', '.join(OF_COLUMNS[:-1])} or {OF_COLUMNS[-1]} without"
                f" bits, got {dtype if dtype is None else jnp.dtype(dtype)}"
            )
        return _of_columns(kernel, dtype)
    if dtype == INT8:
        dtype = None
    elif widening.bits(dtype) != bits:
        raise ValueError(
            f"quantized_dtype must be a type of bits={bits}, or be left out, got {jnp.dtype(dtype)}"
        )
    how: Any = {"bits": bits, "group": group, "zero_points": zero_points, "dtype": dtype}
    made = QuantizedWeight.of(kernel, **how)
    arrays = {"values": made.values, "scale": made.scale, "zero": made.zero}
    return {name: x for name, x in arrays.items() if x is not None}


def stored_as(other: Mapping[str, Any], kernel: jax.Array) -> dict[str, Any]:
    """Returns what a layer stores of a kernel, of the types and groups of what it stores."""
    values, scale = other["values"], other["scale"]
    if not is_stored(other):
        return _of_columns(kernel, values.dtype)
    made = QuantizedWeight.of(
        kernel,
        bits=widening.bits(values.dtype),
        group=values.shape[-2] // scale.shape[-2] if scale.shape[-2] > 1 else None,
        dtype=None if "zero" in other else values.dtype,
        zero_points="zero" in other,
        scale_dtype=scale.dtype,
    )
    return {name: getattr(made, name) for name in other}


def _of_columns(kernel: jax.Array, dtype: Any) -> dict[str, Any]:
    return per_channel.quantize(kernel.swapaxes(-1, -2), dtype)._asdict()


def is_stored(arrays: Mapping[str, Any]) -> bool:
    """Whether these are arrays of a record, and not of weights whose inputs are quantized, too."""
    return len(arrays["scale"].shape) == len(arrays["values"].shape)


def dense(
    promote: Callable[[Any], Sequence[Any]],
    arrays: Mapping[str, Any],
    dtype: Any,
    residual: jax.Array | None,
    options: dict[str, Any],
) -> jax.Array:
    """Computes what `fused.dense` does.

    Args:
        promote: Takes the kernel; returns inputs, kernel, and bias or None, in one type.
        arrays: The arrays that the layer stores, by name.
        dtype: The type of the kernel that they stand for, which has a say in that of the result.
        residual: As for `gemm`.
        options: As for `gemm`.
    """
    if is_stored(arrays):
        kernel = QuantizedWeight(**arrays, dtype=fused.layer_type("param_dtype", dtype))
        return fused.dense(promote(kernel), residual, **options)
    operands = promote(jnp.zeros((), dtype))
    options = fused.with_result(operands, residual, options)
    return per_channel.dense(operands[0], per_channel.Quantized(**arrays), operands[2], **options)
