"""Processors for which XLA cannot link float16: a test that needs such a program is skipped.

XLA converts between float16 and float32 by an instruction, or by a function that its CPU backend
does not find. Many tests go through all types, so that none of them says which programs it makes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

UNLINKED = "Failed to materialize symbols"
"""Stands in the error of a program that cannot be linked."""


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


def skipped(report: pytest.TestReport) -> pytest.TestReport:
    """Returns the report of a test, as that of a skipped one where float16 cannot be linked."""
    if report.failed and UNLINKED in str(report.longrepr) and (why := why_no_float16()):
        path, line, _ = report.location
        report.outcome = "skipped"
        report.longrepr = (path, line or 0, f"Skipped: {why}")
    return report
