"""An order as a picture: number grid, path and waves in text, and a PNG through matplotlib."""

import os
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from schedules import _check
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

    Args:
        schedule: The order to draw.
        workers: Colours the tiles by wave, `workers` tiles at a time, rather than by progress.
        colour: Whether to colour the tiles with ANSI escapes.
    """
    positions = schedule.positions()
    digits = len(str(len(schedule) - 1))
    cells = [[f"{when:>{digits}}" for when in row] for row in positions]
    return _render(cells, " ", _shades(positions, workers) if colour else None)


def waves(schedule: Schedule, workers: int, *, colour: bool = False) -> str:
    """Returns the grid with, on each tile, the wave that computes it when `workers` share the work.

    Tiles of one wave are computed at the same time: the fewer rows and columns a wave touches, the
    less it reads. Waves are written 0 to 9, a to z, A to Z, and from 0 again.

    Args:
        schedule: The order to draw.
        workers: How many tiles are computed at the same time.
        colour: Whether to colour the tiles with ANSI escapes.
    """
    workers = _check.worker_count(workers)
    positions = schedule.positions()
    letters = np.array(list(WAVE_LETTERS))[positions // workers % len(WAVE_LETTERS)]
    return _render(letters.tolist(), "", _shades(positions, workers) if colour else None)


def path(schedule: Schedule, *, workers: int | None = None, colour: bool = False) -> str:
    """Returns the grid with a line through the tiles in visiting order, from ○ to ●.

    The line is broken where the order jumps, and a tile between two jumps is a dot.

    Args:
        schedule: The order to draw.
        workers: Colours the tiles by wave, `workers` tiles at a time, rather than by progress.
        colour: Whether to colour the tiles with ANSI escapes.
    """
    links = _links(schedule)
    glyphs = np.array(list(_LINES))[links]
    glyphs[tuple(schedule.order[0])] = "○"
    glyphs[tuple(schedule.order[-1])] = "●"
    cells = [
        [glyph + ("─" if link & _EAST else " ") for glyph, link in zip(*row, strict=True)]
        for row in zip(glyphs.tolist(), links.tolist(), strict=True)
    ]
    shades = _shades(schedule.positions(), workers) if colour else None
    return _render(cells, "", shades)


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


def _shades(positions: Int32Array, workers: int | None) -> NDArray[np.int64]:
    """Returns the background colour of each tile."""
    if workers is None:
        return np.array(_RAMP)[positions.astype(np.int64) * len(_RAMP) // positions.size]
    return np.array(_CYCLE)[positions // _check.worker_count(workers) % len(_CYCLE)]


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
    """Writes the order as a picture: colour for time, a line for the way, numbers where they fit.

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
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("a PNG needs matplotlib: pip install 'pallas-gemm[viz]'") from error
    scale = 10 / max(schedule.grid)
    figure = Figure(
        (schedule.cols * scale + 0.4, schedule.rows * scale + 0.7), layout="constrained"
    )
    axes = figure.subplots()
    axes.set_title(f"{schedule.name}, {schedule.rows} x {schedule.cols} tiles")
    _paint(axes, schedule, workers)
    figure.savefig(target, dpi=120, format="png")


def _paint(axes: "Axes", schedule: Schedule, workers: int | None) -> None:
    positions = schedule.positions()
    if workers is None:
        axes.imshow(positions, cmap="viridis")
    else:
        wave = positions // _check.worker_count(workers)
        axes.imshow(wave % 10, cmap="tab10", vmin=0, vmax=9, alpha=0.75)
    row, col = schedule.order.T
    axes.plot(col, row, color="white", linewidth=1.2 if len(schedule) < 1000 else 0.5, alpha=0.8)
    axes.set(xticks=[], yticks=[])
    if max(schedule.grid) > 24:
        return
    for when, (y, x) in enumerate(schedule.order.tolist()):
        axes.text(
            x,
            y,
            str(when),
            ha="center",
            va="center",
            fontsize=8,
            color="black",
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "linewidth": 0},
        )
