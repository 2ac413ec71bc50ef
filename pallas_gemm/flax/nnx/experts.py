"""Mixtures of experts for `flax.nnx`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from pallas_gemm.api.gemm import Activation
from pallas_gemm.api.recipe import Recipe, named
from pallas_gemm.flax.nnx.linear import promoted
from pallas_gemm.layers import blocks, fused, routed


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
        routed.check(num_experts, top_k, routing)
        fused.check_sizes(in_features=in_features, hidden_features=hidden_features)
        options: Any = {"use_bias": False, "precision": routed.ROUTER_PRECISION}
        self.router = nnx.Linear(in_features, num_experts, rngs=rngs, **options)
        param_dtype = fused.layer_type("param_dtype", param_dtype)
        there, back = (in_features, hidden_features), (hidden_features, in_features)
        self.gate, self.up, self.down = (
            _Kernel(kernel_init(rngs.params(), (num_experts, *sizes), param_dtype), kernel_metadata)
            for sizes in (there, there, back)
        )
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
        operands = promoted(self, inputs, *kernels)
        return self.mixed(logits, operands, with_logits=with_logits)


class Fp8Experts(blocks.MixtureInBlocks, Experts):
    """`Experts` whose products, those of the gradients too, are of 8 bits.

    The gradients of the kernels are sums over the tokens of each expert, which are filled up with
    zeros to whole blocks.

    >>> Fp8Experts(4096, num_experts=8, hidden_features=14336, rngs=rngs)  # doctest: +SKIP
    """

    def __init__(
        self,
        in_features: int,
        *,
        recipe: Recipe | str = "blocks",
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        """Makes the parameters.

        Args:
            in_features: As for `Experts`.
            recipe: "blocks", or a `pallas_gemm.Recipe`.
            rngs: As for `Experts`.
            **options: All else that `Experts` takes.

        Raises:
            ValueError: As for `Experts`, or there is no such recipe.
        """
        super().__init__(in_features, rngs=rngs, **options)
        self.recipe = named(recipe)


class _Kernel(nnx.Module):
    """The kernels of all experts, as `kernel` of a layer."""

    def __init__(self, kernel: jax.Array, metadata: Mapping[str, Any]) -> None:
        self.kernel = nnx.Param(kernel, **metadata)
