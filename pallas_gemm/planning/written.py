"""Large results with a short K, which take longest to write: their tiles, and the order of these.

    what               is
    rows of a tile     128: two warpgroups store it, and few registers hold its sums
    order              row after row, if the right operand stays in the L2: parts of a row of the
                       result are written at the same time, and cache lines that two tiles share
                       are written once

`bench/results/h200_short_k.csv` tells it, in bfloat16 on an H200, with 8.7 to 159 million elements.
Kernels of 118 products, half with bias and relu, are 1.038 times as fast in geometric mean with 128
rows, 0.78 to 1.59. In this order, 28 of them are 1.051 times as fast again, 0.98 to 1.23. It was
chosen by these; 16 others, in tiles of 128 x 128, are 1.046 times as fast in it as in bands of 8.
"""

from pallas_gemm.device import LINE_BYTES
from pallas_gemm.kernels.hopper.problems import stored_by_tma
from pallas_gemm.problem import Problem

SHORT, LARGE = 128, 8_700_000
"""The longest K, and the fewest elements of a result."""
ROWS = 128
"""Rows of a tile. 12640 x 2216 x 128 takes 35.8 us in tiles of 192 x 160, and 25.8 in tiles of 128
x 112. With bias and relu, 1080 x 38528 x 64 takes 44.0 us in tiles of 64 x 192, which a warpgroup
stores alone, and 35.7 in 128 x 192."""
TALL, WIDE = 2560, 3072
"""The fewest rows and columns of a result for which row after row is the better order. In tiles of
128 x 128, 30536 x 1920 x 128 takes 42.5 us so, and 40.4 in bands of 8. 2048 x 10944 x 16 takes 16.8
us so, and 16.2 in bands of 6. There may be fewer columns if rows of the result are no whole number
of cache lines: 44544 x 2104 x 128 takes 76.8 us so, and 98.4 in bands of 8."""
RIGHT_BYTES = 12_000_000
"""The most of a right operand that the L2 holds beside what is written. 3289 x 41176 x 128 has 10.5
MB, and takes 145 us row after row and 162 in bands of 8. 2048 x 65536 x 128 has 17 MB, and takes
106 us row after row and 97 in bands of 8."""


def is_large(problem: Problem) -> bool:
    """Whether it takes longest to write the result, of 16 bits like the operands.

    Nobody has measured others, what is loaded or reduced, groups, and rows that threads store.
    """
    widths = [dtype.itemsize for dtype in (problem.a_dtype, problem.b_dtype, problem.out_dtype)]
    is_plain = problem.sums == 1 and not (problem.in_groups or problem.symmetric or problem.terms)
    program = problem.epilogue.program
    is_one = len(problem.result_dtypes) == 1 and (program is None or not program.reductions)
    is_alone = is_one and not problem.loaded_dtypes
    if widths != [2, 2, 2] or not is_plain or not is_alone or not stored_by_tma(problem):
        return False
    return problem.k <= SHORT and problem.batch * problem.m * problem.n >= LARGE


def order(problem: Problem, *, mirrored: bool) -> str | None:
    """Returns the order of the tiles of such a result; None where bands are the better one."""
    in_parts = problem.n * problem.out_dtype.itemsize % LINE_BYTES > 0
    right = problem.k * problem.n * problem.b_dtype.itemsize
    has_its_size = problem.m >= TALL and (problem.n >= WIDE or in_parts) and right <= RIGHT_BYTES
    if not has_its_size or problem.batch > 1 or not is_large(problem):
        return None
    return "raster:cols" if mirrored else "raster"
