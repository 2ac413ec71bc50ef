"""Products of groups with known results: rows in groups, and sums over groups."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pallas_gemm.problem import Problem


def exact(problem: Problem, sizes: Sequence[int], a: Any, b: Any) -> np.ndarray:
    """Returns the product of small integers in float32: zero for rows that are in no group."""
    a, b = (np.asarray(x).astype(np.float32) for x in (a, b))
    ends = np.cumsum(sizes)
    groups = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    if problem.ragged_k:
        return np.stack([a[group].T @ b[group] for group in groups])
    result = np.zeros((problem.m, problem.n), np.float32)
    for group, own in zip(groups, b, strict=True):
        result[group] = a[group] @ (own.T if problem.transpose_b else own)
    return result
