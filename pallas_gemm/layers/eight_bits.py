"""Dense layers whose three products are of 8 bits: what does not depend on how they are scaled.

A `Scheme` quantizes the factors, and multiplies what it has quantized. The steps after the product
are in its kernel. Its derivative is that of arrays that are not quantized.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from pallas_gemm.kernels.functions import activations
from pallas_gemm.op.mesh import typed
from pallas_gemm.op.product import equally_varying


class Scheme(Protocol):
    """How the factors of a layer are quantized, and the products of what comes of it."""

    def quantized(self, operands: Sequence[Any], states: Any, *, derived: bool) -> tuple[Any, Any]:
        """Returns the factors, for gradients too if asked for, and the states of the next step."""

    def multiply(self, factors: Any, **options: Any) -> jax.Array:
        """Returns their product; options are as for `gemm`."""

    def gradients(
        self, factors: Any, g: jax.Array, states: Any, *, dtype: Any, **options: Any
    ) -> tuple[Any, Any, Any]:
        """Returns the gradients of inputs and kernel in a type, and the states of the next step."""


class _Saved(NamedTuple):
    """The values of the forward pass that the backward pass needs."""

    factors: Any
    bias: Any
    before: Any
    residual: Any
    states: Any


def dense(
    scheme: Scheme,
    operands: Sequence[Any],
    states: Any,
    *,
    residual: Any,
    activation: Any,
    **options: Any,
) -> jax.Array:
    """Computes `activation(inputs @ kernel + bias) + residual` of factors in 8 bits.

    Args:
        scheme: How they are quantized and multiplied.
        operands: Inputs, kernel, and bias or None, of the type of the computation.
        states: The states of the scheme. Their gradients are their values for the next step.
        residual: As for `gemm`.
        activation: As for `gemm`.
        **options: As for `gemm`.
    """
    result = options.pop("preferred_element_type")
    layer = _Dense(scheme, activation, operands[0].dtype, result, options)
    quantized = jax.custom_vjp(layer.run)
    quantized.defvjp(layer.forward, layer.backward)
    # In a `shard_map`, what is shared by devices has a gradient that is a sum over them.
    given, tree = jax.tree.flatten((tuple(operands), residual))
    return quantized(*jax.tree.unflatten(tree, equally_varying(tuple(given))), states)


class _Dense(NamedTuple):
    """The forward and backward rules of `dense`.

    Attributes:
        scheme: How factors are quantized and multiplied.
        activation: As for `gemm`.
        dtype: Type of the computation, and of the gradients.
        result: Type of the result.
        options: As for `gemm`.
    """

    scheme: Scheme
    activation: Any
    dtype: Any
    result: Any
    options: dict[str, Any]

    def run(self, operands: Sequence[Any], residual: Any, states: Any) -> jax.Array:
        """Computes the result where no derivative is asked for: one kernel."""
        factors, _ = self.scheme.quantized(operands[:2], states, derived=False)
        return self._multiply(factors, operands[2], residual, self.activation)

    def forward(
        self, operands: Sequence[Any], residual: Any, states: Any
    ) -> tuple[jax.Array, _Saved]:
        """Keeps what is before an activation, which its derivative needs."""
        factors, new = self.scheme.quantized(operands[:2], states, derived=True)
        bias = operands[2]
        saved = _Saved(factors, bias, None, residual, new)
        if self.activation is None:
            return self._multiply(factors, bias, residual, None), saved
        before = self._multiply(factors, bias, None, None)
        return self._follow(before, residual), saved._replace(before=before)

    def backward(self, saved: _Saved, g: jax.Array) -> tuple[Any, Any, Any]:
        """Returns the gradients of the operands and the residual, and the states."""
        # Without an activation, nothing depends on what was before.
        before = g if saved.before is None else saved.before
        g, of_residual = jax.vjp(self._follow, before.astype(self.result), saved.residual)[1](g)
        of_inputs, of_kernel, new = self.scheme.gradients(
            saved.factors,
            g,
            saved.states,
            dtype=self.dtype,
            implementation=self.options.get("implementation"),
        )
        rows = tuple(range(g.ndim - 1))
        of_bias = None if saved.bias is None else _summed(g, rows, saved.bias)
        return (of_inputs, of_kernel, of_bias), of_residual, new

    def _multiply(self, factors: Any, bias: Any, residual: Any, activation: Any) -> jax.Array:
        return self.scheme.multiply(
            factors,
            bias=bias,
            residual=residual,
            activation=activation,
            preferred_element_type=self.result,
            **self.options,
        )

    def _follow(self, before: jax.Array, residual: Any) -> jax.Array:
        function = activations.resolve(self.activation)
        wide = before.astype(jnp.float32)
        wide = wide if function is None else function(wide)
        wide = wide if residual is None else wide + residual.astype(jnp.float32)
        return wide.astype(self.result)


def _summed(g: jax.Array, rows: tuple[int, ...], bias: jax.Array) -> jax.Array:
    """Returns the gradient of a bias, split as the bias."""
    summed = jnp.sum(g, axis=rows, dtype=jnp.float32).astype(bias.dtype)
    return typed.split_as(summed, typed.sharding_of(bias))
