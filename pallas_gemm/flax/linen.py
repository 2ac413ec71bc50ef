"""Layers for `flax.linen`."""

from typing import Any

import jax
from flax import linen as nn
from flax.linen.dtypes import promote_dtype

from pallas_gemm.api import Activation, gated_gemm
from pallas_gemm.flax import fused


class Dense(nn.Dense):
    """`flax.linen.Dense` with its bias, an activation and a residual computed in the kernel.

    It has the parameters of the stock layer, `kernel` and `bias`, and all its fields but
    `dot_general` and `dot_general_cls`.

    >>> Dense(4096, activation="gelu", dtype=jnp.bfloat16)  # doctest: +SKIP

    Attributes:
        activation: As for `pallas_gemm.gemm`.
    """

    activation: Activation = None

    @nn.compact
    def __call__(self, inputs: jax.Array, *, residual: jax.Array | None = None) -> jax.Array:
        """Computes `activation(inputs @ kernel + bias) + residual`, rounded once.

        Args:
            inputs: Any number of dimensions, of which the last is contracted.
            residual: An array of the result's shape.

        Returns:
            The result; its type is that of `residual + flax.linen.Dense(...)(inputs)`.
        """
        fused.refuse_dot_general(
            self, dot_general=self.dot_general, dot_general_cls=self.dot_general_cls
        )
        shape = (inputs.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, shape[1:], self.param_dtype)
        operands = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        return fused.dense(operands, residual, activation=self.activation, precision=self.precision)


class _Kernel(nn.Dense):
    """The kernel of a stock layer, under that layer's name and with its initial values."""

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        shape = (inputs.shape[-1], self.features)
        return self.param("kernel", self.kernel_init, shape, self.param_dtype)


class GatedDense(nn.Module):
    """`activation(inputs @ gate) * (inputs @ up)`, rounded once: SwiGLU and its relatives.

    The parameters are those of two stock layers without bias that are named "gate" and "up":

        flax.linen.silu(flax.linen.Dense(features, use_bias=False, name="gate")(inputs))
        * flax.linen.Dense(features, use_bias=False, name="up")(inputs)

    so `{"gate": {"kernel": ...}, "up": {"kernel": ...}}`, both of shape `[inputs, features]`. A
    checkpoint of a block with other names loads with `gate_name` and `up_name`.

    Attributes:
        features: Columns of the result.
        activation: As for `pallas_gemm.gated_gemm`; "silu" is SwiGLU, "gelu" GeGLU.
        dtype: As for `flax.linen.Dense`: the type of the computation.
        param_dtype: As for `flax.linen.Dense`.
        precision: As for `flax.linen.Dense`.
        kernel_init: As for `flax.linen.Dense`; of both kernels.
        promote_dtype: As for `flax.linen.Dense`; called with the inputs and both kernels.
        gate_name: What the layer of the kernel that goes through the activation is called.
        up_name: What the layer of the other kernel is called.
    """

    features: int
    activation: Activation = "silu"
    dtype: Any = None
    param_dtype: Any = jax.numpy.float32
    precision: Any = None
    kernel_init: Any = nn.Dense.kernel_init
    promote_dtype: Any = promote_dtype
    gate_name: str = "gate"
    up_name: str = "up"

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Computes the gated product.

        Args:
            inputs: Any number of dimensions, of which the last is contracted.

        Returns:
            The result.
        """
        gate, up = (
            _Kernel(
                self.features,
                param_dtype=self.param_dtype,
                kernel_init=self.kernel_init,
                name=name,
            )(inputs)
            for name in (self.gate_name, self.up_name)
        )
        inputs, gate, up = self.promote_dtype(inputs, gate, up, dtype=self.dtype)
        return gated_gemm(inputs, gate, up, activation=self.activation, precision=self.precision)
