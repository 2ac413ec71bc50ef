"""XLA's copies before it adds up: of operands that it pads, and of a matrix times a vector.

XLA cuts long sums into pieces of one length, and makes a power of two of them. If K is no whole
number of such pieces, it copies both operands into larger arrays first. A kernel cuts sums as they
are. One row times 107000 x 1664 takes XLA 305 us on an H200, of which 217 are for copies, and a
kernel 82. XLA multiplies one row by a small matrix stored [k, n] element by element, stores all
of them, and adds them up.

XLA compiles for a GPU that is not there, so that its programs tell where it pads. 469 of them are
the fit: types of 32, 16 and 8 bits, batches, K from 4 to 1048576. 199 others judge it: 194 are told
right. Times are a fit to 80 products of the first draw of `h200_long_sums.csv`: half of them are
predicted within 5%, copies and product. Half of 52 others, of the second draw, are within 6%.
"""

import math

from pallas_gemm.problem import ROW_BYTES, Problem

TILE = 64, 128
"""Sides of a tile, of which the first lies along the shorter side of the result."""
PIECES, LONGER, TILES = 1.46, 0.42, 0.63
"""There are PIECES * k**LONGER / tiles**TILES pieces, rounded to a power of two."""
FEWEST = 1.9
"""Fewer pieces than this are one."""
SMALL_WORK = 400_000
"""Multiplications up to which sums are not cut. XLA cuts 580,000 of them, and not 187,000."""
SMALL_MATRIX = 10_000_000
"""Elements of a matrix up to which XLA multiplies it by a vector in another way."""
FEW_COLUMNS, SHORT_COLUMNS = 4096, 8192
"""Numbers of columns and of their elements, below which it stores products of elements first."""
SECONDS, BYTES = 0.5e-6, {1: 1.5e12, 2: 3.15e12, 4: 4e12}
"""The least time of copies, and the bytes that they move in a second, by those of an element. Few
products tell the first and the last."""


def seconds(problem: Problem) -> float:
    """Predicts how long copies take: nothing where there are none."""
    if not (elements := copied(problem)):
        return 0.0
    itemsize = problem.a_dtype.itemsize
    return SECONDS + 2 * elements * itemsize / BYTES[itemsize]


def copied(problem: Problem) -> int:
    """Returns how many elements XLA copies before it adds up."""
    count = pieces(problem)
    if count == 1:
        return max(problem.m, problem.n) * problem.k if _stores_products(problem) else 0
    # Each piece begins at a multiple of 16 bytes.
    whole = count * ROW_BYTES // problem.a_dtype.itemsize
    each = (problem.m + problem.n) * problem.k
    return max(problem.batch, 1) * each if problem.k % whole else 0


def pieces(problem: Problem) -> int:
    """Returns into how many pieces XLA cuts each sum."""
    if problem.in_groups or _work(problem) <= SMALL_WORK or _is_small(problem):
        return 1
    batch, sides = max(problem.batch, 1), sorted((problem.m, problem.n))
    tiles = batch * math.prod(-(-side // own) for side, own in zip(sides, TILE, strict=True))
    count = PIECES * problem.k**LONGER / tiles**TILES
    return 1 if count < FEWEST else 2 ** round(math.log2(count))


def _work(problem: Problem) -> int:
    return max(problem.batch, 1) * problem.m * problem.n * problem.k


def _is_small(problem: Problem) -> bool:
    """Whether a vector is multiplied by a small matrix."""
    return min(problem.m, problem.n) == 1 and _work(problem) <= SMALL_MATRIX


def _stores_products(problem: Problem) -> bool:
    """Whether XLA stores the products of all elements of a matrix and a vector.

    Three with rows of odd sizes take no longer for it.
    """
    by_columns = problem.transpose_a if problem.n == 1 else not problem.transpose_b
    is_one = problem.batch <= 1 and not problem.in_groups
    if not is_one or not _is_small(problem) or _work(problem) <= SMALL_WORK:
        return False
    columns = max(problem.m, problem.n)
    is_short = columns < FEW_COLUMNS and problem.k < SHORT_COLUMNS
    is_even = problem.a_dtype.itemsize == 2 and 2 * columns % ROW_BYTES == 0
    return by_columns and is_short and is_even
