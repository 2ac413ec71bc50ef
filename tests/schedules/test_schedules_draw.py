"""Pictures show the order they are given: parsed back, they are the positions again."""

import importlib.util
import re
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import Schedule, draw, hilbert, raster, split_k, swizzle

sides = st.integers(1, 15)
PAINT = re.compile(r"\x1b\[38;5;(\d+);48;5;(\d+)m([^\x1b]*)")
NEEDS_MATPLOTLIB = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="the viz extra is not installed"
)


@given(rows=sides, cols=sides, group=st.integers(1, 6))
def test_numbers_are_the_positions(rows: int, cols: int, group: int) -> None:
    schedule = swizzle(rows, cols, group=group)
    drawn = [[int(when) for when in line.split()] for line in draw.numbers(schedule).split("\n")]
    assert drawn == schedule.positions().tolist()


@given(rows=sides, cols=sides, workers=st.integers(1, 40))
def test_letters_are_the_waves(rows: int, cols: int, workers: int) -> None:
    schedule = hilbert(rows, cols)
    drawn = [
        [draw.WAVE_LETTERS.index(letter) for letter in line]
        for line in draw.waves(schedule, workers).split("\n")
    ]
    assert drawn == (schedule.positions() // workers % len(draw.WAVE_LETTERS)).tolist()


@given(rows=sides, cols=sides, steps=st.integers(1, 40), data=st.data())
def test_letters_along_k_are_the_pieces(rows: int, cols: int, steps: int, data: Any) -> None:
    parts = data.draw(st.integers(1, steps))
    last = data.draw(st.none() | st.integers(1, rows * cols))
    work = split_k(hilbert(rows, cols), steps, parts, last)
    workers, width = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 50))
    together = -(-steps // width)
    lines = draw.pieces(work, workers, width=width).split("\n")
    assert len(lines) == rows * cols
    for tile, line in zip(np.ndindex(rows, cols), lines, strict=True):
        name, letters = re.findall(r"(\(.*\)) +(\w+)", line)[0]
        assert name == str(tile)
        assert len(letters) <= width
        for letter, step in zip(letters, range(0, steps, together), strict=True):
            row, col, first, length = work.table.T
            own = (row == tile[0]) & (col == tile[1]) & (first <= step) & (step < first + length)
            wave = int(own.argmax()) // workers % len(draw.WAVE_LETTERS)
            assert letter == draw.WAVE_LETTERS[wave]


def follow(picture: str) -> list[tuple[int, int]]:
    """Returns the tiles along the line from ○ to ●, found from the picture alone."""
    lines = [line.ljust(max(map(len, picture.split("\n")))) for line in picture.split("\n")]
    above, below = "└│┘├┤┴┼╵", "┌│┐├┤┬┼╷"
    starts = [(r, line.index("○")) for r, line in enumerate(lines) if "○" in line]
    visited = [starts[0]]
    while lines[visited[-1][0]][visited[-1][1]] != "●":
        row, col = visited[-1]
        near = {
            (row - 1, col): row > 0 and lines[row - 1][col] in below + "●",
            (row + 1, col): row + 1 < len(lines) and lines[row + 1][col] in above + "●",
            (row, col + 2): lines[row][col + 1 : col + 2] == "─",
            (row, col - 2): col > 0 and lines[row][col - 1] == "─",
        }
        here = lines[row][col]
        sealed = {(row - 1, col): here not in above + "○", (row + 1, col): here not in below + "○"}
        ways = [t for t, open_ in near.items() if open_ and not sealed.get(t) and t not in visited]
        visited.append(ways[0])
    return [(row, col // 2) for row, col in visited]


@pytest.mark.parametrize("grid", [(8, 8), (5, 8), (12, 20), (7, 3), (1, 6), (4, 1)])
def test_the_line_of_a_path_leads_through_every_tile_in_order(grid: tuple[int, int]) -> None:
    schedule = hilbert(*grid)
    assert follow(draw.path(schedule)) == [tuple(tile) for tile in schedule.order.tolist()]


def test_jumps_break_the_line() -> None:
    assert draw.path(raster(2, 3)) == "○───╴\n╶───●"
    lonely = Schedule((1, 4), np.array([[0, 0], [0, 2], [0, 1], [0, 3]], np.int32))
    assert draw.path(lonely) == "○ ╶─╴ ●"


def test_colour_paints_the_same_cells_by_progress_or_by_wave() -> None:
    schedule = hilbert(8, 8)
    for plain, painted in (
        (draw.numbers(schedule), draw.numbers(schedule, colour=True)),
        (draw.path(schedule), draw.path(schedule, colour=True)),
        (draw.waves(schedule, 9), draw.waves(schedule, 9, colour=True)),
    ):
        bare = re.sub(r"\x1b\[[0-9;]*m", "", painted)
        assert [line.rstrip() for line in bare.split("\n")] == plain.split("\n")
        assert all(line.endswith("\x1b[0m") for line in painted.split("\n"))
    by_wave = PAINT.findall(draw.numbers(schedule, workers=16, colour=True))
    grounds = np.empty(64, int)
    for _, ground, when in by_wave:
        grounds[int(when)] = int(ground)
    changes = np.flatnonzero(np.diff(grounds)) + 1
    assert changes.tolist() == [16, 32, 48]


@pytest.mark.parametrize("workers", [0, -1, 2.5, 2**21])
def test_pictures_refuse_an_illegal_number_of_workers(workers: int) -> None:
    with pytest.raises(ValueError, match="workers must be "):
        draw.waves(hilbert(4, 4), workers)
    with pytest.raises(ValueError, match="workers must be "):
        draw.numbers(hilbert(4, 4), workers=workers)
    with pytest.raises(ValueError, match="workers must be "):
        draw.path(hilbert(4, 4), workers=workers)


@NEEDS_MATPLOTLIB
@pytest.mark.parametrize("workers", [None, 9])
@pytest.mark.parametrize("grid", [(8, 8), (12, 20), (1, 1), (30, 2)])
def test_png_is_a_picture_of_the_grids_shape(
    tmp_path: Path, grid: tuple[int, int], workers: int | None
) -> None:
    target = tmp_path / "order.png"
    draw.png(swizzle(*grid, group=3), target, workers=workers)
    content = target.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert (width > height) == (grid[1] > grid[0])


def _drawn(
    schedule: Schedule, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: int | None = None
) -> Any:
    """Returns the axes of the picture, as matplotlib was given them."""
    figure = importlib.import_module("matplotlib.figure").Figure
    drawn = []
    save = figure.savefig
    monkeypatch.setattr(figure, "savefig", lambda f, *a, **k: (drawn.append(f), save(f, *a, **k)))
    draw.png(schedule, tmp_path / "order.png", workers=workers)
    return drawn[0].axes[0]


@NEEDS_MATPLOTLIB
def test_png_marks_start_and_end_and_numbers_the_visits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = hilbert(6, 7)
    axes = _drawn(schedule, monkeypatch, tmp_path)
    ends = {line.get_label(): line for line in axes.get_lines() if line.get_marker() == "o"}
    assert list(ends) == ["start", "end"]
    for label, tile in (("start", schedule.order[0]), ("end", schedule.order[-1])):
        (x,), (y,) = ends[label].get_data()
        assert (round(y), round(x)) == tuple(tile)
    numbers = {text.get_text(): text.get_position() for text in axes.texts}
    assert numbers == {str(i): (col, row) for i, (row, col) in enumerate(schedule.order.tolist())}
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["start", "end"]
    # Colour is time: violet, the lowest of the map, to yellow.
    assert axes.images[0].get_array().tolist() == schedule.positions().tolist()


@NEEDS_MATPLOTLIB
def test_png_numbers_no_more_waves_than_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not _drawn(swizzle(65, 9, group=3), monkeypatch, tmp_path, workers=9).texts


@NEEDS_MATPLOTLIB
@pytest.mark.parametrize("tiles", [(4, 10), (7, 6), (1, 3), (64, 9)])
def test_png_numbers_each_wave_on_one_of_its_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiles: tuple[int, int]
) -> None:
    schedule = swizzle(*tiles, group=3)
    axes = _drawn(schedule, monkeypatch, tmp_path, workers=9)
    positions = schedule.positions()
    numbered = {text.get_text(): text.get_position() for text in axes.texts}
    waves = -(-len(schedule) // 9)
    assert list(numbered) == [str(wave) for wave in range(waves)]
    assert all(positions[y, x] // 9 == int(wave) for wave, (x, y) in numbered.items())
    key = axes.get_legend().get_title().get_text()
    assert key == f"one colour: 9 tiles at a time, {waves} wave{'s' * (waves > 1)}"


@NEEDS_MATPLOTLIB
@pytest.mark.parametrize("grid", [(8, 8), (2, 200), (30, 2)])
def test_png_has_no_blank_strip(tmp_path: Path, grid: tuple[int, int]) -> None:
    image = importlib.import_module("matplotlib.image")
    target = tmp_path / "order.png"
    draw.png(raster(*grid), target)
    drawn = image.imread(target)[..., :3].min(axis=2) < 0.99
    for blank in (~drawn.any(axis=0), ~drawn.any(axis=1)):
        runs = np.split(blank, np.flatnonzero(np.diff(blank)) + 1)
        assert max(len(run) for run in runs if run[0]) < 50


def test_png_without_matplotlib_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[viz\]'"):
        draw.png(raster(2, 2), tmp_path / "order.png")
    assert not list(tmp_path.iterdir())
