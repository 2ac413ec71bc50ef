"""What happens to a sum before it is stored: the program of an epilogue on a strip of a tile."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import launch, place
from pallas_gemm.kernels.functions import saturating, shorter, words
from pallas_gemm.kernels.plan import KernelPlan
from pallas_gemm.kernels.ptx import arrays, prefetch, quick
from pallas_gemm.problem import Problem
from pallas_gemm.program import Constant, Operand, Pick, Program, Step


class Strip(NamedTuple):
    """Columns of a tile to which an epilogue is applied at a time, in registers of a warpgroup.

    Attributes:
        batch: Which product of the batch it is of; None without one.
        rows: (first row of the result, how many), in the order of the kernel's own rows and
            columns.
        cols: (first column of the result, how many).
        layout: How its values lie in registers.
        start: The first column, counted from the first of the tile.
    """

    batch: Any
    rows: tuple[Any, int]
    cols: tuple[Any, int]
    layout: Any
    start: int = 0


ReadLoaded = Callable[[int], Any]
"""`read(number)`: the strip's values of an operand with a value for each element."""


def finish(
    plan: KernelPlan, gmem: launch.Inputs, strip: Strip, sums: Sequence[Any], read: ReadLoaded
) -> list[Any]:
    """Runs the program of an epilogue on the sums of a strip.

    Returns its results, each with a value for each element: those to be reduced are not yet. None
    stands for those of which one is picked in each row.

    Args:
        plan: The kernel's.
        gmem: The operands in global memory.
        strip: Where it lies.
        sums: Sums, `[rows, columns]`; of a gated result those of the gate, then those of up.
        read: Reads operands that pass through shared memory, in their order.
    """
    problem = plan.problem
    program = shorter.shorter(words.program(problem))
    made: dict[int, Any] = {i: _sum(x, program.sum_dtype) for i, x in enumerate(sums)}
    loaded = [i for i, operand in enumerate(program.operands) if operand.kind == "mn"]
    first, shape = program.sums, (strip.rows[1], strip.cols[1])

    def value(number: int) -> Any:
        """Operands are read when they are needed: until then their registers are free."""
        if number not in made:
            i = number - first
            operand = program.operands[i]
            if operand.kind == "mn":
                made[number] = _of_type(read(loaded.index(i)), operand.dtype)
            else:
                made[number] = _load(plan, strip, gmem.operands[i], operand)
        return made[number]

    unused = {x for number, own in program.picked.items() for x in (number, own.compared)}
    for number, step in enumerate(program.steps, first + len(program.operands)):
        if number in unused:
            continue
        inputs = [x if isinstance(x, Constant) else value(x) for x in step.inputs]
        made[number] = _run(plan, program, step, _alike(step, inputs, shape), strip.layout)
    return [None if x.value in unused else value(x.value) for x in program.results]


def _sum(x: Any, dtype: Any) -> Any:
    """Returns a sum in a type. Mosaic would join a cast of whole numbers with the next cast."""
    is_whole = jnp.issubdtype(x.dtype, jnp.integer) and jnp.issubdtype(dtype, jnp.floating)
    return x.astype(dtype) + 0.0 if is_whole else x.astype(dtype)


def expect(plan: KernelPlan, gmem: launch.Inputs, strip: Strip) -> None:
    """Fetches the vectors that the program reads for a strip, before its sums are complete."""
    operands = words.program(plan.problem).operands
    for vector, operand in zip(gmem.operands, operands, strict=True):
        if operand.kind in ("m", "n") and not operand.counts:
            _, (first, count) = _lies(plan, strip, operand)
            prefetch.vector(plan, place.vector(vector, strip.batch), first, count=count)


_IN_ONE_BLOCK = {
    lax.ceil_p: quick.ceil,
    lax.cos_p: quick.cos,
    lax.expm1_p: quick.expm1,
    lax.floor_p: quick.floor,
    lax.round_p: quick.nearest,
    lax.sin_p: quick.sin,
}
"""Operations that have instructions of their own, precise ones."""


def _run(plan: KernelPlan, program: Program, step: Step, inputs: Sequence[Any], layout: Any) -> Any:
    """Runs one step, in the instructions that there are for it."""
    params = dict(step.params)
    if step.primitive is lax.logistic_p and program.is_coarse:
        return quick.sigmoid(plan, *inputs, layout)
    if step.primitive in _IN_ONE_BLOCK:
        return _IN_ONE_BLOCK[step.primitive](plan, *inputs, layout)
    if step.primitive is shorter.ONE_PLUS_TANH:
        return quick.one_plus_tanh(plan, *inputs, *params.values(), layout)
    if step.primitive is shorter.FMA:
        return quick.fma(plan, inputs, params["signs"], layout)
    if step.primitive is saturating.SATURATED:
        return quick.saturated(plan, *inputs, params["new_dtype"])
    return step.primitive.bind(*inputs, **params)


def columns(problem: Problem, gmem: launch.Inputs, strip: Strip, pick: Pick) -> Any:
    """Returns the columns that are picked, counted from the first; a strip may not have them."""
    program = shorter.shorter(words.program(problem))
    here = place.vector(gmem.operands[pick.vector], strip.batch).at[pl.ds(*strip.rows)]
    vector = plgpu.load(here, layout=strip.layout.reduce(1), optimized=False)
    first = place.vector(gmem.operands[pick.columns], strip.batch)[strip.cols[0]]
    return _of_type(vector, program.operands[pick.vector].dtype) - first


def picks(problem: Problem) -> list[Pick | None]:
    """Returns what is picked for each result that is reduced along rows; None for other ones."""
    program = shorter.shorter(words.program(problem))
    own = [result for result in program.results if result.kind == "m"]
    return [program.picked.get(result.value) for result in own]


def _alike(step: Step, inputs: Sequence[Any], shape: tuple[int, int]) -> list[Any]:
    """Gives the inputs of an operation one shape; numbers stay numbers where that is allowed."""
    whole = step.primitive.name in ("select_n", "clamp")
    found = []
    for x in inputs:
        number = np.asarray(x.value, x.dtype)[()] if isinstance(x, Constant) else x
        if whole and jnp.ndim(number) == 0:
            number = jnp.broadcast_to(number, shape)
        found.append(number)
    return found


def _of_type(x: Any, dtype: Any) -> Any:
    """Gives what was loaded the type that a program takes it in."""
    return x != 0 if dtype == np.bool_ else x.astype(dtype)


def _load(plan: KernelPlan, strip: Strip, vector: Any, operand: Operand) -> Any:
    """Loads a number, or the values of a vector for a strip in all its elements."""
    if not operand.kind:
        return _of_type(place.scalar(vector, strip.batch), operand.dtype)
    axis, own = _lies(plan, strip, operand)
    shape = (strip.rows[1], strip.cols[1])
    if operand.counts:
        counted = arrays.counted(plan, operand.dtype, shape, axis, strip.layout)
        return counted + place.vector(vector, strip.batch)[own[0]]
    here = place.vector(vector, strip.batch).at[pl.ds(*own)]
    return _of_type(arrays.repeated(plan, here, shape, axis, strip.layout), operand.dtype)


def _lies(plan: KernelPlan, strip: Strip, operand: Operand) -> tuple[int, tuple[Any, int]]:
    """Returns along which axis of a strip a vector lies; its first value there, and how many."""
    # Rows of the result are columns of a kernel that keeps its sums transposed.
    axis = "mn".index(operand.kind) ^ plan.problem.transpose_out
    return axis, (strip.rows, strip.cols)[axis]
