"""Dense layers for `flax.linen`, one or several of the same inputs."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.linen.dtypes import promote_dtype

from pallas_gemm.api import projections as own_projections
from pallas_gemm.api.gemm import Activation, Order
from pallas_gemm.config import GemmConfig
from pallas_gemm.layers import fused


class Dense(nn.Dense):
    """`flax.linen.Dense` with its bias, an activation and a residual computed in the kernel.

    It has the parameters of the stock layer, `kernel` and `bias`, and all its fields but
    `dot_general` and `dot_general_cls`. The kernel may be a `pallas_gemm.QuantizedWeight`.

    >>> Dense(4096, activation="gelu", dtype=jnp.bfloat16)  # doctest: +SKIP

    Attributes:
        activation: As for `pallas_gemm.gemm`.
        schedule: As for `pallas_gemm.gemm`.
        config: As for `pallas_gemm.gemm`.
        implementation: As for `pallas_gemm.gemm`.
    """

    activation: Activation = None
    schedule: Order = None
    config: GemmConfig | None = None
    implementation: str | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array, *, residual: jax.Array | None = None) -> jax.Array:
        """Computes `activation(inputs @ kernel + bias) + residual`, rounded once.

        Args:
            inputs: Any number of dimensions, of which the last is contracted.
            residual: An array of the result's shape.

        Returns:
            The result; its type is that of `residual + flax.linen.Dense(...)(inputs)`.
        """
        refuse_dot_general(self)
        kernel, bias = parameters(self, inputs)
        operands = promoted(self, inputs, kernel, bias)
        return fused.dense(
            operands,
            residual,
            **fused.options(self),
        )


def refuse_dot_general(layer: nn.Dense) -> None:
    """Refuses what would replace the product of a layer."""
    fused.refuse_dot_general(
        layer, dot_general=layer.dot_general, dot_general_cls=layer.dot_general_cls
    )


def promoted(layer: Any, *arrays: Any) -> Any:
    """Returns arrays of the type in which a layer computes; None for what it has not."""
    dtype = fused.layer_type("dtype", layer.dtype)
    return fused.promoted(lambda given: layer.promote_dtype(*given, dtype=dtype), arrays)


class Parameters(nn.Dense):
    """The parameters of a stock layer, under that layer's name and with its initial values."""

    @nn.compact
    def __call__(self, inputs: jax.Array) -> Any:
        """Makes or reads them."""
        return parameters(self, inputs)


def parameters(layer: nn.Dense, inputs: jax.Array) -> tuple[Any, Any]:
    """Makes or reads the kernel of a stock layer and its bias, None if it has none."""
    fused.check_sizes(features=layer.features)
    shape = (inputs.shape[-1], layer.features)
    param_dtype = fused.layer_type("param_dtype", layer.param_dtype)
    kernel = layer.param("kernel", layer.kernel_init, shape, param_dtype)
    if not layer.use_bias:
        return kernel, None
    return kernel, layer.param("bias", layer.bias_init, shape[1:], param_dtype)


def projections(  # noqa: PLR0913 - each is a keyword
    inputs: jax.Array,
    features: Mapping[str, int],
    *,
    use_bias: bool = True,
    dtype: Any = None,
    param_dtype: Any = jax.numpy.float32,
    precision: Any = None,
    kernel_init: Any = nn.Dense.kernel_init,
    bias_init: Any = nn.Dense.bias_init,
    promote_dtype: Any = promote_dtype,
    **how: Any,
) -> tuple[jax.Array, ...]:
    """Computes several dense layers of the same inputs, as `pallas_gemm.projections` does.

    To be called where a layer would be made, in a compact method. The parameters are those of the
    stock layers that it is instead of:

        query = flax.linen.Dense(4096, name="query")(inputs)
        key = flax.linen.Dense(1024, name="key")(inputs)
        value = flax.linen.Dense(1024, name="value")(inputs)

    >>> sizes = {"query": 4096, "key": 1024, "value": 1024}
    >>> query, key, value = projections(inputs, sizes)  # doctest: +SKIP

    Args:
        inputs: Any number of dimensions, of which the last is contracted.
        features: The columns of each result, by the name of its layer.
        use_bias: As for `flax.linen.Dense`; of all layers, as what follows.
        dtype: As for `flax.linen.Dense`: the type of the computation.
        param_dtype: As for `flax.linen.Dense`.
        precision: As for `flax.linen.Dense`.
        kernel_init: As for `flax.linen.Dense`.
        bias_init: As for `flax.linen.Dense`.
        promote_dtype: As for `flax.linen.Dense`; called with inputs, kernels and biases.
        **how: `activations`, `schedule`, `config` and `implementation`, as for
            `pallas_gemm.projections`.

    Returns:
        The results, in the order of their names.

    Raises:
        ValueError: `features` names no layer.
    """
    if not features:
        raise ValueError("features must name one layer or more, got none")
    options: dict[str, Any] = {
        "use_bias": use_bias,
        "param_dtype": param_dtype,
        "kernel_init": kernel_init,
        "bias_init": bias_init,
    }
    made = [Parameters(size, name=name, **options)(inputs) for name, size in features.items()]
    kernels, biases = zip(*made, strict=True)
    dtype = fused.layer_type("dtype", dtype)
    inputs, *ready = fused.promoted(
        lambda given: promote_dtype(*given, dtype=dtype), (inputs, *kernels, *biases)
    )
    kernels, biases = ready[: len(made)], ready[len(made) :]
    return own_projections.projections(inputs, kernels, biases=biases, precision=precision, **how)


class GatedDense(nn.Module):
    """`activation(inputs @ gate) * (inputs @ up)`, rounded once: SwiGLU and its relatives.

    The parameters are those of two stock layers that are named "gate" and "up":

        flax.linen.silu(flax.linen.Dense(features, use_bias=False, name="gate")(inputs))
        * flax.linen.Dense(features, use_bias=False, name="up")(inputs)

    so `{"gate": {"kernel": ...}, "up": {"kernel": ...}}`, both of shape `[inputs, features]`. A
    checkpoint of a block with other names loads with `gate_name` and `up_name`.

    >>> GatedDense(14336, dtype=jnp.bfloat16)  # doctest: +SKIP

    Attributes:
        features: Columns of the result.
        activation: As for `pallas_gemm.gated_gemm`; "silu" is SwiGLU, "gelu" GeGLU.
        dtype: As for `flax.linen.Dense`: the type of the computation.
        param_dtype: As for `flax.linen.Dense`.
        precision: As for `flax.linen.Dense`.
        use_bias: Both have a bias.
        kernel_init: As for `flax.linen.Dense`; of both kernels.
        bias_init: As for `flax.linen.Dense`; of both biases.
        promote_dtype: As for `flax.linen.Dense`; called with inputs, both kernels and both biases.
        gate_name: The name of the layer whose product goes through the activation.
        up_name: The name of the other layer.
        schedule: As for `pallas_gemm.gemm`.
        config: As for `pallas_gemm.gemm`.
        implementation: As for `pallas_gemm.gemm`.
    """

    features: int
    activation: Activation = "silu"
    dtype: Any = None
    param_dtype: Any = jax.numpy.float32
    precision: Any = None
    use_bias: bool = False
    kernel_init: Any = nn.Dense.kernel_init
    bias_init: Any = nn.Dense.bias_init
    promote_dtype: Any = promote_dtype
    gate_name: str = "gate"
    up_name: str = "up"
    schedule: Order = None
    config: GemmConfig | None = None
    implementation: str | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array, *, residual: jax.Array | None = None) -> jax.Array:
        """Computes the gated product.

        Args:
            inputs: Any number of dimensions, of which the last is contracted.
            residual: As for `Dense`.

        Returns:
            The result.
        """
        (gate, gate_bias), (up, up_bias) = (
            Parameters(
                self.features,
                use_bias=self.use_bias,
                param_dtype=self.param_dtype,
                kernel_init=self.kernel_init,
                bias_init=self.bias_init,
                name=name,
            )(inputs)
            for name in (self.gate_name, self.up_name)
        )
        operands = promoted(self, inputs, gate, up, gate_bias, up_bias)
        return fused.gated(
            operands,
            residual,
            **fused.options(self),
        )
