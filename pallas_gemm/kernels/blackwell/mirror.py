"""How the epilogue stores a chunk of a symmetric result: as it is, and mirrored at the diagonal.

Of 128 rows and 64 columns, the mirror image is 64 rows of 128 columns: two boxes of TMA. The
registers write it transposed, each upper and lower half of the chunk into a box of its own:

    chunk   [ upper ]       mirror image   [ upper^T ] [ lower^T ]
            [ lower ]

Each half is a square, which is on the diagonal, or on one side of it. What is above the diagonal is
left to the square that it is the mirror image of.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import place, smem
from pallas_gemm.kernels.blackwell.config import MMA_ROWS, SQUARE
from pallas_gemm.kernels.blackwell.cta import Cta

SQUARES = MMA_ROWS // SQUARE
"""Of a chunk."""


def write(slot: Any, values: Any, *, simulated: bool) -> None:
    """Writes a chunk transposed into a slot of two boxes."""
    if simulated:
        for square, rows in enumerate(jnp.split(values, SQUARES)):
            slot.at[square][...] = rows.T
        return

    rows = smem.ATOM_ROWS

    def emit(_: Any, slot: Any, values: Any) -> None:
        tiles = utils.memref_reshape(slot, (SQUARES, SQUARE // rows, rows, SQUARE))
        # As tiles of the chunk, of 64 rows and 8 columns: each column is a row of an atom.
        values.store_tiled(utils.memref_transpose(tiles, (0, 1, 3, 2)), swizzle=smem.ATOM_BYTES)

    transforms = smem.tile_transforms(smem.ATOM_BYTES, values.dtype)
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), plgpu.Layout.TCGEN05))(emit)(
        slot, values
    )


def copy(cta: Cta, at: place.Where, col: Any, here: Any, there: Any) -> None:
    """Starts the stores of a chunk that begins in column `col`, from both of its slots."""
    out = place.matrix(cta.out, at.batch)
    columns = pl.ds(col, SQUARE)
    for square in range(SQUARES):
        row = at.row + square * SQUARE
        rows = pl.ds(row, SQUARE)
        for box, target, made in (
            (here.at[pl.ds(square * SQUARE, SQUARE)], out.at[rows, columns], row >= col),
            # A square on the diagonal is its own mirror image.
            (there.at[square], out.at[columns, rows], row > col),
        ):
            store = functools.partial(plgpu.copy_smem_to_gmem, box, target, commit_group=False)
            if cta.plan.simulated:
                pl.when(made)(store)
            else:
                store(predicate=made)
    plgpu.commit_smem_to_gmem_group()
