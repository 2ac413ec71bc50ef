"""How the CTAs of a cluster share the steps of its tiles, or all CTAs those of all tiles.

Each takes the same number.

Four CTAs that have five tiles take a tile each, and a quarter of the fifth. Four CTAs that have
three tiles take three quarters of a tile each:

    tile             0                   1                   2
    CTA              0 0 0 0 0 0 0 0 0 1 1 1 | 1 1 1 1 1 1 2 2 2 2 2 2 | 2 2 2 3 3 3 3 3 3 3 3 3
    adds up          0                   1                   2

The CTA with the first steps of a tile takes them last. The others send their sums to it, and it
adds them up. It waits for these sums alone: a barrier counts their bytes. Other CTAs leave sums in
global memory, and say so by a flag.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_gemm.kernels.traced import Scalar


class Piece(NamedTuple):
    """The part of a tile that a CTA computes.

    Attributes:
        tile: Which of the cluster's tiles.
        first: Its first step.
        steps: How many it takes.
        to: The CTA of the cluster that adds up the tile, and stores it.
        place: Which of the sums that are sent to that one this is.
        awaited: How many are sent to this CTA.
    """

    tile: Scalar
    first: Scalar
    steps: Scalar
    to: Scalar
    place: Scalar
    awaited: Scalar


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The pieces of a CTA.

    Attributes:
        tiles: How many tiles its cluster has.
        ctas: How many CTAs.
        steps: Steps of a tile.
        rank: Which of the CTAs it is.
    """

    tiles: Scalar
    ctas: int
    steps: int
    rank: Scalar

    @property
    def count(self) -> Scalar:
        """How many there are."""
        start, stop = self._span
        others = lax.div(stop + (self.steps - 1), jnp.int32(self.steps))
        others -= lax.div(start, jnp.int32(self.steps))
        return self._whole + jnp.where(self._rest > 0, others, 0)

    def piece(self, turn: Scalar) -> Piece:
        """Returns one of them: those that are a whole tile come first."""
        steps, whole = jnp.int32(self.steps), turn < self._whole
        start, stop = self._span
        tile = lax.div(start, steps) + (turn - self._whole)
        first = lax.max(start - tile * steps, jnp.int32(0))
        end = lax.min(stop - tile * steps, steps)
        to, final = self._owner(tile * steps), self._owner(tile * steps + (steps - 1))
        awaited = jnp.where(whole | (to != self.rank), 0, final - to)
        return Piece(
            tile=jnp.where(whole, turn * self.ctas + self.rank, self._whole * self.ctas + tile),
            first=jnp.where(whole, 0, first),
            steps=jnp.where(whole, steps, end - first),
            to=jnp.where(whole, self.rank, to),
            place=self.rank - to - 1,
            awaited=awaited,
        )

    @property
    def _whole(self) -> Scalar:
        """Tiles that a CTA computes alone."""
        return lax.div(self.tiles, jnp.int32(self.ctas))

    @property
    def _rest(self) -> Scalar:
        """Tiles that all CTAs share."""
        return lax.rem(self.tiles, jnp.int32(self.ctas))

    @property
    def _span(self) -> tuple[Scalar, Scalar]:
        """The first step of those tiles that a CTA takes, and the one after its last."""
        all_steps, ctas = self._rest * self.steps, jnp.int32(self.ctas)
        start, stop = (lax.div((self.rank + i) * all_steps, ctas) for i in (0, 1))
        return start, stop

    def _owner(self, step: Scalar) -> Scalar:
        """The CTA that takes a step of those tiles."""
        all_steps = lax.max(self._rest, jnp.int32(1)) * self.steps
        return lax.div((step + 1) * self.ctas + (all_steps - 1), all_steps) - 1


def of_cluster(tiles: int, clusters: int, cluster: Scalar) -> tuple[Scalar, Scalar]:
    """The first tile of a cluster, and how many it has."""
    first, end = (lax.div((cluster + i) * tiles, jnp.int32(clusters)) for i in (0, 1))
    return first, end - first


def most_awaited(tiles: int, clusters: int, ctas: int) -> int:
    """How many sums are sent to a CTA at most."""
    rests = {own % ctas for own in (tiles // clusters, -(-tiles // clusters))}
    # The shares that begin within a tile, not with it.
    begin = [
        -(-(i + 1) * ctas // rest) - 1 - i * ctas // rest for rest in rests for i in range(rest)
    ]
    return max(begin, default=1)
