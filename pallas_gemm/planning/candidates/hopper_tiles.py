"""The tiles of the Hopper kernel that the heuristics choose among, and how they are shared."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pallas_gemm.config import STEP_BYTES
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.problems import is_narrow
from pallas_gemm.kernels.operand import PANEL
from pallas_gemm.planning import written
from pallas_gemm.problem import Problem

# Rows of a tile, and its columns: with these, 94 products drawn at random take 0.5% longer on an
# H200 than with the best of 41 tiles. One of the right width makes the last wave a full one, narrow
# ones are for results of few rows. 256 x 128 is never the best: two WGMMAs of 128 columns for each
# consumer take 4 to 10% longer than one of 256.
COLUMNS = {
    256: (208, 192),
    192: (192, 160, 144),
    128: (256, 240, 224, 208, 192, 176, 160, 144, 128, 112, 96, 16),
    64: (256, 240, 224, 208, 192, 176, 160, 128, 64, 32, 16),
}
NARROWEST = 16
"""Columns of the narrowest tiles, for few columns or rows of a result."""
IN_TURNS = (128, 128)
"""The tile that a consumer stores while the other one multiplies its own, where no consumer can
store under its next tile. 24 products of 1024 x 4096 x 1024 with a residual take 295 us so on an
H200. In tiles of 128 x 256 and 256 x 192, they take 321 and 334 us. A symmetric result is stored
twice, and in larger tiles a third of 4096 cubed would be beyond the diagonal or in a wave that is
not full."""
MUCH_IN_TURNS = ((64, 256), (64, 224))
"""The same where two arrays are loaded and two or three stored. The derivative of SwiGLU takes 2706
us so on an H200 for 16384 x 14336 x 4096, and 3050 us in tiles of 128 x 192. With one more result
it takes 2884 us, and 3208 us in tiles of 128 x 128."""
MUCH_COLUMNS = 16
WIDE_IN_TURNS = (128, 192)
"""The same for float32 results of 16-bit operands: it reads less of the L2. Logits of 8192 x 32000
with K=4096 take 2644 us so on an H200, and 3089 us in tiles of 128 x 128 in turns. Stored at once,
they take 2731 us in tiles of 128 x 256 and 2753 us in 256 x 192. With K=1024, it is 711, 749 and
791 us. A tile of 128 x 256 takes 128 KB, as much as four slots of operands."""
WIDE_COLUMNS = 16
"""The columns of their store slots where the right operand is stored [k, n]: a fifth stage fits. On
an H200, 8192 x 32000 with K=1024 takes 695 us so, and 705 us with 32 columns; with K=4096 both take
2637 us. Stored [n, k], it is 731 and 704 us, and 2774 and 2644."""
LEFT_COLUMNS = 32
"""Columns that are finished at a time of tiles that leave nothing but what is reduced. With labels'
logits, the log-sum-exp of 8192 x 151936 with K=2048 takes 6.34 ms in turns on an H200, and 6.69 ms
in tiles of 128 x 256. The bare product takes 6.29 ms."""
OF_BLOCKS = (
    *((128, 256, 2), (256, 128, 2), (128, 128, 2), (128, 64, 2)),
    *((64, 256, 2), (64, 128, 2), (64, 128, 1), (64, 64, 1), (64, 32, 1)),
)
"""Tiles where blocks have scales, and how many warpgroups share one: the sum of a block takes
registers, too. 64 x 18432 x 7168 takes 36 us on an H200 in tiles of 64 x 256, 45 us in 64 x 128.
Of two that are predicted to take as long, the first is chosen: 8192 cubed takes 824 us in tiles of
128 x 256 and 858 us in 256 x 128, 4096 x 2048 x 7168 92.1 and 96.0. Tiles of 192 x 128, which three
warpgroups share, were the fastest of no product: 8192 cubed takes 905 us in them, and sums over 32
groups of 2880 x 2880 take 464 us, 340 in tiles of 256 x 128."""
CONSUMERS = {256: 2, 192: 3, 128: 2, 64: 1}
"""Warpgroups that share a tile, by its rows."""
ROWS_OF_GROUPS = 128
"""Of a tile where groups have as many on average: fewer would be read from the L2 too often."""
NARROW_OF_GROUPS = (64, 32)
"""More columns that tiles of this height may have. Only groups with few columns use them."""


def forms(problem: Problem) -> Iterator[dict[str, Any]]:
    """Yields what is particular about each: its tile, and how consumers share it."""
    if problem.blocks is not None:
        yield from _forms_of_blocks(problem)
        return
    is_large = written.is_large(problem) and max(problem.m, problem.n) > written.ROWS
    of_one_height = _cooperative(problem, (written.ROWS,)) if is_large else ()
    # A result of few columns may fill no such tile but the narrowest.
    wide = [form for form in of_one_height if form["tile"][1] > NARROWEST]
    yield from wide or _cooperative(problem, COLUMNS)
    if problem.symmetric or _is_stored_early(problem):
        yield {"tile": IN_TURNS, "pingpong": True}
    if _is_much(problem):
        narrow = {"store_columns": MUCH_COLUMNS, "store_slots": 2}
        yield from ({"tile": tile, "pingpong": True} | narrow for tile in MUCH_IN_TURNS)
    if _is_left(problem):
        narrow = {"store_columns": LEFT_COLUMNS}
        yield {"tile": WIDE_IN_TURNS, "pingpong": True, "store_slots": 1} | narrow
    if _is_wide(problem):
        narrow = {} if problem.transpose_b else {"store_columns": WIDE_COLUMNS}
        yield {"tile": WIDE_IN_TURNS, "pingpong": True, "store_slots": 1} | narrow


def _cooperative(problem: Problem, heights: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Yields the same of tiles of some heights, whose rows consumers share."""
    ways = (False,) if problem.symmetric else (False, True)
    for mirrored, rows in itertools.product(ways, heights):
        for columns in _columns(rows, problem):
            if _is_below_groups(rows, problem) or _is_part_of_groups(columns, problem):
                continue
            if _is_part_of_a_panel(columns, problem, mirrored=mirrored):
                continue
            if _is_filled(rows, columns, problem, mirrored=mirrored):
                consumers = CONSUMERS[rows]
                yield {"tile": (rows, columns), "consumers": consumers, "mirrored": mirrored}


def _forms_of_blocks(problem: Problem) -> Iterator[dict[str, Any]]:
    """Yields the same where blocks have scales."""
    for rows, columns, consumers in OF_BLOCKS:
        below = _is_below_groups(rows, problem) or _is_part_of_groups(columns, problem)
        if not below and _is_filled(rows, columns, problem, mirrored=False):
            yield {"tile": (rows, columns), "consumers": consumers}


def _columns(rows: int, problem: Problem) -> tuple[int, ...]:
    """Returns the columns of tiles of a height."""
    narrow = rows == ROWS_OF_GROUPS and _are_narrow_groups(problem)
    return COLUMNS[rows] + (NARROW_OF_GROUPS if narrow else ())


def _are_tall_groups(problem: Problem) -> bool:
    """Whether an average group fills the rows of a tall tile."""
    return problem.m >= ROWS_OF_GROUPS * problem.groups > 0


def _are_narrow_groups(problem: Problem) -> bool:
    """Whether groups have so few columns that no usual tall tile would be half full."""
    widths = COLUMNS[ROWS_OF_GROUPS]
    if problem.blocks is not None:
        widths = tuple(columns for rows, columns, _ in OF_BLOCKS if rows == ROWS_OF_GROUPS)
    return _are_tall_groups(problem) and not any(
        _is_filled(ROWS_OF_GROUPS, columns, problem, mirrored=False)
        for columns in widths
        if columns % widest(problem) == 0
        and not _is_part_of_a_panel(columns, problem, mirrored=False)
    )


def _is_below_groups(rows: int, problem: Problem) -> bool:
    """Whether a tile would be read from the L2 too often, and one of more rows is half full."""
    tall = rows < ROWS_OF_GROUPS and _are_tall_groups(problem)
    return tall and not _are_narrow_groups(problem)


def _is_part_of_groups(columns: int, problem: Problem) -> bool:
    """Whether rows in groups have more columns than a tile that is narrower than what is stored."""
    power = 1 << (problem.n - 1).bit_length()
    return problem.groups > 0 and columns < min(widest(problem), power)


def _is_filled(rows: int, columns: int, problem: Problem, *, mirrored: bool) -> bool:
    """Whether at least half of a tile is not beyond the edge, or it is the smallest."""
    across = problem.sums * problem.n
    m, n = (across, problem.m) if mirrored else (problem.m, across)
    narrowest = PANEL if is_narrow(problem) and not mirrored else NARROWEST
    # A tile of two sums has a panel of each.
    narrowest = 2 * PANEL if problem.epilogue.gated else narrowest
    return (rows < 2 * m or rows == min(COLUMNS)) and (columns < 2 * n or columns == narrowest)


def _is_part_of_a_panel(columns: int, problem: Problem, *, mirrored: bool) -> bool:
    """Whether a tile with these columns reads a part of a panel of its right operand."""
    in_panels = problem.transpose_a if mirrored else not problem.transpose_b
    return in_panels and columns % PANEL > 0


def widest(problem: Problem) -> int:
    """Returns how many columns are stored at a time, unless a tile has its reason for others."""
    return min([64, *(STEP_BYTES // dtype.itemsize for dtype in problem.stored_dtypes)])


def stored_columns(problem: Problem, form: Mapping[str, Any]) -> int:
    """Returns the same of a tile: one of rows in groups is stored in chunks of one width."""
    most = widest(problem)
    return min(most, form["tile"][1]) if problem.groups else most


def _is_stored_early(problem: Problem) -> bool:
    """Whether no tile is small enough to be stored under the next one by the same consumer."""
    smallest = HopperConfig(tile=(64, 128), consumers=1)
    return not smallest.allows_late_store(problem)


def _is_left(problem: Problem) -> bool:
    """Whether tiles of 16-bit operands leave nothing but what is reduced."""
    is_plain = not problem.symmetric and not problem.in_groups and problem.sums == 1
    return problem.a_dtype.itemsize == 2 and not problem.stored_dtypes and is_plain


def _is_much(problem: Problem) -> bool:
    """Whether two arrays of the result's shape are loaded, and two or more stored."""
    is_plain = not problem.symmetric and not problem.in_groups and problem.sums == 1
    is_much = len(problem.loaded_dtypes) == 2 <= len(problem.stored_dtypes)
    return problem.a_dtype.itemsize == 2 and is_plain and is_much


def _is_wide(problem: Problem) -> bool:
    """Whether results take twice the bytes of operands, and nothing else is loaded or stored."""
    widths = problem.a_dtype.itemsize, problem.out_dtype.itemsize
    is_one = len(problem.stored_dtypes) == 1 and not problem.symmetric and not problem.in_groups
    return widths == (2, 4) and is_one
