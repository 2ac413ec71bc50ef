"""The plain product, and the parts of it that other kinds of products do differently.

    kind                        what is different
    plain                       each piece of work is a tile, and takes all steps of k
    rows in groups              a warp finds the pieces; zeros past the last group (`groups/`)
    sums over groups            the same; only elements of the group are summed up (`groups/`)
    sums over crowded groups    besides, the sum is handed on from worker to worker (`along_k/`)
    operands are sums           small terms are summed up first (`summed_operands.py`)
    cut along k                 a piece takes some steps, and leaves its sum (`along_k/`)
    in blocks                   besides any of these but two, blocks have scales (`in_blocks.py`)

A kernel is built for one of them: `kernel.py` chooses, and its roles do not ask.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_gemm.kernels import launch, place, tiles, work
from pallas_gemm.kernels.hopper.cta import Cta, tile_to_store
from pallas_gemm.kernels.hopper.dense import claims, late_store, load, multiply
from pallas_gemm.kernels.traced import Scalar


class Span(NamedTuple):
    """Steps of k of one array."""

    first: Any
    end: Any


class Product:
    """The work of the producer and the consumers of a CTA.

    Attributes:
        cta: The memory and the barriers of the CTA.
        plan: The plan of the kernel.
    """

    def __init__(self, cta: Cta) -> None:
        self.cta, self.plan = cta, cta.plan

    @property
    def all_warps_walk(self) -> bool:
        """Whether all warps of the producer's warpgroup walk along with the one that loads."""
        return self.plan.claims_tiles

    def walk(self, *, producing: bool) -> tiles.Walk:
        """Where the tiles of this CTA's worker come from: dealt, or claimed from a counter."""
        plan, order = self.plan, self.cta.gmem.order
        worker = lax.axis_index(launch.WORKER)
        if not plan.claims_tiles:
            return tiles.share(
                plan.schedule, order, worker, plan.workers, plan.coding, plan.cut
            ).walk
        claimant = None
        if producing:
            rank = lax.axis_index("cluster_row") + lax.axis_index("cluster_col")
            claimant = (rank == 0).astype(jnp.int32)
        return functools.partial(claims.walk, order, worker, plan.workers, plan.coding, claimant)

    @property
    def factors(self) -> Sequence[launch.Factors]:
        """The operands of each term."""
        return self.cta.gmem.factors

    def assist(self, warp: Scalar) -> None:
        """Runs in every warp of the producer: the idle ones may send rows to other devices."""
        self.cta.rows.send(warp)

    def span(self, piece: work.Piece, before: int, steps: int) -> Span:
        """The steps of one array that a piece takes, given the steps of the arrays before it."""
        del piece, before
        return Span(0, steps)

    def load(
        self, piece: work.Piece, factors: launch.Factors, at: place.Where, target: load.Target
    ) -> None:
        """Starts the loads of one step of a piece."""
        del piece
        load.step(self.cta, factors, at, target)

    def place(self, piece: work.Piece, me: Scalar) -> place.Where:
        """Where a consumer's part of a piece's tile is stored."""
        return tile_to_store(self.cta, piece, me)

    def add_up(
        self, me: Scalar, piece: work.Piece, steps: multiply.Steps, stores: late_store.Stores
    ) -> tuple[Any, Any]:
        """Runs the k loop of a piece; returns a consumer's sum, and the slot of the last step."""
        del piece
        return multiply.add_up(self.cta, me, steps, stores)

    def ending(self, me: Scalar) -> late_store.AtOnce:
        """Chooses when and how a consumer stores its sums."""
        when = late_store.Late if self.plan.config.late_store else late_store.AtOnce
        return when(self.cta, me)

    def begin(self, me: Scalar) -> None:
        """Begins the work of a consumer."""

    def end(self, me: Scalar) -> None:
        """Ends the work of a consumer, when all tiles are stored."""
