"""Gated experts in 8 bits, `(function(rows @ gate) * (rows @ up)) @ down`, as a recipe says.

    forward     before = rows @ gate
                hidden, factor = f(rows @ up, before)         in the kernel of the product
                result = hidden @ down
    backward    of_before, of_factor = f'(g @ down', ...)     in the kernel of the product
                of_rows = of_before @ gate' + of_factor @ up'
                of each kernel: a sum over the rows of each expert

All that is multiplied is quantized once. So that no block has rows of two experts, each expert's
rows are filled up with zeros to whole blocks where these are what is added up.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_gemm.api import recipe as recipes
from pallas_gemm.api.groups.group_sums import group_sums
from pallas_gemm.api.groups.grouped import grouped_gemm
from pallas_gemm.api.quantize import BOTH, Quantized
from pallas_gemm.api.recipe import Recipe
from pallas_gemm.kernels.quantize import HEIGHT, filled_up
from pallas_gemm.op.product import equally_varying


def experts(
    recipe: Recipe,
    rows: jax.Array,
    kernels: Sequence[jax.Array],
    sizes: jax.Array,
    function: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Computes what gated experts make of rows in groups. The gradients are of 8 bits, too.

    Args:
        recipe: The types and blocks.
        rows: The rows, those of an expert together.
        kernels: Gate, up and down, each `[groups, k, n]`.
        sizes: How many rows each expert has.
        function: The activation, of float32.
    """
    own = _Experts(recipe, rows.dtype, function)
    run = jax.custom_vjp(own.run)
    run.defvjp(own.forward, own.backward)
    return run(*equally_varying((rows, *kernels, sizes)))


class _Both(NamedTuple):
    """An array in 8 bits: for the forward pass, and for the backward pass, if there is one."""

    forward: Quantized
    backward: Any


class _Experts(NamedTuple):
    """The rules of `experts`.

    Attributes:
        recipe: The types and blocks.
        dtype: The type of rows and results, and of gradients.
        function: The activation.
    """

    recipe: Recipe
    dtype: Any
    function: Callable[[jax.Array], jax.Array]

    def run(self, *given: jax.Array) -> jax.Array:
        """Computes the result where no derivative is asked for."""
        return self._computed(*given, derived=False)[0]

    def forward(self, *given: jax.Array) -> tuple[jax.Array, Any]:
        """Keeps what the backward pass takes."""
        return self._computed(*given, derived=True)

    def _computed(
        self, rows: Any, gate: Any, up: Any, down: Any, sizes: Any, *, derived: bool
    ) -> Any:
        x = self._quantized(rows, sizes, derived=derived)
        kernels = [self._kernel(own, derived=derived) for own in (gate, up, down)]
        product = functools.partial(self._product, sizes)
        before = product(x.forward, kernels[0].forward)

        def followed(s: jax.Array, before: jax.Array) -> Any:
            hidden = self._hidden(before, s).astype(self.dtype)
            return (hidden, s.astype(self.dtype)) if derived else hidden

        found = product(x.forward, kernels[1].forward, epilogue=followed, operands=(before,))
        hidden, factor = found if derived else (found, None)
        h = self._quantized(hidden, sizes, derived=derived)
        saved = (x, h, *kernels)
        kept = [own.backward for own in saved], before, factor, sizes
        return product(h.forward, kernels[2].forward), kept

    def backward(self, saved: Any, g: jax.Array) -> tuple[Any, ...]:
        """Returns the gradients of rows and kernels."""
        (x, h, gate, up, down), before, factor, sizes = saved
        product = functools.partial(self._product, sizes)
        result = self._gradient(g, sizes)

        def derived(s: jax.Array, *given: jax.Array) -> Any:
            return tuple(own.astype(self.dtype) for own in jax.vjp(self._hidden, *given)[1](s))

        inner = product(result.forward, down, epilogue=derived, operands=(before, factor))
        of_before, of_factor = (self._gradient(own, sizes) for own in inner)
        first = product(of_before.forward, gate)

        def added(s: jax.Array, first: jax.Array) -> jax.Array:
            return (s + first.astype(jnp.float32)).astype(self.dtype)

        of_rows = product(of_factor.forward, up, epilogue=added, operands=(first,))
        pairs = (x, of_before), (x, of_factor), (h, result)
        return of_rows, *(self._sums(sizes, left, own.backward) for left, own in pairs), None

    def _hidden(self, before: jax.Array, factor: jax.Array) -> jax.Array:
        """Returns what comes between the products, in float32."""
        return self.function(before.astype(jnp.float32)) * factor.astype(jnp.float32)

    def _quantized(self, rows: jax.Array, sizes: jax.Array, *, derived: bool) -> _Both:
        how = self.recipe, self.recipe.inputs, rows
        if not derived:
            return _Both(recipes.quantized(*how, -1), None)
        along_k, along_rows = recipes.quantized(*how, BOTH, group_sizes=sizes)
        return _Both(along_k, recipes.turned(along_rows))

    def _kernel(self, kernel: jax.Array, *, derived: bool) -> _Both:
        how = self.recipe, self.recipe.kernel, kernel
        if not derived:
            return _Both(recipes.quantized(*how, -2), None)
        along_columns, along_k = recipes.quantized(*how, BOTH)
        return _Both(along_k, recipes.turned(along_columns))

    def _gradient(self, g: jax.Array, sizes: jax.Array) -> _Both:
        return _Both(*recipes.quantized_grad(self.recipe, g.astype(self.dtype), group_sizes=sizes))

    def _product(self, sizes: jax.Array, left: Quantized, right: Quantized, **options: Any) -> Any:
        """Multiplies rows by the matrices of their groups."""
        multiply = functools.partial(grouped_gemm, group_sizes=sizes)
        dtype = {} if options else {"preferred_element_type": self.dtype}
        return recipes.scaled(left, right, self.recipe, multiply=multiply, **options, **dtype)

    def _sums(self, sizes: jax.Array, left: Quantized, right: Quantized) -> jax.Array:
        """Adds up products of rows over each group."""
        whole = filled_up(sizes, filled_up(HEIGHT, self.recipe.inputs.block[1]))
        multiply = functools.partial(group_sums, group_sizes=whole)
        given = left, right, self.recipe
        return recipes.scaled(*given, multiply=multiply, preferred_element_type=self.dtype)
