"""Where XLA was measured to be faster than the kernels: the products that dispatch leaves to it.

Each rule gives its reason, and its docstring the measurement. They count only where nothing is
named: an implementation, a config or a schedule is what the caller wants.
"""

from collections.abc import Callable

import numpy as np

from pallas_gemm.problem import Problem

ROW_BYTES = 16


def few_rows(problem: Problem) -> str | None:
    """Products of fewer than 128 rows or columns are bound by memory.

    XLA reads the weights of 16 x 8192 x 8192 at 3.8 TB/s on an H200 (35.2 us), close to the 4.8
    TB/s that its memory has, by splitting K among more thread blocks than there are tiles.
    """
    least = min(problem.m, problem.n)
    return f"fewer than 128 rows or columns ({least})" if least < 128 else None


def long_and_narrow(problem: Problem) -> str | None:
    """Products with less than a quarter wave of tiles and a long K need K to be split.

    XLA splits it: 512 x 512 x 65536 takes 48 us on an H200, 699 TFLOP/s, and 128 x 8192 x 8192
    39 us; a kernel with 16 tiles of 128 x 128 would use 16 of 132 SMs.
    """
    tiles = problem.batch * -(-problem.m // 128) * -(-problem.n // 128)
    if tiles < 33 and problem.k > 2048:
        return f"K={problem.k} is long for {tiles} tiles, and XLA splits it"
    return None


RULES: tuple[Callable[[Problem], str | None], ...] = (few_rows, long_and_narrow)


def why_xla(problem: Problem) -> str | None:
    """Returns why XLA is faster at a problem, None if no measurement says so.

    Problems whose rows are not a multiple of 16 bytes are never left to XLA for that reason: at
    8191 cubed it computes 165 TFLOP/s on an H200 where aligned rows give it 820.
    """
    if not _rows_are_aligned(problem) and min(problem.m, problem.n, problem.k) >= 512:
        return None
    return next((why for rule in RULES if (why := rule(problem))), None)


def _rows_are_aligned(problem: Problem) -> bool:
    rows = (
        (problem.a_shape[-1], problem.a_dtype),
        (problem.b_shape[-1], problem.b_dtype),
        (problem.out_shape[-1], problem.out_dtype),
    )
    return not any(size * np.dtype(dtype).itemsize % ROW_BYTES for size, dtype in rows)
