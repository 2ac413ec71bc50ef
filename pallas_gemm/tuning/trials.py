"""What a product is tried with: operands that are drawn, and results to hold a config's against."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm.call import DIMENSIONS, Call, Operands
from pallas_gemm.planning.by_xla import xla
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import accuracy

Runner = Callable[..., jax.Array]
"""Computes a product: a function of its operands."""

COLD_BYTES = 2**28
"""Operands are rotated until this much has been read: several times the L2 of any GPU."""
MOST_SETS = 32


def by_xla(problem: Problem, out_dtype: Any = None, precision: Any = None) -> Runner:
    """Returns XLA's product of a kernel's operands.

    Operands may have been made longer for the kernel, which then leaves out what is too much of
    the result. XLA, which takes any size, multiplies what they were made of. Where the sums of
    8-bit floats are short, so are XLA's.
    """
    if precision is None and problem.blocks is not None and not problem.scales:
        precision = jax.lax.Precision.HIGHEST
    call = Call(
        problem.out_dtype if out_dtype is None else out_dtype,
        problem.transpose_a,
        problem.transpose_b,
        problem.epilogue,
        precision,
    )
    rows, cols = problem.kept or (problem.m, problem.n)

    def product(*operands: jax.Array) -> jax.Array:
        given = call.unpack(operands)
        a = given.a[..., :rows] if problem.transpose_a else given.a[..., :rows, :]
        b, up = (
            x if x is None else x[..., :cols, :] if problem.transpose_b else x[..., :cols]
            for x in (given.b, given.up)
        )
        residual = None if given.residual is None else given.residual[..., :cols]
        cut = given._replace(a=a, b=b, up=up, residual=residual)
        return xla.product(call, *cut.present())

    return product


def exact(problem: Problem) -> Runner:
    """Returns the product of wide operands, not rounded.

    It is a program of its own: in one with XLA's product, XLA may leave out the rounding of that.
    """
    return by_xla(problem, exact_dtype(problem), jax.lax.Precision.HIGHEST)


def exact_dtype(problem: Problem) -> np.dtype:
    """Returns the type of a result that is not rounded: float32, or int32 of integers."""
    return np.dtype(np.int32 if np.issubdtype(problem.out_dtype, np.integer) else np.float32)


def operand_shapes(problem: Problem) -> Operands:
    """Returns shape and type of each operand, as a kernel takes it."""
    epilogue = problem.epilogue
    types = {"bias": problem.out_dtype, "residual": problem.added_dtype}
    b = jax.ShapeDtypeStruct(problem.b_shape, problem.b_dtype)
    sizes: dict[str, int] = dict(zip("mn", problem.out_shape[-2:], strict=True))
    extras = {
        name: jax.ShapeDtypeStruct(
            problem.residual_shape
            if name == "residual"
            else tuple(sizes[letter] for letter in DIMENSIONS[name]),
            types.get(name, np.dtype(np.float32)),
        )
        for name in epilogue.operands
    }
    return Operands(
        jax.ShapeDtypeStruct(problem.a_shape, problem.a_dtype),
        b,
        b if epilogue.gated else None,
        **extras,
    )


def drawn(problem: Problem, key: jax.Array) -> tuple[jax.Array, ...]:
    """Draws operands from N(0, 1), for the power that a GPU draws depends on its data."""
    shapes = operand_shapes(problem).present()
    keys = jax.random.split(key, len(shapes))
    arrays = [accuracy.normal(k, x.shape, x.dtype) for k, x in zip(keys, shapes, strict=True)]
    if problem.symmetric:
        # A Gram matrix is of one array, and a square is the one product of any two that commute.
        a = arrays[0] if problem.symmetric == "gram" else _mean_with_its_transpose(arrays[0])
        arrays[:2] = a, a
        place = 2 + (*problem.epilogue.operands, "residual").index("residual")
        arrays[place : place + 1] = map(_mean_with_its_transpose, arrays[place : place + 1])
    return tuple(arrays)


def _mean_with_its_transpose(x: jax.Array) -> jax.Array:
    return (x + jnp.swapaxes(x, -1, -2)) / 2


def sets(problem: Problem, draw: Callable[[jax.Array], Any]) -> list[tuple[jax.Array, ...]]:
    """Draws operands to take in turn, enough that each is out of the cache at its next turn."""
    read = sum(x.size * x.dtype.itemsize for x in operand_shapes(problem).present())
    count = min(MOST_SETS, math.ceil(COLD_BYTES / read))
    return [draw(key) for key in jax.random.split(jax.random.key(0), count)]
