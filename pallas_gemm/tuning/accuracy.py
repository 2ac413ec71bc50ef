"""Whether a product is right: its errors, tile by tile, beside those of XLA in the same types.

Benchmarks and tuning judge by this one rule, on operands that are drawn alike.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

TILE = 128
"""Results are compared tile by tile, so that one wrong tile cannot hide among the right ones."""

ALLOWED = 2.0
"""The error of a result may be this many times the error of XLA's product in the same types."""


def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Draws an operand to check and time with: N(0, 1), integers scaled to fill their range."""
    values = jax.random.normal(key, shape, jnp.float32)
    if jnp.issubdtype(dtype, jnp.integer):
        # Three deviations fill the range of an 8-bit integer.
        return jnp.clip(jnp.round(values * 42), -127, 127).astype(dtype)
    return values.astype(dtype)


@jax.jit
def tile_errors(result: jax.Array, reference: jax.Array) -> jax.Array:
    """Returns the largest absolute error within each tile of the last two dimensions.

    A NaN is an infinite error: a maximum may pass over it.
    """
    error = jnp.abs(result.astype(jnp.float32) - reference.astype(jnp.float32))
    error = jnp.where(jnp.isnan(error), jnp.inf, error)
    *batch, rows, cols = error.shape
    down, across = -(-rows // TILE), -(-cols // TILE)
    filled = [(0, 0)] * len(batch) + [(0, down * TILE - rows), (0, across * TILE - cols)]
    tiled = jnp.pad(error, filled).reshape(*batch, down, TILE, across, TILE)
    return tiled.max(axis=(-3, -1))


@jax.jit
def worst_error(result: jax.Array, reference: jax.Array, xla_errors: jax.Array) -> jax.Array:
    """Returns the largest error of a tile in units of XLA's error in the same tile.

    Args:
        result: The result to check.
        reference: The product in float32 (integers in int32), not rounded.
        xla_errors: `tile_errors` of XLA's product.

    Returns:
        At most `ALLOWED` for a right result; infinite if it holds a NaN or is wrong where XLA is
        exact.
    """
    errors = tile_errors(result, reference)
    # An infinite error of both is no excuse.
    wrong = (errors > 0) & ((xla_errors == 0) | jnp.isinf(errors))
    return jnp.where(wrong, jnp.inf, jnp.where(errors == 0, 0.0, errors / xla_errors)).max()


def compiled_at_once(f: Callable[..., Any], *operands: Any) -> Callable[..., Any]:
    """Compiles a function that is run once or twice: XLA does not look for its fastest way.

    It is not for the product of XLA that results are compared with: how that adds up depends on the
    way that was found fastest.

    Args:
        f: The function.
        *operands: Its arguments, or `jax.ShapeDtypeStruct`s in their place.
    """
    options: dict[str, Any] = {"xla_gpu_autotune_level": 0}
    return jax.jit(f).lower(*operands).compile(compiler_options=options)


def compiled_reference(product: Callable[..., Any], *operands: Any) -> Callable[..., Any]:
    """Compiles a reference, which takes operands as they are.

    Another program widens them: where XLA sees that operands came from 8 bits, it may multiply them
    as such on tensor cores, which add up with fewer bits than float32 has.

    Args:
        product: Computes it from operands in float32 (integers in int32).
        *operands: Its operands before they are widened, or `jax.ShapeDtypeStruct`s in their place.
    """
    widen = compiled_at_once(widened, operands)
    compute = compiled_at_once(product, *jax.eval_shape(widened, operands))
    return lambda *given: compute(*widen(given))


def widened(operands: Any) -> Any:
    """Returns a tree of operands in float32, integers in int32."""

    def wide(x: jax.Array) -> jax.Array:
        return x.astype(jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32)

    return jax.tree.map(wide, operands)
