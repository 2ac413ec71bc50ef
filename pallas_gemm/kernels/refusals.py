"""Sizes that no kernel takes, and symmetric results that none computes by half."""

from collections.abc import Iterator

from pallas_gemm.problem import ROW_BYTES, Problem


def of_sizes(problem: Problem, *, by_tma: bool) -> Iterator[str]:
    """Yields what is wrong with the sizes of a problem; `by_tma` if TMA has to store the result."""
    if 0 in (problem.m, problem.n, problem.k, problem.batch):
        yield (
            f"sizes must be positive, got m={problem.m}, n={problem.n}, k={problem.k} and"
            f" batch={problem.batch}"
        )
    arrays = [
        ("a", problem.a_shape, problem.a_dtype),
        ("b", problem.b_shape, problem.b_dtype),
        ("the result", problem.out_shape, problem.out_dtype),
    ]
    for name, shape, dtype in arrays if by_tma else arrays[:2]:
        whole = ROW_BYTES // dtype.itemsize
        if shape[-1] % whole:
            yield (
                f"TMA needs rows of a multiple of 16 bytes: the last dimension of {name} must be a"
                f" multiple of {whole} for {dtype}, got {shape[-1]};"
                f" the next is {-(-shape[-1] // whole) * whole}"
            )


def of_symmetry(problem: Problem) -> Iterator[str]:
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
