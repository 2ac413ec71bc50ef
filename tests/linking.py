"""What XLA's CPU backend cannot do: a test that needs such a program is skipped.

XLA converts between float16 and float32 by an instruction, or by a function that its CPU backend
does not find. Many tests go through all types, so that none of them says which programs it makes.

Of products of bfloat16 in float32 whose left factor is transposed, some fail: a pass of XLA leaves
them to a library that does not take them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

UNLINKED = "Failed to materialize symbols"
"""Stands in the error of a program that cannot be linked."""
UNTAKEN = "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32"
"""Stands in the error of a program whose product nothing computes."""


@functools.cache
def why_no_float16() -> str | None:
    """Runs the smallest program with float16; returns why it cannot be linked, None if it can."""
    try:
        jax.jit(lambda x: x.astype(jnp.float32))(np.ones(1, np.float16)).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        if UNLINKED in str(error):
            return "XLA cannot link float16 for this processor"
        raise
    return None


@functools.cache
def why_untaken() -> str | None:
    """Multiplies as plain JAX programs do; returns why it cannot be done, None if it can."""
    x, y = np.ones((32, 64), np.int8), np.ones((4, 32, 32), np.int8)

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        factors = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
        return jnp.einsum("km,xky->mxy", *factors, preferred_element_type=jnp.float32)

    try:
        jax.jit(product)(x, y).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        if UNTAKEN in str(error):
            return (
                "XLA cannot multiply a transposed factor of bfloat16 by another on this processor"
            )
        raise
    return None


def skipped(report: pytest.TestReport) -> pytest.TestReport:
    """Returns the report of a test, as that of a skipped one where XLA cannot do what it needs."""
    for text, why_not in ((UNLINKED, why_no_float16), (UNTAKEN, why_untaken)):
        if report.failed and text in str(report.longrepr) and (why := why_not()):
            path, line, _ = report.location
            report.outcome = "skipped"
            report.longrepr = (path, line or 0, f"Skipped: {why}")
    return report
