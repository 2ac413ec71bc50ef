"""Argument checks: every failure names the argument, its value and what is legal."""

import operator
from collections.abc import Sequence

SIDE_LIMIT = 65_536
"""A packed entry keeps row and column in 16 bits each; -1, which is 65,535 twice, is padding."""

TILE_LIMIT = 2**31
"""A position in the order is an int32."""

WORKER_LIMIT = 2**20
"""Far above any device; a slip of the caller should not fill the memory with padding."""


def positive_int(argument: str, value: object) -> int:
    """Returns `value` as an int, or raises unless it is a whole number of at least 1."""
    return int_at_least(argument, value, 1)


def int_at_least(argument: str, value: object, lowest: int) -> int:
    """Returns `value` as an int, or raises unless it is a whole number of at least `lowest`."""
    try:
        # True is an int to Python, but never what somebody means by a size.
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < lowest:
        raise ValueError(f"{argument} must be an integer of at least {lowest}, got {value!r}")
    return number


def worker_count(value: object) -> int:
    """Returns the checked number of workers that share the tiles."""
    workers = positive_int("workers", value)
    if workers > WORKER_LIMIT:
        raise ValueError(f"workers must be at most {WORKER_LIMIT}, got {workers}")
    return workers


def grid_size(rows: object, cols: object, most: int = SIDE_LIMIT) -> tuple[int, int]:
    """Returns the checked size of a grid of tiles, whose sides are all less than `most`."""
    sides = positive_int("rows", rows), positive_int("cols", cols)
    for argument, side in zip(("rows", "cols"), sides, strict=True):
        if side >= most:
            raise ValueError(f"{argument} must be at most {most - 1}, got {side}")
    if sides[0] * sides[1] >= TILE_LIMIT:
        raise ValueError(
            f"rows x cols must be below {TILE_LIMIT} tiles, got rows={sides[0]}, cols={sides[1]}"
        )
    return sides


def one_of(argument: str, value: object, legal: Sequence[str]) -> str:
    """Returns `value`, or raises unless it is one of the `legal` words."""
    if isinstance(value, str) and value in legal:
        return value
    choices = " or ".join(repr(word) for word in legal)
    raise ValueError(f"{argument} must be {choices}, got {value!r}")


def true_or_false(argument: str, value: object) -> bool:
    """Returns `value`, or raises unless it is a bool; "no" would otherwise count as true."""
    if isinstance(value, bool):
        return value
    raise ValueError(f"{argument} must be True or False, got {value!r}")
