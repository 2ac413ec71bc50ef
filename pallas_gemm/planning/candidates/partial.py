"""Into how many partial sums k is cut, so that results err no more than XLA's."""

import math

import numpy as np

from pallas_gemm.config import STEP_BYTES
from pallas_gemm.device import Device
from pallas_gemm.problem import Problem

SUMS_OF_XLA = 2 / 3
"""XLA may make several sums of a float32 result: at least this share of them is made here."""
TILE_OF_XLA = (128, 256)
"""We assume that XLA counts idle SMs with tiles of this size."""
SHORTEST_SUM = 3
"""Steps of a partial sum: XLA makes four of 11 steps."""
LONGEST_SUM_OF_8_BITS = 2048
"""Elements of one sum of 8-bit floats, where shorter sums cost no time.

One row x 36864 x 12544 takes 157 us on an H100 in these sums and in one. It errs 1.9e-3 and 5.4e-3,
and XLA 2.2e-3. Rounding to bfloat16 alone errs 1.7e-3. A sum whose terms are all positive loses 3%
in sums of 4096 elements.
"""
FEW_ROWS_OF_8_BITS = 128
"""Memory bounds a product of 8-bit floats with up to this number of rows or columns."""


def fewest_sums(problem: Problem, device: Device) -> int:
    """Returns how many sums k is cut into at least, so that a result errs as XLA's does.

    With few rows of 8-bit floats, XLA uses no tensor cores, or cuts k for them.
    """
    if problem.blocks is not None:
        return 1
    if problem.longest_sum:
        return -(-problem.large_k // problem.longest_sum)
    if min(problem.m // (problem.groups or 1), problem.n) <= FEW_ROWS_OF_8_BITS:
        return max(_sums_of_float32(problem, device), sums_of_8_bits(problem))
    return _sums_of_float32(problem, device)


def sums_of_8_bits(problem: Problem) -> int:
    """Returns into how many sums 8-bit floats are cut where that costs no time.

    The tensor cores keep fewer bits of such a sum than of others, so that even a result of 16 bits
    shows what a long one cuts off.
    """
    eight = problem.a_dtype.itemsize == problem.b_dtype.itemsize == 1
    floats = problem.accumulator_dtype == np.float32
    if not (eight and floats) or problem.blocks is not None or problem.ragged_k:
        return 1
    return -(-problem.large_k // LONGEST_SUM_OF_8_BITS)


def _sums_of_float32(problem: Problem, device: Device) -> int:
    """Returns into how many sums XLA would cut a float32 result, or a little fewer.

    The tensor cores cut off what a sum of float32 does not hold, so that one sum errs four times as
    much as four, each of a quarter of k. XLA makes several where its tiles leave SMs idle: 8 of 512
    x 512 x 16384 on an H200, 2 of 1024 x 1024 x 4096, 1 of 1024 cubed. Results of 16 bits are
    rounded by more than that, and so are operands of float32 (as TF32).
    """
    narrow = problem.a_dtype.itemsize <= 2 and problem.accumulator_dtype == np.float32
    counts = narrow and problem.out_dtype == np.float32
    if not counts or problem.in_groups:
        return 1
    rows, cols = TILE_OF_XLA
    tiles = problem.batch * -(-problem.m // rows) * -(-problem.n * problem.sums // cols)
    steps = -(-problem.large_k * problem.a_dtype.itemsize // STEP_BYTES)
    return max(1, min(math.ceil(SUMS_OF_XLA * (device.sms // tiles)), steps // SHORTEST_SUM))
