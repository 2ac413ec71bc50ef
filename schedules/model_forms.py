"""Closed forms: what tiling alone says about a matrix multiply, before any cache is simulated."""

from schedules import _check


def mn_tiling_intensity(m: int, n: int, tiles_m: int, tiles_n: int) -> float:
    """Returns multiply-adds per element loaded when the output is cut into tiles.

    Every one of the `tiles_m x tiles_n` tiles loads its own stripes of A and B:
    `MN / (M T_N + N T_M)`. With one tile on each side it is the ideal, `MN / (M + N)`.

    Args:
        m: Rows of the output.
        n: Columns of the output.
        tiles_m: Tiles along the rows.
        tiles_n: Tiles along the columns.

    Raises:
        ValueError: An argument is not a positive integer, or there are more tiles than elements.
    """
    m, n = _check.positive_int("m", m), _check.positive_int("n", n)
    tiles_m = _tiles_along("tiles_m", tiles_m, m)
    tiles_n = _tiles_along("tiles_n", tiles_n, n)
    return m * n / (m * tiles_n + n * tiles_m)


def k_tiling_intensity(m: int, n: int) -> float:
    """Returns multiply-adds per element loaded when only K is cut: `MN / (M + N)`, the ideal.

    Raises:
        ValueError: An argument is not a positive integer.
    """
    m, n = _check.positive_int("m", m), _check.positive_int("n", n)
    return m * n / (m + n)


def log_swizzle_reuse(log: int, tiles_m: int, tiles_n: int) -> int:
    """Returns the reuse of the shift swizzle: `min(2^s, T_M) + min(2^s, T_N) - 1`.

    It counts the tiles of a `2^s x 2^s` patch that share a stripe with one of its tiles, itself
    included.

    Raises:
        ValueError: An argument is not an integer in its range.
    """
    log = _check.int_at_least("log", log, 0)
    tiles_m, tiles_n = (
        _check.positive_int("tiles_m", tiles_m),
        _check.positive_int("tiles_n", tiles_n),
    )
    return min(1 << log, tiles_m) + min(1 << log, tiles_n) - 1


def _tiles_along(argument: str, tiles: object, extent: int) -> int:
    tiles = _check.positive_int(argument, tiles)
    if tiles > extent:
        raise ValueError(f"{argument} must be at most the {extent} elements it cuts, got {tiles}")
    return tiles
