"""Sizes of groups that say more than there is, with sums about 2^31, 2^32 and far beyond.

Of each: how many rows or elements there are, and the sizes. What they add up to is told in 64 bits.
"""

import numpy as np

SIZES: dict[str, tuple[int, np.ndarray]] = {
    f"{name}, {where}": (limit, np.append(np.full(count - 1, limit), limit + more))
    for name, limit, count in (
        ("2^31 of many groups", 2**23, 2**8),
        ("2^31 of few", 2**28, 2**3),
        ("2^32 of many", 2**23, 2**9),
        ("2^32 of few", 2**30, 2**2),
    )
    for where, more in (("just below", -1), ("reached", 0))
} | {
    "2^33, and two groups beyond": (2**23, np.full(1026, 2**23)),
    "far beyond": (2**30, np.full(200, 2**31 - 1)),
    "2^32 among small ones": (2**25, np.resize([2**25, 3, 0, -7, 2**25], 330)),
    "2^32 with the largest last": (2**29, np.append(np.full(40, 2**27), 2**29)),
}


def spans(limit: int, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns where groups begin and end, in 64 bits."""
    there = np.clip(sizes.astype(np.int64), 0, limit)
    ends = np.cumsum(there)
    return ends - there, ends
