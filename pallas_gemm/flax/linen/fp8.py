"""Dense layers for `flax.linen` that train in 8-bit floats."""

import jax
from flax import linen as nn
from flax.linen import fp8_ops

from pallas_gemm.api.recipe import Recipe
from pallas_gemm.flax import fp8
from pallas_gemm.flax.linen.dense import Dense, parameters, promoted, refuse_dot_general
from pallas_gemm.layers import blocks, eight_bits, fused


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
        recipe: "blocks", or a `pallas_gemm.Recipe`: a scale for each block instead. There are no
            states.
    """

    scaling: str = "current"
    amax_history_length: int = 1024
    recipe: Recipe | str | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array, *, residual: jax.Array | None = None) -> jax.Array:
        """Computes what `Dense` does.

        Args:
            inputs: As for `Dense`.
            residual: As for `Dense`.

        Returns:
            The result, of the type that `Dense` would give it.
        """
        refuse_dot_general(self)
        kernel, bias = parameters(self, inputs)
        states, recipe = fp8.States(), fp8.recipe_of(self.recipe, self.scaling)
        if fp8.check_scaling(self.scaling):
            own = fp8_ops.Fp8DirectDotGeneralOp(self.amax_history_length)
            states = fp8.states(lambda name: getattr(own, name).value)
        operands = promoted(self, inputs, kernel, bias)
        options = fused.with_result(operands, residual, fused.options(self))
        if recipe is not None:
            return blocks.dense(recipe, operands, **options)
        return eight_bits.dense(fp8.PerTensor(), operands, states, **options)
