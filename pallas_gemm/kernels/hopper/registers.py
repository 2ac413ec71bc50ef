"""Registers of a thread: how many each role has, and what an epilogue takes of them."""

from typing import NamedTuple

from pallas_gemm.kernels.elementwise import live_arrays
from pallas_gemm.problem import Epilogue, Problem

ADDRESS = 8
"""Registers for where a vector of scales lies."""


class Registers(NamedTuple):
    """Registers per thread after reallocation."""

    producer: int
    consumer: int


def epilogue_arrays(epilogue: Epilogue) -> int:
    """How many registers an epilogue takes for each value at most, but for the sum's own."""
    if epilogue.is_identity:
        return 0
    return live_arrays(epilogue.activation) if epilogue.activation else 1


def vector_registers(problem: Problem, rows: int, columns: int) -> int:
    """How many registers of a thread hold what scales so many rows and columns, and address it.

    A bias alone is part of what is left for the assembler.
    """
    epilogue = problem.epilogue
    of_columns = epilogue.col_scale + epilogue.up_scale + epilogue.up_bias
    across, along = (columns // 4, rows // 32)[:: -1 if problem.transpose_out else 1]
    return (along + ADDRESS) * epilogue.row_scale + (across + ADDRESS) * of_columns
