"""How long XLA takes where rows are no multiple of 16 bytes, which TMA asks for.

Older kernels of cuBLAS, and one by Triton, compute such products. The time of copies comes on
top (`copies.py`). The constants are a fit to 139 products of 16 bits and of float32, drawn at
random (`h200_odd_sizes.csv`, seeds 5 and 6). 8191, 4095 and 1001 cubed take 6,652, 832 and 30 us,
and 6,625, 838 and 19 are predicted. Half of the predictions are within 14%. With 73 others (seed 7)
half are within 17%, and nine of ten are at most 25% too long. Nobody has measured 8 bits.

A batch of products with short sums or rows has a model of its own. Attention makes such products,
and XLA computes them with a kernel by Triton. The model is fitted to half of the short sums of
`h200_odd_batches.csv`. Half of its predictions are within 8% there, and within 14% in the other
half.

A batch of few rows each, and one product with sums of up to 128 elements, are light work. 34 such
batches are the fit of their constants: half are within 14%. Half of 26 others are within 17%, and
half of 24 short sums of `h200_short_sums.csv` within 13%. Our kernels take 1.7 to 6.9 times as long
as XLA for those 26, and 0.99 to 2.9 times as long for the 24.
"""

import itertools
import math

from pallas_gemm.device import Device
from pallas_gemm.kernels.element_types import SINGLE
from pallas_gemm.problem import ROW_BYTES, Problem

TILES = ((16, 64), (32, 64), (64, 64), (64, 128), (128, 64), (128, 128))
PIECES = (1, 2, 3, 4, 5, 6, 8, 12, 16)
"""The numbers of pieces along k."""
LEAST_SECONDS, JOIN_SECONDS = 4e-6, 3e-6
"""Each product takes the first, and the second more if it is cut."""
FLOPS, MEMORY_BYTES = 2.1e12, 2.4e12
"""In a second: of an SM that computes tiles of 128 x 128, and of memory."""
TILE_POWER = 0.24
"""A tile with half of the elements is computed at 0.5 to this power of the rate."""
SINGLE_SHARE = 0.38
"""The share of the rate that float32 reaches."""
ODD_FLOPS, ODD_BYTES = 0.6, 0.84
"""Shares of the rate and of the bytes where a row is no multiple of 4 bytes."""
SHORT = 256
"""The most elements of a short sum, or of a short row of the result."""
BATCH_SECONDS, BATCH_FLOPS, BATCH_ODD = 2e-6, 3e12, 0.84
"""The time that each such batch takes, the rate of an SM, and a share of that and of the bytes. The
share counts where a row of an operand is no multiple of 4 bytes."""
BATCH_BYTES = {2: 2.6e12, 4: 3e12}
"""Bytes that it moves in a second, by those of an element of the result."""
LIGHT_OF_BATCH, LIGHT_SUM = 512, 128
"""Of light work: the most columns and elements of a sum in a batch, and the longest other sum."""
LIGHT_SECONDS, LIGHT_BYTES = 1.25e-6, {2: 3e12, 4: 4e12}
"""The least time of it, and the bytes that it moves in a second, by those of an element."""
LIGHT_FLOPS, LIGHT_POWER = {False: 3e12, True: 2e12}, 0.4
"""The rate of an SM there, by whether rows are odd, and the power of the share of a tile."""
LIGHT_SINGLE = 4.4e11
"""The rate of an SM with float32. 15 products of `h200_single.csv` are the fit: half are within 5%.
Half of 13 drawn ones are within 19%."""
FEW_ROWS, FEW_SECONDS = 64, 2.5e-6
"""Up to the first, the kernel by Triton may be taken, which takes the second."""
FEW_BYTES = {2: 1e12, 8: 2.5e12}
"""Bytes that it moves in a second, by the number that divides each row of the right operand."""
NARROW, NARROW_SUM, NARROW_STEP = 16, 1536, 1e-9
"""Another kernel by Triton computes fewer columns than the first, with sums up to the second. Each
element of a sum takes the third. 110 products on an H200 are the fit: half are within 16%."""
NARROW_SECONDS, NARROW_BYTES = 1.4e-6, 4.8e12
"""The least time of that kernel, and the bytes that it moves in a second."""
COLUMN_STEPS, COLUMN_BYTES = {32: 8e-9, 64: 15e-9}, 2e12
"""It takes these where there are more columns, up to each of the keys. 15 products of
`h200_narrow.csv` are the fit: half are within 15%, and half of 21 others within 17%."""


def rows(problem: Problem) -> tuple[int, int, int]:
    """Returns the bytes of a row of both operands and of the result as they are stored."""
    return (
        problem.a_shape[-1] * problem.a_dtype.itemsize,
        problem.b_shape[-1] * problem.b_dtype.itemsize,
        problem.out_shape[-1] * problem.out_dtype.itemsize,
    )


def has_odd_rows(problem: Problem) -> bool:
    """Whether some rows are no multiple of 16 bytes."""
    return any(row % ROW_BYTES for row in rows(problem))


def is_slow(problem: Problem) -> bool:
    """Whether XLA takes longer for that; a vector it multiplies in another way."""
    return min(problem.m, problem.n, problem.k) > 1 and has_odd_rows(problem)


def seconds(problem: Problem, device: Device) -> float:
    """Predicts the time of one sum, whatever follows it."""
    is_odd = any(row % 4 for row in rows(problem)[:2])
    flops = FLOPS * (ODD_FLOPS if is_odd else 1)
    flops *= SINGLE_SHARE if problem.a_dtype == SINGLE else 1
    if problem.a_dtype.itemsize > 1 and _is_light(problem):
        return _of_light_work(problem, device, is_odd=is_odd)
    if problem.a_dtype.itemsize == 2:
        is_short = problem.m > FEW_ROWS and min(problem.n, problem.k) <= SHORT
        if problem.batch > 1 and is_short:
            return _of_a_batch(problem, device, BATCH_ODD if is_odd else 1)
    moved = problem.moved_bytes
    memory = moved / (MEMORY_BYTES * (ODD_BYTES if is_odd else 1))
    total = LEAST_SECONDS + max(_multiplying(problem, device, flops, PIECES), memory)
    if problem.batch == 1 and not problem.transpose_a:
        total = min(total, _of_few_columns(problem, moved))
    if problem.m > FEW_ROWS:
        return total
    divides = max(size for size in (1, *FEW_BYTES) if rows(problem)[1] % size == 0)
    return min(total, FEW_SECONDS + moved / FEW_BYTES[max(2, divides)])


def _of_few_columns(problem: Problem, moved: int) -> float:
    """Predicts the time of a kernel that reads the left operand once; infinite where none is."""
    width, k = problem.a_dtype.itemsize, problem.k
    if problem.n < NARROW:
        is_aligned = rows(problem)[0] % ROW_BYTES == 0
        if width > 1 and k <= NARROW_SUM and is_aligned:
            return NARROW_SECONDS + NARROW_STEP * k + moved / NARROW_BYTES
    elif width == 2:
        for most, step in COLUMN_STEPS.items():
            if problem.n <= most:
                return NARROW_SECONDS + max(step * k, moved / COLUMN_BYTES)
    return math.inf


def _of_a_batch(problem: Problem, device: Device, share: float) -> float:
    """Predicts the time of a batch of products with short sums."""
    bandwidth = BATCH_BYTES[4 if problem.out_dtype.itemsize > 2 else 2]
    memory = problem.moved_bytes / bandwidth
    multiplying = _multiplying(problem, device, BATCH_FLOPS, (1,))
    return BATCH_SECONDS + math.hypot(multiplying, memory) / share


def _is_light(problem: Problem) -> bool:
    """Whether there is little to compute for each element of the result."""
    is_single = problem.a_dtype == SINGLE
    if problem.batch > 1:
        is_small = problem.m <= FEW_ROWS and max(problem.n, problem.k) <= LIGHT_OF_BATCH
        return is_small and not is_single
    least = NARROW if is_single else max(COLUMN_STEPS) + 1
    is_large = problem.m > FEW_ROWS and problem.n >= least
    return is_large and problem.k <= LIGHT_SUM and not problem.transpose_a


def _of_light_work(problem: Problem, device: Device, *, is_odd: bool) -> float:
    """Predicts the time of products with little to compute, which memory bounds."""
    width = problem.a_dtype.itemsize
    flops = LIGHT_SINGLE if problem.a_dtype == SINGLE else LIGHT_FLOPS[is_odd]
    multiplying = _multiplying(problem, device, flops, (1,), LIGHT_POWER)
    memory = problem.moved_bytes / LIGHT_BYTES[width]
    return LIGHT_SECONDS + math.hypot(multiplying, memory)


def _multiplying(
    problem: Problem,
    device: Device,
    flops: float,
    pieces: tuple[int, ...],
    power: float = TILE_POWER,
) -> float:
    """Returns the time of the fastest tile, cut into one of these numbers of pieces along k."""
    batch, ways = max(problem.batch, problem.groups, 1), []
    for (height, width), count in itertools.product(TILES, pieces):
        tiles = batch * math.ceil(problem.m / height) * math.ceil(problem.n / width) * count
        rate = flops * (height * width / (128 * 128)) ** power
        each = 2 * height * width * math.ceil(problem.k / count) / rate
        ways.append(math.ceil(tiles / device.sms) * each + (JOIN_SECONDS if count > 1 else 0))
    return min(ways)
