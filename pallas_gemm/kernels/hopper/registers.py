"""Registers of a thread: how many each role has, and what an epilogue takes of them."""

import dataclasses
from typing import NamedTuple

from pallas_gemm.kernels import words
from pallas_gemm.problem import Problem

ADDRESS = 8
"""Registers for where a vector of scales lies."""


class Registers(NamedTuple):
    """Registers per thread after reallocation."""

    producer: int
    consumer: int


def epilogue_arrays(problem: Problem) -> int:
    """How many registers an epilogue takes for each value at most, but for the sum's own."""
    if problem.epilogue.is_identity:
        return 0
    # A residual is added when nothing else is left to be computed.
    bare = dataclasses.replace(problem.epilogue, residual=False)
    return words.program(dataclasses.replace(problem, epilogue=bare)).live()


def vector_registers(problem: Problem, rows: int, columns: int) -> int:
    """How many registers of a thread hold what scales so many rows and columns, and address it.

    One vector of columns is part of what is left for the assembler.
    """
    kinds = [operand.kind for operand in words.program(problem).operands]
    of_rows, of_columns = kinds.count("m"), kinds.count("n") - problem.epilogue.bias
    across, along = (columns // 4, rows // 32)[:: -1 if problem.transpose_out else 1]
    return (along + ADDRESS) * of_rows + (across + ADDRESS) * of_columns
