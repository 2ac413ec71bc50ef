"""Products of weights that are stored in 8 bits, a scale for each column, for serving a model.

Inputs are quantized where they come in, a scale for each row. Both scales go back into the sum in
the kernel. Gradients, of all but the weights, are those of the product of inputs that are not
rounded.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_gemm.api.gemm import gemm
from pallas_gemm.kernels.quantize import INT8_MAX
from pallas_gemm.op.product import equally_varying


class Quantized(NamedTuple):
    """Rows in 8 bits: what they stand for is `values * scale[..., None]`.

    Attributes:
        values: The rows; of weights, those are the columns of the product, `[features, inputs]`,
            because 8-bit operands are multiplied along their last dimension.
        scale: One number in float32 for each row.
    """

    values: Any
    scale: Any


SMALLEST = float(jnp.finfo(jnp.float32).tiny)
"""The smallest scale: those below would be 0, and their values infinite."""


def quantize(x: jax.Array, dtype: Any = jnp.int8) -> Quantized:
    """Quantizes rows so that the largest element of each is the largest of a type.

    Args:
        x: The rows, of any number of dimensions.
        dtype: An 8-bit type, of integers or of floats.
    """
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    largest = INT8_MAX if is_integer else float(jnp.finfo(dtype).max)
    wide = x.astype(jnp.float32)
    amax = jnp.max(jnp.abs(wide), axis=-1, initial=0)
    # Rows of zeros stay what they are, and a NaN makes NaNs of its row.
    scale = jnp.where(amax == 0, 1, jnp.maximum(amax / largest, SMALLEST))
    values = jnp.clip(wide / scale[..., None], -largest, largest)
    return Quantized((jnp.round(values) if is_integer else values).astype(dtype), scale)


def dense(
    inputs: jax.Array, kernel: Quantized, bias: Any, *, residual: Any, **options: Any
) -> jax.Array:
    """Computes `activation(inputs @ kernel + bias) + residual` of inputs quantized row by row.

    Args:
        inputs: Any number of dimensions, of which the last is contracted.
        kernel: The weights, transposed.
        bias: As for `gemm`.
        residual: As for `gemm`.
        **options: As for `gemm`.
    """
    # What is named of the kernel was named for operands of 8 bits.
    wide = {name: x for name, x in options.items() if name not in ("config", "schedule")}

    def rounded(inputs: Any, kernel: Quantized, bias: Any, residual: Any) -> jax.Array:
        rows = quantize(inputs, kernel.values.dtype)
        return _scaled(rows.values, kernel, bias, residual, rows.scale, options)

    def straight(inputs: Any, kernel: Quantized, bias: Any, residual: Any) -> jax.Array:
        values = kernel.values.astype(inputs.dtype)
        return _scaled(inputs, kernel._replace(values=values), bias, residual, None, wide)

    run = jax.custom_vjp(rounded)
    run.defvjp(
        lambda *given: (rounded(*given), given),
        lambda given, g: jax.vjp(straight, *given)[1](g),
    )
    # In a `shard_map`, what is shared by devices has a gradient that is a sum over them.
    given, tree = jax.tree.flatten((inputs, kernel, bias, residual))
    return run(*jax.tree.unflatten(tree, equally_varying(tuple(given))))


def _scaled(
    rows: Any, kernel: Quantized, bias: Any, residual: Any, scale: Any, options: dict[str, Any]
) -> jax.Array:
    """Multiplies by the weights, and by a scale of the rows; one row alone is a vector."""
    scales = {} if scale is None else {"row_scale" if rows.ndim > 1 else "alpha": scale}
    return gemm(
        rows,
        kernel.values,
        bias=bias,
        residual=residual,
        col_scale=kernel.scale,
        transpose_b=True,
        **scales,
        **options,
    )
