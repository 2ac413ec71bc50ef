"""Into how many pieces the heuristics cut the k loop of tiles, so that few tiles keep all SMs busy.

Measured on an H200; on Blackwell by the same rules.
"""

import dataclasses
from collections.abc import Iterator

from pallas_gemm.config import GemmConfig
from pallas_gemm.device import Device
from pallas_gemm.problem import Problem

FEW_ROWS = 64
"""Or columns, below which memory bounds a product: 8 x 9984 x 8192, 16 x 4096 x 14336 and 32 x 6144
x 4096 are no faster when cut. And what is cut takes no longer than is predicted: 16 x 2048 x 2048
takes 4.6 us cut and 5.6 whole, where 4.9 and 5.4 are predicted."""
SMALLEST_TILE = 64
"""Rows of the smallest tile: fewer fill it in part only."""
IDLE_WITH_FEW_ROWS = 3
"""SMs for each of the smallest tiles, from which on few rows are cut all the same: 17 x 1408 x 8448
takes 9.5 us in 6 pieces of k and 15.7 whole, where XLA takes 12.9. 12 x 1152 x 9216 takes 8.8 us in
7 pieces and 16.9 whole, where XLA takes 9.6."""
FEWEST_STEPS = 8
"""The fewest steps of a piece of k: the sum of fewer is sooner computed than handed over."""
MOST_WAVES = 3
"""The most waves of pieces of k: each takes part of the L2 until it is joined."""
MOST_PARTS_OF_PIECE = 2
"""Promised parts of a piece. Pieces of more leave too much: 512 x 1024 x 16384 in 16 parts takes
34.2 us on an H200 in four pieces, and 33.5 whole. And the L2 must hold all sums that pieces leave:
512 x 1024 x 65536 in 64 parts takes 146 us in 32 pieces, and 130 whole."""
FULLER = 1.05
"""More waves must gain this much in busy SMs."""
NARROWEST = 16
"""Columns of a chunk, and bytes of half a box of TMA."""


def may_be_cut(problem: Problem, device: Device) -> bool:
    """Whether tiles may be cut along k: few rows are bound by memory, which few SMs keep busy."""
    if problem.in_groups or problem.symmetric or problem.arrays or problem.reductions:
        return False
    most_tiles = problem.batch * -(-max(problem.m, problem.n) // SMALLEST_TILE)
    enough = min(problem.m, problem.n) >= FEW_ROWS
    return enough or most_tiles * IDLE_WITH_FEW_ROWS <= device.sms


def promised_pieces(problem: Problem, device: Device) -> Iterator[int]:
    """Yields into how many pieces every tile may be cut that make the same promised parts."""
    if problem.in_groups or problem.symmetric or problem.reductions:
        return
    sums = problem.batch * problem.m * problem.n * problem.sums
    summand = sums * problem.accumulator_dtype.itemsize
    for each in range(1, MOST_PARTS_OF_PIECE + 1):
        pieces, rest = divmod(problem.parts, each)
        left = 1 + (pieces - 1) * each
        if pieces > 1 and not rest and left * summand <= device.machine.l2_bytes:
            yield pieces


def pieces(config: GemmConfig, problem: Problem, device: Device) -> Iterator[int]:
    """Yields into how many pieces every tile may be cut.

    One wave of pieces; or two or three, if they leave fewer SMs idle.
    """
    tiles, fit = config.tiles(problem), device.coresident_clusters(config.cluster_size)
    most = -(-problem.k // config.tile_k(problem)) // FEWEST_STEPS
    fullest = 0.0
    for waves in range(1, MOST_WAVES + 1):
        pieces = min(waves * fit // tiles, most)
        share = pieces * tiles / (waves * fit)
        if pieces > 1 and share > fullest * FULLER:
            fullest = share
            yield pieces


def joined_by_all[Config: GemmConfig](
    config: Config, problem: Problem, chunks: int, workers: int
) -> Config:
    """Returns the config with chunks so narrow that there is one for each worker, if possible."""
    smallest = min(dtype.itemsize for dtype in (problem.out_dtype, *problem.result_dtypes))
    narrowest = max(NARROWEST, 2 * NARROWEST // smallest)
    columns = config.store_columns
    while columns > narrowest and chunks < workers:
        columns, chunks = columns // 2, 2 * chunks
    return dataclasses.replace(config, store_columns=columns)
