"""What happens to a sum before it is rounded: the arithmetic of `Epilogue` on a part of a tile."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_gemm.kernels import elementwise
from pallas_gemm.problem import Problem


def finish(
    problem: Problem, total: Any, up: Any = None, bias: Any = None, bias_axis: int = 1
) -> Any:
    """Applies the epilogue to some of the sums, and rounds them.

    They are not rounded yet if a residual is still to be added.

    Args:
        problem: What is computed.
        total: Sums, `[rows, columns]`; those of the gate if the result is gated.
        up: The other sums of a gated result.
        bias: The bias of these columns, or None.
        bias_axis: The axis that the bias lies along: 0 where sums are kept transposed.
    """
    epilogue = problem.epilogue

    def scaled(values: Any) -> Any:
        return values if epilogue.alpha == 1 else values * jnp.float32(epilogue.alpha)

    values = scaled(total)
    if bias is not None:
        values = values + lax.broadcast_in_dim(bias, values.shape, (bias_axis,))
    if epilogue.activation is not None:
        values = elementwise.plain(epilogue.activation)(values)
    if up is not None:
        values = values * scaled(up)
    return values if epilogue.residual else values.astype(problem.out_dtype)


def add_residual(problem: Problem, values: Any, residual: Any) -> Any:
    """Adds the residual to what `finish` returned, and rounds."""
    scaled = jnp.float32(problem.epilogue.beta) * residual.astype(jnp.float32)
    return (values + scaled).astype(problem.out_dtype)
