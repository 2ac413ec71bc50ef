"""Mixtures of experts for `flax.linen`."""

from typing import Any

import jax
from flax import linen as nn
from flax.linen.dtypes import promote_dtype

from pallas_gemm.api.gemm import Activation
from pallas_gemm.api.recipe import Recipe
from pallas_gemm.flax.linen.dense import promoted
from pallas_gemm.layers import blocks, fused, routed


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
        routed.check(self.num_experts, self.top_k, self.routing)
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
        operands = promoted(self, inputs, *kernels)
        return self.mixed(logits, operands, with_logits=with_logits)


class Fp8Experts(blocks.MixtureInBlocks, Experts):
    """`Experts` whose products, those of the gradients too, are of 8 bits.

    The gradients of the kernels are sums over the tokens of each expert, which are filled up with
    zeros to whole blocks.

    >>> Fp8Experts(num_experts=8, hidden_features=14336, dtype=jnp.bfloat16)  # doctest: +SKIP

    Attributes:
        recipe: "blocks", or a `pallas_gemm.Recipe`.
    """

    recipe: Recipe | str = "blocks"


class _Kernel(nn.Module):
    """The kernel of a layer, under that layer's name."""

    shape: tuple[int, ...]
    init_kernel: Any
    dtype: Any

    @nn.compact
    def __call__(self) -> Any:
        return self.param("kernel", self.init_kernel, self.shape, self.dtype)
