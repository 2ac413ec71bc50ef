"""A program of an epilogue by XLA: on whole arrays, as kernels run it on parts of tiles."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_gemm.kernels.functions.axes import Names
from pallas_gemm.kernels.ptx.reductions import REDUCTIONS
from pallas_gemm.program import Constant, Program, Result


def run(
    program: Program, names: Names, sums: Sequence[Any], operands: Sequence[tuple[Any, str]]
) -> list[Any]:
    """Computes the results of a program.

    Args:
        program: The program.
        names: The dimensions of the sums: batch, rows and columns, in this order.
        sums: The sums.
        operands: Each with its dimensions.

    Returns:
        The results with their dimensions; log-sum-exps have both parts in front.
    """
    shape = sums[0].shape
    made = [x.astype(program.sum_dtype) for x in sums]
    for (x, letters), operand in zip(operands, program.operands, strict=True):
        places = tuple(names.out.index(letter) for letter in letters)
        made.append(lax.broadcast_in_dim(x.astype(operand.dtype), shape, places))
    for step in program.steps:
        inputs = [
            jnp.full(shape, x.value, x.dtype) if isinstance(x, Constant) else made[x]
            for x in step.inputs
        ]
        made.append(step.primitive.bind(*inputs, **dict(step.params)))
    return [_reduced(made[result.value], result, names) for result in program.results]


def _reduced(x: Any, result: Result, names: Names) -> Any:
    """Reduces the rows or the columns of a value, if a result asks for that."""
    if not result.reduction:
        return x
    lead, rows = len(names.batch), len(names.rows)
    along = (lead + rows, x.ndim) if result.kind == "m" else (lead, lead + rows)
    kept = (*x.shape[: along[0]], *x.shape[along[1] :])
    together = x.reshape(*x.shape[: along[0]], -1, *x.shape[along[1] :])
    found = REDUCTIONS[result.reduction].along(together, along[0])
    return found[0].reshape(kept) if result.vectors == 1 else jnp.stack(found)
