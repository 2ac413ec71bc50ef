"""Kernels that compute nothing: what their roles are told of the pieces of groups."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import launch, work
from pallas_gemm.kernels.hopper import cta as ctas
from pallas_gemm.kernels.hopper.devices import remote
from pallas_gemm.kernels.hopper.groups import group_walk, sum_walk, table
from pallas_gemm.kernels.hopper.groups import told as telling
from pallas_gemm.kernels.hopper.plan import HopperPlan
from tests import races

BARRIERS = ("counted", "wanted", "told", "taken")


def of(
    plan: HopperPlan, fields: tuple[str, ...]
) -> Callable[[jax.Array], tuple[np.ndarray, np.ndarray]]:
    """Returns a function of the sizes: the pieces of each worker and role, and what ends them.

    The first are `[worker, role, turn, field]`; the others how many there are and, of rows, the
    last one.
    """
    consumers, workers = plan.config.consumers, plan.workers
    most = -(-len(plan.schedule) // workers)
    buffers, barriers = ctas.scratch(plan)
    needed = {name: found for name in BARRIERS if (found := getattr(barriers, name)) is not None}

    def body(given: launch.Inputs, pieces: Any, ends: Any, *scratch: Any) -> None:
        words, *barriers = scratch
        own = dict(zip(needed, barriers, strict=True))
        slots, barriers = ctas.Smem(told=words), ctas.Barriers(**own)
        cta = ctas.Cta(plan, given, (), (), remote.Rows(), slots, barriers)
        worker, me = lax.axis_index(launch.WORKER), lax.axis_index(launch.WARPGROUP)

        def note(turn: Any, piece: work.Piece, _: Any) -> Any:
            for number, field in enumerate(fields):
                pieces[worker, me, turn, number] = getattr(piece, field)
            return ()

        def read(*, producing: bool, **which: Any) -> None:
            if plan.problem.groups:
                turns, _ = group_walk.share(cta, producing=producing).walk(note, (), **which)
                ends[worker, me, 1] = group_walk.last_row(cta)
            else:
                turns, _ = sum_walk.walk(cta, producing, note, ())
            ends[worker, me, 0] = turns

        def produce() -> None:
            @plgpu.warp_map
            def _each_warp(warp: Any) -> None:
                pl.when(warp == 0)(functools.partial(read, producing=True))
                walk = group_walk if plan.problem.groups else sum_walk
                pl.when(warp == telling.GUIDE)(functools.partial(walk.guide, cta))

        turns = {"first": me, "every": consumers} if plan.config.pingpong else {}
        lax.cond(me != consumers, functools.partial(read, producing=False, **turns), produce)

    shape = workers, consumers + 1, most, len(fields)
    run = launch.kernel(
        body,
        name="told",
        workers=workers,
        cluster={},
        warpgroups=consumers + 1,
        results=tuple(jax.ShapeDtypeStruct(s, jnp.int32) for s in (shape, (*shape[:2], 2))),
        scratch=(buffers.told, *needed.values()),
        interpret=plan.interpret,
    )
    compiled = jax.jit(lambda sizes: run(launch.Inputs((), (), table.operand(plan, sizes))))

    def checked(sizes: jax.Array) -> tuple[np.ndarray, np.ndarray]:
        with races.recorded() as raced:
            found = tuple(map(np.asarray, compiled(sizes)))
            assert not raced()
        return found  # type: ignore[return-value]

    return checked
