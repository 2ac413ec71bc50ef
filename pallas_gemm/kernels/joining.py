"""How the sum of a tile that is cut along k is joined (`GemmConfig.split_k`): in a second kernel.

    kernel        who                       does
    the first     whoever reads the sums,   registers ──▶ a summand of the tile's sum in global
                  for each piece of work    memory, float32; so few that they stay in the L2
    the second    a warpgroup for each      adds up the summands of its chunk in the order of
                  chunk of the result       their steps; finishes, rounds and stores it

Where only the last tiles are cut (`GemmConfig.split_last`), a kernel for the others comes first,
and the last one stores beside what that one has stored.

Results are the same in every run, whichever piece is computed first. If clusters of one kernel
awaited each other, another kernel would first have to zero their counters: on an H200, 512 x 512 x
16384 takes as long.

Here is what both architectures' kernels share: where summands lie and how they are added up.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_gemm.kernels import launch, place, work
from pallas_gemm.kernels.hardware import WARPGROUP_THREADS
from pallas_gemm.kernels.plan import BLOCK, KernelPlan
from pallas_gemm.kernels.ptx import arrays
from pallas_gemm.kernels.traced import Ref, Values, divided

LOADED_REGISTERS = 128
"""Of a thread, for summands that it loads at the same time: each load takes most of a microsecond.
"""


def kernel(  # noqa: PLR0913 - each is a keyword
    plan: KernelPlan,
    body: Callable[..., None],
    *,
    name: str,
    chunks: int,
    warpgroups: int,
    axes: tuple[str, ...],
    results: tuple[jax.ShapeDtypeStruct, ...],
    scratch: Any,
    approx_math: bool = False,
) -> Callable[[launch.Inputs], Any]:
    """Returns the kernel that joins what the kernel of a plan has handed over.

    It returns the results, unless it is given some whose other tiles have been stored. Each
    warpgroup runs `body(inputs, results, *scratch)`.

    Args:
        plan: The plan.
        body: The work of a warpgroup.
        name: As for `launch.kernel`.
        chunks: Chunks of the result of all cut tiles.
        warpgroups: Warpgroups of a CTA, of which each joins a chunk.
        axes: The axes of a cluster in the first kernel; here there are no clusters.
        results: The shapes and types of the results.
        scratch: The memory that a CTA takes.
        approx_math: As for `launch.kernel`.
    """
    others = plan.computes == "cut"

    def body_into(gmem: launch.Inputs, *scratch: Any) -> None:
        body(gmem, gmem.results, *scratch)

    kernel = launch.kernel(
        body_into if others else body,
        name=name,
        workers=chunks // warpgroups,
        cluster=dict.fromkeys(axes, 1),
        warpgroups=warpgroups,
        results=() if others else (results,),
        scratch=scratch,
        transcendentals=plan.portion(launch.transcendentals(plan.problem)),
        interpret=plan.interpret,
        approx_math=approx_math,
    )
    return lambda given: next(iter(kernel(given)), ())


def summands(plan: KernelPlan) -> jax.ShapeDtypeStruct | None:
    """The summands that the first kernel leaves for the second, None if nothing is cut."""
    if not plan.joins:
        return None
    return jax.ShapeDtypeStruct(plan.summands_shape, plan.problem.accumulator_dtype)


def inputs(plan: KernelPlan, given: launch.Inputs, summands: Any, results: Any) -> launch.Inputs:
    """Returns what `kernel` is given, of what the kernel was that has left the summands."""
    order = None
    if isinstance(plan.pieces, work.Listed):
        # The first pieces of all tiles that are cut come first.
        first = work.Listed(plan.pieces.order[: plan.cut_tiles])
        order = jnp.asarray(work.Coding().pack(first))
    return given._replace(factors=(), order=order, summands=summands, results=results)


def last_cut(plan: KernelPlan, build: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
    """Returns the kernels of a plan whose last tiles are cut along k, and the others are not."""
    whole, cut = build(plan.only("whole")), build(plan.only("cut"))

    def run(*given: jax.Array) -> Any:
        stored = whole(*given)
        results, form = jax.tree.flatten(stored)
        results = tuple(map(jax.new_ref, results))
        cut(*given, results=results)
        return jax.tree.unflatten(form, map(jax.freeze, results))

    return run


def tile_of(plan: KernelPlan, piece: work.Piece) -> Any:
    """The number of the tile that a piece belongs to, of those that are cut."""
    if piece.cut_tile is not None:
        return piece.cut_tile
    rows, cols = plan.config.grid(plan.problem)
    row = piece.row if piece.batch is None else piece.batch * rows + piece.row
    return row * cols + piece.col


def locate(plan: KernelPlan, order: Any, tile: Any) -> place.Where:
    """Where in the result the cluster tile of a number lies, given the joining kernel's order."""
    if order is None:
        piece = plan.coding.piece(*divided(tile, plan.config.stacked_grid(plan.problem)[1]))
    else:
        piece = dataclasses.replace(plan.coding, words=1).unpack(order[tile])
    return place.locate(plan.config, plan.problem, piece)


@dataclasses.dataclass(frozen=True)
class Summands:
    """A part of a tile, of which each element's sum is made when it is asked for.

    Attributes:
        plan: The plan.
        gmem: The sums of all pieces in global memory.
        tile: Number of the cluster tile, and whose tile it is of the CTAs of the cluster.
        corner: Row and column of the part in that tile.
        layout: How values lie in registers.
    """

    plan: KernelPlan
    gmem: Ref
    tile: tuple[Any, Any]
    corner: tuple[Any, Any]
    layout: Any

    def __getitem__(self, index: tuple[slice, slice]) -> Any:
        """Adds up the summands of some rows and columns, in the order of their steps."""
        plan, (tile, rank) = self.plan, self.tile
        sizes = [part.stop - part.start for part in index]
        starts = [corner + part.start for corner, part in zip(self.corner, index, strict=True)]

        def load(summand: Any) -> Any:
            whose = tile, summand, rank
            parts = blocks(plan, self.gmem.at[whose], *zip(starts, sizes, strict=True))
            return read(plan, parts, self.layout)

        def add(first: Any, together: int, total: Values) -> Any:
            for part in [load(first + summand) for summand in range(together)]:
                total = total + part
            return total

        others = plan.summands - 1
        most = max(1, LOADED_REGISTERS * WARPGROUP_THREADS // math.prod(sizes))
        together = -(-others // -(-others // most))
        whole, rest = divmod(others, together)
        total = load(0)
        if whole == 1:
            total = add(1, together, total)
        else:
            total = lax.fori_loop(0, whole, lambda i, t: add(1 + i * together, together, t), total)
        return add(1 + whole * together, rest, total)

    def leave(self, piece: work.Piece, values: Values) -> None:
        """Stores the values of the part as the summand that a piece of work makes."""
        tile, rank = self.tile
        corner = zip(self.corner, values.shape, strict=True)
        parts = blocks(self.plan, self.gmem.at[tile, piece.summand, rank], *corner)
        arrays.write_blocks(self.plan, parts, values, self.layout)


def blocks(plan: KernelPlan, summand: Any, rows: tuple[Any, int], cols: tuple[Any, int]) -> Any:
    """The part of a summand in these rows and columns: the first one, and how many."""
    if plan.simulated:
        return summand.at[pl.ds(*rows), pl.ds(*cols)]
    down, along = (pl.ds(start // BLOCK, size // BLOCK) for start, size in (rows, cols))
    return summand.at[down, along]


def read(plan: KernelPlan, blocks: Any, layout: Any) -> Any:
    """Loads a part of a summand."""
    return arrays.read_blocks(plan, blocks, plan.problem.accumulator_dtype, layout)
