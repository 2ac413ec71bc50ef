"""Which products the kernel takes whose weights go through registers."""

from collections.abc import Iterator

from pallas_gemm.kernels import element_types
from pallas_gemm.kernels.element_types import BITS, FROM_16_BITS, SINGLE, bits
from pallas_gemm.problem import ROW_BYTES, Problem

GROUPS = (32, 64, 128)
"""Contracted elements that may have a scale of their own."""


def is_widened(problem: Problem) -> bool:
    """Whether a problem multiplies weights of few bits by what is wider."""
    return problem.b_dtype in BITS and problem.a_dtype in element_types.FLOATS_16


def is_turned(problem: Problem) -> bool:
    """Whether a problem multiplies float32 that is stored as WGMMA cannot read it."""
    return problem.a_dtype == problem.b_dtype == SINGLE and not problem.transpose_b


def goes_through_registers(problem: Problem) -> bool:
    """Whether the kernel multiplies such operands."""
    return is_widened(problem) or is_turned(problem)


def refusals(problem: Problem) -> tuple[str, ...]:
    """Returns every reason why the kernel cannot take a problem, whatever the config."""
    return tuple(_refusals(problem))


def _refusals(problem: Problem) -> Iterator[str]:
    """Yields them, of a problem as it is asked for: the weights are its right operand."""
    if not goes_through_registers(problem):
        yield (
            "weights of few bits are the right operand, and the left one is bfloat16 or float16,"
            " or both are float32 and the right one is stored [k, n],"
            f" got {problem.a_dtype} and {problem.b_dtype} in layout {problem.layout}"
        )
        return
    yield from _layout_refusals(problem)
    blocks = problem.blocks
    if blocks and (blocks.rows or blocks.columns != 1 or not _is_group(blocks.k, problem.k)):
        yield (
            f"scales are those of {', '.join(map(str, GROUPS))} or more weights of a column, or of"
            f" all, got {blocks}"
        )
    if blocks and is_turned(problem):
        yield f"float32 has no scales in blocks, got {blocks}"
    if problem.terms or problem.symmetric or problem.ragged_k or problem.transpose_out:
        yield "weights are those of one product, of a batch, or of rows in groups"
    if problem.reductions or not problem.result_dtypes:
        yield "a function of the product reduces nothing, and has a value for each element"
    if problem.parts:
        yield "it promises no order in which sums are made"


def _is_group(length: int, k: int) -> bool:
    """Whether the steps of k divide groups of this length, or are divided by them."""
    return length in GROUPS or length % GROUPS[-1] == 0 or length == k


def _layout_refusals(problem: Problem) -> Iterator[str]:
    """Yields what TMA cannot load or store."""
    if 0 in (problem.m, problem.n, problem.k):
        yield f"sizes must be positive, got m={problem.m}, n={problem.n} and k={problem.k}"
    yield from _type_refusals(problem)
    if problem.transpose_a:
        yield "the left operand must be stored with k last"
    last, whole = problem.b_shape[-1], ROW_BYTES * 8 // bits(problem.b_dtype)
    if last % whole:
        yield (
            f"TMA needs rows of a multiple of 16 bytes: the last dimension of b must be a multiple"
            f" of {whole} for {problem.b_dtype}, got {last}"
        )
    if problem.blocks and problem.blocks.zeros and problem.n % whole:
        yield f"zero points of {problem.b_dtype} need n of a multiple of {whole}, got n={problem.n}"
    if problem.k % (own := ROW_BYTES // problem.a_dtype.itemsize):
        yield f"k must be a multiple of {own} for {problem.a_dtype}, got {problem.k}"
    each, columns = (*problem.result_dtypes, *problem.loaded_dtypes), problem.out_shape[-1]
    if columns * min((x.itemsize for x in each), default=ROW_BYTES) % ROW_BYTES:
        yield f"the result needs rows of a multiple of 16 bytes, got {columns} columns"


def _type_refusals(problem: Problem) -> Iterator[str]:
    """Yields which types results and operands of the epilogue must not have."""
    names = ", ".join(sorted(map(str, FROM_16_BITS)))
    for dtype in problem.result_dtypes:
        if dtype not in FROM_16_BITS:
            yield f"the result must be one of {names}, got {dtype}"
    for dtype in problem.loaded_dtypes:
        if dtype not in FROM_16_BITS:
            yield f"what has a value for each element must be one of {names}, got {dtype}"
