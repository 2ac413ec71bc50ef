"""Layers for `flax.nnx`."""

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from pallas_gemm.api import gemm as api
from pallas_gemm.api.gemm import Activation, Order
from pallas_gemm.config import GemmConfig
from pallas_gemm.flax import fused


class Linear(nnx.Linear):
    """`flax.nnx.Linear` with its bias, an activation and a residual computed in the kernel.

    It has the parameters of the stock layer, `kernel` and `bias`, and takes all its arguments but
    `dot_general`.

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
        fused.refuse_dot_general(self, dot_general=options.get("dot_general"))
        super().__init__(in_features, out_features, rngs=rngs, **fused.with_types(options))
        self.activation = activation
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
        bias = None if self.bias is None else self.bias[...]
        operands = self.promote_dtype((inputs, self.kernel[...], bias), dtype=self.dtype)
        return fused.dense(
            operands,
            residual,
            activation=self.activation,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
            out_sharding=out_sharding,
            **fused.how(self),
        )


Dense = Linear
"""`Linear` under the name that `linen` has for it."""


def projections(inputs: jax.Array, layers: Sequence[nnx.Linear]) -> tuple[jax.Array, ...]:
    """Computes several layers of the same inputs, as `pallas_gemm.projections` does.

    >>> query, key, value = projections(x, [self.query, self.key, self.value])  # doctest: +SKIP

    Args:
        inputs: Any number of dimensions, of which the last is contracted.
        layers: Stock layers or ours, without an activation.

    Returns:
        What each layer would return.

    Raises:
        ValueError: There are no layers, they do not compute in the same types, or one of them has
            an activation or a product of its own.
    """
    if not layers:
        raise ValueError(f"layers must be one layer or more, got {layers!r}")
    first = layers[0]
    for i, layer in enumerate(layers):
        for field in (*_OF_STOCK_LAYERS, *fused.HOW):
            own, other = getattr(first, field, None), getattr(layer, field, None)
            if own != other:
                raise ValueError(
                    f"layers must agree in {field}, got {own!r} in layers[0] and {other!r} in"
                    f" layers[{i}]"
                )
        if getattr(layer, "activation", None) is not None:
            raise ValueError(
                f"layers[{i}] has activation={layer.activation!r}; legal is None, and a call of"
                " the layer itself"
            )
        if layer.dot_general not in (jax.lax.dot_general, api.dot_general):
            raise ValueError(
                f"layers[{i}] has dot_general={layer.dot_general!r}, which this would not call"
            )
    kernels: list[Any] = [layer.kernel[...] for layer in layers]
    biases = [None if layer.bias is None else layer.bias[...] for layer in layers]
    promoted: Any = first.promote_dtype((inputs, *kernels, *biases), dtype=first.dtype)
    return api.projections(
        promoted[0],
        promoted[1 : 1 + len(layers)],
        biases=promoted[1 + len(layers) :],
        precision=first.precision,
        preferred_element_type=first.preferred_element_type,
        **fused.how(first),
    )


_OF_STOCK_LAYERS = ("dtype", "precision", "preferred_element_type", "promote_dtype")


class GatedDense(nnx.Module):
    """`activation(inputs @ gate) * (inputs @ up)`, rounded once: SwiGLU and its relatives.

    The parameters lie in two stock layers, `gate` and `up`, so that a block that is written as

        self.gate = nnx.Linear(in_features, out_features, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(in_features, out_features, use_bias=False, rngs=rngs)

    has the same state and the same initial values; of a block with other names, put its layers in
    their place.
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
        fused.refuse_dot_general(self, dot_general=options.get("dot_general"))
        options = {"use_bias": use_bias, "rngs": rngs, **fused.with_types(options)}
        self.gate = nnx.Linear(in_features, out_features, **options)
        self.up = nnx.Linear(in_features, out_features, **options)
        self.activation = activation
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
        kernels = (layer.kernel[...], up.kernel[...])
        biases = [None if own.bias is None else own.bias[...] for own in (layer, up)]
        operands = layer.promote_dtype((inputs, *kernels, *biases), dtype=layer.dtype)
        return fused.gated(
            operands,
            residual,
            activation=self.activation,
            precision=layer.precision,
            preferred_element_type=layer.preferred_element_type,
            out_sharding=out_sharding,
            **fused.how(self),
        )
