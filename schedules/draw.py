"""An order as a picture: numbers, path, waves and pieces in text, and a PNG through matplotlib."""

import os
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from schedules import _check, _public
from schedules.pieces import Pieces
from schedules.table import Int32Array, Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WAVE_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

# Background colours of the 256-colour terminal palette: a ramp from violet to yellow for progress,
# and colours that differ from their neighbours for waves.
_RAMP = (54, 55, 61, 67, 31, 30, 36, 35, 71, 77, 113, 149, 185, 221)
_CYCLE = (25, 178, 71, 132, 37, 173)
_BRIGHT = frozenset({35, 36, 37, 71, 77, 113, 149, 173, 178, 185, 221})

_NORTH, _EAST, _SOUTH, _WEST = 1, 2, 4, 8
_LINES = "·╵╶└╷│┌├╴┘─┴┐┤┬┼"


def numbers(schedule: Schedule, *, workers: int | None = None, colour: bool = False) -> str:
    """Returns the grid with, on each tile, when it is visited.

    >>> from schedules import swizzle
    >>> print(numbers(swizzle(5, 8, group=2)))
     0  2  4  6  8 10 12 14
     1  3  5  7  9 11 13 15
    30 28 26 24 22 20 18 16
    31 29 27 25 23 21 19 17
    32 33 34 35 36 37 38 39

    Args:
        schedule: The order to draw.
        workers: Colours the tiles by wave, `workers` tiles at a time, rather than by progress.
        colour: Whether to colour the tiles with ANSI escapes.
    """
    positions = schedule.positions()
    digits = len(str(len(schedule) - 1))
    cells = [[f"{when if when >= 0 else '':>{digits}}" for when in row] for row in positions]
    return _render(cells, " ", _shades(positions, workers, colour=colour))


def waves(schedule: Schedule, workers: int, *, colour: bool = False) -> str:
    """Returns the grid with, on each tile, the wave that computes it when `workers` share the work.

    Tiles of one wave are computed at the same time: the fewer rows and columns a wave touches, the
    less it reads. Waves are written 0 to 9, a to z, A to Z, and from 0 again.

    >>> from schedules import hilbert
    >>> print(waves(hilbert(6, 12), 9))
    000333444777
    000333444777
    000333444777
    111222555666
    111222555666
    111222555666

    Args:
        schedule: The order to draw.
        workers: How many tiles are computed at the same time.
        colour: Whether to colour the tiles with ANSI escapes.
    """
    workers = _check.worker_count(workers)
    positions = schedule.positions()
    letters = np.array(list(WAVE_LETTERS))[positions // workers % len(WAVE_LETTERS)]
    letters[positions < 0] = " "
    return _render(letters.tolist(), "", _shades(positions, workers, colour=colour))


def path(schedule: Schedule, *, workers: int | None = None, colour: bool = False) -> str:
    """Returns the grid with a line through the tiles in visiting order, from ○ to ●.

    The line is broken where the order jumps, and a tile between two jumps is a dot.

    >>> from schedules import swizzle
    >>> print(path(swizzle(5, 8, group=2)))
    ○ ╷ ╷ ╷ ╷ ╷ ╷ ╷
    ╵ ╵ ╵ ╵ ╵ ╵ ╵ │
    ╷ ╷ ╷ ╷ ╷ ╷ ╷ │
    │ ╵ ╵ ╵ ╵ ╵ ╵ ╵
    └─────────────●

    Args:
        schedule: The order to draw.
        workers: Colours the tiles by wave, `workers` tiles at a time, rather than by progress.
        colour: Whether to colour the tiles with ANSI escapes.
    """
    links = _links(schedule)
    glyphs = np.array(list(_LINES))[links]
    glyphs[schedule.positions() < 0] = " "
    glyphs[tuple(schedule.order[0])] = "○"
    glyphs[tuple(schedule.order[-1])] = "●"
    cells = [
        [glyph + ("─" if link & _EAST else " ") for glyph, link in zip(*row, strict=True)]
        for row in zip(glyphs.tolist(), links.tolist(), strict=True)
    ]
    return _render(cells, "", _shades(schedule.positions(), workers, colour=colour))


def pieces(work: Pieces, workers: int = 1, *, width: int = 64) -> str:
    """Returns a line for each tile, along k: which piece, or which wave of them, computes a step.

    If there are more steps than `width`, each letter stands for several steps and shows the first.
    Letters are those of `waves`.

    >>> from schedules import raster, split_k
    >>> work = split_k(raster(1, 3), steps=6, parts=2, last=2)
    >>> print(pieces(work))
    (0, 0)  000000
    (0, 1)  111333
    (0, 2)  222444
    >>> print(pieces(work, workers=3))
    (0, 0)  000000
    (0, 1)  000111
    (0, 2)  000111

    Args:
        work: The pieces to draw.
        workers: How many pieces are computed at the same time.
        width: The most letters of a line.
    """
    workers, width = _check.worker_count(workers), _check.positive_int("width", width)
    together = -(-work.steps // width)
    rows, cols = work.grid
    drawn = np.empty((rows, cols, -(-work.steps // together)), np.int64)
    for number, (row, col, first, steps) in enumerate(work.table.tolist()):
        letters = slice(-(-first // together), -(-(first + steps) // together))
        drawn[row, col, letters] = number // workers % len(WAVE_LETTERS)
    names = [f"({row}, {col})" for row in range(rows) for col in range(cols)]
    digits = max(map(len, names))
    shown = np.array(list(WAVE_LETTERS))[drawn].reshape(rows * cols, -1)
    lines = zip(names, shown.tolist(), strict=True)
    return "\n".join(f"{name:{digits}}  {''.join(line)}" for name, line in lines)


def _links(schedule: Schedule) -> NDArray[np.int64]:
    """Returns, for each tile, the sides on which the order enters or leaves it."""
    links = np.zeros(schedule.grid, np.int64)
    here, there = schedule.order[:-1], schedule.order[1:]
    sides = (
        (-1, 0, _NORTH, _SOUTH),
        (0, 1, _EAST, _WEST),
        (1, 0, _SOUTH, _NORTH),
        (0, -1, _WEST, _EAST),
    )
    for down, right, leave, enter in sides:
        step = np.all(there - here == (down, right), axis=1)
        links[tuple(here[step].T)] |= leave
        links[tuple(there[step].T)] |= enter
    return links


def _shades(
    positions: Int32Array, workers: int | None, *, colour: bool
) -> NDArray[np.int64] | None:
    """Returns the background colour of each tile, or None for no colour."""
    wave = None if workers is None else positions // _check.worker_count(workers)
    if not colour:
        return None
    if wave is None:
        return np.array(_RAMP)[positions.astype(np.int64) * len(_RAMP) // positions.size]
    return np.array(_CYCLE)[wave % len(_CYCLE)]


def _render(cells: list[list[str]], gap: str, shades: NDArray[np.int64] | None) -> str:
    """Joins the cells of a grid to lines, in colour where `shades` says which."""
    if shades is None:
        return "\n".join(gap.join(row).rstrip() for row in cells)
    lines = []
    for row, row_shades in zip(cells, shades.tolist(), strict=True):
        painted = [
            f"\x1b[38;5;{16 if shade in _BRIGHT else 231};48;5;{shade}m{cell}{gap}"
            for cell, shade in zip(row, row_shades, strict=True)
        ]
        lines.append("".join(painted) + "\x1b[0m")
    return "\n".join(lines)


def png(schedule: Schedule, target: str | os.PathLike[str], *, workers: int | None = None) -> None:
    """Writes the order as a picture: colour for time, a line for the way, its start and its end.

    Tiles carry the number of their visit where it fits, or with `workers` each wave its own.

    Args:
        schedule: The order to draw.
        target: The file to write.
        workers: Colours the tiles by wave, `workers` tiles at a time, rather than by progress.

    Raises:
        ImportError: matplotlib is missing; the `viz` extra brings it.
        OSError: The file cannot be written.
    """
    try:
        # Here, because a text picture must not need matplotlib.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a PNG needs matplotlib: pip install '.[viz]'") from error
    scale = 10 / max(schedule.grid)
    # A row of tiles that is 200 long is drawn higher than it is, to be seen at all.
    height = max(0.6, schedule.rows * scale)
    figure = Figure((max(0.6, schedule.cols * scale), height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_title(f"{schedule.name}, {schedule.rows} x {schedule.cols} tiles")
    axes.set(xticks=[], yticks=[])
    axes.imshow(_pixels(schedule, workers), cmap="viridis", aspect="auto")
    # On larger grids a line is finer than the pixels, and numbers than the eye.
    if max(schedule.grid) <= 128:
        _trace(axes, schedule)
    if workers is not None:
        _label_waves(axes, schedule, workers)
    elif max(schedule.grid) <= 24:
        _label(axes, schedule.order, fontsize=min(18, 0.2 * 72 * scale))
    _mark_ends(axes, schedule)
    axes.legend(
        title=_key(schedule, workers),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.1 / height),
        ncols=2,
        frameon=False,
    )
    # Cut to what is drawn: a title may be wider than the tiles, and no blank strip is left.
    figure.savefig(target, dpi=120, format="png", bbox_inches="tight", pad_inches=0.1)


def _key(schedule: Schedule, workers: int | None) -> str:
    if workers is None:
        return "violet tiles are visited first, yellow ones last"
    waves = -(-len(schedule) // workers)
    return f"one colour: {workers} tiles at a time, {waves} wave{'s' * (waves > 1)}"


def _pixels(schedule: Schedule, workers: int | None) -> NDArray[np.generic]:
    """Returns the progress of each tile, or with `workers` the colour of its wave."""
    positions = schedule.positions()
    if workers is None:
        # What is not visited stays blank.
        return np.ma.masked_less(positions, 0)
    wave = positions // _check.worker_count(workers)
    # Steps of the golden ratio round the colour circle keep waves that meet apart.
    turn = wave * 0.618 % 1 * 2 * np.pi
    thirds = np.array([0, 2, 4]) * np.pi / 3
    return 0.6 + 0.3 * np.cos(turn[..., None] - thirds) - 0.12 * (wave % 3 == 1)[..., None]


def _trace(axes: "Axes", schedule: Schedule) -> None:
    """Draws the way through the tiles: a line for the steps, a faint one for the jumps."""
    row, col = schedule.order.T.astype(float)
    jump = np.abs(np.diff(row)) + np.abs(np.diff(col)) > 1
    width = 1.5 if max(schedule.grid) <= 32 else 0.5
    # A line has a gap where it meets NaN.
    before, after = np.flatnonzero(jump), np.flatnonzero(jump) + 1
    axes.plot(np.insert(col, after, np.nan), np.insert(row, after, np.nan), "w-", linewidth=width)
    gap = np.full(len(after), np.nan)
    jumps = (np.stack([along[before], along[after], gap], 1).ravel() for along in (col, row))
    axes.plot(*jumps, "w:", linewidth=width, alpha=0.5)


def _mark_ends(axes: "Axes", schedule: Schedule) -> None:
    """Draws a ring round the first tile and a disc on the last, beside their numbers."""
    look = {"linestyle": "none", "marker": "o", "markersize": 9, "markeredgecolor": "black"}
    for tile, label, face in ((0, "start", "white"), (-1, "end", "black")):
        row, col = schedule.order[tile]
        corner = (col - 0.3, row - 0.3)
        axes.plot(*corner, label=label, markerfacecolor=face, zorder=4, **look)


def _label(axes: "Axes", tiles: Int32Array, fontsize: float) -> None:
    """Writes 0, 1, 2 and so on onto tiles."""
    paper = {"boxstyle": "round,pad=0.15", "facecolor": "white", "linewidth": 0}
    for number, (y, x) in enumerate(tiles.tolist()):
        axes.text(x, y, str(number), ha="center", va="center", fontsize=fontsize, bbox=paper)


def _label_waves(axes: "Axes", schedule: Schedule, workers: int) -> None:
    """Writes onto each wave its number, on the tile in the middle of its way."""
    starts = np.arange(0, len(schedule), workers)
    ends = np.minimum(starts + workers, len(schedule))
    tiles = schedule.order[(starts + ends) // 2]
    # More numbers than these would hide what they number.
    if len(tiles) <= 64:
        _label(axes, tiles, fontsize=11)


def __dir__() -> list[str]:
    """Returns the public names."""
    return _public.names(globals(), "WAVE_LETTERS")
