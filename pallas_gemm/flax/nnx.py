"""Layers for `flax.nnx`."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from pallas_gemm.api import gemm as api
from pallas_gemm.api.gemm import Activation, Order
from pallas_gemm.config import GemmConfig
from pallas_gemm.flax import fp8
from pallas_gemm.layers import fused, per_channel, routed
from schedules import _public


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

    def _operands(self, inputs: jax.Array, kernel: jax.Array) -> Any:
        """Returns inputs, kernel, and bias or None, of the type of the computation."""
        return self.promote_dtype((inputs, kernel, _value(self.bias)), dtype=self.dtype)

    def _options(self, out_sharding: Any) -> dict[str, Any]:
        """Returns those of the product that do not depend on its operands."""
        wanted = self.preferred_element_type
        return fused.options(self, preferred_element_type=wanted, out_sharding=out_sharding)


def _value(bias: Any) -> Any:
    return None if bias is None else bias[...]


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
            bias_init=lambda *_: _value(bias),
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


class OverwriteWithGradient(nnx.Variable):
    """A state of delayed scaling: its gradient is its value for the next step."""


class Fp8Linear(Linear):
    """`Linear` whose products, those of the gradient too, are of 8-bit floats.

    With current scaling it has the parameters of the stock layer. With delayed scaling it has, as
    `OverwriteWithGradient`, the states that `flax.linen.fp8_ops` has, under the same names.

    >>> Fp8Linear(4096, 14336, dtype=jnp.bfloat16, rngs=rngs)  # doctest: +SKIP
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        scaling: str = "current",
        amax_history_length: int = 1024,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        """Makes the parameters.

        Args:
            in_features: As for `Linear`.
            out_features: As for `Linear`.
            scaling: "current": a scale is of its tensor; "delayed": of what earlier steps saw,
                which saves a pass over each tensor.
            amax_history_length: How many earlier steps count.
            rngs: As for `Linear`.
            **options: All else that `Linear` takes.

        Raises:
            ValueError: `dot_general` is given, or there is no such scaling.
        """
        super().__init__(in_features, out_features, rngs=rngs, **options)
        self.is_delayed = fp8.check_scaling(scaling)
        if self.is_delayed:
            for name, value in fp8.first_states(amax_history_length).items():
                setattr(self, name, OverwriteWithGradient(value))

    def __call__(
        self, inputs: jax.Array, out_sharding: Any = None, *, residual: jax.Array | None = None
    ) -> jax.Array:
        """Computes what `Linear` does; the arguments are its."""
        operands = self._operands(inputs, self.kernel[...])
        states = fp8.States()
        if self.is_delayed:
            states = fp8.states(lambda name: getattr(self, name)[...])
        options = fused.with_result(operands, residual, self._options(out_sharding))
        return fp8.dense(operands, states, **options)


Dense = Linear
"""`Linear` under the name that `linen` has for it."""


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
        if type(layer).__call__ not in (nnx.Linear.__call__, Linear.__call__):
            raise ValueError(
                f"layers[{i}] must be a flax.nnx.Linear or a pallas_gemm.flax.nnx.Linear, got a"
                f" {type(layer).__name__}, which computes something else"
            )
        if layer.dot_general not in (jax.lax.dot_general, api.dot_general):
            raise ValueError(
                f"layers[{i}] must have no dot_general of its own, which projections would not"
                f" call, got {layer.dot_general!r}"
            )
    kernels: list[Any] = [layer.kernel[...] for layer in layers]
    biases = [_value(layer.bias) for layer in layers]
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
        kernels = (layer.kernel[...], up.kernel[...])
        biases = [_value(own.bias) for own in (layer, up)]
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


class Experts(routed.Mixture, nnx.Module):
    """A mixture of experts: each token goes through the `top_k` gated layers that a router chooses.

    Experts have no capacity: no token is dropped, and nothing is padded, whatever the router does.
    An expert computes the same as a `GatedDense` and a `Linear` after it. `pallas_gemm.ragged_dot`
    computes the products of all experts. The router is a stock layer; the parameters are

        router.kernel [inputs, num_experts]
        gate.kernel, up.kernel [num_experts, inputs, hidden_features]
        down.kernel [num_experts, hidden_features, inputs]

    >>> Experts(4096, num_experts=8, hidden_features=14336, rngs=rngs)  # doctest: +SKIP
    """

    def __init__(  # noqa: PLR0913 - each is a keyword
        self,
        in_features: int,
        *,
        num_experts: int,
        hidden_features: int,
        top_k: int = 2,
        routing: routed.Routing = routed.softmax_of_best,
        activation: Activation = "silu",
        dtype: Any = None,
        param_dtype: Any = jax.numpy.float32,
        precision: Any = None,
        kernel_init: Any = routed.KERNEL_INIT,
        promote_dtype: Any = promote_dtype,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        rngs: nnx.Rngs,
    ) -> None:
        """Makes the parameters.

        Args:
            in_features: Size of a token, and of its result.
            num_experts: How many there are.
            hidden_features: Columns of gate and up of each.
            top_k: How many experts a token has.
            routing: Takes logits `[tokens, num_experts]` and `top_k`; returns the weights and the
                numbers of the experts of each token, both `[tokens, top_k]`. Unless given, the
                weights are the softmax of the largest logits.
            activation: As for `GatedDense`.
            dtype: As for `flax.nnx.Linear`: the type of the computation. The router, its weights
                and the sums of experts' results are in float32 at least.
            param_dtype: As for `flax.nnx.Linear`; the router's is float32.
            precision: As for `flax.nnx.Linear`.
            kernel_init: As for `flax.nnx.Linear`, of three dimensions.
            promote_dtype: As for `flax.nnx.Linear`; called with inputs and all experts' kernels.
            kernel_metadata: As for `flax.nnx.Linear`, of all experts' kernels.
            rngs: As for `flax.nnx.Linear`.

        Raises:
            ValueError: `top_k` is more than there are experts, or less than one; or a size is none.
        """
        routed.check(num_experts, top_k)
        fused.check_sizes(in_features=in_features, hidden_features=hidden_features)
        options: Any = {"use_bias": False, "precision": routed.ROUTER_PRECISION}
        self.router = nnx.Linear(in_features, num_experts, rngs=rngs, **options)

        def layer(*sizes: int) -> _Kernel:
            init = kernel_init(
                rngs.params(), (num_experts, *sizes), fused.layer_type("param_dtype", param_dtype)
            )
            return _Kernel(init, kernel_metadata)

        self.gate = layer(in_features, hidden_features)
        self.up = layer(in_features, hidden_features)
        self.down = layer(hidden_features, in_features)
        self.num_experts, self.top_k = num_experts, top_k
        self.routing, self.activation = routing, fused.checked_activation(activation)
        self.dtype, self.precision = fused.layer_type("dtype", dtype), precision
        self.promote_dtype = promote_dtype

    def __call__(self, inputs: jax.Array, *, with_logits: bool = False) -> Any:
        """Computes each token by its experts.

        Args:
            inputs: Any number of dimensions, of which the last is contracted.
            with_logits: Also return the router's logits, for a loss that balances experts.

        Returns:
            The result, of the inputs' shape; with the logits `[..., num_experts]` if asked for.
        """
        logits = self.router(routed.wide(inputs))
        kernels = (layer.kernel[...] for layer in (self.gate, self.up, self.down))
        operands = self.promote_dtype((inputs, *kernels), dtype=self.dtype)
        return self.mixed(logits, operands, with_logits=with_logits)


class _Kernel(nnx.Module):
    """The kernels of all experts, as `kernel` of a layer."""

    def __init__(self, kernel: jax.Array, metadata: Mapping[str, Any]) -> None:
        self.kernel = nnx.Param(kernel, **metadata)


def __dir__() -> list[str]:
    """Returns the public names."""
    return _public.names(globals())
