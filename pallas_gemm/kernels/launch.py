"""How a kernel is launched: what it is given, and the call that both architectures make."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.config import GemmConfig
from pallas_gemm.kernels import place
from pallas_gemm.kernels.element_types import FLOATS_16, bits
from pallas_gemm.kernels.functions import elementwise, words
from pallas_gemm.problem import ROW_BYTES, Problem

ALIGNMENT = 256
"""Bytes of which Mosaic wants every array to begin at a multiple."""
WORKER = "worker"
"""The axis of the grid: clusters."""
WARPGROUP = "warpgroup"
"""The axis of the warpgroups of a CTA."""


class Factors(NamedTuple):
    """What is multiplied: a left operand, and one right operand or, for a gated result, two."""

    a: Any
    b: tuple[Any, ...]


class Inputs(NamedTuple):
    """Arrays that a kernel is given, which are references inside of it. None for what is not given.

    Attributes:
        factors: The arrays to multiply: one pair, or one for each array that the operands are in.
        operands: The operands of the epilogue, in the order of its program. A number is `[1]` or
            `[batch]`, a vector reaches as far as the last tile. They are `[batch, ...]` if each
            product of a batch has its own.
        order: How the schedule is read; the sizes of groups, or a table of them, from which the
            pieces are found; None if it is computed.
        sent: How many loads of rows have been claimed for each device.
        summands: Sums of pieces of k, which another kernel has left to be joined.
        results: The results, some tiles of which another kernel has stored, or an array to write
            into.
        scales: The scales of blocks of the factors, if there are any.
        first: Where the parts begin that are taken of larger arrays (`windows.py`), `[1]`.
    """

    factors: tuple[Factors, ...]
    operands: tuple[Any, ...]
    order: Any
    sent: Any = None
    summands: Any = None
    results: Any = None
    scales: tuple[Any, ...] = ()
    first: Any = None

    def loaded(self, problem: Problem, batch: Any) -> list[Any]:
        """The matrices that are loaded as results of one product of a batch are stored."""
        each = zip(self.operands, words.program(problem).operands, strict=True)
        return [place.loaded(x, own, problem.batch, batch) for x, own in each if own.kind == "mn"]


def inputs(config: GemmConfig, problem: Problem, given: Sequence[Any], order: Any) -> Inputs:
    """Names the operands, of which `given` has those that the problem has.

    These are, in this order: a, b, a second b if the result is gated, then the operands of the
    epilogue's program; where operands are in several arrays, first a and b of each. None stands for
    one that is known otherwise.
    """
    left: Any = (None if x is None else on_its_own(x) for x in given)
    factors = tuple(
        Factors(next(left), tuple(next(left) for _ in range(problem.sums)))
        for _ in range(problem.pairs)
    )
    scales = [on_its_own(next(left)) for _ in range(problem.scales)]
    reach = config.reach(problem)
    operands = []
    for operand, x in zip(words.program(problem).operands, left, strict=True):
        if operand.kind == "mn":
            operands.append(x)
            continue
        size = reach[(operand.kind == "m") == problem.transpose_out]
        if operand.kind and x.shape[-1] == size and x.dtype in FLOATS_16:
            operands.append(on_its_own(x))
            continue
        # All else comes in 32 bits: XLA copies it anyway.
        wide = x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)
        if operand.kind:
            # No mask is used on loading: vectors go as far as the last tile.
            operands.append(longer(wide, size - x.shape[-1]))
        else:
            operands.append(on_its_own(wide.reshape(-1)))
    return Inputs(factors, tuple(operands), order, scales=tuple(scales))


def results(problem: Problem, shape: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the shapes and types of the results that have an element for each sum."""
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for dtype in problem.result_dtypes)


def on_its_own(x: jax.Array) -> jax.Array:
    """Keeps an array apart from a larger one, of which it might be a part that begins anywhere.

    XLA hands over a slice of an array, and takes a result into one, without a copy. Mosaic refuses
    at run time what does not begin at a multiple of 256 bytes. Where whole rows are such multiples,
    every slice along leading dimensions begins at one; of a single row, any part may be a slice.
    """
    several_rows = math.prod(x.shape[:-1]) > 1
    aligned = several_rows and x.shape[-1] * x.dtype.itemsize % ALIGNMENT == 0
    return x if aligned else lax.optimization_barrier(x)


def longer(x: jax.Array, more: int) -> jax.Array:
    """Returns an array with zeros at the end of its last dimension."""
    return on_its_own(jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)]))


def in_whole_rows(x: jax.Array) -> jax.Array:
    """Returns an array with rows of a multiple of 16 bytes: TMA loads no others."""
    beyond = -x.shape[-1] % (8 * ROW_BYTES // bits(x.dtype))
    return longer(x, beyond) if beyond else x


def transcendentals(problem: Problem) -> int:
    """Returns how many exponentials, tangents and the like the epilogue of a problem takes."""
    steps = words.program(problem).steps
    each = sum(step.primitive.name in elementwise.TRANSCENDENTAL for step in steps)
    return each * math.prod(problem.out_shape)


def kernel(  # noqa: PLR0913 - each is a keyword
    body: Callable[..., None],
    *,
    name: str,
    workers: int,
    cluster: Mapping[str, int],
    warpgroups: int,
    results: Any,
    scratch: Sequence[Any],
    interpret: Any,
    flops: int = 0,
    transcendentals: int = 0,
    approx_math: bool = False,
    reduction_scratch_bytes: int = 0,
) -> Callable[[Any], Any]:
    """Returns the kernel whose CTAs run `body(inputs, *results, *scratch)` in each warpgroup.

    It is given `Inputs`, or an array. Workers are clusters, which have CTAs along axes.
    """

    def run(given: Any) -> Any:
        launched = plgpu.kernel(
            body,
            out_type=results,
            grid=(workers,),
            grid_names=(WORKER,),
            cluster=tuple(cluster.values()),
            cluster_names=tuple(cluster),
            num_threads=warpgroups,
            thread_name=WARPGROUP,
            scratch_types=scratch,
            # Most values are reduced within warps alone, which takes no shared memory.
            compiler_params=plgpu.CompilerParams(
                unsafe_no_auto_barriers=True,
                approx_math=approx_math,
                reduction_scratch_bytes=reduction_scratch_bytes,
            ),
            kernel_name=name,
            interpret=interpret,
            **_cost((given, results), flops=flops, transcendentals=transcendentals),
        )
        # Numbers in kernels have 32 bits, and JAX takes its own tracers in any kernel for leaks.
        with jax.enable_x64(False), jax.check_tracer_leaks(False):
            made = launched(given)
        return jax.tree.map(on_its_own, made)

    return run


def _cost(arrays: Any, **operations: int) -> Mapping[str, Any]:
    """Returns what XLA is told of the time that a kernel takes, where the release of JAX does.

    Args:
        arrays: The arrays that are read or written, once each.
        **operations: How many there are of each kind.
    """
    if "cost_estimate" not in inspect.signature(plgpu.kernel).parameters:
        return {}
    moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(arrays))
    return {"cost_estimate": pl.CostEstimate(bytes_accessed=moved, **operations)}
