"""Layers for `flax.linen`."""

from collections.abc import Mapping
from typing import Any

import flax
import jax
from flax import linen as nn
from flax import traverse_util
from flax.linen import fp8_ops
from flax.linen.dtypes import promote_dtype

from pallas_gemm.api import gemm as api
from pallas_gemm.api.gemm import Activation, Order
from pallas_gemm.config import GemmConfig
from pallas_gemm.flax import fp8
from pallas_gemm.layers import fused, per_channel, routed
from schedules import _public


class Dense(nn.Dense):
    """`flax.linen.Dense` with its bias, an activation and a residual computed in the kernel.

    It has the parameters of the stock layer, `kernel` and `bias`, and all its fields but
    `dot_general` and `dot_general_cls`.

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
        _refuse_dot_general(self)
        kernel, bias = _parameters(self, inputs)
        operands = _promoted(self, inputs, kernel, bias)
        return fused.dense(
            operands,
            residual,
            **fused.options(self),
        )


class QuantisedDense(Dense):
    """`Dense` for serving, with weights of 8 bits and a scale for each column.

    Inputs are quantised where they come in, with a scale for each row; both scales, bias,
    activation and residual are applied in the kernel. The weights are no parameters: they are
    `kernel` in the collection "quantised", which `quantised` makes of a stock layer's; only the
    bias is one.

    >>> QuantisedDense(4096, dtype=jnp.bfloat16)  # doctest: +SKIP

    Attributes:
        quantised_dtype: Type of weights that are initialised: `jnp.int8`, or `jnp.float8_e4m3fn`.
        quantized_dtype: The same, in American spelling; None leaves it to `quantised_dtype`.
    """

    quantised_dtype: Any = jax.numpy.int8
    quantized_dtype: Any = None

    @nn.compact
    def __call__(self, inputs: jax.Array, *, residual: jax.Array | None = None) -> jax.Array:
        """Computes what `Dense` does.

        Args:
            inputs: As for `Dense`.
            residual: As for `Dense`.

        Returns:
            The result, of the type that the stock layer's has.
        """
        _refuse_dot_general(self)
        fused.check_sizes(features=self.features)
        shape = (inputs.shape[-1], self.features)
        param_dtype = fused.layer_type("param_dtype", self.param_dtype)

        def made() -> dict[str, jax.Array]:
            kernel = self.kernel_init(self.make_rng("params"), shape, param_dtype)
            dtype = per_channel.weight_type(self.quantised_dtype, self.quantized_dtype)
            return _quantised(kernel, dtype)

        kernel = per_channel.Quantised(**self.variable("quantised", "kernel", made).value)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, shape[1:], param_dtype)
        # The stock layer's kernel has a say in the type of its result.
        stand_in = jax.numpy.zeros((), param_dtype)
        operands = _promoted(self, inputs, stand_in, bias)
        options = fused.with_result(operands, residual, fused.options(self))
        return per_channel.dense(operands[0], kernel, operands[2], **options)


def quantised(model: Mapping[str, Any], stock: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a trained model's variables for a model that has `QuantisedDense` in some places.

    >>> abstract = jax.eval_shape(model.init, key, x)  # doctest: +SKIP
    >>> model.apply(quantised(abstract, trained), x)  # doctest: +SKIP

    Args:
        model: Variables of the model that is quantised, or their shapes and types.
        stock: Variables of the model that was trained, with stock layers of the same names.

    Raises:
        ValueError: A layer of the one is missing in the other, or is of another shape.
    """
    for name, variables, collection in (("model", model, "quantised"), ("stock", stock, "params")):
        if collection not in variables:
            raise ValueError(
                f'{name} must have the collection "{collection}", got {sorted(variables)}'
            )
    stock = flax.core.unfreeze(flax.core.meta.unbox(stock))
    params: dict[Any, Any] = traverse_util.flatten_dict(stock["params"])
    wanted: dict[Any, Any] = traverse_util.flatten_dict(dict(model["quantised"]))
    kernels: dict[Any, Any] = {}
    for (*layer, name), values in wanted.items():
        if name != "values":
            continue
        have, path = params.pop(tuple(layer), None), "/".join(layer)
        if have is None or have.shape != values.shape[::-1]:
            shape = None if have is None else list(have.shape)
            raise ValueError(
                f"{path} must be a kernel of shape {list(values.shape[::-1])} in the trained model,"
                f" got {shape}"
            )
        kernels[tuple(layer)] = _quantised(have, values.dtype)
    made = {
        "params": traverse_util.unflatten_dict(params),
        "quantised": traverse_util.unflatten_dict(kernels),
    }
    return stock | made


def _quantised(kernel: jax.Array, dtype: Any) -> dict[str, jax.Array]:
    return per_channel.quantise(kernel.T, dtype)._asdict()


QuantizedDense, quantized = QuantisedDense, quantised
"""American spellings of the same."""


class Fp8Dense(Dense):
    """`Dense` whose products, those of the gradient too, are of 8-bit floats.

    With current scaling it has the parameters of `flax.linen.Dense`. With delayed scaling it has
    those of `flax.linen.Dense(dot_general_cls=flax.linen.fp8_ops.Fp8DirectDotGeneralOp)`. Its
    states are in the collection `_overwrite_with_gradient`: the gradient of a state is its value
    for the next step, and `flax.training.train_state.TrainState` stores it.

    >>> Fp8Dense(4096, dtype=jnp.bfloat16)  # doctest: +SKIP

    Attributes:
        scaling: "current": a scale is of its tensor; "delayed": of what earlier steps saw, which
            saves a pass over each tensor.
        amax_history_length: How many earlier steps count.
    """

    scaling: str = "current"
    amax_history_length: int = 1024

    @nn.compact
    def __call__(self, inputs: jax.Array, *, residual: jax.Array | None = None) -> jax.Array:
        """Computes what `Dense` does.

        Args:
            inputs: As for `Dense`.
            residual: As for `Dense`.

        Returns:
            The result, of the type that `Dense` would give it.
        """
        _refuse_dot_general(self)
        kernel, bias = _parameters(self, inputs)
        states = fp8.States()
        if fp8.check_scaling(self.scaling):
            own = fp8_ops.Fp8DirectDotGeneralOp(self.amax_history_length)
            states = fp8.states(lambda name: getattr(own, name).value)
        operands = _promoted(self, inputs, kernel, bias)
        options = fused.with_result(operands, residual, fused.options(self))
        return fp8.dense(operands, states, **options)


def _refuse_dot_general(layer: nn.Dense) -> None:
    fused.refuse_dot_general(
        layer, dot_general=layer.dot_general, dot_general_cls=layer.dot_general_cls
    )


def _promoted(layer: Any, *arrays: Any) -> Any:
    """Returns arrays of the type in which a layer computes; None for what it has not."""
    return layer.promote_dtype(*arrays, dtype=fused.layer_type("dtype", layer.dtype))


class _Parameters(nn.Dense):
    """The parameters of a stock layer, under that layer's name and with its initial values."""

    @nn.compact
    def __call__(self, inputs: jax.Array) -> Any:
        return _parameters(self, inputs)


def _parameters(layer: nn.Dense, inputs: jax.Array) -> tuple[Any, Any]:
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
    made = [_Parameters(size, name=name, **options)(inputs) for name, size in features.items()]
    kernels, biases = zip(*made, strict=True)
    inputs, *ready = promote_dtype(
        inputs, *kernels, *biases, dtype=fused.layer_type("dtype", dtype)
    )
    kernels, biases = ready[: len(made)], ready[len(made) :]
    return api.projections(inputs, kernels, biases=biases, precision=precision, **how)


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
            _Parameters(
                self.features,
                use_bias=self.use_bias,
                param_dtype=self.param_dtype,
                kernel_init=self.kernel_init,
                bias_init=self.bias_init,
                name=name,
            )(inputs)
            for name in (self.gate_name, self.up_name)
        )
        operands = _promoted(self, inputs, gate, up, gate_bias, up_bias)
        return fused.gated(
            operands,
            residual,
            **fused.options(self),
        )


class Experts(routed.Mixture, nn.Module):
    """A mixture of experts: each token goes through the `top_k` gated layers that a router chooses.

    Experts have no capacity: no token is dropped, and nothing is padded, whatever the router does.
    An expert computes the same as a `GatedDense` and a `Dense` after it. `pallas_gemm.ragged_dot`
    computes the products of all experts. The parameters are those of stock layers:

        router/kernel [inputs, num_experts]
        gate/kernel, up/kernel [num_experts, inputs, hidden_features]
        down/kernel [num_experts, hidden_features, inputs]

    >>> Experts(num_experts=8, hidden_features=14336, top_k=2)  # doctest: +SKIP

    Attributes:
        num_experts: How many there are.
        hidden_features: Columns of gate and up of each.
        top_k: How many experts a token has.
        routing: Takes logits `[tokens, num_experts]` and `top_k`; returns the weights and the
            numbers of the experts of each token, both `[tokens, top_k]`. Unless given, the weights
            are the softmax of the largest logits.
        activation: As for `GatedDense`.
        dtype: As for `flax.linen.Dense`: the type of the computation. The router, its weights and
            the sums of experts' results are in float32 at least.
        param_dtype: As for `flax.linen.Dense`; the router's is float32.
        precision: As for `flax.linen.Dense`.
        kernel_init: As for `flax.linen.Dense`, of three dimensions.
        router_init: As for `flax.linen.Dense`.
        promote_dtype: As for `flax.linen.Dense`; called with inputs and all experts' kernels.
    """

    num_experts: int
    hidden_features: int
    top_k: int = 2
    routing: routed.Routing = routed.softmax_of_best
    activation: Activation = "silu"
    dtype: Any = None
    param_dtype: Any = jax.numpy.float32
    precision: Any = None
    kernel_init: Any = routed.KERNEL_INIT
    router_init: Any = nn.Dense.kernel_init
    promote_dtype: Any = promote_dtype

    @nn.compact
    def __call__(self, inputs: jax.Array, *, with_logits: bool = False) -> Any:
        """Computes each token by its experts.

        Args:
            inputs: Any number of dimensions, of which the last is contracted.
            with_logits: Also return the router's logits, for a loss that balances experts.

        Returns:
            The result, of the inputs' shape; with the logits `[..., num_experts]` if asked for.
        """
        routed.check(self.num_experts, self.top_k)
        fused.check_sizes(hidden_features=self.hidden_features)
        router = nn.Dense(
            self.num_experts,
            use_bias=False,
            precision=routed.ROUTER_PRECISION,
            kernel_init=self.router_init,
            name="router",
        )
        logits = router(routed.wide(inputs))
        width = inputs.shape[-1]
        shape = (self.num_experts, width, self.hidden_features)
        shapes = {"gate": shape, "up": shape, "down": (shape[0], shape[2], shape[1])}
        kernels = [
            _Kernel(
                shape,
                self.kernel_init,
                fused.layer_type("param_dtype", self.param_dtype),
                name=name,
            )()
            for name, shape in shapes.items()
        ]
        operands = _promoted(self, inputs, *kernels)
        return self.mixed(logits, operands, with_logits=with_logits)


class _Kernel(nn.Module):
    """The kernel of a layer, under that layer's name."""

    shape: tuple[int, ...]
    init_kernel: Any
    dtype: Any

    @nn.compact
    def __call__(self) -> Any:
        return self.param("kernel", self.init_kernel, self.shape, self.dtype)


def __dir__() -> list[str]:
    """Returns the public names."""
    return _public.names(globals())
