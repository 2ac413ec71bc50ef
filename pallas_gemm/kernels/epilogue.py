"""What happens to a sum before it is rounded: the arithmetic of `Epilogue` on a part of a tile."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import elementwise, launch, place
from pallas_gemm.problem import Problem


class Part(NamedTuple):
    """A part of a tile in the registers of a warpgroup.

    Attributes:
        batch: Which product of the batch it is of; None without one.
        rows: (first row, how many), in the order of the kernel's own rows and columns.
        cols: (first column, how many).
        layout: How its values lie in registers.
    """

    batch: Any
    rows: tuple[Any, int]
    cols: tuple[Any, int]
    layout: Any


def finish(problem: Problem, gmem: launch.Inputs, part: Part, total: Any, up: Any = None) -> Any:
    """Applies the epilogue to some of the sums, and rounds them.

    They are not rounded yet if a residual is still to be added.

    Args:
        problem: The product to compute.
        gmem: The operands in global memory.
        part: Which part of a tile it is.
        total: Sums, `[rows, columns]`; those of the gate if the result is gated.
        up: The other sums of a gated result.
    """
    epilogue = problem.epilogue
    load = _loader(problem, part)
    values = _value(problem, load, total, gmem, (gmem.col_scale, gmem.bias))
    if epilogue.activation is not None:
        values = elementwise.plain(epilogue.activation)(values)
    if up is not None:
        values = values * _value(problem, load, up, gmem, (gmem.up_scale, gmem.up_bias))
    return values if epilogue.residual else values.astype(problem.out_dtype)


def add_residual(
    problem: Problem, gmem: launch.Inputs, batch: Any, values: Any, residual: Any
) -> Any:
    """Adds the residual to what `finish` returned, and rounds."""
    beta = problem.epilogue.beta
    factor = place.scalar(gmem.beta, batch) if beta is None else jnp.float32(beta)
    return (values + factor * residual.astype(jnp.float32)).astype(problem.out_dtype)


Load = Callable[..., Any]
"""`load(vector, along)`: the values of a vector for a part of a tile, of as many dimensions."""


def _value(
    problem: Problem, load: Load, total: Any, gmem: launch.Inputs, of_columns: tuple[Any, Any]
) -> Any:
    """Scales a sum and adds the bias; `of_columns` are a scale and a bias of columns."""
    alpha, (scale, bias) = problem.epilogue.alpha, of_columns
    values = total
    if jnp.issubdtype(problem.out_dtype, jnp.floating):
        values = values.astype(jnp.float32)
    if alpha is None:
        values = values * load(gmem.alpha, "")
    elif alpha != 1:
        values = values * jnp.float32(alpha)
    if gmem.row_scale is not None:
        values = values * load(gmem.row_scale, "m")
    if scale is not None:
        values = values * load(scale, "n")
    if bias is not None:
        values = values + load(bias, "n")
    return values


def _loader(problem: Problem, part: Part) -> Load:
    """Returns how vectors are loaded for a part of a tile."""

    def load(vector: Any, along: str) -> Any:
        if not along:
            return place.scalar(vector, part.batch)
        # Rows of the result are columns of a kernel that keeps its sums transposed.
        axis = "mn".index(along) ^ problem.transpose_out
        here = pl.ds(*(part.rows, part.cols)[axis])
        # The layout that a sum over the other axis would have.
        layout = part.layout.reduce(1 - axis)
        values = plgpu.load(
            place.vector(vector, part.batch).at[here], layout=layout, optimized=False
        )
        return lax.broadcast_in_dim(values, (part.rows[1], part.cols[1]), (axis,))

    return load
