"""How the epilogue stores a chunk of a symmetric result: as it is, and mirrored at the diagonal.

Of 128 rows and 64 columns, the mirror image is 64 rows of 128 columns: two boxes of TMA. The
registers write it transposed, each upper and lower half of the chunk into a box of its own:

    chunk   [ upper ]       mirror image   [ upper^T ] [ lower^T ]
            [ lower ]

Each half is a square, which is on the diagonal, or on one side of it. The elements above the
diagonal are left to the square of which they are the mirror image.
"""

from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import place
from pallas_gemm.kernels.blackwell.config import MMA_ROWS, SQUARE
from pallas_gemm.kernels.blackwell.cta import Cta
from pallas_gemm.kernels.ptx import arrays
from pallas_gemm.kernels.traced import Scalar

SQUARES = MMA_ROWS // SQUARE
"""Squares of a chunk."""


def copy(cta: Cta, at: place.Where, col: Scalar, here: Any, there: Any) -> None:
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
            arrays.store_if(cta.plan, made, box, target, commit_group=False)
    plgpu.commit_smem_to_gmem_group()
