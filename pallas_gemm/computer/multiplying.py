"""Whether this computer's NumPy, by which JAX simulates kernels, adds up alike everywhere.

OpenBLAS has kernels for each kind of CPU. The ones for AVX2 add up in another way at the edges of a
matrix. So an element's bits depend on where a tile begins.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

ALIKE = "OPENBLAS_CORETYPE=SandyBridge"
"""With this variable OpenBLAS adds up alike on any x86 CPU. It is read when NumPy is imported."""

# First row and column, rows and columns of parts of a matrix.
_PARTS = ((0, 0, 64, 64), (64, 0, 64, 64), (0, 48, 64, 48), (0, 64, 128, 80), (32, 16, 64, 128))


@functools.cache
def adds_up_alike() -> bool:
    """Whether an element of a product in float32 has the same bits wherever it is."""
    return parts_are_alike(np.matmul)


def parts_are_alike(multiply: Callable[[Any, Any], Any]) -> bool:
    """Whether parts of a product have the bits of the whole."""
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((128, 64), (64, 144)))
    return all(
        np.array_equal(
            multiply(x, y)[row:, col:][:rows, :cols],
            multiply(x[row:][:rows], y[:, col:][:, :cols]),
        )
        for x in (a, np.asfortranarray(a))
        for y in (b, np.asfortranarray(b))
        for row, col, rows, cols in _PARTS
    )
