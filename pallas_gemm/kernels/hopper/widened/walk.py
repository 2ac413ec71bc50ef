"""Which tile a CTA computes: rows and columns are those of the transposed product.

    products         columns of tiles follow each other, then rows, then the products of a batch
    rows in groups   each group has columns of tiles of its own. A CTA adds up the sizes of groups,
                     from which follows how many there are. Rows in no group have such tiles, too:
                     they are zeros. A CTA beyond all tiles ends.

CTAs that follow each other have the same weights, or those that lie side by side.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_gemm.kernels import launch
from pallas_gemm.kernels.hopper.widened.plan import WidenedPlan
from pallas_gemm.kernels.ptx.find_group import BEYOND, At, Groups, find
from pallas_gemm.kernels.traced import Scalar


class Tile(NamedTuple):
    """The tile of a CTA.

    Attributes:
        row: Its first row: a column of the result.
        col: Its first column: a row of the result.
        product: Which product of a batch it is of, or which group; None if there is one.
        end: The row of the result after its last; None if it goes as far as the result.
        exists: Whether there is such a tile; None if there always is.
        empty: Whether its rows are in no group; None if they never are.
    """

    row: Scalar
    col: Scalar
    product: Any = None
    end: Any = None
    exists: Any = None
    empty: Any = None


def tile(plan: WidenedPlan, gmem: launch.Inputs) -> Tile:
    """Finds the tile of this CTA."""
    worker = lax.axis_index(launch.WORKER)
    if plan.problem.groups:
        return _in_groups(plan, gmem.order, worker)
    down, across = plan.config.grid(plan.problem)
    height, width = plan.config.out_tile(plan.problem)
    row, col = lax.div(worker, jnp.int32(across)), lax.rem(worker, jnp.int32(across))
    if plan.problem.batch == 1:
        return Tile(row * height, col * width)
    product, row = lax.div(row, jnp.int32(down)), lax.rem(row, jnp.int32(down))
    return Tile(row * height, col * width, product)


def _in_groups(plan: WidenedPlan, sizes: Any, worker: Scalar) -> Tile:
    problem, (down, most) = plan.problem, plan.config.grid(plan.problem)
    height, width = plan.config.out_tile(problem)
    limit, start = jnp.int32(problem.n), At(*(jnp.int32(0),) * 4)
    known = Groups(problem.groups, problem.n, width)
    ends = find(plan, sizes, start, jnp.int32(BEYOND), known)
    rest = lax.div(limit - lax.min(ends.row, limit) + (width - 1), jnp.int32(width))
    across = lax.min(lax.min(ends.tile, jnp.int32(most)) + rest, jnp.int32(most))
    number, row = lax.rem(worker, across), lax.div(worker, across)
    at = find(plan, sizes, start, number, known)
    col = at.row + (number - at.tile) * width
    empty = number >= ends.tile
    end = lax.select(empty, limit, lax.min(at.row + at.rows, limit))
    group = lax.min(at.group, jnp.int32(problem.groups - 1))
    return Tile(row * height, col, group, end, row < down, empty)
