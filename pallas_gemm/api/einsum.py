"""`einsum`: one pair of operands after the other, each pair by `dot_general`.

A pair is one product if its indices are those of batch, free and contracted dimensions. What is
left over is done around it: a dimension of size 1 that broadcasts is dropped, an index that only
one operand has and the result has not is summed out first, a diagonal is taken first, and a result
whose indices stand in another order is transposed.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import opt_einsum
from jax.sharding import NamedSharding

from pallas_gemm.api.gemm import dot_general

Multiply = Callable[..., jax.Array]


def einsum(
    subscripts: Any,
    /,
    *operands: Any,
    optimize: Any = "auto",
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Computes `jnp.einsum`, with the same arguments, its products by `dot_general`.

    >>> layer = nnx.Einsum("bsd,dhk->bshk", (512, 8, 64), einsum_op=einsum)  # doctest: +SKIP

    Args:
        subscripts: As for `jnp.einsum`.
        *operands: As for `jnp.einsum`; more than two are multiplied in pairs.
        optimize: As for `jnp.einsum`: how the pairs are found.
        precision: Of every product, as for `lax.dot_general`.
        preferred_element_type: Type of the result, and of those in between.
        out_sharding: The result's sharding under an explicit mesh.

    Returns:
        The result.

    Raises:
        ValueError: The subscripts do not fit the operands, or `optimize` puts three or more
            operands into one step.
    """
    if not isinstance(subscripts, str):
        found = opt_einsum.parser.parse_einsum_input((subscripts, *operands))
        subscripts, operands = f"{found[0]}->{found[1]}", tuple(found[2])
    arrays = [jnp.asarray(x) for x in operands]
    dtype = preferred_element_type or jnp.result_type(*arrays)
    if jnp.issubdtype(dtype, jnp.bool_):
        how: dict[str, Any] = {"optimize": optimize, "out_sharding": out_sharding}
        return jnp.einsum(subscripts, *arrays, **how)
    path = tuple(optimize) if isinstance(optimize, list) else optimize
    steps = _steps(subscripts, tuple(x.shape for x in arrays), path)
    for taken, equation in steps:
        chosen = [arrays.pop(i) for i in taken]
        last = out_sharding if not arrays else None
        if len(chosen) == 1:
            arrays.append(_unary(equation, chosen[0], dtype, last).astype(dtype))
            continue
        multiply = functools.partial(dot_general, precision=precision, preferred_element_type=dtype)
        arrays.append(_pair(equation, *chosen, dtype=dtype, multiply=multiply, sharding=last))
    return arrays[0]


@functools.lru_cache(maxsize=4096)
def _steps(
    subscripts: str, shapes: tuple[tuple[int, ...], ...], optimize: Any
) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Returns which operands each step takes off the list, and its equation, without dots."""
    path = list(optimize) if isinstance(optimize, tuple) else optimize
    _, found = opt_einsum.contract_path(subscripts, *shapes, shapes=True, optimize=path)
    steps = tuple((tuple(step[0]), step[2]) for step in found.contraction_list)
    if crowded := [equation for taken, equation in steps if len(taken) > 2]:
        raise ValueError(
            f"optimize={optimize!r} multiplies three or more operands in one step"
            f" ({crowded[0]!r}); legal are 'auto' and paths of pairs"
        )
    return steps


def _unary(equation: str, x: jax.Array, dtype: Any, sharding: Any = None) -> jax.Array:
    # As JAX does it, but where types must not be mixed too: a sum of int8 would overflow.
    with jax.numpy_dtype_promotion("standard"):
        wide = jnp.promote_types(x.dtype, dtype)
    return jnp.einsum(equation, x.astype(wide), out_sharding=sharding)


def _pair(
    equation: str, x: jax.Array, y: jax.Array, *, dtype: Any, multiply: Multiply, sharding: Any
) -> jax.Array:
    """Computes one equation of two operands."""
    operands, _, result = equation.partition("->")
    x_names, _, y_names = operands.partition(",")
    x, x_names = _without_ones(x, x_names, y, y_names)
    y, y_names = _without_ones(y, y_names, x, x_names)
    x, x_names = _alone(x, x_names, y_names + result, dtype)
    y, y_names = _alone(y, y_names, x_names + result, dtype)
    batch = [name for name in result if name in x_names and name in y_names]
    contracted = [name for name in x_names if name in y_names and name not in result]

    def natural(first: str, second: str) -> str:
        shared = {*batch, *contracted}
        return "".join(batch + [name for name in first + second if name not in shared])

    # The order that leaves nothing to transpose, where there is one.
    if natural(x_names, y_names) != result == natural(y_names, x_names):
        x, x_names, y, y_names = y, y_names, x, x_names
    names = natural(x_names, y_names)
    numbers = tuple(
        tuple(tuple(side.index(name) for name in group) for side in (x_names, y_names))
        for group in (contracted, batch)
    )
    if names == result:
        return multiply(x, y, numbers, out_sharding=sharding)
    sharding = _reordered(sharding, [result.index(name) for name in names])
    product = multiply(x, y, numbers, out_sharding=sharding)
    return jnp.transpose(product, [names.index(name) for name in result])


def _without_ones(x: jax.Array, names: str, other: jax.Array, others: str) -> tuple[Any, str]:
    """Drops dimensions of size 1 that broadcast against the other operand's."""
    ones = {
        name
        for name, size in zip(names, x.shape, strict=True)
        if size == 1 and name in others and other.shape[others.index(name)] != 1
    }
    if not ones:
        return x, names
    x = jnp.squeeze(x, [i for i, name in enumerate(names) if name in ones])
    return x, "".join(name for name in names if name not in ones)


def _alone(x: jax.Array, names: str, wanted: str, dtype: Any) -> tuple[jax.Array, str]:
    """Takes diagonals and sums out what neither the other operand nor the result has."""
    kept = "".join(name for name in dict.fromkeys(names) if name in wanted)
    return (x, names) if kept == names else (_unary(f"{names}->{kept}", x, dtype), kept)


def _reordered(sharding: Any, order: list[int]) -> Any:
    """Returns the sharding of a result before it is transposed; dimension i was `order[i]`."""
    if sharding is None:
        return None
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    entries = (*spec, *(None,) * (len(order) - len(spec)))
    spec = spec.update(partitions=tuple(entries[i] for i in order))
    return NamedSharding(sharding.mesh, spec) if isinstance(sharding, NamedSharding) else spec
