"""Dense layers for `flax.linen` whose weights are stored in few bits."""

from collections.abc import Mapping
from typing import Any

import flax
import jax
from flax import linen as nn
from flax import traverse_util

from pallas_gemm.flax.linen.dense import Dense, promoted, refuse_dot_general
from pallas_gemm.layers import few_bits, fused


class QuantizedDense(Dense):
    """`Dense` for serving, with weights of 8 or 4 bits.

    Without `bits`, the weights have 8 bits and a scale for each column. Inputs are quantized where
    they come in, with a scale for each row; both scales, bias, activation and residual are applied
    in the kernel. With `bits`, only the weights are quantized, in groups if you like: for few rows
    that is as fast as the memory, and it errs less.

    The weights are no parameters: they are `kernel` in the collection "quantized", which
    `quantized` makes of a stock layer's; only the bias is one.

    >>> QuantizedDense(4096, dtype=jnp.bfloat16)  # doctest: +SKIP
    >>> QuantizedDense(4096, bits=4, group=128, dtype=jnp.bfloat16)  # doctest: +SKIP

    Attributes:
        quantized_dtype: Type of weights that are initialised: `jnp.int8`, or `jnp.float8_e4m3fn`;
            with `bits` any that `pallas_gemm.QuantizedWeight` takes.
        bits: 8 or 4, where inputs keep their type.
        group: Then, how many inputs share a scale; None for all.
        zero_points: Then, whether the values are uint4 with zero points.
    """

    quantized_dtype: Any = jax.numpy.int8
    bits: int | None = None
    group: int | None = None
    zero_points: bool = False

    @nn.compact
    def __call__(self, inputs: jax.Array, *, residual: jax.Array | None = None) -> jax.Array:
        """Computes what `Dense` does.

        Args:
            inputs: As for `Dense`.
            residual: As for `Dense`.

        Returns:
            The result, of the type that the stock layer's has.
        """
        refuse_dot_general(self)
        fused.check_sizes(features=self.features)
        shape = (inputs.shape[-1], self.features)
        param_dtype = fused.layer_type("param_dtype", self.param_dtype)

        def made() -> dict[str, jax.Array]:
            boxed = self.kernel_init(self.make_rng("params"), shape, param_dtype)
            kernel = flax.core.meta.unbox(boxed)
            dtype = fused.layer_type("quantized_dtype", self.quantized_dtype)
            return few_bits.stored(kernel, self.bits, self.group, self.zero_points, dtype)

        few_bits.check(self.bits, self.group, self.zero_points)
        stored = self.variable("quantized", "kernel", made).value
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, shape[1:], param_dtype)

        def promote(kernel: Any) -> Any:
            return promoted(self, inputs, kernel, bias)

        return few_bits.dense(promote, stored, param_dtype, residual, fused.options(self))


def quantized(model: Mapping[str, Any], stock: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a trained model's variables for a model that has `QuantizedDense` in some places.

    >>> abstract = jax.eval_shape(model.init, key, x)  # doctest: +SKIP
    >>> model.apply(quantized(abstract, trained), x)  # doctest: +SKIP

    Args:
        model: Variables of the model that is quantized, or their shapes and types.
        stock: Variables of the model that was trained, with stock layers of the same names.

    Raises:
        ValueError: A layer of the one is missing in the other, or is of another shape.
    """
    for name, variables, collection in (("model", model, "quantized"), ("stock", stock, "params")):
        if collection not in variables:
            raise ValueError(
                f'{name} must have the collection "{collection}", got {sorted(variables)}'
            )
    stock = flax.core.unfreeze(flax.core.meta.unbox(stock))
    params: dict[Any, Any] = traverse_util.flatten_dict(stock["params"])
    wanted: dict[Any, Any] = traverse_util.flatten_dict(dict(model["quantized"]))
    kernels: dict[Any, Any] = {}
    for (*layer, name), values in wanted.items():
        if name != "values":
            continue
        have, path = params.pop(tuple(layer), None), "/".join(layer)
        arrays = {own[-1]: x for own, x in wanted.items() if own[:-1] == tuple(layer)}
        *lead, rows, columns = values.shape
        shape = values.shape if few_bits.is_stored(arrays) else (*lead, columns, rows)
        if have is None or have.shape != shape:
            found = None if have is None else list(have.shape)
            raise ValueError(
                f"{path} must be a kernel of shape {list(shape)} in the trained model, got {found}"
            )
        kernels[tuple(layer)] = few_bits.stored_as(arrays, have)
    made = {
        "params": traverse_util.unflatten_dict(params),
        "quantized": traverse_util.unflatten_dict(kernels),
    }
    return stock | made
