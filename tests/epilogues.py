"""Runs the program of an epilogue in plain JAX: what a kernel computes, on whole arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm.kernels.functions import words
from pallas_gemm.kernels.ptx.reductions import REDUCTIONS
from pallas_gemm.problem import Epilogue, Problem
from pallas_gemm.program import Constant, Program


def of_activation(function: Callable[..., Any]) -> Program:
    """Returns the program of an activation of float32 sums, not rounded."""
    epilogue = Epilogue(activation=function)
    return words.program(Problem(64, 64, 64, out_dtype=jnp.float32, epilogue=epilogue))


def run(program: Program, sums: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """Runs a program; operands have the shape of the sums, or 1 where they have no dimension."""
    shape = sums[0].shape
    values = [jnp.asarray(x) for x in sums]
    for x, operand in zip(operands, program.operands, strict=True):
        own = x != 0 if operand.dtype == np.bool_ else x.astype(operand.dtype)
        values.append(jnp.broadcast_to(own, shape))
    for step in program.steps:
        inputs = [
            np.full(shape, x.value, x.dtype) if isinstance(x, Constant) else values[x]
            for x in step.inputs
        ]
        values.append(step.primitive.bind(*map(jnp.asarray, inputs), **dict(step.params)))
    found = []
    for result in program.results:
        x = values[result.value]
        axis = {"m": 1, "n": 0}.get(result.kind)
        if axis is None:
            found.append(x)
            continue
        reduction = REDUCTIONS[result.reduction]
        left = tuple(part[None] for part in reduction.along(x, axis))
        found.append(reduction.joined(left))
    return found


def jitted(program: Program) -> Callable[..., Any]:
    """Returns the first result of a program of sums alone."""
    return jax.jit(lambda x: run(program, [x], [])[0])
