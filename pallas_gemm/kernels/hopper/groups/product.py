"""Products of groups whose sizes the running program has: see `dense/product.py`."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_gemm.kernels import launch, place, tiles, work
from pallas_gemm.kernels.hardware import WGMMA_DEPTH
from pallas_gemm.kernels.hopper.cta import Cta, tile_to_store
from pallas_gemm.kernels.hopper.dense import in_blocks, late_store, load, multiply
from pallas_gemm.kernels.hopper.dense.in_blocks import InBlocks
from pallas_gemm.kernels.hopper.dense.product import Product, Span
from pallas_gemm.kernels.hopper.groups import (
    group_rows,
    group_sums,
    group_walk,
    short_step,
    sum_walk,
    told,
)
from pallas_gemm.kernels.traced import Scalar


class InGroups(Product):
    """A warp of the producer that loads nothing finds the pieces.

    Attributes:
        guide: The work of that warp.
    """

    guide: Callable[[Cta], None]

    @property
    def all_warps_walk(self) -> bool:
        """See `Product`."""
        return False

    def assist(self, warp: Scalar) -> None:
        """See `Product`: one of them finds the pieces."""
        pl.when(warp == told.GUIDE)(functools.partial(self.guide, self.cta))


class RowsInGroups(InGroups):
    """Each group of rows has a matrix of its own."""

    guide = staticmethod(group_walk.guide)

    def walk(self, *, producing: bool) -> tiles.Walk:
        """See `Product`."""
        return group_walk.share(self.cta, producing=producing).walk

    def end(self, me: Scalar) -> None:
        """See `Product`."""
        super().end(me)
        group_rows.zero_the_rest(self.cta, me)


class RowsInGroupsInBlocks(RowsInGroups, InBlocks):
    """Besides, blocks of the factors have scales."""


class SumsOverGroups(InGroups):
    """Each group of contracted elements has a matrix of the result."""

    guide = staticmethod(sum_walk.guide)

    def walk(self, *, producing: bool) -> tiles.Walk:
        """See `Product`."""
        return functools.partial(sum_walk.walk, self.cta, producing)

    def span(self, piece: work.Piece, before: int, steps: int) -> Span:
        """See `Product`; there is one array."""
        del before, steps
        return Span(piece.first_step, piece.first_step + piece.steps)

    def load(
        self, piece: work.Piece, factors: launch.Factors, at: place.Where, target: load.Target
    ) -> None:
        """See `Product`: the last step of a group is no deeper than the group."""
        k_start = work.aligned(piece.first_k) + target.k_start
        deep = group_sums.parts(self.plan, piece.end_k - k_start) * WGMMA_DEPTH
        for depth in range(WGMMA_DEPTH, self.plan.tile_k + 1, WGMMA_DEPTH):
            some = target._replace(k_start=k_start, depth=depth)
            pl.when(deep == depth)(functools.partial(load.step, self.cta, factors, at, some))

    def add_up(
        self, me: Scalar, piece: work.Piece, steps: multiply.Steps, stores: late_store.Stores
    ) -> tuple[Any, Any]:
        """See `Product`: whole steps, and then the short one."""
        within = piece.first_k, piece.end_k
        divided = short_step.divided(self.plan, piece)
        mask = functools.partial(group_sums.mask, self.cta, me, within)
        steps = steps._replace(count=divided.whole, mask=mask)
        done = multiply.add_up(self.cta, me, steps, stores)
        return short_step.add(self.cta, me, divided, mask, done)


class SumsOverLast(SumsOverGroups):
    """Both operands are stored with the contracted dimension last.

    A step may have elements of several groups: zeros take the place of those of others.
    """

    def load(
        self, piece: work.Piece, factors: launch.Factors, at: place.Where, target: load.Target
    ) -> None:
        """See `Product`."""
        k_start = self._origin(piece) + target.k_start
        load.step(self.cta, factors, at, target._replace(k_start=k_start))

    def add_up(
        self, me: Scalar, piece: work.Piece, steps: multiply.Steps, stores: late_store.Stores
    ) -> tuple[Any, Any]:
        """See `Product`."""
        return multiply.add_up(self.cta, me, self._masked(me, piece, steps), stores)

    def _masked(self, me: Scalar, piece: work.Piece, steps: multiply.Steps) -> multiply.Steps:
        within = piece.first_k, piece.end_k
        mask = functools.partial(group_sums.mask_last, self.cta, me, within)
        return steps._replace(count=piece.steps, mask=mask)

    def _origin(self, piece: work.Piece) -> Any:
        """The first element that is loaded of a piece."""
        return work.aligned(piece.first_k, self.plan.tile_k)


class SumsOverGroupsInBlocks(SumsOverLast, InBlocks):
    """Besides, blocks of the factors have scales.

    Blocks are those of all groups, and so steps begin with a block.
    """

    def add_up(
        self, me: Scalar, piece: work.Piece, steps: multiply.Steps, stores: late_store.Stores
    ) -> tuple[Any, Any]:
        """See `Product`."""
        steps = self._masked(me, piece, steps)
        begin = lax.div(self._origin(piece), jnp.int32(self.plan.tile_k))
        at = tile_to_store(self.cta, piece, me)
        return in_blocks.add_up(self.cta, me, at, steps, stores, begin)
