"""`projections`: several products of one left operand, whose gradient is one product."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallas_gemm.api import arguments, function, notes, request
from pallas_gemm.api.eager import compiled
from pallas_gemm.api.few_bits.weights import QuantizedWeight
from pallas_gemm.api.gemm import Activation, Order, answer
from pallas_gemm.call import Numerics, Operands
from pallas_gemm.config import GemmConfig
from pallas_gemm.op.projections import projections as bind_projections
from pallas_gemm.problem import Epilogue


@compiled("a", "weights", "operands", "biases")
def projections(  # noqa: PLR0913 - each is a keyword
    a: jax.Array,
    weights: Sequence[jax.Array],
    *,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[Sequence[jax.Array]] | None = None,
    biases: Sequence[jax.Array | None] | None = None,
    activations: Sequence[Activation] | Activation = None,
    preferred_element_type: Any = None,
    precision: Any = None,
    transpose_b: bool = False,
    schedule: Order = None,
    config: GemmConfig | None = None,
    implementation: str | None = None,
    numerics: Numerics | None = None,
) -> tuple[Any, ...]:
    """Computes `activation(a @ w + bias)` for several weights, such as queries, keys and values.

    Each result is that of `gemm`, also with `epilogue=f`. The gradient of `a` differs: it is a sum
    over all results, computed as one product in one accumulator and rounded once. With an
    activation or a function, or where something is named, it is a product for each result.

    >>> query, key, value = projections(x, [w_query, w_key, w_value])  # doctest: +SKIP

    Args:
        a: The left operand of all.
        weights: The right operands; each may be a `QuantizedWeight`.
        epilogue: As for `gemm`, for each product.
        operands: The arguments of `epilogue` after each product: one sequence for each of the
            weights.
        biases: The bias of each, or None.
        activations: The activation of each, or one for all, as for `gemm`.
        preferred_element_type: As for `gemm`.
        precision: As for `gemm`.
        transpose_b: All weights are stored `[n, k]`.
        schedule: As for `gemm`, for each product.
        config: As for `gemm`, for each product.
        implementation: As for `gemm`.
        numerics: As for `gemm`.

    Returns:
        The result for each of the weights.

    Raises:
        ValueError: As for `gemm`, or there are no weights, or another number of biases or
            activations.
        TypeError: As for `gemm`.
    """
    result = {"preferred_element_type": preferred_element_type, "precision": precision}
    options = arguments.options(implementation, config, schedule, numerics)
    if epilogue is not None or operands is not None:
        how = {"precision": precision, "transpose_b": transpose_b}
        words = {"biases": biases, "activations": activations}
        words["preferred_element_type"] = preferred_element_type
        said = function.said(words)
        each = arguments.each_with_operands(weights, operands)
        return tuple(
            function.answer(Operands(a, w), epilogue, own, options, said, answer, **how)
            for w, own in each
        )
    asked = []
    each = arguments.each_with_extras(weights, biases, activations)
    for i, (b, bias, activation) in enumerate(each):
        given, words = Operands(a, b, bias=bias), Epilogue(activation=activation)
        try:
            own = request.of_gemm(given, words, options, False, transpose_b, **result)
        except (TypeError, ValueError) as error:
            raise type(error)(f"weights[{i}]: {error}") from None
        asked.append(own)
    first = asked[0]
    alike = all(
        (own.call, own.outside, own.result_sharding) == (first.call, None, None) for own in asked
    )
    alone = options.names_something or first.call.epilogue.activation is not None
    alone = alone or any(isinstance(w, QuantizedWeight) for w in weights)
    if alone or not alike:
        return tuple(map(answer, asked))
    for own in asked:
        notes.note(own)
    dims = tuple(own.contraction for own in asked)
    rights = tuple(own.operands.present()[1:] for own in asked)
    # What JAX has traced before says nothing of the line that asks for it now.
    run = bind_projections if notes.is_noting() else _projections
    return tuple(run(first.call, dims, first.operands.a, rights))


_projections = jax.jit(bind_projections, static_argnums=(0, 1), inline=True)
