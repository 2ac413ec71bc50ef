"""What the layers of experts share: which rows are whose, and the way there and back.

    tokens ──▶ copies, a row for each choice ──▶ sorted by expert ──▶ experts ──▶ back ──▶ sum
      │                                               ▲                                    ▲
      └──▶ router ──▶ weights, choices ───────────────┴──────────── weights ───────────────┘

Every expert takes what chose it: none has a capacity, no token is dropped, and nothing is padded.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gemm.api import arguments
from pallas_gemm.api.groups.grouped import grouped_gemm
from pallas_gemm.op.permutation import permuted

ROUTER_PRECISION = "highest"
"""A GPU would round the operands of float32 products otherwise."""

KERNEL_INIT = jax.nn.initializers.lecun_normal(batch_axis=(0,))
"""The stock layers' initialiser, for each expert."""

Compute = Callable[[jax.Array, jax.Array], jax.Array]
"""Takes rows, sorted by expert, and how many rows each expert has; returns a row for each."""


class Choice(NamedTuple):
    """Which experts compute a token.

    Attributes:
        weights: The weight of each result, `[tokens, top_k]`.
        experts: Their numbers, of the same shape.
    """

    weights: jax.Array
    experts: jax.Array


Routing = Callable[[jax.Array, int], Choice]
"""Takes the logits `[tokens, experts]` and how many experts a token has; returns its choice."""


def softmax_of_best(logits: jax.Array, top_k: int) -> Choice:
    """Chooses the experts of the largest logits; weights are the softmax of these, as in Mixtral.

    They are those of the softmax over all experts, scaled to a sum of one.

    Args:
        logits: `[tokens, experts]`.
        top_k: How many experts a token has.
    """
    best, experts = lax.top_k(logits, top_k)
    return Choice(jax.nn.softmax(best), experts)


def apply(inputs: jax.Array, choice: Choice, experts: int, compute: Compute) -> jax.Array:
    """Returns the weighted sums of what experts make of each token.

    Args:
        inputs: `[..., inputs]`.
        choice: The choice of each token.
        experts: How many there are.
        compute: The function that they apply.

    Returns:
        `[..., features]`, of the type of what `compute` returns. Sums are in float32 at least.
    """
    weights, chosen = choice
    copies = jnp.repeat(rows(inputs), chosen.shape[1], axis=0)
    results = in_groups(copies, chosen.reshape(-1), experts, compute)

    # So that reverse mode keeps the results as they are, and not in float32.
    @jax.checkpoint
    def total(results: jax.Array, weights: jax.Array) -> jax.Array:
        each = wide(results.reshape(*chosen.shape, results.shape[1]))
        return (each * weights[..., None].astype(each.dtype)).sum(axis=1).astype(results.dtype)

    return total(results, weights).reshape(*inputs.shape[:-1], results.shape[1])


def in_groups(x: jax.Array, group: jax.Array, groups: int, compute: Compute) -> jax.Array:
    """Returns what is computed of rows in the order of their groups, in the order of the rows.

    Args:
        x: The rows.
        group: The number of each one's group; `groups` of those in none, which come last.
        groups: How many there are.
        compute: The computation.
    """
    is_own = group[:, None] == lax.broadcasted_iota(group.dtype, (1, groups), 1)
    order = jnp.argsort(group, stable=True)
    row = lax.iota(order.dtype, order.size)
    places = jnp.zeros_like(order).at[order].set(row, unique_indices=True, mode="promise_in_bounds")
    results = compute(permuted(x, order, places), is_own.sum(axis=0, dtype=jnp.int32))
    return permuted(results, places, order)


class Mixture:
    """Sends tokens to experts: the part of a layer of experts that all interfaces share.

    Attributes:
        num_experts: How many there are.
        top_k: How many experts a token has.
        routing: Makes the choice of each token.
        activation: As for `gated_gemm`.
        precision: As for `gemm`.
    """

    num_experts: int
    top_k: int
    routing: Routing
    activation: Any
    precision: Any

    def mixed(
        self, logits: jax.Array, operands: Sequence[Any], *, with_logits: bool
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Returns the result of a layer, with the logits if asked for.

        Args:
            logits: The router's results, `[..., num_experts]`.
            operands: Inputs, and gate, up and down of all experts, of the type of the computation.
            with_logits: Whether the logits are asked for.
        """
        inputs, *kernels = operands
        each = rows(logits)
        choice = checked(self.routing(each, self.top_k), each.shape[0], self.top_k)
        result = self.mix(inputs, choice, kernels)
        return (result, logits) if with_logits else result

    def mix(self, inputs: jax.Array, choice: Choice, kernels: Sequence[Any]) -> jax.Array:
        """Returns the weighted sums; a subclass may send the rows to where their experts are.

        Args:
            inputs: As for the layer, of the type of the computation.
            choice: The choice of each token.
            kernels: Gate, up and down of all experts, of the same type.
        """
        compute = gated(kernels, self.activation, self.precision)
        return apply(inputs, choice, self.num_experts, compute)


def rows(x: jax.Array) -> jax.Array:
    """Returns an array in two dimensions."""
    return x.reshape(-1, x.shape[-1])


def wide(x: jax.Array) -> jax.Array:
    """Returns an array in float32 at least."""
    return x.astype(np.promote_types(x.dtype, np.float32))


def gated(kernels: Sequence[Any], activation: Any, precision: Any) -> Compute:
    """Returns what experts of gated layers compute: `(activation(x @ gate) * (x @ up)) @ down`.

    Args:
        kernels: Gate, up and down, each with a matrix for each expert.
        activation: As for `gemm`.
        precision: As for `gemm`.
    """
    gate, up, down = kernels

    def compute(rows: jax.Array, sizes: jax.Array) -> jax.Array:
        hidden = grouped_gemm(rows, gate, sizes, up=up, activation=activation, precision=precision)
        return grouped_gemm(hidden, down, sizes, precision=precision)

    return compute


def checked(choice: Any, tokens: int, top_k: int) -> Choice:
    """Returns what a routing function returned.

    Raises:
        TypeError: It is no choice of experts.
    """
    given = choice if isinstance(choice, tuple | list) else (choice,)
    if len(given) == 2 and all(map(arguments.is_array, given)):
        weights, experts = given
        fits = weights.shape == experts.shape and experts.ndim == 2 and experts.shape[0] == tokens
        is_number = jnp.issubdtype(experts.dtype, jnp.integer)
        if fits and is_number and jnp.issubdtype(weights.dtype, jnp.floating):
            # A narrow type may not hold the numbers of all experts.
            return Choice(weights, experts.astype(np.int32))
    types = (
        f"{x.dtype}{list(x.shape)}" if arguments.is_array(x) else type(x).__name__ for x in given
    )
    raise TypeError(
        "routing must return weights (floats) and numbers of experts (integers), both"
        f" [{tokens}, {top_k}], got {' and '.join(types)}"
    )


def check(num_experts: int, top_k: int, routing: Any) -> None:
    """Checks the options of a layer.

    Raises:
        ValueError: There are no experts, or fewer than a token is to have, or one is no integer.
        TypeError: The routing is no function.
    """
    if not callable(routing):
        raise TypeError(f"routing must be a function of logits and top_k, got {routing!r:.80}")
    if not isinstance(num_experts, int | np.integer) or num_experts < 1:
        raise ValueError(f"num_experts must be an integer of at least 1, got {num_experts!r}")
    if not isinstance(top_k, int | np.integer) or not 1 <= top_k <= num_experts:
        raise ValueError(
            f"top_k must be an integer from 1 to num_experts, which is {num_experts}, got {top_k!r}"
        )
