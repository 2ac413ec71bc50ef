"""Operations that XLA computes in the kernel of a product, and not in a pass over its result."""

from pallas_gemm.kernels.functions import activations, words
from pallas_gemm.planning.by_xla import odd_sizes
from pallas_gemm.problem import Problem

FUSED = frozenset(("add", "convert_element_type", "max", "mul", "sub"))
"""Operations that cuBLAS computes with a product of 16 bits: bias, relu, factor, residual."""
SHARE = 0.1
"""The share of a pass that a bias of columns and relu take there. With them, 38 products of
`h200_large_results.csv` take longer by 2 to 40% of a pass, half of them by up to 10%. 31 others
take longer by 2 to 49%, half of them by up to 9%."""


def makes_pass(problem: Problem) -> bool:
    """Whether XLA makes a pass over the sums for what follows the product."""
    if problem.epilogue.is_identity:
        return False
    if activations.kernel_refusal(problem.epilogue.activation) is not None:
        return True
    program = words.program(problem)
    is_one = len(program.results) == 1 and not program.reductions
    is_short = problem.out_dtype.itemsize == 2 and is_one
    return not (is_short and program.primitives <= FUSED)


def pass_share(problem: Problem) -> float:
    """Returns the share of the time of a pass that XLA takes for what follows the product.

    Nobody has measured bias alone, a residual, operands of other widths, and rows of odd sizes.
    """
    widths = problem.a_dtype.itemsize, problem.b_dtype.itemsize
    is_one = problem.sums == 1 and problem.batch == 1 and not problem.in_groups
    if widths != (2, 2) or not is_one or odd_sizes.is_slow(problem) or makes_pass(problem):
        return 1.0
    program = words.program(problem)
    adds = all(own.kind == "n" for own in program.operands) and "mul" not in program.primitives
    return SHARE if adds else 1.0
