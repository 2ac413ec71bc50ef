"""Which symmetric results a kernel computes by half."""

from collections.abc import Iterator

from pallas_gemm.problem import ROW_BYTES, Problem


def refusals(problem: Problem) -> Iterator[str]:
    """Yields every reason why half of a symmetric result is not all that has to be computed."""
    if problem.m != problem.n:
        yield f"a symmetric result is square, got m={problem.m} and n={problem.n}"
    if problem.out_dtype.itemsize != 2:
        yield f"a symmetric result is one of 16 bits, got {problem.out_dtype}"
    if problem.out_shape[-1] * problem.out_dtype.itemsize % ROW_BYTES:
        yield (
            "a symmetric result has rows of a multiple of 16 bytes, got"
            f" {problem.out_shape[-1]} elements of {problem.out_dtype}"
        )
    if problem.transpose_out:
        yield "a symmetric product is not mirrored"
    if problem.residual_dtype is not None:
        yield f"a symmetric result has a residual of its type, got {problem.residual_dtype}"
    if others := set(problem.epilogue.operands) - {"residual", "alpha", "beta"}:
        yield f"a symmetric result has no {', '.join(sorted(others))}"
