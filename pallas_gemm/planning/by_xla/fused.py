"""Operations that XLA computes in the kernel of a product, and not in a pass over its result.

A program may round the product to 16 bits first, as `jax.nn.relu(a @ b + bias)` does: then XLA
computes bias and relu with it. Words and functions of `gemm` take float32 sums: XLA stores these,
and makes a pass. Nothing is rounded before it in float32: there a pass is no more than a program's.
Where XLA cuts sums along k, the pass that adds up pieces computes what follows.
"""

from pallas_gemm.kernels.element_types import SINGLE
from pallas_gemm.kernels.functions import words
from pallas_gemm.planning.by_xla import copies, odd_sizes
from pallas_gemm.problem import Problem
from pallas_gemm.program import Program

SHORT_SHARE = 0.35
"""The share that other functions of short sums of float32 take in XLA's kernel by Triton, if they
read each value once, as no GELU does. Sines of 14 such products of `h200_single.csv` take 18 to 64%
of a pass, half of them up to 38%."""
FUSED = frozenset(("add", "convert_element_type", "max", "sub"))
"""Operations that cuBLAS computes with a product, such as bias and relu."""
SHARE = 0.1
"""The share of a pass that a bias of columns and relu take there. With them, 38 products of
`h200_large_results.csv` take longer by 2 to 40% of a pass, half of them by up to 10%. 31 others
take longer by 2 to 49%, half of them by up to 9%. 30 batches of `h200_short_k.csv`, whose products
share a bias, take from 5% less to 32% more, half of them up to 4% more."""


def pass_share(problem: Problem) -> float:
    """Returns the share of the time of a pass that XLA takes for what follows a product.

    Functions of sums that are cut count so, too. 15 products of 16 bits with bias and GELU take 1.1
    us more than is predicted for them alone, in the median. 12 with bias and relu take 0.5 more
    (`h200_long_functions.csv`, the first draw). A pass would take more than 2.
    Nobody has measured other operands and types there.

    Bias or relu alone count so, too, which nobody has measured. Nor has anybody measured a bias for
    each product of a batch, a factor, a residual, operands of other widths and rows of odd sizes,
    which count as a pass.
    """
    is_single = problem.a_dtype == problem.b_dtype == problem.out_dtype == SINGLE
    program = words.program(problem) if is_single else problem.epilogue.program
    is_one = problem.sums == 1 and not problem.in_groups
    if program is None or program.reductions or len(program.results) != 1 or not is_one:
        return 1.0
    if copies.pieces(problem) > 1:
        return SHARE
    if not all(own.kind == "n" for own in program.operands):
        return 1.0
    adds = program.primitives <= FUSED
    if is_single:
        is_short = problem.k <= odd_sizes.LIGHT_SUM and not problem.transpose_a
        return SHARE if adds else SHORT_SHARE if is_short and _is_chain(program) else 1.0
    widths = {x.itemsize for x in (problem.a_dtype, problem.b_dtype, program.results[0].dtype)}
    return SHARE if widths == {2} and adds and not odd_sizes.is_slow(problem) else 1.0


def _is_chain(program: Program) -> bool:
    """Whether no value that depends on the sums is read twice."""
    first = program.sums + len(program.operands)
    read = [x for step in program.steps for x in step.inputs if isinstance(x, int)]
    made = [x for x in read if x < program.sums or x >= first]
    return len(made) == len(set(made))
