"""One step of the Blackwell kernel: its loads, its MMAs, and the waits of the roles."""

import itertools

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import place
from pallas_gemm.kernels.blackwell.cta import Cta, accumulator_of, freed_of, slot_of, sums_of
from pallas_gemm.kernels.blackwell.plan import PAIR_AXIS, BlackwellPlan
from pallas_gemm.kernels.traced import Scalar


def load_step(cta: Cta, at: place.Where, k: Scalar, step: Scalar) -> None:
    """Starts the loads of one step, each CTA those of its own part."""
    plan = cta.plan
    slot, atoms, (factors,) = slot_of(plan, step), plan.config.atoms, cta.gmem.factors
    full = cta.barriers.full.at[slot]
    for (operand, gmem, ring, first), atom in itertools.product(
        (
            (plan.a, (factors.a,), cta.slots.a, at.row),
            (plan.b, factors.b, cta.slots.b, at.col),
        ),
        range(atoms),
    ):
        width = operand.tile * plan.ctas_per_mma
        deep = pl.ds((k * atoms + atom) * operand.tile_k, operand.tile_k)
        # In a pair, the window is that of both: each loads its half along what is not contracted.
        half = plgpu.CopyPartition.PARTITIONED(0 if operand.k_major else 1)
        for part in range(operand.parts):
            which, nth = divmod(part, operand.parts // len(gmem))
            along = pl.ds(first + nth * width, width)
            window = (along, deep) if operand.k_major else (deep, along)
            plgpu.copy_gmem_to_smem(
                place.matrix(gmem[which], at.batch).at[window],
                ring.box.at[part, slot * atoms + atom],
                full,
                collective_axes=pair_axis(plan),
                leader_tracked=half if plan.ctas_per_mma == 2 else None,
            )


def multiply_step(cta: Cta, turn: Scalar, k: Scalar, step: Scalar, half: int | None = None) -> None:
    """Issues the MMAs of one step, or those of half of its columns."""
    plan = cta.plan
    slot, atoms = slot_of(plan, step), plan.config.atoms
    width = plan.config.tile[1] // plan.b.parts
    for atom in range(atoms):
        a = cta.slots.a.tile.at[0, slot * atoms + atom]
        a = a if plan.a.k_major else a.transpose((1, 0))
        for part in range(plan.b.parts) if half is None else (half,):
            b = cta.slots.b.tile.at[part, slot * atoms + atom]
            plgpu.tcgen05_mma(
                sums_of(cta, turn, part * width, width),
                a,
                b.transpose((1, 0)) if plan.b.k_major else b,
                accumulate=k > 0 if atom == 0 else True,
                collective_axis=pair_axis(plan),
            )


def free_slot(cta: Cta, step: Scalar) -> None:
    """Has the tensor core free a step's slot when its MMAs are done."""
    plan = cta.plan
    empty = cta.barriers.empty.at[slot_of(plan, step)]
    plgpu.tcgen05_commit_arrive(empty, collective_axis=pair_axis(plan))


def publish_sums(cta: Cta, turn: Scalar) -> None:
    """Has the tensor core announce the sums of a tile when its last MMA is done."""
    plan = cta.plan
    plgpu.tcgen05_commit_arrive(
        cta.barriers.ready.at[accumulator_of(plan, turn)], collective_axis=pair_axis(plan)
    )


def await_slot(cta: Cta, step: Scalar) -> None:
    """Waits until the MMAs of a step are done and its slot can be filled again."""
    plgpu.barrier_wait(cta.barriers.empty.at[slot_of(cta.plan, step)])


def await_operands(cta: Cta, step: Scalar) -> None:
    """Waits until the operands of a step have been loaded, in both CTAs."""
    plgpu.barrier_wait(cta.barriers.full.at[slot_of(cta.plan, step)])


def await_accumulator(cta: Cta, turn: Scalar, half: int) -> None:
    """Waits until the sums of half of a tile have been read, in both CTAs."""
    plgpu.barrier_wait(freed_of(cta, turn, half))


def await_sums(cta: Cta, turn: Scalar) -> None:
    """Waits until the sums of a tile are complete."""
    plgpu.barrier_wait(cta.barriers.ready.at[accumulator_of(cta.plan, turn)])


def pair_axis(plan: BlackwellPlan) -> str | None:
    """The axis of the CTAs that issue one MMA together; None if one does."""
    return PAIR_AXIS if plan.ctas_per_mma == 2 else None
