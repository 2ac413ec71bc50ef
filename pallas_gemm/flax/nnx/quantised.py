"""Linear layers for `flax.nnx` whose weights are stored in few bits."""

from typing import Any

import jax
from flax import nnx

from pallas_gemm.flax.nnx.linear import Linear, value_of
from pallas_gemm.layers import fused, per_channel


class Quantised(nnx.Variable):
    """Weights of 8 bits, or their scales: what no optimiser changes."""


class QuantisedLinear(Linear):
    """`Linear` for serving, with weights of 8 bits and a scale for each column.

    Inputs are quantised where they come in, with a scale for each row; both scales, bias,
    activation and residual are applied in the kernel. The weights, `kernel_values` and
    `kernel_scale`, are no parameters: the bias is one.

    >>> block.up = QuantisedLinear.of(block.up)  # doctest: +SKIP
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        quantised_dtype: Any = jax.numpy.int8,
        quantized_dtype: Any = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        """Makes weights and quantises them.

        Args:
            in_features: As for `Linear`.
            out_features: As for `Linear`.
            quantised_dtype: `jnp.int8`, or `jnp.float8_e4m3fn`.
            quantized_dtype: The same, in American spelling; None leaves it to `quantised_dtype`.
            rngs: As for `Linear`.
            **options: All else that `Linear` takes.

        Raises:
            ValueError: `dot_general` is given.
        """
        super().__init__(in_features, out_features, rngs=rngs, **options)
        dtype = per_channel.weight_type(quantised_dtype, quantized_dtype)
        made = per_channel.quantise(self.kernel[...].T, dtype)
        del self.kernel
        self.kernel_values, self.kernel_scale = map(Quantised, made)

    @classmethod
    def of(
        cls, layer: nnx.Linear, quantised_dtype: Any = jax.numpy.int8, **options: Any
    ) -> "QuantisedLinear":
        """Returns a layer with the weights of a trained one.

        Args:
            layer: A stock layer or one of ours.
            quantised_dtype: As for the class.
            **options: `activation`, `schedule`, `config` or `implementation`, where they are to be
                other than those of `layer`; `quantized_dtype` as for the class.

        Raises:
            TypeError: `layer` has no weights to quantise.
        """
        if not isinstance(layer, nnx.Linear) or not hasattr(layer, "kernel"):
            raise TypeError(
                "layer must be a flax.nnx.Linear with a kernel, or one of ours, got"
                f" {type(layer).__name__}"
            )
        kernel, bias = layer.kernel, layer.bias
        fields = ("use_bias", "precision", "promote_dtype", *fused.TYPES_OF_LAYERS)
        stock = {name: getattr(layer, name) for name in fields}
        own = {"activation": getattr(layer, "activation", None), **fused.how(layer)}
        return cls(
            layer.in_features,
            layer.out_features,
            quantised_dtype=quantised_dtype,
            kernel_init=lambda *_: kernel[...],
            bias_init=lambda *_: value_of(bias),
            rngs=nnx.Rngs(0),
            **(stock | own | options),
        )

    def __call__(
        self, inputs: jax.Array, out_sharding: Any = None, *, residual: jax.Array | None = None
    ) -> jax.Array:
        """Computes what `Linear` does; the arguments are its."""
        # The stock layer's kernel has a say in the type of its result.
        operands = self._operands(inputs, jax.numpy.zeros((), self.param_dtype))
        options = fused.with_result(operands, residual, self._options(out_sharding))
        kernel = per_channel.Quantised(self.kernel_values[...], self.kernel_scale[...])
        return per_channel.dense(operands[0], kernel, operands[2], **options)


QuantizedLinear = QuantisedLinear
"""American spelling of the same."""
