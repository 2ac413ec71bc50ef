"""Names for what a kernel is given while it is traced, which to Python is anything; division."""

from typing import Any

import jax.numpy as jnp
from jax import lax

Scalar = Any
"""A traced int32."""
Values = Any
"""An array in registers."""
Ref = Any
"""A reference to an array in memory: global, shared or tensor memory."""


def divided(dividend: Scalar, divisor: int) -> tuple[Scalar, Scalar]:
    """Returns the quotient and the rest of what is not negative."""
    by = jnp.int32(divisor)
    return lax.div(dividend, by), lax.rem(dividend, by)
