"""`lax.dot_general` for which XLA computes no less than the precision asks for.

XLA computes a single product of bfloat16 for X9, and for X3 and X6 if the result is one row or one
column: it takes the small terms for zeros. We ask it for float32 instead.
"""

import math
from typing import Any

import jax
from jax import lax
from jax.lax import dot_general as stock_dot_general

FORGOTTEN = lax.DotAlgorithmPreset.BF16_BF16_F32_X9
FORGOTTEN_OF_VECTORS = (
    FORGOTTEN,
    lax.DotAlgorithmPreset.BF16_BF16_F32_X6,
    lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
)


def dot_general(
    a: jax.Array, b: jax.Array, numbers: Any, *, precision: Any, **rest: Any
) -> jax.Array:
    """Computes `lax.dot_general` with the same arguments."""
    (of_a, of_b), (batch_a, batch_b) = numbers
    own = _free(a, of_a, batch_a), _free(b, of_b, batch_b)
    return stock_dot_general(a, b, numbers, precision=enough(precision, is_vector=1 in own), **rest)


def enough(precision: Any, *, is_vector: bool) -> Any:
    """Returns the precision to ask of XLA.

    Args:
        precision: As `precision.resolve` returns it.
        is_vector: The result, or each of a batch, has one row or one column.
    """
    is_forgotten = precision in FORGOTTEN_OF_VECTORS if is_vector else precision == FORGOTTEN
    return (lax.Precision.HIGHEST,) * 2 if is_forgotten else precision


def _free(x: jax.Array, contracted: Any, batch: Any) -> int:
    """Returns how many rows, or columns, of the product come from an operand."""
    return math.prod(x.shape[i] for i in range(x.ndim) if i not in (*contracted, *batch))
