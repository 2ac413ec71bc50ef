"""How long XLA takes for gradients of weights with few outputs, such as those of a policy's head.

Such a product sums over all rows of a batch: 16384 rows of 512 inputs and 18 outputs are a product
of 18 x 512 x 16384. A kernel reads the activations once, and so does XLA, with what it copies first
(`copies.py`).

20 products of 2 to 16 and of 18 outputs are the fit (`h200_few_outputs.csv`): half are within 8%,
and nine of ten within 20%. XLA is faster at all of them: kernels run at 0.54 to 0.98 times its
speed. With 24 to 64 outputs, kernels run at 0.68 to 1.12. With one output, four run at 0.88 to
1.08, and one at 2.15. 62 others of `h200_long_sums.csv` judge it, with up to 964608 rows: half are
within 11%, and nine of ten within a third.
"""

from pallas_gemm.problem import Problem

FEW, LONGEST = 18, 8192
"""The most outputs, and the most inputs that were measured."""
SECONDS, BYTES = 2.7e-6, 4.2e12
"""The least time, and the bytes that it moves in a second."""


def has_few_outputs(problem: Problem) -> bool:
    """Whether a product is such a gradient."""
    outputs, inputs = sorted((problem.m, problem.n))
    widths = problem.a_dtype.itemsize, problem.b_dtype.itemsize
    is_one = problem.batch == 1 and not problem.in_groups and widths == (2, 2)
    are_rows = problem.transpose_a and not problem.transpose_b
    return is_one and are_rows and 1 < outputs <= FEW and inputs <= LONGEST


def seconds(problem: Problem) -> float:
    """Predicts its time."""
    return SECONDS + problem.moved_bytes / BYTES
