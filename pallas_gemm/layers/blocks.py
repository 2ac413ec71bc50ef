"""A scale for each block of the factors of a layer, or of experts, as a recipe says."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gemm.api import gated_recipe, request
from pallas_gemm.api import recipe as recipes
from pallas_gemm.api.gemm import gemm
from pallas_gemm.api.recipe import Factors, Recipe
from pallas_gemm.call import Operands, Options
from pallas_gemm.kernels.functions import activations
from pallas_gemm.layers import eight_bits, routed
from pallas_gemm.op.mesh.matrices import Rows, of_matrix
from pallas_gemm.problem import Epilogue


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
    shape, dims = (*inputs.shape[:-1], kernel.shape[-1]), inputs.ndim - 1
    plain = Operands(inputs, kernel, bias=bias, residual=residual)
    split = request.of_gemm(plain, Epilogue(), Options(), out_sharding=out_sharding).type_sharding
    # Rows follow each other, so that blocks of them cross the examples of a batch.
    rows = Rows.of(inputs, dims)
    factors = rows.matrix(inputs), kernel
    options["out_sharding"] = of_matrix(split, dims)
    if residual is not None:
        residual = jnp.broadcast_to(residual, shape)
        if split is not None:
            residual = jax.sharding.reshard(residual, split)
        residual = rows.matrix(residual)
    if 0 in (*factors[0].shape, *kernel.shape):
        # There is no block.
        result = gemm(*factors, bias=bias, residual=residual, **options)
    else:
        given = (*factors, bias)
        result = eight_bits.dense(InBlocks(recipe), given, None, residual=residual, **options)
    return rows.whole(result, kernel.shape[-1:], split)


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
