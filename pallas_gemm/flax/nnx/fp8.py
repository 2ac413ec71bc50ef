"""Linear layers for `flax.nnx` that train in 8-bit floats."""

from typing import Any

import jax
from flax import nnx

from pallas_gemm.api.recipe import Recipe
from pallas_gemm.flax import fp8
from pallas_gemm.flax.nnx.linear import Linear
from pallas_gemm.layers import blocks, eight_bits, fused


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
        recipe: Recipe | str | None = None,
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
            recipe: "blocks", or a `pallas_gemm.Recipe`: a scale for each block instead. There are
                no states.
            rngs: As for `Linear`.
            **options: All else that `Linear` takes.

        Raises:
            ValueError: `dot_general` is given, or there is no such scaling or recipe.
        """
        super().__init__(in_features, out_features, rngs=rngs, **options)
        self.recipe = fp8.recipe_of(recipe, scaling)
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
        if self.recipe is not None:
            return blocks.dense(self.recipe, operands, **options)
        return eight_bits.dense(fp8.PerTensor(), operands, states, **options)
