"""Which problems the Hopper kernel takes, whatever the config."""

from collections.abc import Iterator

import numpy as np

from pallas_gemm.config import STEP_BYTES
from pallas_gemm.kernels import element_types
from pallas_gemm.kernels.operand import PANEL
from pallas_gemm.kernels.refusals import of_sizes, of_symmetry
from pallas_gemm.problem import ROW_BYTES, Problem

MOST_GROUPS = 1 << 15
"""Groups that an entry of a table numbers."""
MOST_TERMS = 8
"""Products of a sum; each takes two descriptors of TMA of 128 bytes, and a kernel's arguments may
be no more than 4,096 bytes on older drivers."""


FEWEST_OF_BLOCK = 32
"""Contracted elements of a block with a scale: those that one WGMMA takes of 8 bits."""
MOST_ARRAYS = 6
"""Results and operands of a function, each with a descriptor of TMA and slots of its own."""


def stored_by_tma(problem: Problem) -> bool:
    """Whether TMA stores the results; else rows of one are of an odd length, and threads do."""
    lengths = [problem.out_shape[-1] * dtype.itemsize for dtype in problem.result_dtypes]
    return all(size % ROW_BYTES == 0 for size in lengths)


def is_narrow(problem: Problem) -> bool:
    """Whether groups have right operands stored [k, n] that are narrower than a panel."""
    return problem.in_groups and not problem.transpose_b and problem.n < PANEL


def refusals(problem: Problem) -> tuple[str, ...]:
    """Returns every reason why the Hopper kernel cannot take a problem, whatever the config."""
    reasons = tuple(layout_refusals(problem))
    return reasons if any(layout_refusals(problem.mirrored())) else ()


def layout_refusals(problem: Problem) -> Iterator[str]:
    """Yields every reason why the kernel cannot take a problem as it is computed."""
    yield from element_types.refusals(problem, single=True, blocks=True)
    if problem.blocks is not None:
        yield from _block_refusals(problem)
    yield from _transposed_refusals(problem) if problem.transpose_out else ()
    yield from of_symmetry(problem) if problem.symmetric else ()
    yield from of_sizes(problem, by_tma=False)
    if problem.ragged_k:
        yield from _ragged_refusals(problem)
    if problem.groups:
        yield from _grouped_refusals(problem)
    yield from _program_refusals(problem)
    if problem.pairs > MOST_TERMS:
        yield f"a sum must have at most {MOST_TERMS} products, got {problem.pairs}"
    if problem.arrays and (problem.in_groups or problem.symmetric):
        yield "operands that are sums of arrays are those of one product, not of a symmetric one"
    step = STEP_BYTES // problem.a_dtype.itemsize
    if any(size % step or not size for size in problem.terms):
        yield (
            f"the contracted sizes of a sum of products must be positive multiples of {step} for"
            f" {problem.a_dtype}, got {problem.terms}"
        )
    in_atoms = not problem.transpose_b and not is_narrow(problem)
    if in_atoms and (problem.n % PANEL or problem.k % 8):
        yield (
            "b stored [k, n] needs n to be a multiple of 64 and k a multiple of 8, got"
            f" n={problem.n}, k={problem.k}; stored [n, k] it needs neither"
        )


def _block_refusals(problem: Problem) -> Iterator[str]:
    """Yields which scales of blocks the kernel does not take."""
    blocks = problem.blocks
    assert blocks is not None
    if {problem.a_dtype, problem.b_dtype} - element_types.FLOATS_8:
        yield (
            "blocks have scales where both operands are 8-bit floats, got"
            f" {problem.a_dtype} and {problem.b_dtype}"
        )
    if blocks.k % FEWEST_OF_BLOCK or blocks.k & (blocks.k - 1):
        yield f"blocks of k must be powers of two from {FEWEST_OF_BLOCK} on, got {blocks.k}"
    if problem.scales and problem.k % blocks.k:
        yield f"k must be a multiple of the blocks of {blocks.k}, got {problem.k}"
    if problem.transpose_out:
        yield "a product in blocks is not mirrored"
    if problem.terms or problem.symmetric:
        yield "scales of blocks are those of one product of two operands, or of products of groups"


def _ragged_refusals(problem: Problem) -> Iterator[str]:
    """Yields which sums over groups the kernel does not take."""
    last = problem.blocks is not None or problem.a_dtype not in element_types.FLOATS_16
    stored = (problem.transpose_a, problem.transpose_b) == (not last, last)
    if not stored or problem.transpose_out or problem.terms or problem.sums > 1:
        shapes = "[m, k] and [n, k]" if last else "[k, m] and [k, n]"
        yield f"sums over groups are of two operands stored {shapes}"


def _program_refusals(problem: Problem) -> Iterator[str]:
    """Yields what a function as epilogue cannot have."""
    if problem.epilogue.program is None:
        return
    arrays, loaded = problem.result_dtypes, problem.loaded_dtypes
    if problem.ragged_k or problem.terms or problem.symmetric:
        yield "a function as epilogue is for one product of two operands"
    if problem.groups and any(own.kind != "m" for own in problem.reductions):
        yield "rows in groups are reduced along each row alone"
    if len(arrays) + len(loaded) > MOST_ARRAYS:
        yield (
            f"a function may have at most {MOST_ARRAYS} results and operands of the product's"
            f" shape, got {len(arrays)} and {len(loaded)}"
        )
    if problem.reductions and problem.accumulator_dtype != np.float32:
        yield f"sums of {problem.a_dtype} are not reduced"
    for dtype in {*arrays, *loaded} if loaded else ():
        if problem.out_shape[-1] * dtype.itemsize % ROW_BYTES:
            yield (
                "results and operands of a function need rows of a multiple of 16 bytes, got"
                f" {problem.out_shape[-1]} columns of {dtype}"
            )
    if problem.transpose_out and (problem.reductions or loaded or len(arrays) != 1):
        yield "a mirrored product has a function with one result"


def cut_refusals(problem: Problem, split_k: int, partial_sums: int) -> Iterator[str]:
    """Yields why the sums of a problem cannot be cut along k so, or why they have to be."""
    fewest = -(-problem.large_k // problem.longest_sum) if problem.longest_sum else 1
    if partial_sums < fewest:
        yield (
            f"partial_sums must be at least {fewest}, for sums of at most {problem.longest_sum}"
            f" elements, got {partial_sums}"
        )
    if problem.blocks is not None and partial_sums > 1:
        yield f"a product in blocks needs partial_sums=1, got {partial_sums}"
    if split_k > 1 and problem.arrays:
        yield f"operands that are sums of arrays need split_k=1, got {split_k}"
    if split_k > 1 and problem.reductions:
        yield f"a function that reduces needs split_k=1, got {split_k}"


def _grouped_refusals(problem: Problem) -> Iterator[str]:
    if problem.transpose_a or problem.transpose_out or problem.batch > 1 or problem.terms:
        yield "rows in groups are those of one left operand stored [m, k]"
    if problem.epilogue.residual:
        yield "rows in groups have no residual"
    if not stored_by_tma(problem):
        yield (
            "rows in groups need a result with rows of a multiple of 16 bytes, got"
            f" {problem.out_shape[-1]} columns of {problem.out_dtype}"
        )
    if problem.groups > MOST_GROUPS:
        yield f"rows must be in at most {MOST_GROUPS} groups, got {problem.groups}"


def _transposed_refusals(problem: Problem) -> Iterator[str]:
    if problem.out_dtype.itemsize != 2:
        yield f"a mirrored product has a result of 16 bits, got {problem.out_dtype}"
    if problem.epilogue.residual or problem.epilogue.gated:
        parts = " and ".join(problem.epilogue.parts)
        yield f"a mirrored product has neither a residual nor a gate, got {parts}"
