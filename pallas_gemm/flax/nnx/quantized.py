"""Linear layers for `flax.nnx` whose weights are stored in few bits."""

import functools
from typing import Any

import jax
from flax import nnx

from pallas_gemm.flax.nnx.fp8 import Fp8Linear
from pallas_gemm.flax.nnx.linear import Linear, value_of
from pallas_gemm.layers import few_bits, fused


class Quantized(nnx.Variable):
    """Weights of few bits, their scales or zero points: what no optimizer changes."""


class QuantizedLinear(Linear):
    """`Linear` for serving, with weights of 8 or 4 bits.

    Without `bits`, the weights have 8 bits and a scale for each column. Inputs are quantized where
    they come in, with a scale for each row; both scales, bias, activation and residual are applied
    in the kernel. With `bits`, only the weights are quantized, in groups if you like: for few rows
    that is as fast as the memory, and it errs less.

    The weights, `kernel_values` and `kernel_scale`, with zero points `kernel_zero`, are no
    parameters: the bias is one.

    >>> block.up = QuantizedLinear.of(block.up)  # doctest: +SKIP
    >>> block.up = QuantizedLinear.of(block.up, bits=4, group=128)  # doctest: +SKIP
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        quantized_dtype: Any = jax.numpy.int8,
        bits: int | None = None,
        group: int | None = None,
        zero_points: bool = False,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        """Makes weights and quantizes them.

        Args:
            in_features: As for `Linear`.
            out_features: As for `Linear`.
            quantized_dtype: `jnp.int8`, or `jnp.float8_e4m3fn`; with `bits` any that
                `pallas_gemm.QuantizedWeight` takes.
            bits: 8 or 4, where inputs keep their type.
            group: Then, how many inputs share a scale; None for all.
            zero_points: Then, whether the values are uint4 with zero points.
            rngs: As for `Linear`.
            **options: All else that `Linear` takes.

        Raises:
            ValueError: `dot_general` is given.
        """
        super().__init__(in_features, out_features, rngs=rngs, **options)
        dtype = fused.layer_type("quantized_dtype", quantized_dtype)
        kernel = self.kernel[...]
        few_bits.check(bits, group, zero_points)
        made = few_bits.stored(kernel, bits, group, zero_points, dtype)
        del self.kernel
        self.kernel_values, self.kernel_scale = Quantized(made["values"]), Quantized(made["scale"])
        if "zero" in made:
            self.kernel_zero = Quantized(made["zero"])

    @classmethod
    def of(
        cls, layer: nnx.Linear, quantized_dtype: Any = jax.numpy.int8, **options: Any
    ) -> "QuantizedLinear":
        """Returns a layer with the weights of a trained one.

        Args:
            layer: A stock layer or one of ours.
            quantized_dtype: As for the class.
            **options: `activation`, `schedule`, `config` or `implementation`, where they are to be
                other than those of `layer`; `quantized_dtype`, `bits`, `group` and `zero_points` as
                for the class.

        Raises:
            TypeError: `layer` has no weights to quantize.
        """
        known = (nnx.Linear, Linear, Fp8Linear)
        is_known = type(layer).__call__ in [own.__call__ for own in known]
        if not is_known or not hasattr(layer, "kernel"):
            raise TypeError(
                "layer must be a flax.nnx.Linear with a kernel, or one of ours, got"
                f" {type(layer).__name__}"
            )
        kernel, bias = layer.kernel, layer.bias
        fields = ("use_bias", "precision", "promote_dtype", *fused.TYPES_OF_LAYERS)
        stock: dict[str, Any] = {name: getattr(layer, name) for name in fields}
        own: dict[str, Any] = {"activation": getattr(layer, "activation", None), **fused.how(layer)}
        return cls(
            layer.in_features,
            layer.out_features,
            quantized_dtype=quantized_dtype,
            kernel_init=lambda *_: kernel[...],
            bias_init=lambda *_: value_of(bias),
            rngs=nnx.Rngs(0),
            **(stock | own | options),
        )

    def __call__(
        self, inputs: jax.Array, out_sharding: Any = None, *, residual: jax.Array | None = None
    ) -> jax.Array:
        """Computes what `Linear` does; the arguments are its."""
        stored = {"values": self.kernel_values[...], "scale": self.kernel_scale[...]}
        if hasattr(self, "kernel_zero"):
            stored["zero"] = self.kernel_zero[...]
        promote = functools.partial(self._operands, inputs)
        options = self._options(out_sharding)
        return few_bits.dense(promote, stored, self.param_dtype, residual, options)
