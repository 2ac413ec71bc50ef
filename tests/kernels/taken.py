"""Operands in the order and the arrays in which a kernel takes them."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm.call import Operands
from pallas_gemm.problem import Problem


def as_taken(problem: Problem, operands: Operands) -> list[jax.Array]:
    """The arrays that a kernel takes: `operands`, or those of each product of a sum in turn."""
    if not problem.terms:
        return list(operands.present())
    cuts = np.cumsum(problem.terms)[:-1]
    lefts = jnp.split(operands.a, cuts, -2 if problem.transpose_a else -1)
    rights = jnp.split(operands.b, cuts, -1 if problem.transpose_b else -2)
    return [x for pair in zip(lefts, rights, strict=True) for x in pair]
