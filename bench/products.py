"""What a case computes: its operands, its formula in plain JAX, and whether a result is right."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from bench.shapes import Case
from pallas_gemm.tuning import accuracy

Operands = dict[str, jax.Array]
Results = tuple[jax.Array, ...]
Formula = Callable[[Operands], Results]

normal = jax.jit(accuracy.normal, static_argnums=(1, 2))
"""Draws an operand from N(0, 1), as tuning does; integers are scaled to fill their range."""


def operand_shapes(case: Case) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the operands of a case by their names."""
    problem = case.problem
    a, b, out = problem.a_dtype, problem.b_dtype, problem.out_dtype
    shapes = {"a": (problem.a_shape, a), "b": (problem.b_shape, b)}
    if case.epilogue in ("bias", "bias_gelu"):
        shapes["bias"] = ((case.n,), out)
    if case.epilogue == "residual":
        shapes["residual"] = (problem.out_shape, out)
    if case.epilogue == "swiglu":
        shapes["up"] = (problem.b_shape, b)
    if case.direction != "forward":
        shapes["cotangent"] = (problem.out_shape, out)
    return {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}


def operand_bytes(case: Case) -> int:
    """Returns the size of one set of operands."""
    return sum(shape.size * shape.dtype.itemsize for shape in operand_shapes(case).values())


def make_operands(case: Case, key: jax.Array) -> Operands:
    """Returns operands drawn from N(0, 1), for the power that a GPU draws depends on its data."""
    shapes = operand_shapes(case)
    keys = jax.random.split(key, len(shapes))
    return {
        name: normal(key, shape.shape, shape.dtype)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def plain(case: Case) -> Formula:
    """Returns what a user of JAX would write, to be put under `jax.jit`."""

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(*_upright(case, a, b), preferred_element_type=case.problem.out_dtype)

    return formula(case, product)


def exact(case: Case) -> Formula:
    """Returns the reference: everything in float32 (integers in int32), and not rounded."""

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(*_upright(case, a, b), precision="highest")

    compute = formula(case, product)
    return lambda operands: compute(accuracy.widened(operands))


def formula(case: Case, product: Callable[[jax.Array, jax.Array], jax.Array]) -> Formula:
    """Returns a case's formula on top of a matrix multiply of two operands as they are stored."""

    def forward(operands: Operands) -> jax.Array:
        total = product(operands["a"], operands["b"])
        match case.epilogue:
            case "bias":
                return total + operands["bias"][None]
            case "bias_gelu":
                return jax.nn.gelu(total + operands["bias"][None])
            case "residual":
                return total + operands["residual"]
            case "swiglu":
                return jax.nn.silu(total) * product(operands["a"], operands["up"])
        return total

    def run(operands: Operands) -> Results:
        if case.direction == "forward":
            return (forward(operands),)
        result, pull = jax.vjp(product, operands["a"], operands["b"])
        gradients = pull(operands["cotangent"].astype(result.dtype))
        return gradients if case.direction == "backward" else (result, *gradients)

    return run


def _upright(case: Case, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    return (
        a.swapaxes(-1, -2) if case.problem.transpose_a else a,
        b.swapaxes(-1, -2) if case.problem.transpose_b else b,
    )


def worst_error(results: Results, reference: Results, xla_errors: Results) -> float:
    """Returns the largest error of a tile in units of XLA's error in the same tile.

    Args:
        results: What is checked.
        reference: What `exact` gives.
        xla_errors: `accuracy.tile_errors` of XLA's product.

    Returns:
        At most `accuracy.ALLOWED` for right results; infinite if one has another shape, holds a
        NaN, or is wrong where XLA is exact.
    """
    worst = 0.0
    for result, expected, allowed in zip(results, reference, xla_errors, strict=True):
        if result.shape != expected.shape:
            return float("inf")
        worst = max(worst, float(accuracy.worst_error(result, expected, allowed)))
    return worst
