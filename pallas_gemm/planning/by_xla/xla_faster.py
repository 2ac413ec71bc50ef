"""Where XLA was measured to be faster than the kernels: the products that dispatch leaves to it.

Each rule gives its reason, and its docstring the measurement. They count only where nothing is
named: an implementation, a config or a schedule is what the caller wants. Groups have no rule.
"""

from collections.abc import Callable

import numpy as np

from pallas_gemm.config import STEP_BYTES
from pallas_gemm.device import LINE_BYTES
from pallas_gemm.planning import written
from pallas_gemm.planning.by_xla import odd_sizes
from pallas_gemm.problem import Problem
from schedules.model import SECTOR_BYTES

SHORT_ROW = 1024
"""Elements up to which it tells that a row of a transposed left operand begins within a line."""
FEW_COLUMNS = 2048
"""With up to this many columns, a transposed left operand of few rows is fast."""
ROWS_BY_SPLIT_LINES = 128
"""In results with up to this many rows, rows of b stored [k, n] may begin within a cache line."""
SHORT_SPLIT_LINES, COLUMNS_BY_SPLIT_LINES = 256, 1024
"""They may also with sums up to the first, and columns up to the second."""
MANY_RESULTS, MANY_SHORTEST, MANY_AS_READ = 4096 * 4096, 12_000_000, 8_700_000
"""Elements from which on a product with a short K is XLA's: however it is stored, up to K=512, and
where it is stored as the tensor cores read it."""
LARGE, LARGE_SUM, LARGE_COLUMNS = 25_000_000, 128, 256
"""Elements from which on memory bounds a product, with sums up to the second. Sums of one product
may be twice as long where there are no more columns than the third. Nobody has measured that with a
transposed left operand."""
SMALL, LARGE_OF_SMALL = 128, 8_700_000
"""The same of a batch of matrices, none of whose sides is longer than the first."""
HALF_STEP, HALF_STEP_RESULTS = 32, 2**20
"""The longest sums of less than a step, and the fewest elements of their results."""
WHOLE_ROWS = 64
"""With K up to 512, results are left to XLA if their rows are a multiple of this."""
TINY_ROWS, TINY_COLUMNS, TINY_BYTES = 16, 640, 20 * STEP_BYTES
"""The most of a result that takes few tiles, and the longest rows of K that are not cut."""
ONE_TILE = 64
"""The most rows and columns of a result whose operands begin anywhere."""
NARROW_FUSED = 512
"""The longest sums of a narrow result that are XLA's whatever follows them."""
NARROW_STEP, NARROW_WHOLE, NARROW_LONGEST, NARROW_ROWS = 128, 1024, 4096, 4096
"""If nothing follows, XLA also computes multiples of the first. It computes multiples of the second
up to the third, unless there are more rows than the fourth."""
OF_SHORT_ROWS, WITHIN_SECTORS, WITHIN_LINES = 0.6, 0.5, 0.85
"""Shares of its predicted speed, at which a kernel is counted. The first is for few rows of a
transposed left operand: the slowest ran at 0.62. The second is for rows of K elements that begin
within a sector, and the third for rows that begin within a line only. The third also counts where
it takes longest to write. 13 products of `h200_short_k.csv` and `h200_short_k_judged.csv` tell it,
whose rows begin within a sector: they run at 0.84 to 1.75 times what is predicted beside XLA."""
VECTOR_BYTES = 20_000_000
"""The most that a matrix has which XLA multiplies by a vector sooner."""


def short_rows(problem: Problem) -> str | None:
    """A transposed left operand of few rows is slow to load unless they are whole cache lines.

    20 such products were measured on an H200, with 48 to 1023 rows and more than 2048 columns. One
    runs at 1.71 times XLA's speed (136 x 4096 x 768), the others at 0.62 to 1.01, half of them at
    0.92 or less. 64 and 96 rows, whole half lines, are one box: five products run at 1.14 to 1.46.

    Up to 2048 columns and with K to 3584, five products of 48 to 592 rows run at 1.10 to 1.73. With
    K from 7808 to 24576, seven run at 0.80 to 1.15, four of them below 0.87; with 8 and 24 rows
    four at 0.53, 0.66, 0.91 and 1.74.

    A kernel may make up for it with bias and activation, as for `misaligned`. With GELU, 424 x
    7552 x 64 and 672 x 6912 x 64 (TT) take 8.1 and 8.3 us in kernels, and 9.8 and 12.3 in stock
    JAX. Words of `gemm` take 13.0 and 16.6 by XLA.
    """
    few_steps = problem.m >= 48 and problem.n <= FEW_COLUMNS and problem.k <= 4096
    if not problem.transpose_a or problem.m >= SHORT_ROW or few_steps:
        return None
    size = problem.a_shape[-1] * problem.a_dtype.itemsize
    whole = LINE_BYTES // 2 if LINE_BYTES <= size < 2 * LINE_BYTES else LINE_BYTES
    if size % whole:
        return f"{problem.m} rows of a transposed left operand are no whole number of cache lines"
    return None


def misaligned(problem: Problem) -> str | None:
    """Rows that begin within a sector, or a cache line, cost TMA more reads than they cost cuBLAS.

    8200, 4104 and 1000 cubed in bfloat16 reach 0.97, 0.90 and 0.94 of XLA's speed on an H200 with
    the best of their configs.

    Whole sectors are enough for rows of K elements: 16 products run at 0.97 to 3.90 times XLA's
    speed. Small tiles read rows of N elements at half the speed: 694 x 1376 x 13824 (NN) runs at
    0.62. Three of few rows and 1440 to 7392 columns, stored [k, n], run at 0.93, 1.02 and 1.29.
    Many rows of a transposed left operand are the kernel's: 21 products run at 0.95 to 1.16, at
    1.013 in geometric mean. Large float32 results are, too: 8192 x 30000 runs at 1.119 with K=512,
    at 1.017 with K=2048.

    With K up to 256 and up to 1024 columns, the right operand is small, and stays in the cache. 12
    such products of `h200_large_results.csv` run at 0.88 to 1.32, at 1.083 in geometric mean, and
    with bias and relu at 1.098. Nobody has judged it by others.

    A kernel may make up for it with bias and activation: XLA stores sums in float32, and makes a
    pass. With relu, 59408 x 768 x 72 takes 44 us in the kernel and 123 so, 31 of 1712 x 1472 x 72
    73 and 205. 24 products of `h200_short_k_judged.csv`, not all with such rows, take 1.5 to 3.7
    times as long. Where a program rounds sums first, the pass is shorter. Bias and GELU of 8192 x
    4304 x 1152 (NN) take 123 us in the kernel, and 168 in two of XLA's. 8192 x 1000 x 5000, whose
    rows of K begin within a sector, takes 157 us with GELU, and 122 by XLA. 12 products of
    `h200_within_sectors.csv` tell it. The kernel is taken for five of 12 others, and runs at 1.13
    to 1.54.

    A result of one tile is the kernel's. 15 products of 16 bits, with K from 168 to 7560, run at
    0.94 to 2.10, at 1.36 in geometric mean. 11 that were drawn later run at 0.93 to 2.23.
    """
    is_one_tile = max(problem.m, problem.n) <= ONE_TILE and problem.batch == 1
    if is_one_tile and problem.a_dtype.itemsize == 2:
        return None
    is_read_whole = problem.m <= ROWS_BY_SPLIT_LINES or _has_small_right(problem)
    right = problem.transpose_b or is_read_whole or _is_wide(problem)
    rows = [(problem.b_shape[-1], problem.b_dtype, right)]
    if not problem.transpose_a:
        rows.insert(0, (problem.a_shape[-1], problem.a_dtype, True))
    for size, dtype, may_begin_in_a_line in rows:
        whole, name = (SECTOR_BYTES, "sectors") if may_begin_in_a_line else (LINE_BYTES, "lines")
        if size * np.dtype(dtype).itemsize % whole:
            return f"rows of {size} elements are no whole number of {name}"
    return None


def short(problem: Problem) -> str | None:
    """With few steps of k for each of many tiles, cuBLAS moves from tile to tile faster.

    4096 x 4096 x 512 and 8192 x 8192 x 512 reach 0.96 and 0.97 of XLA's speed on an H200, and 16384
    x 16384 x 512 0.95. 4096 x 14336 x 768 reaches 0.98, and 16384 x 4096 x 896 (NT) 0.99. With
    K=1024 and K=256 it is 1.00 and 1.03. A fused epilogue makes up for it.

    From 12 million results on, four products with K=512 reach 0.93 to 0.95, below it four others
    0.97 to 1.26. Stored as the tensor cores read them (NT), seven of 8.7 million results and more
    reach 0.94 to 1.05, with K from 576 to 896: 0.978 in geometric mean. Eight others were NN and
    TN: six are faster than XLA by 3 to 8%, and the slowest reaches 0.93.

    Up to K=512, results of 16 bits are XLA's if their rows are a multiple of 64. Seed 77 of
    `h200_large_results.csv` shows it: 12 such products run at 0.986 in geometric mean, and 10 with
    other numbers of rows at 1.052. Two other seeds judge it: seven at 0.987, and four at 1.064.
    """
    k, is_whole = problem.k, problem.transpose_a or problem.m % WHOLE_ROWS == 0
    if not 256 < k < 1024 or not problem.epilogue.is_identity:
        return None
    if _is_wide(problem) and problem.b_shape[-1] * problem.b_dtype.itemsize % LINE_BYTES:
        # XLA is slower where rows begin within a line.
        return None
    many = MANY_RESULTS
    if problem.a_dtype.itemsize == 2 and problem.batch == 1:
        if k <= 512 and problem.out_dtype.itemsize == 2 and not is_whole:
            return None
        is_read_so = problem.transpose_b and not problem.transpose_a
        many = MANY_AS_READ if is_read_so and k > 512 else many
        many = MANY_SHORTEST if k <= 512 else many
    return f"K={k} is short" if problem.batch * problem.m * problem.n >= many else None


def large(problem: Problem) -> str | None:
    """Memory bounds large results with little to compute for each element: XLA writes them sooner.

    Seed 77 of `h200_large_results.csv` shows it on an H200: kernels run at 0.88 to 1.01 times XLA's
    speed at 19 such products, at 0.937 in geometric mean. Two other seeds judge it: 17 run at 0.80
    to 1.05, at 0.941. 37 products with K up to 256 are left to kernels there, which run at 1.068.
    Kernels also keep the 17 with bias and relu. They run at 0.75 to 1.50, at 0.98.

    14 batches of `h200_short_k.csv` run at 0.64 to 1.05, at 0.909, with K from 16 to 128.
    66 batches of small matrices run at 0.43 to 1.17, at 0.908 (seeds 4 and 5 of
    `h200_small_matrices.csv`). Seed 6 judges the rule: 27 run at 0.40 to 1.06, at 0.796.
    """
    widths = problem.a_dtype.itemsize, problem.b_dtype.itemsize, problem.out_dtype.itemsize
    is_one = problem.batch == 1
    is_small = not is_one and max(problem.m, problem.n) <= SMALL
    least = LARGE_OF_SMALL if is_small else LARGE
    is_large = problem.batch * problem.m * problem.n >= least and problem.epilogue.is_identity
    has_few_columns = problem.n <= LARGE_COLUMNS and not problem.transpose_a and is_one
    longest = LARGE_SUM * (2 if has_few_columns else 1)
    if widths != (2, 2, 2) or problem.terms or not is_large or problem.k > longest:
        return None
    return f"K={problem.k} is short for so large a result"


def half_steps(problem: Problem) -> str | None:
    """With K up to 32, kernels load half a step of k or less, and XLA's are sooner done.

    21 products of `h200_short_k.csv` show it on an H200, in bfloat16. Kernels run at 0.63 to 1.05
    times its speed, at 0.89 in geometric mean. 11 that were drawn later run at 0.66 to 1.04, at
    0.88, and 19 in `h200_odd_batches.csv`, `h200_short_sums.csv` and `h200_large_results.csv` at
    0.35 to 0.98. 26 larger batches of `h200_small_matrices.csv` run at 0.44 to 1.25, at 0.894.
    """
    widths = problem.a_dtype.itemsize, problem.b_dtype.itemsize, problem.out_dtype.itemsize
    is_plain = widths == (2, 2, 2) and not problem.terms
    is_large = problem.batch * problem.m * problem.n >= HALF_STEP_RESULTS
    if not is_plain or not problem.epilogue.is_identity or problem.k > HALF_STEP or not is_large:
        return None
    return f"K={problem.k} is half a step or less"


def tiny(problem: Problem) -> str | None:
    """Up to ten tiles, each of which goes through all of k alone, take longer than XLA's kernels.

    On an H200, three run at 0.72 to 0.83 times XLA's speed: 5 x 448 x 512, 8 x 512 x 896 and 2 x
    360 x 2048 (float8). 15 x 512 x 448 runs at 1.03. Five were looked at after these: one is faster
    than XLA (5 x 448 x 448, 1.20), the others run at 0.50 (1 x 448 x 2304, float8) to 0.91. With
    896 columns and more, eight of nine run at 1.01 to 1.71.
    """
    size = problem.k * problem.a_dtype.itemsize
    is_one = problem.batch == 1 and problem.epilogue.is_identity
    if is_one and problem.m <= TINY_ROWS and problem.n <= TINY_COLUMNS and size <= TINY_BYTES:
        return "it is over before few tiles have gone through k"
    return None


def vector(problem: Problem) -> str | None:
    """XLA multiplies one row by a small matrix stored [n, k] without tensor cores, and sooner.

    Two 16-bit matrices of 4.4 to 18.9 MB run at 0.73 and 0.80 times its speed on an H200. Five that
    were looked at after these run at 0.59 to 0.88, and ten of 21 to 655 MB at 0.95 to 1.18. Five in
    float8 run at 1.02 to 1.38 and one at 0.92; stored [k, n], 16 run at 0.93 to 1.87.
    """
    size = problem.n * problem.k * problem.b_dtype.itemsize
    is_vector = problem.m == problem.batch == 1 and problem.transpose_b
    if is_vector and problem.b_dtype.itemsize == 2 and problem.epilogue.is_identity:
        return "one row of a small matrix stored [n, k]" if size < VECTOR_BYTES else None
    return None


def narrow(problem: Problem) -> str | None:
    """XLA's kernels by Triton read the left operand of a narrow result faster.

    Kernels are faster at seven of 84 products on an H200, with up to 12 columns and K from 128 to
    4096. Five of these have K=4096 and 16384 rows. 32 of the products that this leaves to XLA were
    drawn later, some with bias and relu. Kernels run at 0.38 to 0.99 times its speed, and once at
    1.31 (4328 x 13 x 336). They are faster where K is long and no multiple of 1024: 2126 x 9 x 1920
    runs at 1.32, and 1322 x 4 x 14112 at 3.51.
    """
    widths = problem.a_dtype.itemsize, problem.b_dtype.itemsize
    is_one = problem.batch == 1 and not problem.terms
    if problem.n >= odd_sizes.NARROW or widths != (2, 2) or not is_one or problem.transpose_a:
        return None
    k = problem.k
    is_whole = k % NARROW_STEP == 0 and k <= odd_sizes.NARROW_SUM
    is_long = k % NARROW_WHOLE == 0 and k <= NARROW_LONGEST and problem.m <= NARROW_ROWS
    is_alone = problem.epilogue.is_identity and (is_whole or is_long)
    if not (k <= NARROW_FUSED or is_alone):
        return None
    return f"a result with n={problem.n} is narrow"


RULES: tuple[Callable[[Problem], str | None], ...] = (
    short_rows,
    misaligned,
    short,
    large,
    half_steps,
    tiny,
    vector,
    narrow,
)


def why_xla(problem: Problem, faster: float = 1.0) -> str | None:
    """Returns why XLA is faster at a problem, None if no measurement says so.

    No rule counts where rows are no multiple of 16 bytes, and no size is below 512: at 8191 cubed
    XLA computes 165 TFLOP/s on an H200, where aligned rows give it 820.

    Args:
        problem: The product.
        faster: How many times as fast a kernel is predicted to be, with what follows the product.
    """
    if odd_sizes.has_odd_rows(problem) and min(problem.m, problem.n, problem.k) >= 512:
        return None
    whys = (rule(problem) for rule in RULES if faster * _speed(rule, problem) <= 1)
    return next(filter(None, whys), None)


def _speed(rule: Callable[[Problem], str | None], problem: Problem) -> float:
    """Returns the share of a kernel's predicted speed that counts where it saves XLA a pass.

    It is 0 if there is no pass, and where a rule holds however fast the kernel is.
    """
    if problem.epilogue.is_identity or rule not in (short_rows, misaligned):
        return 0.0
    if rule is short_rows:
        return OF_SHORT_ROWS
    left, right, _ = odd_sizes.rows(problem)
    of_k = [left] * (not problem.transpose_a) + [right] * problem.transpose_b
    in_sectors = any(row % SECTOR_BYTES for row in of_k) and not written.is_large(problem)
    return WITHIN_SECTORS if in_sectors else WITHIN_LINES


def _has_small_right(problem: Problem) -> bool:
    """Whether a right operand of one product of 16 bits stays in the cache."""
    widths = problem.a_dtype.itemsize, problem.b_dtype.itemsize, problem.out_dtype.itemsize
    is_small = problem.k <= SHORT_SPLIT_LINES and problem.n <= COLUMNS_BY_SPLIT_LINES
    return is_small and widths == (2, 2, 2) and problem.batch == 1


def _is_wide(problem: Problem) -> bool:
    """Whether a large result of 16-bit operands stored [k, n] is float32, and nothing else."""
    widths = problem.a_dtype.itemsize, problem.out_dtype.itemsize
    is_alone = problem.epilogue.is_identity and problem.batch == 1
    large = problem.m * problem.n >= MANY_RESULTS
    return widths == (2, 4) and is_alone and large and not problem.transpose_b
