"""Registers of a thread: how many each role has, and what an epilogue takes of them."""

import dataclasses
from typing import NamedTuple

from pallas_gemm.kernels.functions import words
from pallas_gemm.kernels.functions.elementwise import branches, divides
from pallas_gemm.kernels.hardware import WARPGROUP_THREADS
from pallas_gemm.problem import Problem
from pallas_gemm.program import Program

ADDRESS = 8
"""Registers for where a vector of scales lies."""
EXP_AND_ARRAYS = 32
"""Registers that must be left where sums of exp are reduced beside what is stored. With 26 left,
tiles of 128 x 128 in turns spill 24 bytes, with 16 those of 192 x 192 spill 40, and with 44
nothing is spilled."""


class Registers(NamedTuple):
    """Registers per thread after reallocation."""

    producer: int
    consumer: int


def epilogue_registers(problem: Problem, rows: int, columns: int) -> int:
    """How many registers of a thread an epilogue takes for these rows and columns."""
    values = rows * columns // WARPGROUP_THREADS
    return values * _arrays(problem) + _vectors(problem, rows, columns)


def _arrays(problem: Problem) -> int:
    """How many registers an epilogue takes for each value at most, but for the sum's own."""
    program = words.program(problem)
    if problem.epilogue.is_identity or not (program.arrays or program.computes):
        return 0
    if problem.epilogue.residual:
        # It is added when nothing else is left to be computed.
        bare = dataclasses.replace(problem.epilogue, residual=False)
        program = words.program(dataclasses.replace(problem, epilogue=bare))
    return program.live


def _vectors(problem: Problem, rows: int, columns: int) -> int:
    """How many registers of a thread hold and address the scales of these rows and columns.

    One vector of columns is part of what is left for the assembler. Reductions along rows count
    for two strips: that of the tile so far, and the next one. Numbers of columns that only say
    which one is picked are not there.
    """
    program = words.program(problem)
    kinds = [own.kind for own in program.operands if not (own.counts and program.picked)]
    of_rows, of_columns = kinds.count("m"), kinds.count("n") - problem.epilogue.bias
    across, along = (columns // 4, rows // 32)[:: -1 if problem.transpose_out else 1]
    reduced = 2 * along * sum(program.vectors(own) for own in program.reductions if own.kind == "m")
    return (along + ADDRESS) * of_rows + (across + ADDRESS) * of_columns + reduced


def reordered_registers(program: Program, addresses: int) -> int:
    """How many registers must be left for what the assembler reorders.

    Args:
        program: The epilogue.
        addresses: How many kinds of addresses are kept beside it.
    """
    if branches(program.primitives) and not program.is_coarse:
        return 88 + 28 * addresses
    if divides(program.primitives):
        return 64 + 16 * addresses
    if addresses:
        return 56
    return EXP_AND_ARRAYS if program.arrays and program.sums_exp else 8
