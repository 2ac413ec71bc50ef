"""What a case computes: its operands, its formula in plain JAX, and whether a result is right."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bench.shapes import BLOCK, Case
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
    shapes = {"a": (problem.a_shape, a)}
    if case.factors == "two":
        shapes["b"] = problem.b_shape, b
    if case.epilogue in ("bias", "bias_gelu"):
        shapes["bias"] = ((case.n,), out)
    if case.epilogue == "residual":
        shapes["residual"] = (problem.out_shape, out)
    if case.epilogue == "swiglu":
        shapes["up"] = (problem.b_shape, b)
    if case.groups:
        shapes["sizes"] = ((case.groups,), jnp.int32)
    shapes |= {name: (shape, jnp.float32) for name, shape in case.scale_shapes.items()}
    if case.direction != "forward":
        shapes["cotangent"] = (problem.out_shape, out)
    return {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}


def operand_bytes(case: Case) -> int:
    """Returns the size of one set of operands."""
    return sum(shape.size * shape.dtype.itemsize for shape in operand_shapes(case).values())


def make_operands(case: Case, key: jax.Array) -> Operands:
    """Returns operands drawn from N(0, 1), for the power that a GPU draws depends on its data.

    Sizes of groups are the case's. Scales of blocks are positive.
    """
    shapes = operand_shapes(case)
    keys = jax.random.split(key, len(shapes))
    found = {
        name: jnp.asarray(case.sizes) if name == "sizes" else normal(key, shape.shape, shape.dtype)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return found | {name: jnp.exp(found[name]) for name in case.scale_shapes}


def plain(case: Case, by_groups: Callable[..., jax.Array] = lax.ragged_dot) -> Formula:
    """Returns what a user of JAX would write, to be put under `jax.jit`.

    Args:
        case: The product to compute.
        by_groups: The function that multiplies rows in groups, with the arguments of
            `lax.ragged_dot`.
    """

    def product(a: jax.Array, b: jax.Array, *sizes: jax.Array) -> jax.Array:
        multiply: Callable[..., jax.Array] = by_groups if case.groups else jnp.matmul
        dtype = case.problem.out_dtype
        return multiply(*_upright(case, a, b), *sizes, preferred_element_type=dtype)

    return formula(case, product)


def exact(case: Case) -> Formula:
    """Returns the reference: everything in float32 (integers in int32), and not rounded."""

    def product(a: jax.Array, b: jax.Array, *sizes: jax.Array) -> jax.Array:
        multiply = _by_groups if case.groups else jnp.matmul
        return multiply(*_upright(case, a, b), *sizes, precision="highest")

    compute = formula(case, product)
    return lambda operands: compute(accuracy.widened(operands))


def _by_groups(a: jax.Array, b: jax.Array, sizes: jax.Array, precision: Any) -> jax.Array:
    """Computes a product of groups, group by group: all rows by its matrix, and its own count."""
    ends = jnp.cumsum(sizes)
    row = lax.broadcasted_iota(ends.dtype, (a.shape[0], 1), 0)

    # What is derived computes its rows anew, for those of all groups would fill the memory.
    @jax.checkpoint
    def add(total: jax.Array, group: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        matrix, size, end = group
        is_own = (end - size <= row) & (row < end)
        rows = jnp.where(is_own, a, jnp.zeros_like(a))
        return total + jnp.matmul(rows, matrix, precision=precision), None

    shape = (a.shape[0], b.shape[2])
    return lax.scan(add, jnp.zeros(shape, a.dtype), (b, sizes, ends))[0]


def formula(case: Case, product: Callable[..., jax.Array]) -> Formula:
    """Returns a case's formula on top of a matrix multiply of two operands as they are stored.

    Args:
        case: The product to compute.
        product: Takes both operands, and the sizes of groups if there are any.
    """

    def forward(operands: Operands) -> jax.Array:
        sizes = [operands["sizes"]] if case.groups else []
        if case.scales == "blocks":
            return product(*_scaled(case, operands))
        total = product(operands["a"], operands.get("b", operands["a"]), *sizes)
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
        result, pull = jax.vjp(
            lambda a, b: forward(operands | {"a": a, "b": b}), operands["a"], operands["b"]
        )
        gradients = pull(operands["cotangent"].astype(result.dtype))
        return gradients if case.direction == "backward" else (result, *gradients)

    return run


def _scaled(case: Case, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Returns what operands with scales of blocks stand for, in the type of the result or wider."""
    rows, cols = operands["row_scale"], operands["col_scale"].T
    pairs = (("a", jnp.repeat(rows, BLOCK, 1)), ("b", _repeated(cols, (case.n, case.k))))
    narrow = operands["a"].dtype.itemsize == 1
    dtype = case.problem.out_dtype if narrow else operands["a"].dtype
    a, b = ((operands[name].astype(jnp.float32) * scale).astype(dtype) for name, scale in pairs)
    return a, b


def _repeated(scale: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Returns the scale of each element of blocks in both dimensions."""
    return jnp.repeat(jnp.repeat(scale, BLOCK, 0), BLOCK, 1)[: shape[0], : shape[1]]


def _upright(case: Case, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    return (
        a.swapaxes(-1, -2) if case.problem.transpose_a else a,
        b.swapaxes(-1, -2) if case.problem.transpose_b else b,
    )


def worst_error(results: Results, reference: Results, xla_errors: Results) -> float:
    """Returns the largest error of a tile in units of XLA's error in the same tile.

    Args:
        results: The result to check.
        reference: The result of `exact`.
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
