"""What the layers of all interfaces share: the product with all that follows it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm.api import arguments
from pallas_gemm.api.few_bits.weights import QuantizedWeight
from pallas_gemm.api.gemm import gated_gemm, gemm
from pallas_gemm.kernels.functions import activations
from pallas_gemm.problem import element_type


def dense(operands: Sequence[Any], residual: jax.Array | None, **options: Any) -> jax.Array:
    """Computes `activation(inputs @ kernel + bias) + residual`, rounded once.

    The result has the type that the same steps in JAX would give it: that of the product, promoted
    with those of bias and residual.

    Args:
        operands: Inputs, kernel, and bias or None, as `promote_dtype` of the layer returns them.
        residual: As for `gemm`.
        **options: As for `gemm`.
    """
    inputs, kernel, bias = operands
    return gemm(inputs, kernel, bias=bias, **with_result(operands, residual, options))


def gated(operands: Sequence[Any], residual: jax.Array | None, **options: Any) -> jax.Array:
    """Computes `activation(inputs @ gate + bias) * (inputs @ up + bias) + residual`, rounded once.

    Args:
        operands: Inputs, both kernels, and both biases or None.
        residual: As for `dense`.
        **options: As for `gated_gemm`.
    """
    inputs, gate, up, *biases = operands
    named = dict(zip(("gate_bias", "up_bias"), biases, strict=True))
    options = with_result((inputs, gate, *biases), residual, options)
    return gated_gemm(inputs, gate, up, **named, **options)


def promoted(promote: Callable[[list[Any]], Any], operands: Sequence[Any]) -> list[Any]:
    """Returns operands of the type in which a layer computes; None for what it has not.

    Weights of few bits stay as they are: they take part with the type of what they stand for.

    Args:
        promote: Takes arrays and returns them in one type, as `promote_dtype` of the layer.
        operands: Inputs, kernels and biases, or None.
    """
    given = [jnp.zeros((), x.dtype) if isinstance(x, QuantizedWeight) else x for x in operands]
    return [
        dataclasses.replace(x, dtype=own.dtype) if isinstance(x, QuantizedWeight) else own
        for x, own in zip(operands, promote(given), strict=True)
    ]


def with_result(
    operands: Sequence[Any], residual: jax.Array | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Returns the options of a product, the residual and the type of the result among them.

    Args:
        operands: Inputs, a kernel, and each bias or None.
        residual: As for `gemm`.
        options: As for `gemm`.
    """
    inputs, kernel, *biases = operands
    wanted = options.get("preferred_element_type")
    dtype = jnp.result_type(inputs, kernel) if wanted is None else wanted
    # Strict promotion would refuse a bias of a narrower type than the result.
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.result_type(dtype, *(x.dtype for x in biases if x is not None))
    if residual is not None:
        dtype = jnp.promote_types(dtype, jnp.result_type(residual))
    return options | {"residual": residual, "preferred_element_type": dtype}


def options(layer: Any, **others: Any) -> dict[str, Any]:
    """Returns how the product of a layer is computed, as its fields say and as is said besides."""
    own = {"activation": layer.activation, "precision": getattr(layer, "precision", None)}
    return own | how(layer) | others


def how(layer: Any) -> dict[str, Any]:
    """Returns how a layer is told to compute its products; stock ones are told nothing."""
    return {name: getattr(layer, name, None) for name in HOW}


HOW = ("schedule", "config", "implementation")
"""Fields of a layer that are passed on to the product as they are."""


def checked(
    layer: Any, options: dict[str, Any], in_features: Any, out_features: Any
) -> dict[str, Any]:
    """Returns the options of a stock layer with types in place of their short names.

    Raises:
        ValueError: One of them would replace the product, or a size is none.
        TypeError: A type is none.
    """
    refuse_dot_general(layer, dot_general=options.get("dot_general"))
    check_sizes(in_features=in_features, out_features=out_features)
    return {
        name: layer_type(name, value) if name in TYPES_OF_LAYERS else value
        for name, value in options.items()
    }


def layer_type(name: str, value: Any) -> Any:
    """Returns a type of a layer that may be given by a short name such as "bf16", or None.

    Raises:
        TypeError: It is no type.
    """
    if value is not None:
        arguments.number_type(name, value)
    return element_type(value)


TYPES_OF_LAYERS = frozenset(("dtype", "param_dtype", "preferred_element_type"))


def check_sizes(otherwise: str = "", **sizes: Any) -> None:
    """Checks the sizes of a layer.

    Args:
        otherwise: Is said after the error.
        **sizes: The sizes.

    Raises:
        ValueError: One of them is no number of features.
    """
    for name, size in sizes.items():
        if not isinstance(size, (int, np.integer)) or size < 0:
            raise ValueError(f"{name} must be an integer of at least 0, got {size!r}{otherwise}")


def checked_activation(activation: Any) -> Any:
    """Returns an activation that a product would take.

    Raises:
        ValueError: There is none of that name.
        TypeError: It is no elementwise function of a float32 array.
    """
    activations.resolve(activation)
    return activation


def check_alike(layers: Sequence[Any], fields: Sequence[str]) -> None:
    """Checks that layers compute their products in the same way, without what follows them.

    Raises:
        ValueError: They differ in a field, or one of them has an activation.
    """
    first = layers[0]
    for i, layer in enumerate(layers):
        for field in (*fields, *HOW):
            own, other = getattr(first, field, None), getattr(layer, field, None)
            if own != other:
                raise ValueError(
                    f"layers must agree in {field}, got {own!r} in layers[0] and {other!r} in"
                    f" layers[{i}]"
                )
        if (activation := getattr(layer, "activation", None)) is not None:
            raise ValueError(
                f"layers[{i}] must have no activation, got activation={activation!r}; call that"
                " layer by itself"
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
