"""Linear layers for `flax.nnx`, one or several of the same inputs."""

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from pallas_gemm.api import gemm as api
from pallas_gemm.api import projections as own_projections
from pallas_gemm.api.gemm import Activation, Order
from pallas_gemm.config import GemmConfig
from pallas_gemm.layers import fused


class Linear(nnx.Linear):
    """`flax.nnx.Linear` with its bias, an activation and a residual computed in the kernel.

    It has the parameters of the stock layer, `kernel` and `bias`, and takes all its arguments but
    `dot_general`. The kernel may be a `pallas_gemm.QuantizedWeight`.

    >>> Linear(4096, 14336, activation="gelu", dtype=jnp.bfloat16, rngs=rngs)  # doctest: +SKIP
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        activation: Activation = None,
        schedule: Order = None,
        config: GemmConfig | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        """Makes the parameters.

        Args:
            in_features: As for `flax.nnx.Linear`.
            out_features: As for `flax.nnx.Linear`.
            activation: As for `pallas_gemm.gemm`.
            schedule: As for `pallas_gemm.gemm`.
            config: As for `pallas_gemm.gemm`.
            implementation: As for `pallas_gemm.gemm`.
            rngs: As for `flax.nnx.Linear`.
            **options: All else that `flax.nnx.Linear` takes.

        Raises:
            ValueError: `dot_general` is given.
        """
        options = fused.checked(self, options, in_features, out_features)
        super().__init__(in_features, out_features, rngs=rngs, **options)
        self.activation = fused.checked_activation(activation)
        self.schedule, self.config, self.implementation = schedule, config, implementation

    def __call__(
        self, inputs: jax.Array, out_sharding: Any = None, *, residual: jax.Array | None = None
    ) -> jax.Array:
        """Computes `activation(inputs @ kernel + bias) + residual`, rounded once.

        Args:
            inputs: Any number of dimensions, of which the last is contracted.
            out_sharding: The result's sharding under an explicit mesh.
            residual: An array of the result's shape.

        Returns:
            The result; its type is that of `residual + flax.nnx.Linear(...)(inputs)`.
        """
        operands = self._operands(inputs, self.kernel[...])
        return fused.dense(operands, residual, **self._options(out_sharding))

    def _operands(self, inputs: jax.Array, kernel: Any) -> Any:
        """Returns inputs, kernel, and bias or None, of the type of the computation."""
        return promoted(self, inputs, kernel, value_of(self.bias))

    def _options(self, out_sharding: Any) -> dict[str, Any]:
        """Returns those of the product that do not depend on its operands."""
        wanted = self.preferred_element_type
        return fused.options(self, preferred_element_type=wanted, out_sharding=out_sharding)


def value_of(bias: Any) -> Any:
    """Returns the array of a layer's bias, or None if it has none."""
    return None if bias is None else bias[...]


def promoted(layer: Any, *arrays: Any) -> list[Any]:
    """Returns arrays of the type in which a layer computes; None for what it has not."""
    return fused.promoted(lambda given: layer.promote_dtype(given, dtype=layer.dtype), arrays)


Dense = Linear
"""`Linear` under the name that `linen` has for it."""


def check_plain(name: str, layer: Any) -> None:
    """Refuses a layer that is no product of its inputs with its kernel, and a bias.

    Raises:
        ValueError: It computes something else.
    """
    if type(layer).__call__ not in (nnx.Linear.__call__, Linear.__call__):
        raise ValueError(
            f"{name} must be a flax.nnx.Linear or a pallas_gemm.flax.nnx.Linear, got a"
            f" {type(layer).__name__}, which computes something else"
        )
    if layer.dot_general not in (jax.lax.dot_general, api.dot_general):
        raise ValueError(
            f"{name} must have no dot_general of its own, which would not be called, got"
            f" {layer.dot_general!r}"
        )


def projections(inputs: jax.Array, layers: Sequence[nnx.Linear]) -> tuple[jax.Array, ...]:
    """Computes several layers of the same inputs, as `pallas_gemm.projections` does.

    >>> query, key, value = projections(x, [self.query, self.key, self.value])  # doctest: +SKIP

    Args:
        inputs: Any number of dimensions, of which the last is contracted.
        layers: Stock layers or ours, without an activation.

    Returns:
        The result of each layer.

    Raises:
        TypeError: `layers` is no list of layers.
        ValueError: There are no layers, they do not compute in the same types, or one of them has
            an activation or a product of its own.
    """
    if not isinstance(layers, Sequence):
        raise TypeError(f"layers must be a list of layers, got {type(layers).__name__}")
    if not layers:
        raise ValueError(f"layers must be one layer or more, got {layers!r}")
    fused.check_alike(layers, _OF_STOCK_LAYERS)
    first = layers[0]
    for i, layer in enumerate(layers):
        check_plain(f"layers[{i}]", layer)
    kernels: list[Any] = [layer.kernel[...] for layer in layers]
    biases = [value_of(layer.bias) for layer in layers]
    inputs, *ready = promoted(first, inputs, *kernels, *biases)
    wanted = {"preferred_element_type": first.preferred_element_type}
    given = list(zip(ready[: len(layers)], ready[len(layers) :], strict=True))
    each = [fused.with_result((inputs, *own), None, wanted) for own in given]

    def computed(own: Sequence[Any], options: dict[str, Any]) -> tuple[jax.Array, ...]:
        dtype = options["preferred_element_type"]
        w, biases = zip(*own, strict=True)
        how = fused.how(first) | {"precision": first.precision, "preferred_element_type": dtype}
        return own_projections.projections(inputs, w, biases=biases, **how)

    # A bias that not all layers have may make results of some wider.
    if all(options == each[0] for options in each):
        return computed(given, each[0])
    return tuple(computed([own], options)[0] for own, options in zip(given, each, strict=True))


_OF_STOCK_LAYERS = ("dtype", "precision", "preferred_element_type", "promote_dtype")


class GatedDense(nnx.Module):
    """`activation(inputs @ gate) * (inputs @ up)`, rounded once: SwiGLU and its relatives.

    The parameters lie in two stock layers, `gate` and `up`, so that a block that is written as

        self.gate = nnx.Linear(in_features, out_features, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(in_features, out_features, use_bias=False, rngs=rngs)

    has the same state and the same initial values; of a block with other names, put its layers in
    their place.

    >>> GatedDense(4096, 14336, dtype=jnp.bfloat16, rngs=rngs)  # doctest: +SKIP
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        activation: Activation = "silu",
        schedule: Order = None,
        config: GemmConfig | None = None,
        implementation: str | None = None,
        use_bias: bool = False,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        """Makes the parameters.

        Args:
            in_features: The contracted size.
            out_features: Columns of the result.
            activation: As for `pallas_gemm.gated_gemm`; "silu" is SwiGLU, "gelu" GeGLU.
            schedule: As for `pallas_gemm.gemm`.
            config: As for `pallas_gemm.gemm`.
            implementation: As for `pallas_gemm.gemm`.
            use_bias: Both layers have a bias.
            rngs: As for `flax.nnx.Linear`.
            **options: All else that `flax.nnx.Linear` takes, of both layers.

        Raises:
            ValueError: `dot_general` is given.
        """
        options = fused.checked(self, options, in_features, out_features)
        options |= {"use_bias": use_bias, "rngs": rngs}
        self.gate = nnx.Linear(in_features, out_features, **options)
        self.up = nnx.Linear(in_features, out_features, **options)
        self.activation = fused.checked_activation(activation)
        self.schedule, self.config, self.implementation = schedule, config, implementation

    def __call__(
        self, inputs: jax.Array, out_sharding: Any = None, *, residual: jax.Array | None = None
    ) -> jax.Array:
        """Computes the gated product.

        Args:
            inputs: Any number of dimensions, of which the last is contracted.
            out_sharding: The result's sharding under an explicit mesh.
            residual: As for `Linear`.

        Returns:
            The result.
        """
        layer, up = self.gate, self.up
        for name, own in (("gate", layer), ("up", up)):
            check_plain(name, own)
            if (activation := getattr(own, "activation", None)) is not None:
                raise ValueError(f"{name} must have no activation, got {activation!r}")
        kernels = (layer.kernel[...], up.kernel[...])
        biases = [value_of(own.bias) for own in (layer, up)]
        operands = promoted(layer, inputs, *kernels, *biases)
        return fused.gated(
            operands,
            residual,
            activation=self.activation,
            precision=layer.precision,
            preferred_element_type=layer.preferred_element_type,
            out_sharding=out_sharding,
            **fused.how(self),
        )
