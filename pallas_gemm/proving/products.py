"""Operands with known products: what the kernel tests run on, simulated and on a GPU."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm.call import DIMENSIONS, Operands
from pallas_gemm.problem import Problem


def small_integers(problem: Problem, rng: np.random.Generator) -> Operands:
    """Operands whose products and sums are exact in every dtype and order of summation."""
    return _operands(problem, lambda shape: rng.integers(-2, 3, shape))


def normal(problem: Problem, rng: np.random.Generator) -> Operands:
    """Operands as they occur: N(0, 1)."""
    return _operands(problem, rng.standard_normal)


def exact(problem: Problem, operands: Operands) -> np.ndarray:
    """The product in float64 with its epilogue, not rounded."""
    a = np.asarray(operands.a).astype(np.float64)
    a = a.swapaxes(-1, -2) if problem.transpose_a else a

    def given(x: jax.Array | None, *index: Any, otherwise: Any) -> Any:
        return otherwise if x is None else np.asarray(x).astype(np.float64)[(..., *index)]

    def value(b: jax.Array, scale: jax.Array | None, bias: jax.Array | None) -> np.ndarray:
        wide = np.asarray(b).astype(np.float64)
        whole = a @ (wide.swapaxes(-1, -2) if problem.transpose_b else wide)
        alpha = given(operands.alpha, None, None, otherwise=epilogue.alpha)
        scaled = alpha * given(operands.row_scale, None, otherwise=1) * whole[..., :rows, :cols]
        return scaled * given(scale, None, slice(None), otherwise=1) + given(
            bias, None, slice(None), otherwise=0
        )

    epilogue = problem.epilogue
    rows, cols = problem.kept or (problem.m, problem.n)
    out = value(operands.b, operands.col_scale, operands.bias)
    if epilogue.activation is not None:
        out = np.asarray(epilogue.activation(jnp.asarray(out, jnp.float32)), np.float64)
    if operands.up is not None:
        out = out * value(operands.up, operands.up_scale, operands.up_bias)
    if operands.residual is not None:
        residual = np.asarray(operands.residual).astype(np.float64)
        beta = given(operands.beta, None, None, otherwise=epilogue.beta)
        out = out + beta * residual[..., :cols]
    return out


def rounded(problem: Problem, values: np.ndarray) -> np.ndarray:
    """Rounds once to the result's dtype, and returns float64 for comparing."""
    wide = values.astype(problem.accumulator_dtype)
    return wide.astype(problem.out_dtype).astype(np.float64)


def _operands(problem: Problem, draw: Any) -> Operands:
    epilogue = problem.epilogue
    *batch, rows, cols = problem.out_shape
    sizes = {"m": (rows,), "n": (cols,), "": ()}
    extras = {
        name: _converted(draw(problem.residual_shape), problem.out_dtype)
        if name == "residual"
        else _converted(draw((*batch, *sizes[DIMENSIONS[name]])), jnp.float32)
        for name in epilogue.operands
    }
    return Operands(
        _converted(draw(problem.a_shape), problem.a_dtype),
        _converted(draw(problem.b_shape), problem.b_dtype),
        _converted(draw(problem.b_shape), problem.b_dtype) if epilogue.gated else None,
        **extras,
    )


def _converted(numbers: np.ndarray, dtype: Any) -> jax.Array:
    """Converts with NumPy, for which JAX would compile a program for each shape and type."""
    return jnp.asarray(numbers.astype(dtype))


def transposed(problem: Problem, layout: str) -> Problem:
    """The same product with its operands stored in another layout."""
    return dataclasses.replace(problem, transpose_a=layout[0] == "T", transpose_b=layout[1] == "T")
