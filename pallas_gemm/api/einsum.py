"""`einsum`: JAX's own, which comes down to one `dot_general` after the other, with ours."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.numpy import einsum as stock_einsum

from pallas_gemm.api import arguments, request
from pallas_gemm.api.few_bits import weight_operands
from pallas_gemm.api.gemm import answer, dot_general, gemm
from pallas_gemm.call import Numerics, Options
from pallas_gemm.op.contraction import of_dot_general
from pallas_gemm.planning import numerics as planned


def einsum(
    subscripts: Any,
    /,
    *operands: Any,
    out: None = None,
    optimize: Any = "auto",
    precision: Any = None,
    preferred_element_type: Any = None,
    _dot_general: Callable[..., jax.Array] = dot_general,
    out_sharding: Any = None,
    numerics: Numerics | None = None,
) -> jax.Array:
    """Computes `jnp.einsum`, with the same arguments, its products by `dot_general`.

    >>> layer = nnx.Einsum("bsd,dhk->bshk", (512, 8, 64), einsum_op=einsum)  # doctest: +SKIP

    Args:
        subscripts: As for `jnp.einsum`.
        *operands: As for `jnp.einsum`; more than two are multiplied in pairs. A `QuantizedWeight`
            is one of few bits in "...k,kn->...n", and the array that it stands for elsewhere.
        out: None; there is no other value that `jnp.einsum` takes.
        optimize: As for `jnp.einsum`: how the pairs are found.
        precision: The precision of every product, as for `lax.dot_general`.
        preferred_element_type: Type of the result, and of those in between.
        _dot_general: The function that multiplies a pair; layers of neural networks pass theirs.
        out_sharding: The result's sharding under an explicit mesh.
        numerics: As for `gemm`. The rows are those of the first of two operands.

    Returns:
        The result.

    Raises:
        ValueError: Something is promised of more than two operands, or of what is no one product.
    """
    promised = planned.stated(arguments.options(None, None, None, numerics)).numerics
    if promised is not None and len(operands) != 2:
        why = f"{len(operands)} operands are multiplied in an order that depends on their sizes"
        raise ValueError(planned.why_not_kept(promised, why))
    if _dot_general is dot_general and out_sharding is None:
        axis = weight_operands.contracted_axis(subscripts, operands)
        if axis is not None:
            how = {"precision": precision, "preferred_element_type": preferred_element_type}
            return gemm(*operands, transpose_b=axis == -1, numerics=numerics, **how)
    operands = weight_operands.arrays(operands)
    if preferred_element_type is not None:
        named = "preferred_element_type", preferred_element_type
        preferred_element_type = arguments.number_type(*named)
    if _dot_general is dot_general and isinstance(subscripts, str) and len(operands) == 2:
        _dot_general = _lettered(subscripts.replace(" ", ""), promised)
    return stock_einsum(
        subscripts,
        *operands,
        out=out,
        optimize=optimize,
        precision=precision,
        preferred_element_type=preferred_element_type,
        _dot_general=_dot_general,
        out_sharding=out_sharding,
    )


@functools.lru_cache(maxsize=4096)
def _lettered(subscripts: str, promised: Numerics | None = None) -> Callable[..., jax.Array]:
    """Returns `dot_general` for a product whose dimensions have letters, always the same one."""
    return functools.partial(_dot_general_of, subscripts, promised)


def _dot_general_of(
    subscripts: str,
    promised: Numerics | None,
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    precision: Any = None,
    **result: Any,
) -> jax.Array:
    letters = _letters(subscripts, lhs.ndim, rhs.ndim, dimension_numbers)
    options = Options(numerics=promised)
    if promised is not None and letters is None:
        why = f"einsum({subscripts!r}) is more than one product of its operands, or JAX swaps them"
        raise ValueError(planned.why_not_kept(promised, why))
    if promised is not None and letters is not None and not subscripts.startswith(f"{letters[0]},"):
        return _swapped(lhs, rhs, dimension_numbers, options, letters, precision, **result)
    asked = request.of_dot_general(
        lhs, rhs, dimension_numbers, options, letters, precision=precision, **result
    )
    return answer(asked)


def _swapped(
    lhs: jax.Array,
    rhs: jax.Array,
    numbers: Any,
    options: Options,
    letters: tuple[str, str],
    precision: Any,
    **result: Any,
) -> jax.Array:
    """Computes a product with its operands in the caller's order, whose first one has the rows."""
    contracting, batch = (tuple(pair[::-1]) for pair in numbers)
    precision = precision[::-1] if isinstance(precision, tuple) else precision
    asked = request.of_dot_general(
        rhs, lhs, (contracting, batch), options, letters[::-1], precision=precision, **result
    )
    own = asked.contraction
    wanted = of_dot_general(lhs.ndim, rhs.ndim, _as_tuples(numbers), letters)
    same = dict(zip(own.lhs + own.rhs, wanted.rhs + wanted.lhs, strict=True))
    found = "".join(same[x] for x in own.out)
    return jnp.transpose(answer(asked), [found.index(x) for x in wanted.out])


def _as_tuples(numbers: Any) -> Any:
    return tuple(tuple(map(tuple, pair)) for pair in numbers)


def _letters(subscripts: str, lhs: int, rhs: int, numbers: Any) -> tuple[str, str] | None:
    """Returns the letters of operands, given their dimensions, in JAX's order.

    None if it cannot be known: JAX may swap operands, and sum or broadcast dimensions first.
    """
    given, _, out = subscripts.partition("->")
    first, second = given.split(",")
    if not all(own.isalpha() and len(set(own)) == len(own) for own in (first, second)):
        return None
    numbers = _as_tuples(numbers)
    shared = len({*first} & {*second})
    found = []
    for own in ((first, second), (second, first)):
        if tuple(map(len, own)) == (lhs, rhs) and sum(len(x) for x, _ in numbers) == shared:
            dims = of_dot_general(lhs, rhs, numbers, own)
            if (dims.lhs, dims.rhs) == own and {*dims.out} == {*out}:
                found.append((own, dims.out == out))
    exact = [own for own, fits in found if fits]
    known = exact if exact else [own for own, _ in found]
    return known[0] if len(known) == 1 else None
