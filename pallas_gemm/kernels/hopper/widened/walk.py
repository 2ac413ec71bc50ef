"""Which tiles a CTA computes: rows and columns are those of the transposed product.

    products         columns of tiles follow each other, then rows, then the products of a batch.
                     If the weights have fewer bytes than the other operand, rows come first
    rows in groups   each group has columns of tiles of its own. They follow each other, then rows,
                     then groups. A CTA adds up the sizes of groups to know the number of columns.
                     Rows in no group have such tiles, too: they are zeros. A CTA beyond all tiles
                     ends.

CTAs that follow each other have the same part of the larger operand, or parts that lie side by
side. A CTA has one tile, or several: then the loads of the next one begin before the last has
ended. CTAs of a cluster share its tiles, or all CTAs do: see `shares.py`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_gemm.kernels import launch
from pallas_gemm.kernels.hopper.widened import shares
from pallas_gemm.kernels.hopper.widened.plan import WidenedPlan
from pallas_gemm.kernels.ptx.find_group import BEYOND, At, Groups, find
from pallas_gemm.kernels.traced import Scalar, divided

ALONG_K = "along_k"
"""The axis of a cluster."""


class Tile(NamedTuple):
    """The tile of a CTA.

    Attributes:
        row: Its first row: a column of the result.
        col: Its first column: a row of the result.
        product: Which product of a batch it is of, or which group; None if there is one.
        end: The row of the result after its last; None if it goes as far as the result.
        empty: Whether its rows are in no group; None if they never are.
        piece: The steps of the CTA; None if it shares with nobody.
    """

    row: Scalar
    col: Scalar
    product: Any = None
    end: Any = None
    empty: Any = None
    piece: Any = None


class Share(NamedTuple):
    """The tiles of a CTA.

    Attributes:
        count: How many there are; None if there is one.
        tile: Returns one of them, by its number.
    """

    count: Any
    tile: Callable[[Scalar], Tile]


def rank(plan: WidenedPlan) -> Scalar:
    """Which of the CTAs this is that share tiles.

    A GPU may have no room for all CTAs at once, and begins with the first ones. So a CTA waits for
    sums of those that are before it in the grid.
    """
    if not plan.config.shares_all:
        return lax.axis_index(ALONG_K)
    return jnp.int32(plan.workers - 1) - lax.axis_index(launch.WORKER)


def share(plan: WidenedPlan, gmem: launch.Inputs) -> Share:
    """Returns the tiles of this CTA."""
    worker = lax.axis_index(launch.WORKER)
    if plan.config.shares_all:
        tiles = jnp.int32(plan.config.tiles(plan.problem))
        pieces = shares.Pieces(tiles, plan.workers, plan.k_steps, rank(plan))
        return _pieces(pieces, functools.partial(_of_products, plan))
    if plan.config.ctas_along_k > 1:
        return _share_of_cluster(plan, gmem, worker)
    return _share_of_workers(plan, gmem, worker)


def _share_of_workers(plan: WidenedPlan, gmem: launch.Inputs, worker: Scalar) -> Share:
    if plan.problem.groups:
        tiles, of_number = _of_groups(plan, gmem.order)
        own = _count(plan, tiles, worker)
        return Share(own, lambda turn: of_number(worker + turn * plan.workers))

    def tile(turn: Scalar) -> Tile:
        return _of_products(plan, worker + turn * plan.workers)

    tiles = plan.config.tiles(plan.problem)
    return Share(None if tiles <= plan.workers else _count(plan, tiles, worker), tile)


def _share_of_cluster(plan: WidenedPlan, gmem: launch.Inputs, cluster: Scalar) -> Share:
    """Returns the pieces of a CTA, of the tiles of its cluster."""
    rank, ctas = lax.axis_index(ALONG_K), plan.config.ctas_along_k
    if not plan.has_several_tiles:
        one = _share_of_workers(plan, gmem, cluster)
        piece = shares.Pieces(jnp.int32(1), ctas, plan.k_steps, rank).piece(jnp.int32(0))
        return one._replace(tile=lambda turn: one.tile(turn)._replace(piece=piece))
    tiles = plan.config.tiles(plan.problem)
    tile = functools.partial(_of_products, plan)
    if plan.problem.groups:
        tiles, tile = _of_groups(plan, gmem.order)
    first, own = shares.of_cluster(tiles, plan.workers, cluster)
    return _pieces(shares.Pieces(own, ctas, plan.k_steps, rank), lambda i: tile(first + i))


def _pieces(pieces: shares.Pieces, of_number: Callable[[Scalar], Tile]) -> Share:
    def tile(turn: Scalar) -> Tile:
        piece = pieces.piece(turn)
        return of_number(piece.tile)._replace(piece=piece)

    return Share(pieces.count, tile)


def _count(plan: WidenedPlan, tiles: Any, worker: Scalar) -> Scalar:
    """How many of all tiles a worker has."""
    workers = jnp.int32(plan.workers)
    return lax.div(lax.max(tiles - worker, jnp.int32(0)) + (workers - 1), workers)


def _of_products(plan: WidenedPlan, number: Scalar) -> Tile:
    """A tile of a product, or of a batch of them."""
    down, across = plan.config.grid(plan.problem)
    height, width = plan.config.out_tile(plan.problem)
    product = None
    if plan.problem.batch > 1:
        product, number = divided(number, down * across)
    if plan.weights_are_smaller:
        col, row = divided(number, down)
    else:
        row, col = divided(number, across)
    return Tile(row * height, col * width, product)


def _of_groups(plan: WidenedPlan, sizes: Any) -> tuple[Scalar, Callable[[Scalar], Tile]]:
    """Returns how many tiles rows in groups have, and one of them by its number."""
    problem, (down, most) = plan.problem, plan.config.grid(plan.problem)
    height, width = plan.config.out_tile(problem)
    limit, start = jnp.int32(problem.n), At(*(jnp.int32(0),) * 4)
    known = Groups(problem.groups, problem.n, width)
    ends = find(plan, sizes, start, jnp.int32(BEYOND), known)
    rest = lax.div(limit - lax.min(ends.row, limit) + (width - 1), jnp.int32(width))
    across = lax.min(lax.min(ends.tile, jnp.int32(most)) + rest, jnp.int32(most))

    def tile(place: Scalar) -> Tile:
        number, _ = divided(place, down)
        at = find(plan, sizes, start, number, known)
        empty = number >= ends.tile
        # Sizes that are not legal can have more columns of tiles than there are.
        own = lax.div(at.rows + (width - 1), jnp.int32(width))
        own = lax.select(empty, across - at.tile, lax.min(own, across - at.tile))
        among = place - at.tile * down
        col = at.row + lax.rem(among, own) * width
        # Each group begins with another row. Else a CTA could get the last row of every group, and
        # this one is often shorter.
        row = lax.rem(lax.div(among, own) + at.group, jnp.int32(down))
        end = lax.select(empty, limit, lax.min(at.row + at.rows, limit))
        group = lax.min(at.group, jnp.int32(problem.groups - 1))
        return Tile(row * height, col, group, end, empty)

    return across * down, tile
