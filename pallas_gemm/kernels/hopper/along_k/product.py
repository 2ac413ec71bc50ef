"""Products whose tiles several workers share along k: see `dense/product.py`."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_gemm.kernels import place, work
from pallas_gemm.kernels.hopper.along_k import join, relay
from pallas_gemm.kernels.hopper.dense import in_blocks, late_store, multiply
from pallas_gemm.kernels.hopper.dense.product import Product, Span
from pallas_gemm.kernels.hopper.groups.product import (
    SumsOverGroups,
    SumsOverGroupsInBlocks,
    SumsOverLast,
)
from pallas_gemm.kernels.traced import Scalar, Values


class CutAlongK(Product):
    """A piece takes some of the steps of a tile, and another kernel joins their sums."""

    def span(self, piece: work.Piece, before: int, steps: int) -> Span:
        """See `Product`."""
        first, end = piece.first_step, piece.first_step + piece.steps
        if len(self.plan.term_steps) == 1:
            return Span(first, end)
        return Span(*(jnp.clip(step - before, 0, steps) for step in (first, end)))

    def add_up(
        self, me: Scalar, piece: work.Piece, steps: multiply.Steps, stores: late_store.Stores
    ) -> tuple[Any, Any]:
        """See `Product`."""
        steps, parts = steps._replace(count=piece.steps), self.plan.parts_of_piece
        if parts == 1:
            return multiply.add_up(self.cta, me, steps, stores)
        last, is_first = join.summand(self.plan, piece), piece.summand == 0

        def leave(number: Any, total: Values) -> None:
            own = piece._replace(summand=last - (parts - 1) + number)
            pl.when(jnp.logical_not(is_first))(lambda: join.hand_over(self.cta, me, own, total))

        def added(total: Values, part: Values) -> Values:
            return lax.cond(is_first, lambda: total + part, lambda: part)

        apart = multiply.Apart(piece.summand * parts, leave, added)
        return multiply.add_up(self.cta, me, steps, stores, apart=apart)

    def ending(self, me: Scalar) -> late_store.AtOnce:
        """See `Product`."""
        return HandedOver(self.cta, me)


class CutAlongKInBlocks(CutAlongK, in_blocks.InBlocks):
    """Besides, blocks of the factors have scales."""

    def add_up(
        self, me: Scalar, piece: work.Piece, steps: multiply.Steps, stores: late_store.Stores
    ) -> tuple[Any, Any]:
        """See `Product`."""
        own, at = steps._replace(count=piece.steps), self.place(piece, me)
        return in_blocks.add_up(self.cta, me, at, own, stores, piece.first_step)


class HandedOver(late_store.AtOnce):
    """Leaves the sums of a tile to another kernel, which finishes them."""

    def expect(self, at: place.Where) -> None:
        """Loads nothing: it takes no operand of the epilogue."""

    def take(self, piece: work.Piece, total: Values, at: place.Where) -> None:
        """Stores them as they are."""
        del at
        own = piece._replace(summand=join.summand(self.cta.plan, piece))
        join.hand_over(self.cta, self.me, own, total)


class Relayed(SumsOverGroups):
    """Sums over groups, of which crowded ones are cut along k and handed on."""

    def place(self, piece: work.Piece, me: Scalar) -> place.Where:
        """See `Product`."""
        return relay.where(self.cta, piece, super().place(piece, me))

    def add_up(
        self, me: Scalar, piece: work.Piece, steps: multiply.Steps, stores: late_store.Stores
    ) -> tuple[Any, Any]:
        """See `Product`."""
        total, slot = super().add_up(me, piece, steps, stores)
        return relay.run(self.cta, me, piece, total), slot


class RelayedLast(Relayed, SumsOverLast):
    """The same of operands stored with the contracted dimension last."""


class RelayedInBlocks(Relayed, SumsOverGroupsInBlocks):
    """The same, where blocks of the factors have scales."""
