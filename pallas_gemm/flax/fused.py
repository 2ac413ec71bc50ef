"""What the layers of both Flax interfaces share: the product with all that follows it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gemm.api.gemm import Activation, gemm


def dense(
    operands: Sequence[Any], residual: jax.Array | None, *, activation: Activation, **options: Any
) -> jax.Array:
    """Computes `activation(inputs @ kernel + bias) + residual`, rounded once.

    The result has the type that the same steps in JAX would give it: that of the product, promoted
    with the residual's.

    Args:
        operands: Inputs, kernel, and bias or None, as `promote_dtype` of the layer returns them.
        residual: As for `gemm`.
        activation: As for `gemm`.
        **options: As for `gemm`.
    """
    inputs, kernel, bias = operands
    wanted = options.pop("preferred_element_type", None)
    dtype = jnp.result_type(inputs, kernel) if wanted is None else wanted
    if residual is not None:
        dtype = jnp.promote_types(dtype, residual.dtype)
    return gemm(
        inputs,
        kernel,
        bias=bias,
        residual=residual,
        activation=activation,
        preferred_element_type=dtype,
        **options,
    )


def refuse_dot_general(layer: Any, **given: Any) -> None:
    """Refuses the arguments of a stock layer that would replace the product.

    Raises:
        ValueError: One of them is given.
    """
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name}={value!r} has no meaning for {type(layer).__name__}, which fuses what"
                " follows the product; the stock layer takes it"
            )
