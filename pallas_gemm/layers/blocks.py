"""A scale for each block of the factors of a layer, or of experts, as a recipe says."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gemm.api import gated_recipe
from pallas_gemm.api import recipe as recipes
from pallas_gemm.api.gemm import gemm
from pallas_gemm.api.recipe import Factors, Recipe
from pallas_gemm.kernels.functions import activations
from pallas_gemm.layers import eight_bits, routed


def dense(
    recipe: Recipe,
    operands: Sequence[Any],
    *,
    residual: Any,
    out_sharding: Any = None,
    **options: Any,
) -> jax.Array:
    """Computes `activation(inputs @ kernel + bias) + residual` of factors quantized in blocks.

    Args:
        recipe: The types and blocks.
        operands: Inputs, kernel, and bias or None, of the type of the computation.
        residual: As for `gemm`.
        out_sharding: As for `gemm`.
        **options: As for `gemm`.
    """
    inputs, kernel, bias = operands
    # Rows follow each other, so that blocks of them cross the examples of a batch.
    count = math.prod(inputs.shape[:-1])
    rows = inputs.reshape(count, inputs.shape[-1])
    columns = kernel.shape[-1]
    if residual is not None:
        residual = jnp.broadcast_to(residual, (*inputs.shape[:-1], columns))
        residual = residual.reshape(count, columns)
    if 0 in (*rows.shape, *kernel.shape):
        # There is no block.
        result = gemm(rows, kernel, bias=bias, residual=residual, **options)
    else:
        scheme = InBlocks(recipe)
        result = eight_bits.dense(scheme, (rows, kernel, bias), None, residual=residual, **options)
    result = result.reshape(*inputs.shape[:-1], columns)
    return result if out_sharding is None else jax.sharding.reshard(result, out_sharding)


@dataclasses.dataclass(frozen=True)
class InBlocks:
    """The blocks of a recipe: see `eight_bits.Scheme`. It has no states.

    Attributes:
        recipe: The recipe.
    """

    recipe: Recipe

    def quantized(
        self, operands: Sequence[Any], states: Any, *, derived: bool
    ) -> tuple[Factors, Any]:
        """Quantizes the factors."""
        inputs, kernel = operands
        return recipes.factors(self.recipe, inputs, kernel, derived=derived), states

    def multiply(self, factors: Factors, **options: Any) -> jax.Array:
        """Returns the product of the factors."""
        return recipes.multiply(factors, self.recipe, **options)

    def gradients(
        self, factors: Factors, g: jax.Array, states: Any, *, dtype: Any, **options: Any
    ) -> tuple[Any, Any, Any]:
        """Returns the gradients of inputs and kernel."""
        found = recipes.gradients(factors, self.recipe, g.astype(dtype), dtype, **options)
        return (*found, states)


class MixtureInBlocks(routed.Mixture):
    """Sends tokens to experts that multiply in blocks of 8 bits.

    Attributes:
        recipe: "blocks", or a `pallas_gemm.Recipe`.
    """

    recipe: Recipe | str

    def mix(self, inputs: jax.Array, choice: routed.Choice, kernels: Sequence[Any]) -> jax.Array:
        """Returns the weighted sums; the arguments are those of `Mixture`."""
        if self.precision is not None:
            raise ValueError(
                f"precision has no meaning for products of 8 bits, got {self.precision!r}"
            )
        function = activations.resolve(self.activation) or (lambda x: x)
        named = recipes.named(self.recipe)

        def compute(rows: jax.Array, sizes: jax.Array) -> jax.Array:
            return gated_recipe.experts(named, rows, kernels, sizes, function)

        return routed.apply(inputs, choice, self.num_experts, compute)
