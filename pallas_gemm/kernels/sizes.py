"""Sizes that no kernel takes: empty ones, and rows that TMA cannot copy."""

from collections.abc import Iterator

from pallas_gemm.problem import ROW_BYTES, Problem


def refusals(problem: Problem, *, by_tma: bool) -> Iterator[str]:
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
