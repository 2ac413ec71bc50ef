"""What the roles of one CTA share: shared and tensor memory, barriers, and the indices of them."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import launch, protocol, smem
from pallas_gemm.kernels.blackwell import launch_control
from pallas_gemm.kernels.blackwell.config import SQUARE
from pallas_gemm.kernels.blackwell.plan import PAIR_AXIS, BlackwellPlan
from pallas_gemm.kernels.traced import Scalar


class Smem(NamedTuple):
    """The ring of operand slots, and the store slots of the epilogue if it has any.

    Attributes:
        a: Slots of the left operand, an atom after the other.
        b: Slots of the right operand, likewise.
        out: Store slots, or None.
        residual: Slots of a residual of another type than the result's, like `out`.
        mirrored: Slots for the mirror images of chunks, where the result is symmetric.
    """

    a: Any = None
    b: Any = None
    out: Any = None
    residual: Any = None
    mirrored: Any = None


class Barriers(NamedTuple):
    """See the table in the docstring of `kernel.py`; None for what a kernel has not."""

    full: Any = None
    empty: Any = None
    ready: Any = None
    freed: Any = None
    residual: Any = None


class Cta(NamedTuple):
    """All that the roles of a CTA know.

    Attributes:
        plan: The plan of the kernel.
        gmem: The operands in global memory.
        out: The result in global memory.
        slots: Both views of every buffer in shared memory.
        sums_tmem: The accumulators, side by side in tensor memory.
        barriers: The barriers.
        summands: The sums of all pieces in global memory, if tiles are cut along k; see
            `joining.py`.
    """

    plan: BlackwellPlan
    gmem: launch.Inputs
    out: Any
    slots: Smem
    sums_tmem: Any
    barriers: Barriers
    summands: Any = None


Scratch = tuple[Smem, Any, Barriers, launch_control.Requests | None]


def scratch(plan: BlackwellPlan) -> Scratch:
    """The buffers and barriers of a CTA, and its requests for tiles."""
    config, problem = plan.config, plan.problem
    # What is cut along k is stored by another kernel.
    stores, residual = (Smem(), None) if plan.joins else store_scratch(plan)
    slots = config.stages * config.atoms
    buffers = stores._replace(a=plan.a.ring(slots), b=plan.b.ring(slots))
    sums = plgpu.TMEM(
        (config.tile[0], config.accumulators * config.tile[1]),
        problem.accumulator_dtype,
        collective=plan.ctas_per_mma == 2,
    )
    requests = launch_control.scratch(plan.roles) if plan.takes_over else None
    return buffers, sums, _barriers(plan)._replace(residual=residual), requests


def store_scratch(plan: BlackwellPlan) -> tuple[Smem, Any]:
    """The buffers of the epilogue, and the barriers of what it loads, if it loads anything."""
    config, problem = plan.config, plan.problem
    stores = (config.store_slots, config.tile[0], config.store_columns)
    mirrored = (config.store_slots, config.tile[0] // SQUARE, config.store_columns, SQUARE)
    boxed = functools.partial(smem.boxed, simulated=plan.simulated)
    added = problem.residual_dtype
    buffers = Smem(
        out=None if config.direct_store else boxed([stores], problem.out_dtype),
        residual=None if added is None else boxed([stores], added),
        mirrored=boxed([mirrored], problem.out_dtype) if problem.symmetric else None,
    )
    loaded = plgpu.Barrier(num_barriers=config.store_slots) if problem.epilogue.residual else None
    return buffers, loaded


def _barriers(plan: BlackwellPlan) -> Barriers:
    config = plan.config
    by_tensor_core = functools.partial(
        plgpu.Barrier, num_arrivals=protocol.commit_arrivals(), orders_tensor_core=True
    )
    return Barriers(
        full=plgpu.Barrier(num_arrivals=plan.full_arrivals, num_barriers=config.stages),
        empty=by_tensor_core(num_barriers=config.stages),
        ready=by_tensor_core(num_barriers=config.accumulators),
        freed=plgpu.ClusterBarrier(
            collective_axes=(PAIR_AXIS,),
            num_arrivals=protocol.freed_arrivals(),
            num_barriers=config.accumulators * plan.halves,
            orders_tensor_core=True,
        ),
    )


def views(plan: BlackwellPlan, buffers: Smem) -> Smem:
    """Both views of every buffer that was made as `scratch` or `store_scratch` says."""
    stores = (
        None if slots is None else smem.views(slots, simulated=plan.simulated)[0]
        for slots in (buffers.out, buffers.residual, buffers.mirrored)
    )
    a, b = (
        None if slots is None else operand.views(slots)
        for operand, slots in ((plan.a, buffers.a), (plan.b, buffers.b))
    )
    return Smem(a, b, *stores)


def slot_of(plan: BlackwellPlan, step: Scalar) -> Any:
    """The slot of the ring that a step of the whole walk uses."""
    return lax.rem(step, jnp.int32(plan.config.stages))


def accumulator_of(plan: BlackwellPlan, turn: Scalar) -> Any:
    """The accumulator of a tile."""
    return lax.rem(turn, jnp.int32(plan.config.accumulators))


def freed_of(cta: Cta, turn: Scalar, half: Scalar) -> Any:
    """The barrier of a half of the accumulator of a tile, or of the whole if it has no halves."""
    return cta.barriers.freed.at[accumulator_of(cta.plan, turn) * cta.plan.halves + half]


def sums_of(cta: Cta, turn: Scalar, start: Any, width: int) -> Any:
    """Some columns of the accumulator of a tile."""
    first = accumulator_of(cta.plan, turn) * cta.plan.config.tile[1] + start
    return cta.sums_tmem.at[:, pl.ds(first, width)]
