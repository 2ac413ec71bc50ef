"""Where XLA was measured to be faster than the kernels: the products that dispatch leaves to it.

Each rule gives its reason, and its docstring the measurement. They count only where nothing is
named: an implementation, a config or a schedule is what the caller wants.
"""

from collections.abc import Callable

import numpy as np

from pallas_gemm.device import LINE_BYTES
from pallas_gemm.problem import ROW_BYTES, Problem

SHORTEST_SPLIT = 2048
"""Up to this K, XLA was not seen to gain by splitting it."""
IDLE = 1.4
"""How much longer than with all SMs busy a kernel may be predicted to take."""
IDLE_CUT = 1.5
"""The same where its tiles are cut along K."""
SPLIT_SECONDS = 1.2e-6
"""What to split K costs XLA too: 192 x 256 x 2304 (TN) takes 4.3 us on an H200 cut, predicted 4.9,
and 2.5 with all SMs busy; XLA takes 5.7."""


def few_columns(problem: Problem) -> str | None:
    """Products of few columns were not measured; rows of few bytes are slow to load.

    Few rows are another matter, unless the left operand is stored transposed: 8 x 16128 x 4608 runs
    at 0.72 times XLA's speed on an H200 then, 16 x 4608 x 14464 at 0.93, 32 x 4096 x 4096 at 0.93,
    40 x 8448 x 1376 at 0.75. With 64 and 96 rows, whole half lines, five products run at 1.14 to
    1.46.
    """
    if problem.n < 128:
        return f"fewer than 128 columns ({problem.n})"
    if problem.transpose_a and problem.m < 128 and not _in_half_lines(problem):
        return f"fewer than 128 rows of a transposed left operand ({problem.m})"
    return None


def _in_half_lines(problem: Problem) -> bool:
    """Whether rows of the left operand are a cache line at least, and whole half lines."""
    size = problem.a_shape[-1] * problem.a_dtype.itemsize
    return size >= LINE_BYTES and size % (LINE_BYTES // 2) == 0


def misaligned(problem: Problem) -> str | None:
    """Rows that begin in the middle of cache lines cost TMA more reads than they cost cuBLAS.

    8200, 4104 and 1000 cubed in bfloat16 reach 0.97, 0.90 and 0.94 of XLA's speed on an H200 with
    the best of their configs.
    """
    rows = [
        (problem.a_shape[-1], problem.a_dtype),
        (problem.b_shape[-1], problem.b_dtype),
    ]
    if problem.transpose_a and problem.m < 128 and _in_half_lines(problem):
        # So few are one box, and no box begins within a line (`few_columns`).
        del rows[0]
    for size, dtype in rows:
        if size * np.dtype(dtype).itemsize % LINE_BYTES:
            return f"rows of {size} elements are no whole number of cache lines"
    return None


def short(problem: Problem) -> str | None:
    """With few steps of k for each of many tiles, cuBLAS moves from tile to tile faster.

    4096 x 4096 x 512 and 8192 x 8192 x 512 reach 0.98 of XLA's speed on an H200, 16384 x 16384 x
    512 0.95; with K=1024 and K=256 it is 1.00 and 1.03. A fused epilogue makes up for it.
    """
    many = problem.batch * problem.m * problem.n >= 4096 * 4096
    if many and 256 < problem.k < 1024 and problem.epilogue.is_identity:
        return f"K={problem.k} is short"
    return None


def single_precision(problem: Problem) -> str | None:
    """4096 cubed in float32 (tf32), NT, reaches 0.88 of XLA's speed on an H200, 8192 cubed 0.98."""
    wide = problem.a_dtype == np.dtype(np.float32) and problem.epilogue.is_identity
    return "float32 results take too long to store" if wide else None


def wide_results(problem: Problem) -> str | None:
    """A tile of float32 is stored twice as long, and only smaller tiles are stored under others.

    8192 x 8192 x 1024 and 4096 x 14336 x 4096 in bfloat16 with float32 results reach 0.96 of XLA's
    speed on an H200 with the best of their configs; 4096 cubed 1.00, 1024 x 1024 x 4096 1.22.
    """
    many = problem.batch * problem.m * problem.n > 4096 * 4096
    wide = problem.a_dtype.itemsize == 2 and problem.out_dtype == np.dtype(np.float32)
    if many and wide and problem.epilogue.is_identity:
        return "so large a float32 result takes too long to store"
    return None


def some_rows(problem: Problem) -> str | None:
    """With 257 to 511 rows, tiles that are partly empty keep all SMs busy.

    Of nine such products drawn at random, eight are slower than XLA on an H200: 344 x 6144 x 10240
    at 0.80 times its speed, 432 x 10368 x 6144 0.92, 456 x 10496 x 4096 0.95, 269 x 24576 x 1536
    and 273 x 12544 x 4608 0.97, 260 x 8960 x 4224 0.98, 438 x 7424 x 18944 and 438 x 36864 x 12800
    0.99; 277 x 6912 x 2048 runs at 1.02. With fewer columns, 320 x 2240 x 5504 runs at 1.17.
    """
    wide = problem.n >= 6144 and problem.a_dtype.itemsize == 2 and problem.epilogue.is_identity
    if wide and problem.batch == 1 and 256 < problem.m < 512:
        return f"{problem.m} rows leave tiles partly empty"
    return None


RULES: tuple[Callable[[Problem], str | None], ...] = (
    few_columns,
    misaligned,
    short,
    single_precision,
    wide_results,
    some_rows,
)


def idle(problem: Problem, seconds: float, at_best: float, *, is_cut: bool = False) -> str | None:
    """Few tiles with a long K leave SMs idle, for which XLA splits K.

    Of 44 products drawn at random, those that the kernel was predicted to take more than 1.4 times
    as long for as all SMs would run at 0.33, 0.64, 0.65, 0.98 and 1.32 times XLA's speed on an
    H200: 8 x 360 x 12800, 148 x 896 x 7168, 2 x 2048 x 15360, 15 x 1376 x 5760 and 64 x 1920 x 4224
    (TN). Those predicted to take less run at 1.13 times, the slowest at 0.80.

    Cut along K, ten products run at 0.98 to 1.57 times XLA's speed, among them 148 x 896 x 7168 at
    1.10 and 64 x 1920 x 4224 at 1.55. At most 1.48 times the time with all SMs busy is predicted.

    Args:
        problem: What is computed.
        seconds: The predicted time of the kernel, and of the passes around it.
        at_best: That of a kernel which keeps all SMs busy.
        is_cut: The kernel's tiles are cut along K.
    """
    most = IDLE_CUT * at_best + SPLIT_SECONDS if is_cut else IDLE * at_best
    if problem.k <= SHORTEST_SPLIT or seconds <= most:
        return None
    return f"{seconds * 1e6:.0f} us with idle SMs against {at_best * 1e6:.0f} us with K split"


def why_xla(
    problem: Problem, seconds: float, at_best: float, *, is_cut: bool = False
) -> str | None:
    """Returns why XLA is faster at a problem, None if no measurement says so.

    Problems whose rows are not a multiple of 16 bytes are never left to XLA for that reason: at
    8191 cubed it computes 165 TFLOP/s on an H200 where aligned rows give it 820.

    Args:
        problem: What is computed.
        seconds: As for `idle`.
        at_best: As for `idle`.
        is_cut: As for `idle`.
    """
    if not _rows_are_aligned(problem) and min(problem.m, problem.n, problem.k) >= 512:
        return None
    why_idle = idle(problem, seconds, at_best, is_cut=is_cut)
    return next((why for rule in RULES if (why := rule(problem))), why_idle)


def _rows_are_aligned(problem: Problem) -> bool:
    rows = (
        (problem.a_shape[-1], problem.a_dtype),
        (problem.b_shape[-1], problem.b_dtype),
        (problem.out_shape[-1], problem.out_dtype),
    )
    return not any(size * np.dtype(dtype).itemsize % ROW_BYTES for size, dtype in rows)
