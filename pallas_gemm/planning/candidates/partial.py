"""Into how many partial sums k is cut, so that results err no more than XLA's."""

import math

import numpy as np

from pallas_gemm.config import STEP_BYTES
from pallas_gemm.device import Device
from pallas_gemm.problem import Problem

SUMS_OF_XLA = 2 / 3
"""XLA may make several sums of a float32 result: at least this share of them is made here."""
TILE_OF_XLA = (128, 256)
"""Tiles by which XLA is taken to see how many SMs a product would leave idle."""
SHORTEST_SUM = 3
"""Steps of a partial sum: XLA makes four of 11 steps."""


def fewest_sums(problem: Problem, device: Device) -> int:
    """Returns how many sums k is cut into at least, so that a float32 result errs as XLA's does.

    The tensor cores cut off what a sum of float32 does not hold, so that one sum errs four times as
    much as four, each of a quarter of k. XLA makes several where its tiles leave SMs idle: 8 of 512
    x 512 x 16384 on an H200, 2 of 1024 x 1024 x 4096, 1 of 1024 cubed. Results of 16 bits are
    rounded by more than that, and so are operands of float32 (as TF32).
    """
    if problem.blocks is not None:
        return 1
    if problem.longest_sum:
        return -(-problem.large_k // problem.longest_sum)
    narrow = problem.a_dtype.itemsize <= 2 and problem.accumulator_dtype == np.float32
    counts = narrow and problem.out_dtype == np.float32
    if not counts or problem.in_groups:
        return 1
    rows, cols = TILE_OF_XLA
    tiles = problem.batch * -(-problem.m // rows) * -(-problem.n * problem.sums // cols)
    steps = -(-problem.large_k * problem.a_dtype.itemsize // STEP_BYTES)
    return max(1, min(math.ceil(SUMS_OF_XLA * (device.sms // tiles)), steps // SHORTEST_SUM))
