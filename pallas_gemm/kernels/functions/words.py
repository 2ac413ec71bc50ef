"""The words of an epilogue, such as bias and activation, as the program that they stand for."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm.kernels.functions.axes import Names
from pallas_gemm.kernels.functions.parts import Split
from pallas_gemm.kernels.functions.split import split
from pallas_gemm.problem import KINDS, VALUES, Epilogue, Problem
from pallas_gemm.program import Program

_SIZES = {"m": 2, "n": 3}


def program(problem: Problem) -> Program:
    """Returns what becomes of the sums of a problem."""
    epilogue = problem.epilogue
    if epilogue.program is not None:
        return epilogue.program
    return _program(epilogue, problem.accumulator_dtype, problem.out_dtype, problem.added_dtype)


def arranged(problem: Problem, arrays: Sequence[Any], reduced: Sequence[Any]) -> list[Any]:
    """Returns the results of a program in their order."""
    of_each = {True: iter(arrays), False: iter(reduced)}
    return [next(of_each[result.kind == "mn"]) for result in program(problem).results]


@functools.lru_cache(maxsize=1024)
def _program(
    epilogue: Epilogue, sum_dtype: np.dtype, out_dtype: np.dtype, added_dtype: np.dtype
) -> Program:
    sums = 2 if epilogue.gated else 1
    shapes = [jax.ShapeDtypeStruct((2, 3), sum_dtype)] * sums
    for name in epilogue.operands:
        # As rows and columns of a matrix; a kernel takes all but the residual in float32.
        lies = [_SIZES[x] if x in KINDS[name] else 1 for x in "mn"] if KINDS[name] else []
        dtype = added_dtype if name == "residual" else np.float32
        shapes.append(jax.ShapeDtypeStruct(tuple(lies), dtype))
    function = jax.make_jaxpr(functools.partial(_formula, epilogue, out_dtype))(*shapes)
    parts = split(function, Names("mn", "m", "n"), sums)
    assert isinstance(parts, Split), parts
    return parts.program


def _formula(epilogue: Epilogue, out_dtype: np.dtype, *args: Any) -> Any:
    """Computes the result of the sums: see `Epilogue`."""
    sums, operands = args[: 1 + epilogue.gated], args[1 + epilogue.gated :]
    given = dict(zip(epilogue.operands, operands, strict=True))
    pairs = zip(sums, VALUES, strict=False)
    result, *ups = [_value(epilogue, out_dtype, total, given, names) for total, names in pairs]
    if epilogue.activation is not None:
        result = epilogue.activation(result)
    for up in ups:
        result = result * up
    if epilogue.residual:
        beta = given.get("beta", jnp.float32(1.0 if epilogue.beta is None else epilogue.beta))
        result = result + beta * given["residual"].astype(jnp.float32)
    return result.astype(out_dtype)


def _value(
    epilogue: Epilogue, out_dtype: np.dtype, total: Any, given: Any, names: Sequence[str]
) -> Any:
    """Makes a value of a sum, with the operands of these names."""
    *scales, bias = names
    if jnp.issubdtype(out_dtype, jnp.floating) or not epilogue.is_identity:
        total = total.astype(jnp.float32)
    if epilogue.alpha not in (None, 1):
        total = total * jnp.float32(epilogue.alpha)
    for name in scales:
        total = total * given[name] if name in given else total
    return total + given[bias] if bias in given else total
